"""The ledger, its answers and the pages belong together: none without the others."""

import json
import re
from pathlib import Path

import pytest

from lmgeom import cli, study_command
from lmgeom.errors import RecordError
from lmgeom.study import judge, load_claims, paths
from lmgeom.study.claims import UNANSWERED, overview
from lmgeom.study.run import load_study, studies
from lmgeom.study.shown import shown_claims

CLAIMS = load_claims()
JUDGED = {name: judge(claim) for name, claim in CLAIMS.items()}
RULES = {name: claim["rule"] for name, claim in CLAIMS.items() if "rule" in claim}
ELSEWHERE = {"head-convex": "lmgeom.study.convex"}  # studies that are no runs of language models


def cells(kind):
    """Sources of the notebooks' cells of a kind, by notebook."""
    for path in sorted((paths.root() / "nbs").rglob("*.ipynb")):
        found = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path.stem, "\n".join("".join(c["source"]) for c in found if c["cell_type"] == kind)


CODE = "\n".join(source for _, source in cells("code"))


def test_every_claim_is_shown_in_a_chapter_and_every_row_shown_is_a_claim():
    shown = shown_claims()
    assert not CLAIMS.keys() - shown.keys()
    assert not shown.keys() - CLAIMS.keys()
    assert shown["lev-ablation-separable"][0] == "experiments/02_leviathan_arms"


def test_a_cell_that_cannot_be_read_alone_is_named(tmp_path):
    cell = {"cell_type": "code", "id": "its-claims", "source": ["claims_box(*elsewhere)"]}
    (tmp_path / "nbs").mkdir()
    (tmp_path / "nbs" / "a.ipynb").write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(RecordError, match="cell its-claims shows claims and needs more"):
        shown_claims(tmp_path)


def named(study):
    """Whether a claim names a study, or it is the screening of one that is named."""
    text = json.dumps(list(CLAIMS.values()))
    rules = [rule["study"] for rule in RULES.values()]
    screened = study.endswith("-lr") and any(r.startswith(study.removesuffix("-lr")) for r in rules)
    return screened or re.search(rf'[" ]{study}[" `]', text) is not None


def test_every_study_and_every_record_answers_a_claim():
    folders = {path.name for path in paths.results().iterdir()} - {"benchmarks", "alignment"}
    assert not [name for name in sorted(folders | {*studies()}) if not named(name)]


def test_every_benchmark_answers_a_claim_or_is_read_by_a_chapter():
    asked = {claim["benchmark"]["record"] for claim in CLAIMS.values() if "benchmark" in claim}
    for folder in ("benchmarks", "alignment"):
        there = {f"{folder}/{path.name}" for path in (paths.results() / folder).glob("*.json")}
        assert not [name for name in there - asked if Path(name).stem not in CODE]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_asks_for_arms_that_are_planned(name):
    rule = RULES[name]
    if rule["study"] in ELSEWHERE:
        return
    arms = {run.arm for run in load_study(rule["study"]).runs}
    if "models" in rule:
        rules = (rule["better"], *rule["rivals"])
        wanted = {f"{model}-{one}-" for model in rule["models"] for one in rules}
        assert all(any(arm.startswith(start) for arm in arms) for start in wanted)
    elif "factors" not in rule:
        pairs = rule.get("pairs") or [(rule["better"], rule["than"])]
        assert {arm for pair in pairs for arm in pair} <= arms
    else:
        assert len(arms) == 2 ** len(rule["factors"])


NUMBERS = r"[+-]\d+\.\d{4} \[[+-]\d+\.\d{4}, [+-]\d+\.\d{4}\]"
WORD = "holds exactly|holds|direction only|no effect found|fails"


def texts():
    """What is written by hand: prose pages and the Markdown of notebooks."""
    pages = [*(paths.root() / "book").glob("*.md"), paths.root() / "README.md"]
    yield from ((path.name, path.read_text(encoding="utf-8")) for path in pages)
    yield from cells("markdown")


def disagreements(text, evidence, verdicts):
    """Intervals that no evidence has, and verdicts that are not the computed ones."""
    ids = "|".join(map(re.escape, verdicts))
    said = re.findall(rf"`?\b({ids})`?\*{{0,2}}[:,]?\*{{0,2}} ({WORD})\b", text)
    wrong = [f"{name} {word}" for name, word in said if verdicts[name] != word]
    return wrong + [found for found in re.findall(NUMBERS, text) if found not in evidence]


def test_no_text_says_another_verdict_or_interval_than_the_records():
    judged = {name: JUDGED[name] for name, claim in CLAIMS.items() if "test" not in claim}
    evidence = " ".join(found.evidence for found in judged.values())
    verdicts = {name: found.verdict for name, found in judged.items()}
    for page, text in texts():
        assert not disagreements(text, evidence, verdicts), page


def test_a_text_that_disagrees_is_found():
    found = "+0.0100 [-0.0020, +0.0220]"
    for text, wrong in (
        (f"It is {found} nats, and `a-claim` fails.", []),
        ("It is +0.0100 [-0.0020, +0.0210] nats.", ["+0.0100 [-0.0020, +0.0210]"]),
        ("**a-claim: holds.**", ["a-claim holds"]),
    ):
        assert disagreements(text, found, {"a-claim": "fails"}) == wrong


def test_claims_without_their_runs_say_what_makes_them():
    for name, claim in CLAIMS.items():
        found = JUDGED[name]
        if found.verdict == "not attempted" and claim.get("rule", {}).get("study") in studies():
            assert f"`lmgeom study run {claim['rule']['study']}`" in found.evidence, name
        if "scale" in claim:
            known = [other for other in CLAIMS if other in claim["scale"]]
            assert "`" in claim["scale"] or known, name


def test_the_overview_folds_what_is_not_answered():
    page = overview(CLAIMS.values(), {"lev-vs-tied": ["experiments/01_leviathan"]})
    answered, _, rest = page.rpartition('<div class="claims">')
    assert page.count("<tr id=") == len(CLAIMS)
    folded = {name for name in CLAIMS if f'id="claim-{name}"' in rest}
    assert folded == {n for n, found in JUDGED.items() if found.verdict in UNANSWERED}
    assert '<a href="experiments/01_leviathan.html">' in answered


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        ((), lambda claim, found: True),
        (("--part", "depth"), lambda claim, found: claim["part"] == "depth"),
        (("--kind", "cost"), lambda claim, found: claim["kind"] == "cost"),
        (("--verdict", "fails"), lambda claim, found: found.verdict == "fails"),
    ],
)
def test_the_command_prints_the_ledger(capsys, options, keeps):
    assert cli.main(["study", "claims", *options]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == [name for name, claim in CLAIMS.items() if keeps(claim, JUDGED[name])]


def test_the_command_knows_every_word_of_the_ledger():
    assert {claim["part"] for claim in CLAIMS.values()} <= {*study_command.PARTS}
    assert {claim["kind"] for claim in CLAIMS.values()} <= {*study_command.KINDS}
    assert {found.verdict for found in JUDGED.values()} <= {*study_command.VERDICTS}
