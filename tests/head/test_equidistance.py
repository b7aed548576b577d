"""Laws of equidistance: the decomposition, its limits, and the family of spread rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgeom.head.equidistance import equidistance

SEEDS = st.integers(0, 2**32 - 1)


def cloud(seed, V, D):
    """Rows of unequal lengths in float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(V, D, generator=generator, dtype=torch.float64)
    return rows * torch.rand(V, 1, generator=generator, dtype=torch.float64)


def squared_distances(W):
    """All V (V - 1) / 2 squared distances, by brute force."""
    return torch.pdist(W).square()


@given(SEEDS, st.integers(2, 40), st.integers(1, 20))
def test_decomposition_is_the_brute_force_variance(seed, V, D):
    W = cloud(seed, V, D)
    squares = squared_distances(W)
    expected = squares.var(correction=0) / squares.mean().square()
    found = equidistance(W)
    assert abs(found.total - expected) < 1e-11
    assert found.norms >= 0
    assert found.spectrum > -1e-12
