import json

import pytest
import yaml

from lmgeom.errors import RecordError
from lmgeom.study import judge, load_claims
from lmgeom.study.claims import check_tests, judge_interval, table
from lmgeom.study.records import FIELDS, record

BASE = {"part": "input", "claim": "c", "place": "p", "kind": "k", "reported": "r", "bar": "b"}


def write(tmp_path, *rows):
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([BASE | row for row in rows]))
    return path


def test_the_book_s_ledger_is_valid():
    claims = load_claims()
    assert {claim["part"] for claim in claims.values()} == {"input", "depth", "output"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "a"}], "needs one of"),
        ([{"id": "a", "open": "x", "test": "y"}], "needs one of"),
        ([{"id": "a", "open": "x"}] * 2, "stands twice"),
        ([{"id": "a", "rule": {"study": "s", "at": "end"}}], "unknown 'at'"),
    ],
)
def test_a_broken_ledger_is_refused(tmp_path, rows, message):
    with pytest.raises(RecordError, match=message):
        load_claims(write(tmp_path, *rows))


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
            run = dict.fromkeys(FIELDS, 0) | {"study": "s", "arm": arm, "seed": seed}
            record(run | {"id": f"{seed}", "losses": {"val": val}}, tmp_path)
    verdict = judge({"rule": rule}, folder=tmp_path)
    assert verdict.verdict == "holds"
    assert "-0.1033 nats" in verdict.evidence
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
            run = dict.fromkeys(FIELDS, 0) | {
                "study": "s",
                "arm": arm,
                "seed": seed,
                "curve": curve,
            }
            record(run | {"id": f"{seed}", "losses": {"val": late}}, tmp_path)
    assert judge({"rule": rule}, folder=tmp_path).verdict == verdict


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
