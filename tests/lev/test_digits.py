"""Laws of bases and digits, with NumPy and Python's integers as the independent oracle."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgeom.lev.digits import base, digits

REAL_SIZES = (50_257, 100_277, 200_376)
SIZES = st.integers(1, 5_000_000)
COUNTS = st.integers(1, 4)


def horner(found, b):
    """The ids that digits stand for."""
    ids = torch.zeros(found.shape[:-1], dtype=torch.int64)
    for place in found.unbind(-1):
        ids = ids * b + place
    return ids


def check_digits(ids, b, n_digits):
    """Digits lie in [0, b), are NumPy's, and lead back to the ids."""
    found = digits(ids, b, n_digits)
    assert found.dtype == torch.int64
    assert found.min() >= 0
    assert found.max() < b
    assert torch.equal(horner(found, b), ids)
    expected = np.stack(np.unravel_index(ids.numpy(), (b,) * n_digits), -1)
    assert (found.numpy() == expected).all()
    return found


def test_bijection():
    for vocab_size, n_digits in itertools.product(REAL_SIZES, (1, 2, 3, 4)):
        found = check_digits(torch.arange(vocab_size), base(vocab_size, n_digits), n_digits)
        rows = found.numpy()[np.lexsort(found.numpy().T)]
        assert (rows[1:] != rows[:-1]).any(-1).all(), "no two ids share their digits"


@given(SIZES, COUNTS)
def test_digits_of_any_vocabulary(vocab_size, n_digits):
    stride = 1 + vocab_size // 20_000
    ids = torch.cat([torch.arange(0, vocab_size, stride), torch.tensor([vocab_size - 1])])
    check_digits(ids, base(vocab_size, n_digits), n_digits)


def test_base_values():
    assert [base(v, 3) for v in REAL_SIZES] == [37, 47, 59]
    misrounded = [n for n in range(2, 1000) if math.ceil((n**5) ** (1 / 5)) != n]
    assert misrounded, "the powers below are hard: a floating-point root gets some of them wrong"
    for n, k in itertools.product((*range(2, 1000), 10**9, 10**20), range(2, 9)):
        assert [base(n**k + step, k) for step in (-1, 0, 1)] == [n, n, n + 1]


@given(st.integers(1, 10**60), st.integers(1, 12))
def test_base_is_the_smallest(vocab_size, n_digits):
    b = base(vocab_size, n_digits)
    assert b**n_digits >= vocab_size
    assert b == 1 or (b - 1) ** n_digits < vocab_size


@given(st.integers(2, 10**20), st.integers(1, 12))
def test_perfect_powers_do_not_misround(root, n_digits):
    power = root**n_digits
    assert base(power - 1, n_digits) == (root if n_digits > 1 else root - 1)
    assert base(power, n_digits) == root
    assert base(power + 1, n_digits) == root + 1


@given(st.integers(1, 1000), COUNTS)
def test_digits_count_like_an_odometer(b, n_digits):
    last = b**n_digits - 1
    found = digits(torch.tensor([0, last]), b, n_digits)
    assert found.tolist() == [[0] * n_digits, [b - 1] * n_digits]


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["int", "uint"])
def test_integer_dtypes(kind, bits):
    dtype = getattr(torch, f"{kind}{bits}")
    found = digits(torch.tensor([0, 1, 99], dtype=dtype), 300, 2)
    assert found.tolist() == [[0, 0], [0, 1], [0, 99]]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 0, 4)])
def test_shapes(shape):
    assert digits(torch.zeros(shape, dtype=torch.int64), 5, 3).shape == (*shape, 3)


def test_ids_near_the_end_of_int64():
    largest = 2**63 - 1
    b = base(largest + 1, 3)
    assert torch.equal(horner(digits(torch.tensor([largest]), b, 3), b), torch.tensor([largest]))


@pytest.mark.parametrize("bad", [-1, 27, 10**9])
def test_an_id_out_of_range_is_named(bad):
    with pytest.raises(ValueError, match=rf"^id {bad} is outside \[0, 3\*\*3 = 27\)$"):
        digits(torch.tensor([[0, bad], [26, 1]]), 3, 3)


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), [1, 2], 3])
def test_ids_that_are_no_integers(ids):
    with pytest.raises(TypeError, match="ids must be a tensor of integers"):
        digits(ids, 3, 3)


def test_ids_without_values():
    with pytest.raises(ValueError, match="ids must have values, got a tensor on the meta device"):
        digits(torch.arange(3, device="meta"), 3, 3)


@pytest.mark.parametrize("bad", [0, -3])
def test_counts_below_one(bad):
    ids = torch.tensor([0])
    for name, call in {
        "vocab_size": lambda: base(bad, 3),
        "n_digits": lambda: base(10, bad),
        "base": lambda: digits(ids, bad, 3),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got {bad}"):
            call()
    with pytest.raises(ValueError, match="n_digits must be at least 1"):
        digits(ids, 3, bad)


@pytest.mark.parametrize("bad", [3.0, "3", None, True])
def test_counts_that_are_no_integers(bad):
    ids = torch.tensor([0])
    for call in (lambda: base(bad, 3), lambda: base(10, bad), lambda: digits(ids, bad, 3)):
        with pytest.raises(TypeError, match="must be an integer, got"):
            call()


def test_numpy_integers_count():
    assert base(np.int64(2**62), np.int32(2)) == 2**31
