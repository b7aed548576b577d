"""Laws of equidistance: the decomposition, its limits, codes, and the family of spread rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import fractional_matrix_power

from lmgeom.head.equidistance import (
    _signs,
    distance_ratio_bound,
    equidistance,
    kerdock,
    simplex_pair,
    spread,
)
from lmgeom.head.steepest import polar, unit_rows

SEEDS = st.integers(0, 2**32 - 1)
POWERS = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])


def cloud(seed, V, D, tail=0.0):
    """Rows in float64, of log-normal lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(V, D, generator=generator, dtype=torch.float64)
    return rows * torch.exp(tail * torch.randn(V, 1, generator=generator, dtype=torch.float64))


def ratio(W):
    distances = torch.pdist(W)
    return (distances.min() / distances.max()).item()


def rotation(seed, D):
    return torch.linalg.qr(cloud(seed, D, D))[0]


# ---------------------------------------------------------------- the decomposition


@given(SEEDS, st.integers(2, 40), st.integers(1, 20), st.floats(0, 2))
def test_decomposition_is_the_brute_force_variance(seed, V, D, tail):
    W = cloud(seed, V, D, tail)
    squares = torch.pdist(W).square()
    expected = (squares.var(correction=0) / squares.mean().square()).item()
    found = equidistance(W)
    assert found.total == pytest.approx(expected, rel=1e-9, abs=1e-13)
    assert found.total == found.floor + found.norms + found.spectrum
    assert found.norms >= 0
    assert found.spectrum > -1e-12
    assert found.floor == pytest.approx(max(V - 1 - D, 0) / (V * D))


@given(SEEDS, st.integers(3, 20), st.integers(2, 6))
def test_rank_sets_the_floor_and_not_the_total(seed, V, D):
    rank = min(D - 1, V - 1)
    W = cloud(seed, V, rank) @ cloud(seed + 1, rank, D)
    found = equidistance(W, rank=rank)
    assert found.total == pytest.approx(equidistance(W).total, abs=1e-12)
    assert found.floor == pytest.approx((V - 1 - rank) / (V * rank), abs=1e-12)
    assert found.spectrum > -1e-12


def test_floor_is_attained_by_frames_only():
    assert equidistance(torch.eye(9)).total == pytest.approx(0, abs=1e-14)
    assert equidistance(torch.eye(9)).excess == math.inf
    cross = torch.cat([torch.eye(5), -torch.eye(5)])
    found = equidistance(cross)
    assert found.excess == pytest.approx(1, abs=1e-12)
    assert equidistance(polar(cloud(0, 50, 4) - cloud(0, 50, 4).mean(0))).spectrum < 1e-12


@pytest.mark.parametrize("scale", [1e-160, 1e-30, 1.0, 1e160])
def test_scale_and_shift_do_not_matter(scale):
    W = cloud(0, 30, 5, 1)
    assert equidistance(scale * W).total == pytest.approx(equidistance(W).total, rel=1e-12)
    assert equidistance(W + 1e4).total == pytest.approx(equidistance(W).total, rel=1e-8)
    assert equidistance(W.float()).total == pytest.approx(equidistance(W).total, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(3), "finite matrix of 2 or more rows"),
        (torch.zeros(1, 3), "finite matrix of 2 or more rows"),
        (torch.tensor([[0.0], [torch.nan]]), "finite matrix"),
        (torch.tensor([[0.0], [torch.inf]]), "finite matrix"),
        (torch.ones(4, 3), "all rows of W are equal"),
        (torch.full((7, 2), 0.1), "all rows of W are equal"),  # their mean is rounded
    ],
)
def test_misuse_of_equidistance(wrong, message):
    with pytest.raises(ValueError, match=message):
        equidistance(wrong)


@pytest.mark.parametrize("rank", [0, 3])
def test_rank_must_be_one_that_centered_rows_can_have(rank):
    with pytest.raises(ValueError, match=f"rank must be between 1 and 2, got {rank}"):
        equidistance(torch.eye(3), rank=rank)


# ---------------------------------------------------------------- limits and codes


def test_limits_of_equidistance():
    """At most D + 1 points; beyond, a bound that no cloud breaks and constructions attain."""
    for D in (2, 3, 5, 8):
        simplex = torch.eye(D + 1, dtype=torch.float64)  # D dimensions, up to a constant one
        assert torch.linalg.matrix_rank(simplex - simplex.mean(0)) == D
        assert (
            ratio(simplex) == distance_ratio_bound(D + 1, D) == 1 > distance_ratio_bound(D + 2, D)
        )
        for V in (D + 2, D + 3, 4 * D + 5, 100):
            for seed in range(20):
                W = cloud(seed, V, D)
                for points in (W, unit_rows(W), spread(W, sweeps=5)):
                    eps = equidistance(points).total ** 0.5
                    assert 1 / ratio(points) >= eps + math.sqrt(1 + eps**2) - 1e-9
                    assert ratio(points) <= distance_ratio_bound(V, D) + 1e-12
    for D in (2, 4, 10, 64):
        points = simplex_pair(D).double()
        assert points.shape == (D + 2, D)
        assert ratio(points) == pytest.approx(distance_ratio_bound(D + 2, D), abs=1e-6)
    for D in (16, 64):
        code = kerdock(D).double()
        assert 0 < distance_ratio_bound(len(code), D) - ratio(code) < 0.02
    assert 0 < distance_ratio_bound(50_257, 1024) - math.sqrt(31 / 33) < 4e-4


@pytest.mark.parametrize("D", [4, 16, 64, 256])
def test_kerdock_cosines(D):
    code = kerdock(D, min(D * (D // 2 + 1), 4000)).double()
    assert torch.allclose(code.norm(dim=1), torch.ones(1, dtype=torch.float64), atol=1e-6)
    cosines = (code @ code.T).abs().fill_diagonal_(0)
    allowed = torch.minimum(cosines, (cosines - D**-0.5).abs())
    assert allowed.max() < 1e-6


def test_kerdock_code_for_gpt2():
    """50,257 points in 1024 dimensions: all cosines of two bases are one Hadamard transform."""
    bits = torch.arange(1024)[:, None] >> torch.arange(10) & 1
    hadamard = 1.0 - 2 * (bits @ bits.T % 2)
    signs = torch.stack([_signs(a, bits) for a in range(49)]).float()
    first, second = torch.triu_indices(49, 49, 1)
    meetings = signs[first] * signs[second] @ hadamard
    assert meetings.abs().unique().tolist() == [32.0]
    tail = kerdock(1024, 50_257)[-100:]
    assert (tail.double() @ tail.double().T - torch.eye(100)).abs().max() < 1 / 32 + 1e-6


@pytest.mark.parametrize("D", [8, 32, 60, 0, 16384])
def test_no_kerdock_code(D):
    with pytest.raises(ValueError, match=f"D must be one of .*got {D}"):
        kerdock(D)
    with pytest.raises(ValueError, match="count must be between 1 and 144, got 145"):
        kerdock(16, 145)


@pytest.mark.parametrize("D", [3, 0, -2])
def test_no_simplex_pair(D):
    with pytest.raises(ValueError, match=f"positive even number, got {D}"):
        simplex_pair(D)


@given(SEEDS, st.integers(2, 12), st.integers(-1, 3))
def test_polar_factor_is_the_simplex_for_small_vocabularies(seed, V, more):
    G = cloud(seed, V, V + more)
    G -= G.mean(0)
    assert (torch.pdist(polar(G)) - 2**0.5).abs().max() < 1e-6


# ---------------------------------------------------------------- the family


def by_definition(G, p, sweeps):
    """The sweeps row by row, with SciPy's matrix power."""
    B = np.eye(G.shape[1])
    for _ in range(sweeps):
        C = sum(np.outer(g, g) / np.sum((B @ g) ** 2) for g in G)
        B = fractional_matrix_power(C, -p / 2)
    return np.stack([B @ g / np.linalg.norm(B @ g) for g in G])


@given(SEEDS, st.integers(20, 40), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=40)
def test_one_matrix_does_what_alternating_does_up_to_a_rotation(seed, V, D, sweeps):
    G = S = cloud(seed, V, D, 1)
    for _ in range(sweeps):
        values, axes = torch.linalg.eigh(unit_rows(S).T @ unit_rows(S))
        S = unit_rows(S) @ (axes * values**-0.5) @ axes.T
    ours, theirs = spread(G, sweeps=sweeps), unit_rows(S)
    assert (ours @ ours.T - theirs @ theirs.T).abs().max() < 1e-7


@given(SEEDS, st.integers(2, 40), st.integers(1, 10))
def test_what_unequal_lengths_remain_of_unit_rows(seed, V, D):
    U = unit_rows(cloud(seed, V, D) + 0.3)
    m, M = U.mean(0), U.T @ U / V
    if m.norm() < 0.99:
        expected = 2 * (1 - 1 / V) * (m @ M @ m - (m @ m) ** 2) / (1 - m @ m) ** 2
        assert equidistance(U).norms == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)


@given(SEEDS, st.integers(6, 30), st.integers(1, 4), POWERS, st.integers(1, 3))
@settings(max_examples=40)
def test_spread_is_its_definition(seed, V, D, p, sweeps):
    G = cloud(seed, V, D, 1)
    difference = abs(spread(G, p, sweeps).numpy() - by_definition(G.numpy(), p, sweeps)).max()
    assert difference < 1e-6


@given(SEEDS, st.integers(1, 30), st.integers(1, 8), POWERS, st.integers(1, 4))
def test_spread_rows_have_length_one_and_descend(seed, V, D, p, sweeps):
    G = cloud(seed, V, D, 2)
    for gradient in (G, G.float()):
        S = spread(gradient, p, sweeps)
        assert S.dtype == gradient.dtype
        assert (S.norm(dim=1) - 1).abs().max() < 8 * torch.finfo(S.dtype).eps
        assert (gradient * S).sum() > 0
        assert (gradient.double() * S.double()).sum(1).min() > -1e-6 * G.norm(dim=1).max()


@given(SEEDS, st.integers(9, 30), st.integers(2, 8), POWERS, st.integers(1, 3))
def test_spread_symmetries(seed, V, D, p, sweeps):
    G = cloud(seed, V, D, 1)
    S = spread(G, p, sweeps)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
    assert (spread(G[order], p, sweeps) - S[order]).abs().max() < 1e-8
    Q = rotation(seed, D)
    assert (spread(G @ Q, p, sweeps) - S @ Q).abs().max() < 1e-6
    lengths = torch.exp(cloud(seed + 1, V, 1))
    assert (spread(lengths * G, p, sweeps) - S).abs().max() < 1e-8
    assert torch.equal(spread(2.0**-20 * G, p, sweeps), S)
    assert torch.equal(spread(G, p, sweeps), S)


def sweep(A, G, p):
    """One sweep as a map of positive definite matrices."""
    values, axes = torch.linalg.eigh(A)
    weights = (G @ (axes * values**-p) @ axes.T * G).sum(1, keepdim=True)
    return (G / weights).T @ G


def hilbert_of_matrices(A, B):
    root = torch.linalg.inv(torch.linalg.cholesky(B))
    values = torch.linalg.eigvalsh(root @ A @ root.T)
    return (values[-1] / values[0]).log().item()


@given(SEEDS, POWERS, st.integers(2, 6), st.floats(0, 2))
def test_a_sweep_contracts_hilberts_metric_by_the_power(seed, p, D, tail):
    G = cloud(seed, 4 * D, D, tail)
    A, B = (x.T @ x for x in (cloud(seed + 1, 2 * D, D, 1), cloud(seed + 2, 2 * D, D, 1)))
    after = hilbert_of_matrices(sweep(A, G, p), sweep(B, G, p))
    assert after <= p * hilbert_of_matrices(A, B) + 1e-6


@given(SEEDS, st.sampled_from([0.25, 0.5]))
@settings(max_examples=20)
def test_sweeps_converge_for_powers_below_one(seed, p):
    G = cloud(seed, 40, 4, 1)
    assert (spread(G, p, 40) - spread(G, p, 41)).abs().max() < 1e-7


def test_three_sweeps_come_within_five_percent_of_the_floor(real_gradients):
    for seed, (V, D, tail) in enumerate([(200, 8, 0.0), (1000, 16, 1.0), (2000, 32, 1.5)]):
        G = cloud(seed, V, D, tail) @ torch.diag(torch.logspace(0, -2, D, dtype=torch.float64))
        assert equidistance(spread(G - G.mean(0), sweeps=3)).excess < 1.05
    low = cloud(3, 500, 5) @ cloud(4, 5, 12)
    found = equidistance(spread(low - low.mean(0), sweeps=3), rank=5)
    assert math.sqrt(found.total / found.floor) < 1.05
    for G in real_gradients:
        values = [equidistance(spread(G - G.mean(0), sweeps=n)).excess for n in (1, 3, 30)]
        assert values[2] < values[0]


def test_equal_rows_stay_equal_and_bound_the_spectrum():
    G = cloud(0, 400, 8)
    G[:100] = G[0]
    S = spread(G, sweeps=20)
    assert torch.pdist(S[:100]).max() < 1e-7
    assert torch.linalg.eigvalsh(S.T @ S / 400)[-1] >= 0.25


def test_small_vocabularies_become_simplices():
    independent = cloud(1, 6, 9)
    assert (torch.pdist(spread(independent)) - 2**0.5).abs().max() < 1e-6
    centered = independent - independent.mean(0)
    distances = torch.pdist(spread(centered, sweeps=200))
    assert (distances - (2 * 6 / 5) ** 0.5).abs().max() < 0.02


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_zero_rows_and_degenerate_shapes(p):
    G = cloud(0, 10, 4).float()
    G[3] = 0
    S = spread(G, p, 2)
    assert not S[3].any()
    kept = torch.arange(10) != 3
    assert torch.allclose(S[kept], spread(G[kept], p, 2), atol=1e-5)
    assert not spread(torch.zeros(5, 3), p).any()
    assert torch.allclose(
        spread(torch.tensor([[3.0, 4.0]]), p), torch.tensor([[0.6, 0.8]]), atol=1e-3
    )
    assert spread(torch.randn(7, 1), p).abs().eq(1).all()


@given(SEEDS, st.integers(1, 3), st.sampled_from([0.5, 1.0]))
def test_rank_deficient_rows_use_the_pseudo_inverse(seed, rank, p):
    small, axes = cloud(seed, 30, rank), rotation(seed, 6)[:rank]
    assert (spread(small @ axes, p, 2) - spread(small, p, 2) @ axes).abs().max() < 1e-5


def test_float32_follows_float64(real_gradients):
    moderate = cloud(0, 300, 8, 2) @ torch.diag(torch.logspace(0, -2, 8, dtype=torch.float64))
    for p, sweeps in ((0.0, 1), (0.5, 2), (1.0, 1), (1.0, 3)):
        exact, single = spread(moderate, p, sweeps), spread(moderate.float(), p, sweeps)
        assert (exact - single).norm() < 1e-3 * exact.norm()
    for G in real_gradients:
        rows = G - G.mean(0)
        exact, single = spread(rows), spread(rows.float())
        assert equidistance(single).total == pytest.approx(equidistance(exact).total, rel=0.05)


@pytest.mark.parametrize("whiten", [-0.1, 1.1, float("nan")])
def test_whiten_must_be_a_power_from_0_to_1(whiten):
    with pytest.raises(ValueError, match="whiten must be between 0 and 1"):
        spread(torch.eye(2), whiten)


@pytest.mark.parametrize("sweeps", [0, -1, 1.5])
def test_sweeps_must_be_positive_integers(sweeps):
    with pytest.raises(ValueError, match="sweeps must be a positive integer"):
        spread(torch.eye(2), sweeps=sweeps)
