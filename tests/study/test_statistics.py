import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lmgeom.study import paired, paired_arms, paired_curve, ratios, tokens_to_match

losses = st.lists(st.floats(1, 10), min_size=2, max_size=6)


@given(losses, st.floats(-1, 1))
def test_paired_agrees_with_scipy(a, shift):
    b = [x * (1 + 0.01 * i) + shift for i, x in enumerate(a)]
    difference = np.subtract(a, b)
    if np.ptp(difference) < 1e-6:
        return
    ours, theirs = paired(a, b), stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    np.testing.assert_allclose([ours.low, ours.high], theirs, rtol=1e-9, atol=1e-9)


@given(losses)
def test_paired_is_antisymmetric(a):
    b = a[::-1]
    assert paired(a, b).low == pytest.approx(-paired(b, a).high, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "b"), [([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([1.0, np.nan], [1.0, 1.0])]
)
def test_paired_refuses(a, b):
    with pytest.raises(ValueError, match=r"need two|finite"):
        paired(a, b)


def run(arm, seed, val, curve=()):
    points = [{"tokens": t, "val": v} for t, v in curve]
    return {"arm": arm, "seed": seed, "losses": {"val": val}, "curve": points}


def test_arms_are_paired_by_seed():
    records = [run("a", 0, 3.0), run("a", 2, 5.0), run("a", 1, 4.0)]
    records += [run("b", 1, 4.5), run("b", 2, 5.25), run("b", 7, 0.0)]
    assert paired_arms(records, "a", "b", "val").differences == (-0.5, -0.25)
    assert paired_arms(records[:4], "a", "b", "val") is None


def test_curves_are_paired_by_tokens():
    records = [
        run(arm, s, 0, [(10, s), (20, s + x)]) for arm, x in (("a", 0), ("b", 1)) for s in (1, 2)
    ]
    curve = paired_curve(records, "a", "b", "val")
    assert [(t, p.mean) for t, p in curve] == [(10, 0.0), (20, -1.0)]


@given(st.floats(-2, 2))
def test_ratios_are_two_readings_of_one_number(d):
    reduction, excess = ratios(d)
    assert (1 - reduction) * (1 + excess) == pytest.approx(1)


def test_tokens_to_match():
    curve = [(10, 5.0), (100, 4.0), (1000, 3.0)]
    assert tokens_to_match(curve, 4.0) == pytest.approx(100)
    assert tokens_to_match(curve, 3.5) == pytest.approx(10**2.5)
    assert tokens_to_match(curve, 6.0) == 10
    assert tokens_to_match(curve, 2.0) is None
