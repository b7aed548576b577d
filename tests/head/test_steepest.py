"""The steepest step: its dual, its certificates, and what row normalization keeps of it."""

import cvxpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgeom.head.steepest import polar, steepest, steepness, tension_bounds, unit_rows

SEEDS = st.integers(0, 2**32 - 1)


def gradient(seed, V, D, spread=1.0):
    """Centered rows whose lengths are spread log-normally."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(V, D, generator=generator, dtype=torch.float64)
    rows *= torch.exp(spread * torch.randn(V, 1, generator=generator, dtype=torch.float64))
    return rows - rows.mean(0)


def simplex(k):
    """k + 1 unit vectors in k dimensions, equally far apart."""
    corners = torch.eye(k + 1, dtype=torch.float64) - 1 / (k + 1)
    return unit_rows(corners @ torch.linalg.svd(corners)[2][:k].T)


def diameter(S):
    return torch.pdist(S).max().item()


def by_convex_solver(G):
    """T(G) from a conic solver, as the step that it is the maximum over."""
    phi = cvxpy.Variable(G.shape)
    limits = [cvxpy.norm(phi[i] - phi[j]) <= 1 for i in range(len(G)) for j in range(i)]
    problem = cvxpy.Problem(cvxpy.Maximize(cvxpy.sum(cvxpy.multiply(G.numpy(), phi))), limits)
    return problem.solve(solver=cvxpy.CLARABEL)


def unserved(G, answer):
    """What the flow of an answer leaves of the gradient."""
    rest = G.index_add(0, answer.pairs[:, 0], answer.flow, alpha=-1)
    return rest.index_add(0, answer.pairs[:, 1], answer.flow)


@pytest.mark.parametrize("size", [(3, 1), (5, 2), (9, 3), (12, 5), (8, 12), (20, 4)])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_certified_pair_agrees_with_a_convex_solver(size, spread):
    G = gradient(sum(size), *size, spread)
    G /= G.norm(dim=1).sum()
    answer = steepest(G, tol=3e-6)
    expected = by_convex_solver(G)
    assert 0 <= answer.upper - answer.lower <= 3e-6
    assert abs(answer.lower - expected) < 1e-5
    assert abs(answer.upper - expected) < 1e-5


@given(SEEDS, st.integers(2, 12), st.integers(1, 6), st.floats(0, 2))
@settings(max_examples=15)
def test_certificates_hold_at_any_moment(seed, V, D, spread):
    G = gradient(seed, V, D, spread)
    exact = steepest(G, tol=1e-5)
    for rounds in (0, 50, 200):
        early = steepest(G, tol=0, rounds=rounds)
        assert early.lower <= exact.upper * (1 + 1e-12)
        assert early.upper >= exact.lower * (1 - 1e-12)
        assert diameter(early.step) <= 1 + 1e-12
        assert abs((G * early.step).sum().item() - early.lower) < 1e-9 * early.upper
        rest = unserved(G, early)
        assert early.upper >= early.flow.norm(dim=1).sum().item() - 1e-9
        assert rest.sum(0).abs().max() < 1e-9 * G.abs().max()


def test_pairs_with_flow_stand_at_distance_one_along_it():
    G = gradient(3, 15, 3)
    answer = steepest(G, tol=1e-7)
    size = answer.flow.norm(dim=1, keepdim=True)
    i, j = answer.pairs[(size > 1e-3 * size.max()).flatten()].T
    along = (answer.flow / size)[(size > 1e-3 * size.max()).flatten()]
    assert (answer.step[i] - answer.step[j] - along).abs().max() < 1e-3


def test_row_normalization_keeps_its_guarantee(real_gradients):
    for k in (1, 2, 5, 9, 30):
        low, high = tension_bounds(simplex(k))
        assert abs(low / high - ((k + 1) / (2 * k)) ** 0.5) < 1e-12
        step = simplex(k) / diameter(simplex(k))
        assert abs((simplex(k) * step).sum().item() - high) < 1e-12 * high
    random = [gradient(seed, 5 + 3 * seed, 1 + seed, seed / 3) for seed in range(6)]
    for G in [*random, *real_gradients]:
        answer = steepest(G, tol=1e-2)
        assert tension_bounds(G)[0] / answer.upper > 0.7071
        rows = unit_rows(G - G.mean(0)) / 2
        assert (G * rows).sum().item() > 0.7071 * answer.upper
        assert diameter(rows) <= 1 + 1e-12


@given(SEEDS, st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=15)
def test_row_normalization_is_exact_on_symmetric_clouds(seed, pairs, D):
    half = gradient(seed, pairs, D)
    half[0] += 1
    G = torch.cat([half, -half])
    answer = steepest(G, tol=1e-4)
    assert answer.lower * (1 - 1e-12) <= tension_bounds(G)[0] <= answer.upper * (1 + 1e-12)


@pytest.mark.parametrize("size", [(3, 1), (5, 2), (9, 3), (12, 5), (20, 4)])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_row_normalization_is_the_steepest_step_in_a_ball(size, spread):
    """With all rows in a ball of radius 1/2, wherever its center, no step is steeper."""
    G = gradient(sum(size), *size, spread)
    phi, center = cvxpy.Variable(G.shape), cvxpy.Variable(G.shape[1])
    limits = [cvxpy.norm(phi[i] - center) <= 0.5 for i in range(len(G))]
    decrease = cvxpy.sum(cvxpy.multiply(G.numpy(), phi))
    best = cvxpy.Problem(cvxpy.Maximize(decrease), limits).solve(solver=cvxpy.CLARABEL)
    step = unit_rows(G) / 2
    assert step.norm(dim=1).max() <= 0.5 * (1 + 1e-12)
    assert (G * step).sum().item() == pytest.approx(best, rel=1e-6)
    assert best == pytest.approx(G.norm(dim=1).sum().item() / 2, rel=1e-6)


def test_one_dimension_is_half_the_sum_of_absolute_values():
    G = gradient(0, 30, 1)
    answer = steepest(G)
    assert abs(answer.lower - G.abs().sum().item() / 2) < 1e-5
    assert tension_bounds(G) == pytest.approx((answer.lower, answer.lower), rel=1e-5)


def test_a_star_is_optimal_for_one_heavy_token():
    answer = steepest(torch.tensor([[-3.0, 0.0], [1.0, 0.0], [2.0, 0.0]]))
    assert answer.upper == pytest.approx(3, abs=1e-5)


@given(SEEDS, st.integers(2, 12), st.integers(1, 6), st.floats(0, 2))
@settings(max_examples=15)
def test_steepness_is_below_the_true_share(seed, V, D, spread):
    G = gradient(seed, V, D, spread)
    answer = steepest(G, tol=1e-4)
    for S in (G, G.sign(), unit_rows(G), polar(G)):
        width = diameter(S)
        share = (G * S).sum().item() / (width * answer.lower)
        assert steepness(G, S) <= share * (1 + 1e-9)
        assert steepness(G, S) <= steepness(G, S, width) * (1 + 1e-9) <= share * (1 + 2e-9)
    assert answer.upper >= torch.linalg.svdvals(G).sum() / 2**0.5 * (1 - 1e-9)
    assert answer.lower <= ((V - 1) / 2) ** 0.5 * G.norm() * (1 + 1e-9)
    assert tension_bounds(G)[0] <= answer.upper * (1 + 1e-9)
    assert answer.lower <= tension_bounds(G)[1] * (1 + 1e-9)
    rank = min(D, V - 1)
    assert steepness(G, unit_rows(G)) >= ((rank + 1) / (2 * rank)) ** 0.5 - 1e-9


def test_the_mark_of_unit_rows_does_not_suffer_from_their_mean():
    """One heavy row against nine light ones: unit rows are exactly steepest, their mean is long."""
    G = torch.tensor([[-9.0]] + 9 * [[1.0]])
    assert steepness(G, unit_rows(G)) == pytest.approx(1)
    assert steepness(G, unit_rows(G) + 5) == pytest.approx(1 / 1.8)


@given(SEEDS, st.integers(2, 12), st.integers(1, 6))
def test_nuclear_norm_bound(seed, V, D):
    G = gradient(seed, V, D)
    factor = polar(G)
    assert (G * factor).sum().item() == pytest.approx(torch.linalg.svdvals(G).sum().item())
    assert diameter(factor) <= 2**0.5 + 1e-12
    assert tension_bounds(G)[1] >= torch.linalg.svdvals(G).sum().item() / 2**0.5 - 1e-9
    assert tension_bounds(G)[0] <= ((V - 1) / 2) ** 0.5 * G.norm().item() * (1 + 1e-9)


def test_scale_and_common_row_change_nothing():
    G = gradient(1, 10, 3)
    a, b = steepest(G), steepest(1e-20 * (G + 3))
    assert b.lower == pytest.approx(1e-20 * a.lower, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_rows_at_any_scale(dtype):
    tiny = torch.finfo(dtype).tiny
    scales = [0.0, tiny * 4, 1e-25, 1.0, 1e25, torch.finfo(dtype).max / 4]
    G = torch.tensor(scales, dtype=dtype)[:, None] * torch.tensor([[1.0, -2.0, 0.0]], dtype=dtype)
    rows = unit_rows(G)
    assert rows.dtype == dtype
    assert not rows[0].any()
    expected = torch.tensor([1.0, -2.0, 0.0], dtype=dtype) / 5**0.5
    assert (rows[1:] - expected).abs().max() < 4 * torch.finfo(dtype).eps


def test_polar_keeps_the_column_space():
    G = gradient(2, 9, 4)
    assert torch.allclose(polar(G).T @ polar(G), torch.eye(4, dtype=torch.float64))
    low = G[:, :2] @ torch.randn(2, 4, dtype=torch.float64)
    assert torch.linalg.svdvals(polar(low))[2] < 1e-12
    assert not polar(torch.zeros(3, 2)).any()


@pytest.mark.parametrize("shape", [(1, 3), (3, 2), (4, 3), (7, 2)])
def test_equal_rows_have_no_steepest_step(shape):
    answer = steepest(torch.full(shape, 0.1))  # the mean of three or seven of these is rounded
    assert (answer.lower, answer.upper, len(answer.pairs)) == (0, 0, 0)
    assert not answer.step.any()
    assert torch.tensor(steepness(torch.full(shape, 0.1), torch.ones(shape))).isnan()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(0, 2), torch.tensor([[torch.nan, 0], [0, 1]])]
)
def test_misuse(wrong):
    with pytest.raises(ValueError, match="finite matrix"):
        steepest(wrong)
