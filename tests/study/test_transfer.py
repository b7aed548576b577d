"""Whether a size carries over: vertices, limits and verdicts on made-up trials."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgeom.study import claims
from lmgeom.study.claims import load_claims
from lmgeom.study.run import load_study
from lmgeom.study.transfer import best_size, carried, largest_harmless, size_trials

SIZES = 2.0 ** np.arange(-3, 4)
RULE = load_claims()["head-step-transfers"]["rule"]
NAMES = (RULE["better"], *RULE["rivals"])


def valley(center, bend=0.03, bottom=5.0):
    """Losses of the sizes: a parabola over octaves."""
    return bottom + bend * (np.log2(SIZES) - center) ** 2


@given(st.floats(-1.9, 1.9), st.floats(1e-3, 1.0), st.floats(-3, 3))
def test_the_vertex_of_a_parabola_is_exact(center, bend, octaves):
    found = best_size(SIZES * 2**octaves, valley(center, bend))
    assert math.log2(found) == pytest.approx(center + octaves, abs=1e-6)


@given(st.lists(st.floats(0, 9), min_size=3, max_size=7))
def test_the_vertex_is_within_half_a_step_of_the_lowest_trial(losses):
    sizes = SIZES[: len(losses)]
    k = int(np.argmin(losses))
    found = best_size(sizes, losses)
    assert (found is None) == (k in (0, len(losses) - 1))
    assert found is None or abs(math.log2(found / sizes[k])) <= 0.5 + 1e-9


@given(st.floats(-2.5, 0.5), st.floats(0.05, 0.3))
def test_the_harmless_limit_is_where_the_wall_passes_the_tolerance(center, within):
    losses = valley(center, bend=0.05)
    found = math.log2(largest_harmless(SIZES, losses, within))
    assert np.interp(found, np.log2(SIZES), losses) == pytest.approx(losses.min() + within)
    assert found > np.log2(SIZES[losses.argmin()])


def test_a_grid_that_ends_too_early_gives_no_answer():
    assert best_size(SIZES, SIZES) is None
    assert best_size(SIZES, -SIZES) is None
    assert largest_harmless(SIZES, -SIZES) is None
    assert largest_harmless(SIZES, valley(2.9)) is None
    assert best_size(SIZES[:3], [1.0, 1.0, 1.0]) is None
    assert best_size(SIZES[:3], [2.0, 1.0, 2.0]) == pytest.approx(SIZES[1])


def runs(centers):
    """Made-up records: the rules' best octaves in each model."""
    return [
        {
            "arm": f"{model}-{rule}-{size:g}",
            "seed": 0,
            "config": {"train": {"head_lr": size}},
            "losses": {"val": loss},
        }
        for rule, found in centers.items()
        for model, center in zip(RULE["models"], found, strict=True)
        for size, loss in zip(SIZES, valley(center), strict=True)
    ]


def judged(monkeypatch, steady, drifting, name="head-step-transfers"):
    """The verdict where the first rule has the first best octaves and its rivals the others."""
    made = runs({rule: drifting for rule in NAMES} | {RULE["better"]: steady})
    monkeypatch.setattr(claims, "load_records", lambda study, folder: made)
    return claims.judge(load_claims()[name])


@pytest.mark.parametrize(
    ("steady", "drifting", "verdict"),
    [
        ((0, 0, 0), (1, -1, 0), "holds"),
        ((0, 0.4, 0), (0.6, 0, 0), "direction only"),
        ((1, -1, 0), (0, 0, 0), "fails"),
        ((1, -1, 0), (1, -1, 0), "fails"),
        ((0, 0, 0), (-3, 0, 0), "not attempted"),
    ],
)
def test_verdicts(monkeypatch, steady, drifting, verdict):
    found = judged(monkeypatch, steady, drifting)
    assert found.verdict == verdict
    words = "one seed" if verdict != "not attempted" else "muon are too few"
    assert found.evidence.endswith(words)


def test_the_harmless_limits_have_a_verdict_of_their_own(monkeypatch):
    assert judged(monkeypatch, (0, 0, 0), (0, -2, 0), "head-step-stable").verdict == "holds"
    assert judged(monkeypatch, (2.9, 0, 0), (0, 0, 0), "head-step-stable").verdict == (
        "not attempted"
    )


def test_missing_trials_are_no_answer(monkeypatch):
    made = runs(dict.fromkeys(NAMES, (0, 0, 0)))
    assert carried(made, "adamw", RULE["models"]).spread == pytest.approx(0, abs=1e-9)
    assert carried([], "adamw", RULE["models"]) is None
    last = f"{RULE['models'][-1]}-adamw"
    assert len(size_trials(made, last)) == len(SIZES)
    kept = [r for r in made if r["arm"] != f"{last}-1"]
    assert carried(kept, "adamw", RULE["models"]) is None
    monkeypatch.setattr(claims, "load_records", lambda study, folder: kept)
    found = claims.judge(load_claims()["head-step-transfers"])
    assert found.verdict == "not attempted"


def test_the_plan_has_the_trials_that_the_rule_asks_for():
    plan = load_study(RULE["study"])
    found = {}
    for run in plan.runs:
        cell, _, size = run.arm.rpartition("-")
        assert float(size) == run.train.head_lr
        assert cell.endswith(f"-{run.train.head_optimizer}")
        found.setdefault(cell, []).append(run.train.head_lr)
    for rule in NAMES:
        tried = [sorted(found[f"{model}-{rule}"]) for model in RULE["models"]]
        assert all(sizes == tried[0] for sizes in tried)
        assert len(tried[0]) == 6 + 3 * (rule == "adamw")  # whose grid the rule of the edge widened
        assert np.allclose(np.diff(np.log2(tried[0])), 1)


@pytest.mark.parametrize(
    ("margins", "message"),
    [({"spread": -1}, "margins: spread=-1 must be"), ({"typo": 1}, "margins: unknown 'typo'")],
)
def test_bad_margins_are_refused(margins, message):
    assert message in claims._fault({"rule": RULE | {"margins": margins}})
