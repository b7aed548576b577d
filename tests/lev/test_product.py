"""The law of the spline product: it is the direct product, with zeros and signs."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgeom.lev.product import SplineProduct
from lmgeom.lev.spline import basis


@given(st.integers(0, 10**6), st.sampled_from([0, 0.1, 0.5]), st.integers(1, 4), st.booleans())
def test_spline_product_is_the_direct_product(seed, zeros, chunk, normalize):
    """Factors have both signs, and some curves are zero everywhere, which no gradient may fear."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.rand(4, 2, 6, dtype=torch.float64, generator=generator)
    curves = torch.randn(2, 6, 4, 3, dtype=torch.float64, generator=generator)
    curves *= torch.rand(2, 6, 1, 3, generator=generator) >= zeros
    inputs = t.requires_grad_(), (curves - 1).requires_grad_()
    goal = torch.randn(4, 2, 3, dtype=torch.float64, generator=generator)
    factors = torch.einsum("nhjg,hjgm->nhjm", basis(inputs[0], 4, normalize), 1 + inputs[1])
    direct, found = factors.prod(2), SplineProduct.apply(*inputs, chunk, normalize)
    assert torch.allclose(found, direct, rtol=1e-12, atol=1e-15)
    ours, theirs = (torch.autograd.grad(out, inputs, goal) for out in (found, direct))
    for one, other in zip(ours, theirs, strict=True):
        assert one.isfinite().all()
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-13)
