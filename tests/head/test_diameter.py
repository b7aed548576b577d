"""The diameter against brute force in float64, on clouds that try to break it."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgeom.head.diameter import diameter, diameter_bounds, diameter_brackets

SEED = st.integers(0, 2**32 - 1)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def brute(W):
    """All distances in float64, without products."""
    mode = "donot_use_mm_for_euclid_dist"
    return torch.cdist(W.double(), W.double(), compute_mode=mode)


def check(W):
    """The value is that of all pairs, the pair has it, and the bounds hold."""
    truth = brute(W)
    value, (i, j) = diameter(W)
    rounding = (W.shape[1] + 64) * 1e-15
    assert math.isclose(value, truth.max().item(), rel_tol=rounding)
    assert math.isclose(value, truth[i, j].item(), rel_tol=rounding)
    assert i < j or value == 0
    low, high = diameter_bounds(W)
    assert low <= value * (1 + rounding)
    assert value <= high * (1 + rounding)


def heavy(seed, n, d):
    return normal(seed, n, d) * torch.exp(2 * normal(seed + 1, n, 1))


CLOUDS = {
    "gaussian": lambda s, n, d: normal(s, n, d),
    "unit rows": lambda s, n, d: F.normalize(normal(s, n, d)),
    "heavy tails": heavy,
    "decaying spectrum": lambda s, n, d: normal(s, n, d) * torch.arange(1, d + 1).rsqrt(),
    "duplicates": lambda s, n, d: normal(s, max(1, n // 7), d).repeat(7, 1),
    "two heaps": lambda s, n, d: normal(s, 2, d).repeat(n, 1),
    "one point": lambda s, n, d: normal(s, 1, d).expand(n, d),
    "a line": lambda s, n, d: normal(s, n, 1) * normal(s + 1, 1, d),
    "offset": lambda s, n, d: normal(s, n, d, dtype=torch.float64) + 1e6,
    "offset in float32": lambda s, n, d: normal(s, n, d) + 1e6,
    "tiny": lambda s, n, d: 1e-8 * normal(s, n, d),
    "huge": lambda s, n, d: 1e8 * normal(s, n, d),
    "signs": lambda s, n, d: normal(s, n, d).sign(),
    "one far away": lambda s, n, d: torch.cat([normal(s, n, d), torch.full((1, d), 1e5)]),
    "half precision": lambda s, n, d: normal(s, n, d).bfloat16(),
}


@pytest.mark.parametrize("name", CLOUDS)
@settings(max_examples=20)
@given(seed=SEED, n=st.integers(1, 300), d=st.integers(1, 20))
def test_equals_brute_force(name, seed, n, d):
    check(CLOUDS[name](seed, n, d))


@pytest.mark.parametrize("name", ["gaussian", "unit rows", "signs", "heavy tails"])
def test_equals_brute_force_over_several_tiles(name):
    check(CLOUDS[name](1, 2500, 6))


def test_ties_everywhere():
    check(torch.eye(200))
    check(torch.cat([torch.eye(60), -torch.eye(60)]))
    angles = torch.arange(1200, dtype=torch.float64) * math.pi / 600
    check(torch.stack([angles.cos(), angles.sin()], 1))


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30, 3e38])
def test_scales_at_the_ends_of_float32(scale):
    check(normal(0, 50, 4).clamp(-1, 1) * scale)
    check(torch.cat([torch.full((50, 1), 1.0), normal(0, 50, 4).clamp(-1, 1) * 1e-42], 1))


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_scales_beyond_float32(scale):
    cloud = normal(0, 50, 4, dtype=torch.float64)
    assert math.isclose(diameter(cloud * scale).value, diameter(cloud).value * scale, rel_tol=1e-12)


def test_few_rows():
    assert diameter(torch.ones(1, 3)) == (0.0, (0, 0))
    assert diameter_bounds(torch.ones(1, 3)) == (0.0, 0.0)
    assert diameter(torch.tensor([[0.0, 0.0], [3.0, 4.0]])) == (5.0, (0, 1))
    assert diameter(torch.full((40, 3), 0.1)) == (0.0, (0, 0))


@given(seed=SEED, n=st.integers(2, 400), d=st.integers(1, 12))
def test_brackets_close_in(seed, n, d):
    cloud = normal(seed, n, d)
    truth, last = brute(cloud).max().item(), (0.0, math.inf)
    for bracket in diameter_brackets(cloud, passes=6):
        assert last[0] <= bracket.lower <= truth * (1 + 1e-12)
        assert truth * (1 - 1e-12) <= bracket.upper <= last[1]
        assert math.isclose(brute(cloud)[bracket.pair].item(), bracket.lower, rel_tol=1e-12)
        last = bracket
    assert bracket.lower == bracket.upper


@pytest.mark.parametrize("name", ["gaussian", "unit rows", "heavy tails", "decaying spectrum"])
def test_bounds_are_within_the_square_root_of_two(name):
    low, high = diameter_bounds(CLOUDS[name](3, 2000, 64))
    assert high / low < math.sqrt(2)


@given(SEED, st.integers(2, 300), st.integers(1, 12), st.floats(0, 3), st.integers(1, 30))
def test_bounds_of_any_cloud_near_the_square_root_of_two(seed, n, d, tail, passes):
    """The center of pass t is within R / sqrt(t) of the best; a rim point lies across from it."""
    cloud = normal(seed, n, d) * torch.exp(tail * normal(seed + 1, n, 1))
    low, high = diameter_bounds(cloud, passes)
    off = 1 / math.sqrt(passes)
    assert high <= low * 2 * (1 + off) / math.hypot(1, 1 - off) * (1 + 1e-4)


def test_allowed_shortcuts_of_the_processor_change_nothing():
    cloud, before = normal(5, 600, 64), torch.get_float32_matmul_precision()
    expected = diameter(cloud)
    torch.set_float32_matmul_precision("medium")
    try:
        assert diameter(cloud) == expected
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_matrix_is_left_alone():
    cloud = normal(6, 300, 5).requires_grad_()
    before = cloud.detach().clone()
    diameter(cloud)
    assert torch.equal(cloud, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (7, 2)])
def test_what_is_not_finite_is_refused(bad, place):
    cloud = normal(0, 20, 3)
    cloud[place] = bad
    for function in (diameter, diameter_bounds):
        with pytest.raises(ValueError, match="finite"):
            function(cloud)


def test_misuse():
    with pytest.raises(TypeError, match=r"floating-point.*int64"):
        diameter(torch.arange(6).view(2, 3))
    for shape in ((3,), (0, 4), (4, 0), (2, 3, 4)):
        with pytest.raises(ValueError, match="matrix"):
            diameter(torch.zeros(shape))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        diameter_bounds(torch.zeros(4, 2), passes=0)
