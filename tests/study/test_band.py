import json

import numpy as np
import pytest

from lmgeom import cli
from lmgeom.errors import RecordError
from lmgeom.study.band import check_path, check_run, prediction_band
from lmgeom.study.records import FIELDS, record

TOKENS = (100, 200, 400)


def made(arm, seed, values, study="s", **train):
    entry = dict.fromkeys(FIELDS, 0) | {"study": study, "arm": arm, "seed": seed}
    entry["config"] = {"train": {"lr": 0.1, "seed": seed} | train}
    entry["curve"] = [{"tokens": t, "val": v} for t, v in zip(TOKENS, values, strict=False)]
    return entry | {"id": f"{arm}{seed}", "losses": {"val": values[-1]}}


def test_the_band_is_students_interval_with_the_scatter_of_all_arms():
    runs = [made("a", 0, [5, 4, 3]), made("a", 1, [5.2, 4.1, 3]), made("b", 0, [6, 5, 4])]
    runs += [made("b", 1, [6.4, 5.1, 4.2])]
    band = prediction_band(runs, "a", level=0.94)
    assert band.tokens == TOKENS
    assert band.mean == pytest.approx([5.1, 4.05, 3.0])
    t = 6.9645567  # quantile 0.99 of Student's t with two degrees of freedom
    scatter = np.sqrt([(0.02 + 0.08) / 2, 0.005, 0.01])
    assert band.half == pytest.approx(t * scatter * np.sqrt(1.5), rel=1e-6)


def test_a_right_run_is_inside_as_often_as_promised():
    rng, inside = np.random.default_rng(0), 0
    for _ in range(400):
        runs = [
            made(arm, seed, 4 + 0.1 * rng.standard_normal(3)) for arm in "abc" for seed in range(3)
        ]
        new = dict(zip(TOKENS, 4 + 0.1 * rng.standard_normal(3), strict=True))
        inside += not prediction_band(runs, "a").outside(new)
    assert 0.93 < inside / 400 < 0.985


RUNS = [made(arm, seed, [5 + 0.01 * seed, 4, 3 - 0.01 * seed]) for arm in "ab" for seed in range(3)]


def test_where_a_curve_leaves():
    found = check_run(made("a", 7, [5.0, 4.9, 3.9]), RUNS)
    assert [point[:2] for point in found.outside] == [(200, 4.9), (400, 3.9)]
    assert "2 outside our band of 3 seeds, first at 200 tokens: 4.9000 where ours is 4.0" in str(
        found
    )
    assert found.same_seed is None
    again = check_run(made("a", 1, [5.01, 4, 2.99]), RUNS)
    assert not again.outside
    assert again.same_seed == pytest.approx(0)
    assert "all within our band of 3 seeds; +0.000000 nats" in str(again)


def test_settings_that_differ_are_named():
    other = made("a", 7, [5, 4, 3], lr=0.2, clip=1.0) | {"fingerprint": "x"}
    found = check_run(other, RUNS).other
    assert found[0] == "train.lr: 0.2 where ours has 0.1"
    assert found[1:] == [
        "train.clip: 1.0 where ours has None",
        "fingerprint: 'x' where ours has None",
    ]


@pytest.mark.parametrize(
    ("entry", "runs", "message"),
    [
        (made("z", 0, [5, 4, 3]), RUNS, "unknown arm 'z'; on record: a, b"),
        (made("z", 0, [5, 4, 3]), [], "unknown arm 'z'; on record: none"),
        (made("a", 0, [5, 4, 3]), [RUNS[0], RUNS[3]], "an arm with two seeds"),
        (made("a", 0, [5]) | {"curve": [{"tokens": 7, "val": 5.0}]}, RUNS, "no evaluation at the"),
        (made("a", 0, [5]) | {"curve": [{"tokens": 100, "x": 5.0}]}, RUNS, "unknown metric 'val'"),
    ],
)
def test_what_cannot_be_compared_is_refused(entry, runs, message):
    with pytest.raises(RecordError, match=message):
        check_run(entry, runs)


def test_the_command_checks_every_record_of_a_folder(tmp_path, monkeypatch, capsys):
    for run in RUNS:
        record(run, tmp_path / "ours")
    mine = tmp_path / "mine"
    good = record(made("a", 5, [5.01, 4, 2.99]), mine)
    (mine / "other.json").write_text(json.dumps({}))
    monkeypatch.setattr("lmgeom.study.paths.results", lambda: tmp_path / "ours")
    assert cli.main(["study", "check", str(mine)]) == 0
    record(made("b", 5, [9.0, 4, 2.99]), mine)
    assert cli.main(["study", "check", str(mine)]) == 1
    assert cli.main(["study", "check", str(good)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["s a-seed5"] * 2 + ["s b-seed5", "s a-seed5"]
    for path in (mine / "none.json", tmp_path / "nothing"):
        assert cli.main(["study", "check", str(path)]) == 2
    assert len(check_path(mine)) == 2
