"""Laws of Hilbert's distance: isometry, contraction, and what it controls, in float64."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgeom.head.hilbert import (
    birkhoff_contraction,
    hilbert_distance,
    projective_diameter,
    range_seminorm,
)

SEED = st.integers(0, 2**32 - 1)
SIZE = st.integers(1, 30)
SPREAD = st.sampled_from([1e-8, 1e-3, 1.0, 30.0, 1e4])


def normal(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@given(SEED, SIZE, SPREAD, st.floats(-1e3, 1e3))
def test_range_is_a_seminorm_that_ignores_shifts(seed, n, spread, factor):
    u, v = spread * normal(seed, 2, n)
    size = range_seminorm(u)
    assert size >= 0
    assert torch.isclose(range_seminorm(u + spread * factor), size, atol=1e-9 * spread)
    assert torch.isclose(range_seminorm(factor * u), abs(factor) * size)
    assert range_seminorm(u + v) <= (size + range_seminorm(v)) * (1 + 1e-12)
    centered = u - (u.max() + u.min()) / 2
    assert torch.isclose(size, 2 * centered.abs().max(), atol=1e-12 * spread)


@given(SEED, SIZE, st.floats(0.05, 20), st.sampled_from([1e-6, 1e-2, 1.0, 15.0]))
def test_isometry_at_any_temperature_and_finite_step(seed, n, temperature, length):
    z, step = normal(seed, 2, n)
    step *= length * temperature
    p, q = (torch.softmax(logits / temperature, -1) for logits in (z, z + step))
    expected = range_seminorm(step) / temperature
    assert abs(hilbert_distance(p.log(), q.log()) - expected) < 1e-12 * (1 + expected)
    by_logits = hilbert_distance(z / temperature, (z + step) / temperature)
    assert abs(by_logits - expected) < 1e-12 * (1 + expected)


@given(SEED, SIZE, SPREAD)
def test_metric_on_predictions(seed, n, spread):
    p, q, r = spread * normal(seed, 3, n)
    distance = hilbert_distance(p, q)
    assert distance == hilbert_distance(q, p)
    assert hilbert_distance(p, p) == 0
    assert distance <= (hilbert_distance(p, r) + hilbert_distance(r, q)) * (1 + 1e-12)
    assert (distance == 0) == bool((p - q).unique().numel() == 1)
    odds = (p - q)[:, None] - (p - q)
    assert distance == odds.max()


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=8), st.data())
def test_projective_and_exact_in_rationals(p, data):
    q = [data.draw(st.integers(1, 10**6)) for _ in p]
    ratios = [Fraction(a, b) for a, b in zip(p, q, strict=True)]
    exact = math.log(max(ratios) / min(ratios))
    scaled = hilbert_distance(tensor(p).log() + 300, tensor(q).log() - 300)
    assert abs(scaled - exact) < 1e-12
    assert abs(hilbert_distance(tensor(p).log(), tensor(q).log()) - exact) < 1e-13 * (1 + exact)


def test_probabilities_far_below_the_smallest_float():
    log_p = tensor([0.0, -300 * math.log(10), -1e5])
    log_q = tensor([0.0, -299 * math.log(10), -2e5])
    assert torch.isclose(hilbert_distance(log_p, log_q), tensor(1e5 + math.log(10)))


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([0.8, 0.2, 0.0], [0.2, 0.4, 0.0], math.log(8)),  # a common zero does not count
        ([0.5, 0.5, 0.0], [0.5, 0.0, 0.5], math.inf),
        ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], math.inf),
        ([0.5, 0.5, 0.0], [0.5, 0.25, 0.25], math.inf),
        ([1.0, 0.0], [1.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], math.nan),  # nothing but zeros is no distribution
        ([0.0, 0.0], [0.5, 0.5], math.nan),
        ([math.nan, 0.5], [0.5, 0.5], math.nan),
    ],
)
def test_zeros_and_what_is_no_distribution(p, q, expected):
    log_p, log_q = tensor(p).log(), tensor(q).log()
    for found in (hilbert_distance(log_p, log_q), hilbert_distance(log_q, log_p)):
        assert torch.isclose(found, tensor(expected), equal_nan=True)


def test_shapes_broadcast_and_narrow_types_are_widened():
    log_p, log_q = torch.randn(4, 1, 7), torch.randn(3, 7)
    assert hilbert_distance(log_p, log_q).shape == (4, 3)
    assert range_seminorm(log_p).shape == (4, 1)
    half = hilbert_distance(log_p.bfloat16(), log_q.bfloat16())
    assert half.dtype == torch.float32
    assert torch.equal(half, hilbert_distance(log_p.bfloat16().float(), log_q.bfloat16().float()))
    assert hilbert_distance(log_p, log_q.double()).dtype == torch.float64


def test_gradient_flows_past_common_zeros():
    log_p = tensor([0.3, 0.1, -math.inf]).requires_grad_()
    hilbert_distance(log_p, tensor([0.0, 0.0, -math.inf])).backward()
    assert log_p.grad.tolist() == [1.0, -1.0, 0.0]


@given(SEED, st.integers(2, 6), st.integers(2, 6), st.sampled_from([1e-3, 1.0, 5.0]))
def test_positive_matrices_contract(seed, m, n, spread):
    log_A = spread * normal(seed, m, n)
    x, y = 3 * normal(seed + 1, 2, 20, n)
    before = hilbert_distance(x, y)
    after = hilbert_distance(*(torch.logsumexp(v[:, None] + log_A, -1) for v in (x, y)))
    assert (after <= birkhoff_contraction(log_A) * before + 1e-12).all()
    delta = projective_diameter(log_A)
    ratio = torch.cosh((delta + before) / 4) / torch.cosh((delta - before) / 4)
    assert (after <= 2 * ratio.log() * (1 + 1e-12) + 1e-12).all()  # the exact limit, below the line
    entries = log_A[:, None, :, None] + log_A[None, :, None, :]
    exact = (entries - entries.transpose(0, 1)).max()  # over rows i, j and columns k, l
    assert torch.isclose(projective_diameter(log_A), exact)


@given(SEED, st.integers(2, 6), st.integers(2, 6))
def test_the_contraction_factor_is_the_smallest(seed, m, n):
    log_A = normal(seed, m, n)
    columns = log_A.T
    table = torch.stack([hilbert_distance(columns, column) for column in columns])
    i, j = divmod(int(table.argmax()), n)
    change = columns[i] - columns[j]
    delta = projective_diameter(log_A)
    for d in (1e-4, 3.0):
        y = torch.full((n,), -torch.inf, dtype=torch.float64)
        y[i], y[j] = 0, (change.max() + change.min() + d) / 2
        x = y.clone()
        x[i] += d
        after = hilbert_distance(*(torch.logsumexp(v + log_A, -1) for v in (x, y)))
        limit = 2 * (torch.cosh((delta + d) / 4) / torch.cosh((delta - d) / 4)).log()
        assert torch.isclose(after, limit, rtol=1e-9, atol=1e-12)
        assert d > 1 or d * birkhoff_contraction(log_A) - after < 1e-10


def test_contraction_with_zeros():
    assert birkhoff_contraction(torch.eye(3).log()) == 1
    assert birkhoff_contraction(torch.ones(3, 2).log()) == 0


# ------------------------------------------------------------------ what the distance controls
def effects(log_p, log_q):
    change, p = log_p - log_q, log_p.exp()
    return change.abs().max(), (p - log_q.exp()).abs().sum() / 2, (p * change).sum()


def bounds(d):
    kappa = (d.expm1() / d).log() + d / d.expm1() - 1
    return d, torch.tanh(d / 4), kappa, d**2 / 8


def two_tokens(first, d):
    log_p = torch.stack([first.log(), (-first).log1p()])
    return log_p, (log_p + torch.stack([d, torch.zeros_like(d)])).log_softmax(-1)


@given(SEED, st.integers(2, 30), st.sampled_from([1e-3, 0.1, 1.0, 5.0]), st.floats(0.05, 12))
def test_loss_total_variation_and_kl_are_bounded_and_the_bounds_are_reached(seed, n, spread, far):
    log_p = normal(seed, n).log_softmax(-1)
    log_q = (log_p + spread * normal(seed + 1, n)).log_softmax(-1)
    d = hilbert_distance(log_p, log_q)
    loss, variation, divergence = effects(log_p, log_q)
    limits = bounds(d)
    assert loss <= limits[0] * (1 + 1e-12)
    assert variation <= limits[1] * (1 + 1e-12)
    assert divergence <= limits[2] * (1 + 1e-9) + 1e-14
    assert limits[2] <= limits[3] * (1 + 1e-9) + 1e-14

    d = tensor(far)
    firsts = (torch.exp(-d) / 1000 * d.clamp(max=1), torch.sigmoid(-d / 2), 1 / d - 1 / d.expm1())
    for i, first in enumerate(firsts):
        log_p, log_q = two_tokens(first, d)
        assert abs(hilbert_distance(log_p, log_q) - d) < 1e-12
        reached, limit = effects(log_p, log_q)[i], bounds(d)[i]
        assert limit * 0.99 < reached < limit * (1 + 1e-9)


def test_the_quadratic_bound_on_kl_is_tight_for_small_steps():
    shares = [(bounds(tensor(d))[2] / bounds(tensor(d))[3]).item() for d in (0.1, 1.0, 8.0)]
    assert shares[0] > 0.999
    assert 0.6 < shares[2] < shares[1] < shares[0]
