"""The loss: two routes that agree, float32 accumulation, and a counted peak of memory."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmgeom.errors import ConfigError, DataError
from lmgeom.lm import bits_per_byte, token_loss


class PeakBytes(TorchDispatchMode):
    """The most bytes alive at once among tensors created inside."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def add(self, storage):
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())

    def remove(self, key, size):
        self.known.discard(key)
        self.live -= size


def problem(tokens=40, dim=8, vocab=30, dtype=torch.float32, ignored=0.0, seed=0):
    torch.manual_seed(seed)
    head = nn.Linear(dim, vocab, bias=False).to(dtype)
    hidden = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    targets[torch.rand(tokens) < ignored] = -100
    return head, hidden, targets


def gap(a, b):
    return (a - b).abs().max() / b.abs().max()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 50), st.integers(1, 60), st.sampled_from([0.0, 0.3]), st.integers(0, 99))
def test_both_routes_agree(tokens, chunk, ignored, seed):
    head, hidden, targets = problem(tokens, ignored=ignored, seed=seed)
    targets[0] = 1
    plain, chunked = (token_loss(head, hidden, targets, c) for c in (None, chunk))
    assert gap(chunked, plain) < 1e-6
    inputs = (hidden, head.weight)
    both = (torch.autograd.grad(loss, inputs) for loss in (chunked, plain))
    assert all(gap(a, b) < 1e-6 for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("chunk", [None, 7])
def test_agrees_with_the_definition(chunk):
    head, hidden, targets = problem(dtype=torch.float64)
    p = torch.exp(head(hidden)) / torch.exp(head(hidden)).sum(-1, keepdim=True)
    nats = -p[torch.arange(40), targets].log()
    each = token_loss(head, hidden, targets, chunk, "none")
    assert (each - nats).abs().max() < 1e-13
    assert (token_loss(head, hidden, targets, chunk) - nats.mean()).abs() < 1e-13


@pytest.mark.parametrize("chunk", [None, 7])
def test_unscored_targets_cost_nothing(chunk):
    head, hidden, targets = problem(ignored=0.4)
    scored = targets != -100
    each = token_loss(head, hidden, targets, chunk, "none")
    assert (each[~scored] == 0).all()
    mean = token_loss(head, hidden, targets, chunk)
    assert mean.item() == pytest.approx(each[scored].mean().item(), rel=1e-6)
    mean.backward()
    assert (hidden.grad[~scored] == 0).all()
    assert token_loss(head, hidden, torch.full((40,), -100), chunk).isnan()


@pytest.mark.parametrize("chunk", [None, 16])
def test_bfloat16_is_accumulated_in_float32(chunk):
    head, hidden, targets = problem(tokens=64, vocab=5000, dtype=torch.bfloat16)
    loss = token_loss(head, hidden, targets, chunk)
    exact = F.cross_entropy(head(hidden).double(), targets)
    assert loss.dtype == torch.float32
    assert token_loss(head, hidden, targets, chunk, "none").dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 1e-5


@pytest.mark.parametrize("chunk", [None, 3])
def test_twice_differentiable(chunk):
    head, hidden, targets = problem(tokens=5, dim=3, vocab=6, dtype=torch.float64)

    def loss(x):
        return token_loss(head, x, targets, chunk)

    assert torch.autograd.gradcheck(loss, hidden)
    assert torch.autograd.gradgradcheck(loss, hidden)


def test_any_head_and_any_leading_shape():
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 30))
    hidden, targets = torch.randn(2, 3, 5, 8), torch.randint(30, (2, 3, 5))
    each = token_loss(head, hidden, targets, 4, "none")
    assert each.shape == (2, 3, 5)
    assert gap(each, token_loss(head, hidden, targets, None, "none")) < 1e-6


def test_chunks_hold_a_fraction_of_the_memory():
    head, hidden, targets = problem(tokens=512, dim=16, vocab=4096)
    peaks = {}
    for chunk in (None, 32):
        with PeakBytes() as bytes_:
            token_loss(head, hidden, targets, chunk).backward()
        peaks[chunk] = bytes_.peak
    logits = 512 * 4096 * 4
    assert 3 * logits <= peaks[None] < 3.2 * logits
    assert peaks[32] < peaks[None] / 10


def test_evaluation_holds_one_chunk():
    head, hidden, targets = problem(tokens=512, dim=16, vocab=4096)
    with torch.no_grad(), PeakBytes() as bytes_:
        token_loss(head, hidden, targets, 32, "none")
    assert bytes_.peak < 3 * 32 * 4096 * 4


@pytest.mark.parametrize("chunk", [0, -1, True, 2.0])
def test_impossible_chunks_are_refused(chunk):
    with pytest.raises(ConfigError, match=f"chunk={chunk}: must be a positive number of tokens"):
        token_loss(*problem(), chunk)


def test_wrong_shapes_and_reductions_are_refused():
    head, hidden, targets = problem()
    with pytest.raises(ConfigError, match="reduction='sum': must be 'mean' or 'none'"):
        token_loss(head, hidden, targets, reduction="sum")
    with pytest.raises(DataError, match=r"targets have shape \(39,\): must be \(40,\)"):
        token_loss(head, hidden, targets[1:])


def test_bits_per_byte():
    assert bits_per_byte(100 * math.log(256), 100) == pytest.approx(8)
    assert bits_per_byte(math.log(2), 1) == pytest.approx(1)
