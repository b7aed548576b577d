"""Laws of the quadratic B-spline basis, with SciPy as the independent oracle."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import BSpline

from lmgeom.lev.spline import basis, bspline, live_knots, live_slopes, stretch

POINT = st.floats(0, 1, allow_subnormal=False)
POINTS = st.lists(POINT, min_size=1, max_size=20)
KNOTS = st.integers(3, 40)


def scipy_basis(t, n_knots, nu=0):
    breaks = np.arange(4) - 1.5
    columns = [
        BSpline.basis_element(g + breaks, extrapolate=False)(t * (n_knots - 1), nu=nu)
        for g in range(n_knots)
    ]
    return np.nan_to_num(np.stack(columns, -1)) * (n_knots - 1) ** nu


def tensor(points):
    return torch.tensor(points, dtype=torch.float64)


def hard_points(n_knots):
    """Both ends, every knot, every breakpoint, and the floating-point neighbors of each."""
    places = torch.arange(2 * n_knots - 1, dtype=torch.float64) / (2 * n_knots - 2)
    up, down = (torch.nextafter(places, torch.full_like(places, end)) for end in (2.0, -1.0))
    return torch.cat([places, up, down]).clamp(0, 1)


def rows(t, n_knots, normalize=True):
    """Dense rows rebuilt from the three live knots."""
    first, values = live_knots(t, n_knots, normalize)
    index = first[..., None] + torch.arange(3)
    return torch.zeros(*t.shape, n_knots, dtype=t.dtype).scatter(-1, index, values)


@given(POINTS, KNOTS)
def test_local_support(points, n_knots):
    for t in (tensor(points), hard_points(n_knots), torch.linspace(0, 1, 997, dtype=torch.float64)):
        values = basis(t, n_knots, normalize=False)
        alive = values != 0
        assert alive.sum(-1).max() <= 3
        positions = torch.arange(n_knots)
        last = torch.where(alive, positions, -1).amax(-1)
        first = torch.where(alive, positions, n_knots).amin(-1)
        assert torch.equal(last - first + 1, alive.sum(-1)), "live knots are consecutive"
        assert np.abs(values.numpy() - scipy_basis(t.numpy(), n_knots)).max() < 1e-12


@given(POINTS, KNOTS)
def test_partition_of_unity(points, n_knots):
    delta = 1 / (n_knots - 1)
    grid = torch.linspace(0, 1, 997, dtype=torch.float64)
    t = torch.cat([tensor(points), hard_points(n_knots), grid])
    sums = basis(t, n_knots, normalize=False).sum(-1)
    inside = (t >= delta / 2) & (t <= 1 - delta / 2)
    assert (sums[inside] - 1).abs().max() < 1e-12
    missing = 0.5 * (0.5 - torch.minimum(t, 1 - t) / delta).clamp(min=0) ** 2
    assert (sums - (1 - missing)).abs().max() < 1e-12
    ends = basis(tensor([0.0, 1.0]), n_knots, normalize=False).sum(-1)
    assert (ends - 0.875).abs().max() < 1e-12
    assert (basis(t, n_knots).sum(-1) - 1).abs().max() < 1e-12


@given(POINTS, KNOTS, st.booleans())
def test_non_negative_and_symmetric(points, n_knots, normalize):
    t = tensor(points)
    values = basis(t, n_knots, normalize)
    assert values.min() >= 0
    assert (basis(1 - t, n_knots, normalize) - values.flip(-1)).abs().max() < 1e-12


@given(POINTS, KNOTS, st.booleans())
def test_live_knots_rebuild_the_basis(points, n_knots, normalize):
    for t in (tensor(points), hard_points(n_knots)):
        first, values = live_knots(t, n_knots, normalize)
        assert first.dtype == torch.int64
        assert values.shape == (*t.shape, 3)
        assert (rows(t, n_knots, normalize) - basis(t, n_knots, normalize)).abs().max() < 1e-14


@given(POINTS, KNOTS, st.booleans())
def test_slopes_are_the_gradients(points, n_knots, normalize):
    t = torch.cat([tensor(points), hard_points(n_knots)]).requires_grad_()
    index = live_knots(t, n_knots, normalize)[0][:, None] + torch.arange(3)
    for values in (
        live_knots(t, n_knots, normalize)[1],
        basis(t, n_knots, normalize).gather(-1, index),
    ):
        columns = [torch.autograd.grad(v, t, retain_graph=True)[0] for v in values.sum(0)]
        expected = torch.stack(columns, -1)
        slopes = live_slopes(t.detach(), n_knots, normalize)
        assert (slopes - expected).abs().max() < 1e-12 * n_knots


@given(POINTS, KNOTS)
def test_slopes_match_scipy(points, n_knots):
    t = tensor(points)
    index = live_knots(t, n_knots)[0][:, None] + torch.arange(3)
    expected = torch.from_numpy(scipy_basis(t.numpy(), n_knots, nu=1)).gather(-1, index)
    assert (live_slopes(t, n_knots, normalize=False) - expected).abs().max() < 1e-11 * n_knots


@given(POINTS, KNOTS, st.floats(0.5, 100))
def test_stretched_points_read_moved_knots(points, n_knots, scale):
    t = tensor(points)
    knots = 0.5 + (torch.arange(n_knots, dtype=torch.float64) - (n_knots - 1) / 2) / scale
    moved = bspline((t.clamp(knots[0], knots[-1])[:, None] - knots) * scale)
    found = basis(stretch(t, torch.tensor(scale, dtype=torch.float64), n_knots), n_knots, False)
    assert (found - moved).abs().max() < 1e-11 * n_knots


@given(POINTS, KNOTS)
def test_stretching_to_the_fixed_spacing_moves_nothing(points, n_knots):
    t = tensor(points)
    assert (stretch(t, torch.tensor(n_knots - 1.0), n_knots) - t).abs().max() < 1e-15


def test_gradcheck():
    t = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t.requires_grad_()
    for normalize in (True, False):
        assert torch.autograd.gradcheck(lambda x, n=normalize: basis(x, 8, n), (t,))
        assert torch.autograd.gradcheck(lambda x, n=normalize: live_knots(x, 8, n)[1], (t,))


def test_straight_lines_are_reproduced_inside():
    t = torch.linspace(0.5 / 15, 1 - 0.5 / 15, 101, dtype=torch.float64)
    assert (basis(t, 16) @ torch.linspace(0, 1, 16, dtype=torch.float64) - t).abs().max() < 1e-14


def test_area_and_smoothness_of_the_bump():
    x = torch.linspace(-2, 2, 4001, dtype=torch.float64)
    assert abs(bspline(x).sum().item() / 1000 - 1) < 1e-6
    jumps = bspline(x).diff().mul(1000).diff().abs().max().item()
    assert jumps < 2.1e-3, "the slope changes by at most |B''| = 2 a unit: it does not jump"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_kept_and_close_to_float64(dtype):
    t = (torch.arange(65) / 64).to(dtype)
    tolerance = 16 * torch.finfo(dtype).eps
    for function in (basis, lambda t, n: live_knots(t, n)[1], live_slopes):
        assert function(t, 16).dtype == dtype
    assert (basis(t, 16).double() - basis(t.double(), 16)).abs().max() < tolerance
    assert (basis(t, 16).double().sum(-1) - 1).abs().max() < tolerance


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 0, 4)])
def test_shapes(shape):
    t = torch.full(shape, 0.3)
    assert basis(t, 5).shape == (*shape, 5)
    assert live_knots(t, 5)[0].shape == shape
    assert live_knots(t, 5)[1].shape == live_slopes(t, 5).shape == (*shape, 3)


@pytest.mark.parametrize("normalize", [True, False])
def test_outside_the_interval_is_clamped(normalize):
    far = tensor([-torch.inf, -5.0, -1e-9, 1 + 1e-9, 2.0, torch.inf])
    ends = tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert torch.equal(basis(far, 8, normalize), basis(ends, 8, normalize))
    assert torch.equal(live_knots(far, 8, normalize)[1], live_knots(ends, 8, normalize)[1])
    assert not live_slopes(far, 8, normalize).any()


def test_nan_stays_nan():
    assert basis(tensor([torch.nan]), 8).isnan().all()
    assert live_knots(tensor([torch.nan]), 8)[1].isnan().all()


@pytest.mark.parametrize("function", [basis, live_knots, live_slopes])
def test_misuse(function):
    with pytest.raises(TypeError, match=r"floating-point.*int64"):
        function(torch.tensor([0, 1]), 8)
    with pytest.raises(TypeError, match="floating-point tensor, got float"):
        function(0.5, 8)
    for n_knots in (2, 0, -1):
        with pytest.raises(ValueError, match=f"at least 3.*got {n_knots}"):
            function(torch.tensor([0.5]), n_knots)


def test_full_order_inside_and_lower_order_at_the_ends():
    errors = {}
    for n_knots, normalize in itertools.product((17, 33), (True, False)):
        t = torch.linspace(0, 1, 2001, dtype=torch.float64)
        design, target = basis(t, n_knots, normalize), t.exp()[:, None]
        fit = torch.linalg.lstsq(design, target).solution
        errors[n_knots, normalize] = (design @ fit - target).abs().max().item()
    assert 1.8 < errors[17, True] / errors[33, True] < 2.2
    assert errors[17, False] / errors[33, False] < 1.2


def test_exports_as_one_graph():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(Both(), (torch.rand(5),))
    t = torch.rand(5)
    for ours, theirs in zip(exported.module()(t), Both()(t), strict=True):
        assert torch.equal(ours, theirs)


class Both(torch.nn.Module):
    """The dense and the live route behind one call."""

    def forward(self, t):
        return basis(t, 8), *live_knots(t, 8), live_slopes(t, 8)
