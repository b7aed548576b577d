import json

import numpy as np
import pytest
import yaml

from lmgeom.errors import RecordError
from lmgeom.study import claims_box, claims_list, judge, load_claims
from lmgeom.study.claims import ENDS, JUDGES, Verdict, check_tests, judge_interval, table
from lmgeom.study.records import FIELDS, record
from lmgeom.study.statistics import stratify

BASE = {"part": "input", "claim": "c", "place": "p", "kind": "k", "reported": "r", "bar": "b"}
RULE = {"study": "s", "metric": "val", "better": "x", "than": "y"}
FLAT = RULE | {"kind": "flat", "above": 1e-4, "within": 0.02}
PAIRS = {"study": "s", "metric": "val", "kind": "each", "pairs": [["x", "y"], ["u", "v"]]}
SCREENING = {"study": "once", "arms": ["p", "x", "q"]}
ADDITIVE = {"study": "s", "metric": "val", "kind": "additive", "within": 0.05}
ADDITIVE |= {"factors": ["a", "b"], "effect": ["a", "b"]}
BENCH = {"record": "b.json", "value": "ratio"}
BLANK = dict.fromkeys(FIELDS, 0) | {"config": {}, "curve": []}


def write(tmp_path, *rows):
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([BASE | row for row in rows]))
    return path


def test_the_book_s_ledger_is_valid():
    claims = load_claims()
    assert {claim["part"] for claim in claims.values()} == {"input", "depth", "output", "together"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "a"}], "needs one of"),
        ([{"id": "a", "open": "x", "test": "y"}], "needs one of"),
        ([{"id": "a", "open": "x"}] * 2, "stands twice"),
        ([{"id": "a", "open": None}], "needs one of"),
        ([{"id": "a", "rule": {}}], "lacks study, metric, better, than"),
        ([{"id": "a", "rule": RULE | {"at": "end"}}], "unknown 'at'"),
        ([{"id": "a", "rule": RULE | {"kind": "best"}}], "unknown rule 'best'; known: difference,"),
        ([{"id": "a", "rule": RULE | {"than": 3}}], "than=3 must be a string"),
        (
            [{"id": "a", "rule": RULE | {"threshold": -0.1}}],
            "threshold=-0.1 must be a number, 0 or",
        ),
        ([{"id": "a", "rule": RULE | {"behind_at_first": 1}}], "behind_at_first=1 must be true or"),
        ([{"id": "a", "rule": RULE | {"kind": "match", "threshold": 0.1}}], "unknown 'threshold'"),
        ([{"id": "a", "rule": RULE | {"kind": "rare"}}], "lacks targets"),
        ([{"id": "a", "rule": ADDITIVE | {"effect": ["c"]}}], "must be some of the factors"),
        ([{"id": "a", "rule": ADDITIVE | {"effect": []}}], "must be some of the factors"),
        ([{"id": "a", "rule": RULE | {"kind": "rare", "targets": True}}], "targets=True must be"),
        ([{"id": "a", "rule": FLAT | {"above": 2e-4}}], "above=0.0002 is no edge of the strata"),
        ([{"id": "a", "rule": FLAT | {"within": float("nan")}}], "within=nan must be a number"),
        ([{"id": "a", "rule": PAIRS | {"kind": "trend"}}], "must be 3 or more pairs of arms"),
        ([{"id": "a", "rule": PAIRS | {"pairs": [["x", "y"], ["x"]]}}], "must be 2 or more pairs"),
        ([{"id": "a", "rule": PAIRS | {"pairs": "xy"}}], "pairs='xy' must be a list"),
        ([{"id": "a", "rule": RULE | {"kind": "each", "pairs": []}}], "unknown 'better'"),
        ([{"id": "a", "rule": PAIRS | {"screening": {"study": "s"}}}], "lacks arms"),
        (
            [{"id": "a", "rule": PAIRS | {"screening": SCREENING | {"arms": ["p", "q"]}}}],
            r"arms=\['p', 'q'\] must name x, too",
        ),
        ([{"id": "a", "benchmark": BENCH}], "needs at_least or at_most"),
        ([{"id": "a", "benchmark": {"record": "r", "correlation": "mlp"}}], "lacks at_least"),
        ([{"id": "a", "benchmark": BENCH | {"at_most": "1"}}], "at_most='1' must be a number"),
        ([{"id": "a", "benchmark": {"record": "r", "at_most": 1}}], "lacks value"),
    ],
)
def test_a_broken_ledger_is_refused(tmp_path, rows, message):
    with pytest.raises(RecordError, match=message):
        load_claims(write(tmp_path, *rows))


@pytest.mark.parametrize("text", ["- {id: a, open: x, open: y}", "- [", None])
def test_a_ledger_that_cannot_be_read_is_refused(tmp_path, text):
    path = tmp_path / "claims.yaml"
    if text:
        path.write_text(text)
    with pytest.raises(RecordError, match=r"claims\.yaml cannot be read: "):
        load_claims(path)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((-0.1, -0.12, -0.08), "holds"),
        ((-0.1, -0.25, 0.05), "direction only"),
        ((0.01, -0.1, 0.12), "no effect found"),
        ((0.1, 0.05, 0.15), "fails"),
    ],
)
def test_verdicts_of_intervals(interval, verdict):
    assert judge_interval(*interval) == verdict


def test_a_threshold_moves_the_bar():
    assert judge_interval(-0.1, -0.12, -0.08, 0.05) == "holds"
    assert judge_interval(-0.1, -0.12, -0.08, 0.09) == "direction only"
    assert judge_interval(-0.1, -0.12, -0.08, 0.11) == "no effect found"


def test_a_rule_reads_the_records(tmp_path):
    rule = {"study": "s", "metric": "val", "better": "x", "than": "y"}
    assert judge({"rule": rule}, folder=tmp_path).verdict == "not attempted"
    for seed, (x, y) in enumerate([(3.0, 3.1), (3.2, 3.31), (2.9, 3.0)]):
        for arm, val in (("x", x), ("y", y)):
            run = BLANK | {"study": "s", "arm": arm, "seed": seed}
            record(run | {"id": f"{seed}", "losses": {"val": val}}, tmp_path)
    verdict = judge({"rule": rule}, folder=tmp_path)
    assert verdict.verdict == "holds"
    assert "-0.1033 [-0.1177, -0.0890] nats, 3 paired" in verdict.evidence
    swapped = rule | {"better": "y", "than": "x"}
    assert judge({"rule": swapped}, folder=tmp_path).verdict == "fails"


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        ([0.1, 0.11, 0.1], "holds"),
        ([0.1, -0.05, 0.1], "direction only"),
        ([-0.1, -0.11, -0.1], "fails"),
    ],
)
def test_a_crossing_is_behind_at_first_and_ahead_at_the_end(tmp_path, first, verdict):
    rule = {"study": "s", "metric": "val", "better": "x", "than": "y", "behind_at_first": True}
    for seed, start in enumerate(first):
        for arm, early, late in (("x", 5 + start, 3 + seed / 100), ("y", 5.0, 3.5)):
            curve = [{"tokens": 10, "val": early}, {"tokens": 20, "val": late}]
            run = BLANK | {
                "study": "s",
                "arm": arm,
                "seed": seed,
                "curve": curve,
            }
            record(run | {"id": f"{seed}", "losses": {"val": late}}, tmp_path)
    assert judge({"rule": rule}, folder=tmp_path).verdict == verdict


def keep(folder, arm, seed, val, **fields):
    """Store the record of one run."""
    run = BLANK | {"study": "s", "arm": arm, "seed": seed, "id": str(seed)}
    record(run | {"losses": {"val": val}, "tokens": 1000} | fields, folder)


def judged(rule, folder):
    return judge({"rule": rule}, folder=folder)


@pytest.mark.parametrize(
    ("loss", "verdict", "evidence"),
    [
        (2.0, "holds", "in the screening `x` is the lowest, 2 paired seeds of 1,000 tokens"),
        (4.0, "no effect found", "in the screening `p` is the lowest"),
        (None, "not attempted", "the screening lacks x"),
    ],
)
def test_a_screening_has_to_agree(tmp_path, loss, verdict, evidence):
    for seed in (1, 2):
        for arm, val in (("x", 1.0), ("y", 2.0), ("u", 1.0), ("v", 2.0)):
            keep(tmp_path, arm, seed, val + 0.001 * seed * val)
    for arm, val in (("p", 3.0), ("q", 3.5), ("other", 1.0), ("x", loss)):
        if val:
            keep(tmp_path, arm, 0, val, study="once")
    keep(tmp_path, "x", 1, 1.0, study="once")
    found = judged(PAIRS | {"screening": SCREENING}, tmp_path)
    assert found.verdict == verdict
    assert evidence in found.evidence


EVERY_KIND = [RULE, PAIRS, PAIRS | {"kind": "common"}, FLAT]
EVERY_KIND += [
    RULE | {"kind": "match"},
    RULE | {"kind": "drift"},
    RULE | {"kind": "rare", "targets": 500},
]
EVERY_KIND += [RULE | {"kind": "ratio", "metric": "size", "times": 10}]
EVERY_KIND += [ADDITIVE]
EVERY_KIND += [
    {"kind": "transfer", "study": "s", "metric": "val", "better": "x", "rivals": ["y"]}
    | {"models": ["a", "b"], "margins": {"spread": 0.25}}
]
EVERY_KIND += [PAIRS | {"kind": "trend", "pairs": [["x", "y"], ["u", "v"], ["a", "b"]]}]


@pytest.mark.parametrize("rule", EVERY_KIND)
def test_a_rule_without_its_runs_is_not_attempted(tmp_path, rule):
    assert set(JUDGES) == {rule.get("kind", "difference") for rule in EVERY_KIND}
    assert judged(rule, tmp_path).verdict == "not attempted"
    for arm in "xyuvab":
        keep(tmp_path, arm, 0, 4.0, curve=[{"tokens": 10, "val": 4.0}])
    found = judged(rule, tmp_path)
    assert found.verdict == "not attempted"
    assert found.evidence == "study `s` has not the runs that it takes"


@pytest.mark.parametrize(
    ("differences", "each", "common"),
    [
        ([(-0.1, -0.11, -0.1), (-0.1, -0.12, -0.1)], "holds", "holds"),
        ([(-0.1, -0.11, -0.1), (-0.3, -0.31, -0.3)], "holds", "fails"),
        ([(-0.1, -0.11, -0.1), (-0.1, -0.5, 0.1)], "direction only", "direction only"),
        ([(-0.1, -0.11, -0.1), (0.1, -0.09, 0.1)], "no effect found", "no effect found"),
        ([(-0.1, -0.11, -0.1), (0.1, 0.11, 0.1)], "fails", "fails"),
    ],
)
def test_several_pairs_are_as_strong_as_the_weakest(tmp_path, differences, each, common):
    for (better, than), values in zip(PAIRS["pairs"], differences, strict=True):
        for seed, difference in enumerate(values):
            keep(tmp_path, better, seed, 4.0 + difference)
            keep(tmp_path, than, seed, 4.0)
    assert judged(PAIRS, tmp_path).verdict == each
    found = judged(PAIRS | {"kind": "common"}, tmp_path)
    assert found.verdict == common
    apart = abs(np.mean(differences[0]) - np.mean(differences[1])) > 0.15
    assert ("no common point" in found.evidence) == apart
    assert "3 paired seeds of 1,000 tokens" in found.evidence


@pytest.mark.parametrize(
    ("slopes", "verdict"),
    [
        ((-0.01, -0.012, -0.011), "holds"),
        ((-0.01, 0.004, -0.01), "direction only"),
        ((0.001, -0.001, 0.002), "no effect found"),
        ((0.01, 0.012, 0.011), "fails"),
    ],
)
def test_a_trend_is_the_slope_against_doublings(tmp_path, slopes, verdict):
    pairs = [["x", "y"], ["u", "v"], ["a", "b"]]
    for doublings, (better, than) in zip((0, 2, 3), pairs, strict=True):
        for seed, slope in enumerate(slopes):
            size = {"parameters": {"total": 1_000_000 * 2**doublings}}
            keep(tmp_path, better, seed, 4.0 + 0.3 + slope * doublings, parameters={"total": 7})
            keep(tmp_path, than, seed, 4.0, **size)
    found = judged(PAIRS | {"kind": "trend", "pairs": pairs}, tmp_path)
    assert found.verdict == verdict
    words = "the loss difference moves by"
    assert found.evidence.startswith(f"{words} {np.mean(slopes):+.4f} [")


@pytest.mark.parametrize(
    ("interactions", "verdict"),
    [
        ((0.01, -0.01, 0.0), "holds"),
        ((0.04, 0.0, 0.08), "direction only"),
        ((0.2, 0.21, 0.2), "fails"),
    ],
)
def test_gains_add_up_if_their_interaction_is_near_zero(tmp_path, interactions, verdict):
    for seed, interaction in enumerate(interactions):
        losses = {"none": 4.0, "a": 3.8, "b": 3.9, "a-b": 3.7 + interaction}
        for arm, loss in losses.items():
            keep(tmp_path, arm, seed, loss + seed)
    found = judged(ADDITIVE, tmp_path)
    assert found.verdict == verdict
    assert found.evidence.startswith(f"interaction {np.mean(interactions):+.4f} [")


@pytest.mark.parametrize(
    ("losses", "verdict", "words"),
    [
        ([(4.5, 3.9), (4.52, 3.9), (4.5, 3.91)], "holds", "of the budget"),
        ([(4.0, 3.9), (4.7, 4.01), (4.6, 4.01)], "fails", "reached on 1 of 3 seeds"),
        ([(4.6, 4.0), (4.6, 4.0), (3.9, 3.8)], "direction only", "after 0."),
        ([(4.6, 4.1), (4.6, 4.1), (4.6, 4.1)], "fails", "reached on 0 of 3 seeds"),
    ],
)
def test_a_match_needs_every_seed(tmp_path, losses, verdict, words):
    for seed, (middle, end) in enumerate(losses):
        curve = [{"tokens": 500, "val": middle}, {"tokens": 1000, "val": end}]
        keep(tmp_path, "x", seed, end, curve=curve)
        base = [{"tokens": 500, "val": 4.6}, {"tokens": 1000, "val": 4.0}]
        keep(tmp_path, "y", seed, 3.0, curve=base)
    found = judged(RULE | {"kind": "match"}, tmp_path)
    assert found.verdict == verdict
    assert words in found.evidence
    with pytest.raises(RecordError, match="unknown metric 'wiki_ood' along training; known: val"):
        judged(RULE | {"kind": "match", "metric": "wiki_ood"}, tmp_path)


@pytest.mark.parametrize(
    ("slopes", "verdict"),
    [
        ((-0.1, -0.11, -0.1), "holds"),
        ((-0.1, 0.06, -0.1), "direction only"),
        ((0.1, 0.11, 0.1), "fails"),
    ],
)
def test_a_drift_is_the_slope_of_the_second_half(tmp_path, slopes, verdict):
    for seed, slope in enumerate(slopes):
        for arm, part in (("x", 1), ("y", 0)):
            losses = {250: 5 + part, 500: 4.0, 1000: 4 + slope * part}  # the first is too early
            curve = [{"tokens": t, "val": loss} for t, loss in losses.items()]
            keep(tmp_path, arm, seed, losses[1000], curve=curve)
    found = judged(RULE | {"kind": "drift"}, tmp_path)
    assert found.verdict == verdict
    assert f"{np.mean(slopes):+.4f} [" in found.evidence
    assert "nats a doubling of tokens, 3 paired seeds" in found.evidence


def strata_records(folder, effects, *, noise=0.001, targets=(0, 3, 600, 0, 500, 700, 900)):
    """Two arms whose difference in stratum s is effects[s], with a little noise a seed."""
    rng = np.random.default_rng(0)
    which = np.repeat(np.arange(7), targets)
    documents = rng.permutation(len(which)) % 40
    for seed in range(3):
        for arm, sign in (("x", 1), ("y", 0)):
            shift = np.array(effects) * sign + noise * rng.standard_normal()
            nats = 5 + shift[which]
            sums = {"val/a": stratify(which, nats, documents)}
            strata = {"weights": {"val/a": 1.0}, "splits": sums}
            keep(folder, arm, seed, float(nats.mean()), strata=strata)


@pytest.mark.parametrize(
    ("rare", "frequent", "noise", "verdict"),
    [
        (-0.3, -0.01, 0.001, "holds"),
        (-0.3, -0.01, 0.3, "direction only"),
        (-0.3, -0.6, 0.001, "fails"),
        (0.3, 0.6, 0.001, "fails"),
    ],
)
def test_rare_tokens_gain_and_more_than_frequent_ones(tmp_path, rare, frequent, noise, verdict):
    """The stratum with 3 targets is too small to count, and its effect is not seen."""
    strata_records(tmp_path, [9, 9, rare, 9, -0.1, -0.1, frequent], noise=noise)
    found = judged(RULE | {"kind": "rare", "targets": 500}, tmp_path)
    assert found.verdict == verdict
    assert found.evidence.startswith("`x` minus `y`, frequency 1e-06 to 1e-05: ")
    assert "; less that above 0.01: " in found.evidence
    few = judged(RULE | {"kind": "rare", "targets": 900}, tmp_path)
    assert few.verdict == "not attempted"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((12, 10, 30), "holds"),
        ((12, 9.9, 30), "direction only"),
        ((12, 0.9, 30), "fails"),
        ((12,), "not attempted"),
    ],
)
def test_a_ratio_is_judged_in_every_seed_and_at_the_end(tmp_path, ratios, verdict):
    for seed, ratio in enumerate(ratios):
        for arm, last in (("x", 0.01), ("y", 0.01 * ratio)):
            curve = [{"tokens": 10, "size": 5.0}, {"tokens": 20, "size": last}]
            keep(tmp_path, arm, seed, 4.0, curve=curve)
    found = judged(RULE | {"kind": "ratio", "metric": "size", "times": 10}, tmp_path)
    assert found.verdict == verdict
    if len(ratios) > 1:
        assert f"{ratios[0]} {ratios[1]} {ratios[2]} times (bar: 10), 3 paired" in found.evidence


@pytest.mark.parametrize(
    ("frequent", "noise", "verdict"),
    [
        (0.005, 0.001, "holds"),
        (0.005, 0.05, "direction only"),
        (-0.04, 0.001, "fails"),
        (0.04, 0.1, "no effect found"),
    ],
)
def test_flat_means_within_the_limit_and_not_merely_unseen(tmp_path, frequent, noise, verdict):
    strata_records(tmp_path, [9, 9, 9, 9, frequent, frequent, frequent], noise=noise)
    found = judged(FLAT, tmp_path)
    assert found.verdict == verdict
    assert found.evidence.startswith("`x` minus `y`, frequency above 0.0001: ")


def test_a_limit_from_above(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps({"ratio": 1.05}))
    for limits, verdict in (
        ({"at_most": 1.1}, "holds"),
        ({"at_most": 1.05}, "holds"),
        ({"at_most": 1.04}, "fails"),
        ({"at_least": 1, "at_most": 1.1}, "holds"),
        ({"at_least": 1.06, "at_most": 1.1}, "fails"),
    ):
        found = judge({"benchmark": BENCH | limits}, folder=tmp_path)
        assert found.verdict == verdict
    assert found.evidence == "ratio 1.05 (bar: at least 1.06, at most 1.1)"


def test_a_benchmark_that_lacks_the_value_answers_nothing(tmp_path):
    (tmp_path / "b.json").write_text('{"other": 1}')
    claim = {"benchmark": {"record": "b.json", "value": "ratio", "at_least": 5}}
    assert judge(claim, folder=tmp_path) == Verdict(
        "not attempted", "record `b.json` has no `ratio`"
    )


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((0.5, 0.2, 0.7), "holds"),
        ((0.1, -0.3, 0.5), "direction only"),
        ((-0.1, -0.5, 0.3), "no effect found"),
        ((-0.5, -0.7, -0.2), "fails"),
        ((0.5, 0.2), "not attempted"),
    ],
)
def test_a_correlation_is_judged_by_its_interval(tmp_path, ends, verdict):
    record = {f"mlp_correlation_{end}": value for end, value in zip(ENDS, ends, strict=False)}
    (tmp_path / "b.json").write_text(json.dumps(record))
    claim = {"benchmark": {"record": "b.json", "correlation": "mlp", "at_least": 0.0}}
    assert judge(claim, folder=tmp_path).verdict == verdict


@pytest.mark.parametrize(("value", "verdict"), [(5.0, "holds"), (4.99, "fails")])
def test_a_benchmark_meets_its_bar_or_not(tmp_path, value, verdict):
    claim = {"benchmark": {"record": "b.json", "value": "ratio", "at_least": 5}}
    assert judge(claim, folder=tmp_path).verdict == "not attempted"
    (tmp_path / "b.json").write_text(json.dumps({"ratio": value}))
    assert judge(claim, folder=tmp_path).verdict == verdict


def test_tests_behind_claims_are_run(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").touch()
    (tmp_path / "book").mkdir()
    (tmp_path / "test_it.py").write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    monkeypatch.chdir(tmp_path)
    claims = [BASE | {"kind": "identity", "test": f"test_it.py::test_{name}"} for name in "abc"]
    assert list(check_tests(claims).values()) == ["passed", "failed", "failed"]
    assert [judge(claim).verdict for claim in claims] == ["holds exactly", "fails", "fails"]


def test_a_table_escapes_what_it_shows(tmp_path):
    page = table([BASE | {"id": "a", "claim": "x < `y`", "open": "none"}])
    assert "x &lt; <code>y</code>" in page
    assert "not attempted" in page


def test_claims_are_shown_as_a_table_and_as_a_list():
    claim = load_claims()["lev-perplexity-200m"]
    assert claims_list(claim["id"]).data.startswith(
        f"- **{claim['id']}: not at our scale.** {claim['claim']} Needs 4.2B"
    )
    assert f'id="claim-{claim["id"]}"' in claims_box(claim["id"]).data
    for show in (claims_box, claims_list):
        with pytest.raises(RecordError, match="unknown claim 'lev-best'"):
            show("lev-best")
