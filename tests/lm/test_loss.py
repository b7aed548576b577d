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
from lmgeom.lm import TiedHead, bits_per_byte, token_loss
from lmgeom.lm.loss import linear_weight


class PeakBytes(TorchDispatchMode):
    """The most bytes alive at once among tensors created inside."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.add((args, kwargs), counts=False)  # what is new here was made outside
        out = func(*args, **(kwargs or {}))
        self.add(out)
        self.peak = max(self.peak, self.live)
        return out

    def add(self, tensors, counts=True):
        leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
        for storage in (leaf.untyped_storage() for leaf in leaves):
            if storage._cdata not in self.known:
                size = storage.nbytes() if counts else 0
                self.known.add(storage._cdata)
                self.live += size
                weakref.finalize(storage, self.remove, storage._cdata, size)

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


def sliced(head):
    """The same head as one that the loss knows nothing about."""

    def any_head(hidden):
        return head(hidden)

    any_head.weight = head.weight
    return any_head


def both_gradients(head, hidden, targets, chunk):
    """The loss and the gradients of the hidden states and of the head."""
    loss = token_loss(head, hidden, targets, chunk)
    return (loss, *torch.autograd.grad(loss, (hidden, head.weight)))


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
    assert all(gap(a, b) < 3e-6 for a, b in zip(*both, strict=True))


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


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 50), st.integers(1, 60), st.sampled_from([0.0, 0.3]), st.integers(0, 99))
def test_one_pass_is_exact(tokens, chunk, ignored, seed):
    head, hidden, targets = problem(tokens, dtype=torch.float64, ignored=ignored, seed=seed)
    targets[0] = 1
    routes = [both_gradients(head, hidden, targets, c) for c in (chunk, None)]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*routes, strict=True))


class Products(TorchDispatchMode):
    """The number of matrix products run inside."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def products(head, hidden, targets, reduction="mean"):
    with Products() as counted:
        loss = token_loss(head, hidden, targets, 10, reduction).sum()
        if loss.requires_grad:
            loss.backward()
    return counted.count


def test_a_linear_head_takes_three_products_a_chunk():
    head, hidden, targets = problem()
    assert products(head, hidden, targets) == 4 * 3
    assert products(sliced(head), hidden, targets) == 4 * 4
    assert products(head, hidden, targets, "none") == 4 * 4
    assert products(head, hidden.detach(), targets) == 4 * 2
    assert products(head.requires_grad_(False), hidden, targets) == 4 * 2
    assert products(head, hidden.detach(), targets) == 4
    with torch.no_grad():
        assert products(head, hidden, targets) == 4


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_gradients_that_are_needed(frozen):
    head, hidden, targets = problem()
    wanted = both_gradients(head, hidden, targets, None)
    {"hidden": hidden, "weight": head.weight}[frozen].requires_grad_(False)
    token_loss(head, hidden, targets, 7).backward()
    for x, gradient in zip((hidden, head.weight), wanted[1:], strict=True):
        assert (x.grad is None) if not x.requires_grad else gap(x.grad, gradient) < 1e-6


def test_a_tied_table_gets_the_gradient_of_both_its_uses():
    torch.manual_seed(0)
    table = nn.Embedding(30, 8).double()
    ids, targets = torch.randint(30, (2, 3, 20))[:, :, 0:7]
    gradients = []
    for chunk in (None, 4):
        table.zero_grad()
        token_loss(TiedHead(table), table(ids).tanh(), targets, chunk).backward()
        gradients.append(table.weight.grad.clone())
    assert (gradients[0] - gradients[1]).abs().max() < 1e-12


def test_gradients_add_up_and_scale():
    head, hidden, targets = problem(dtype=torch.float64)
    one = torch.autograd.grad(token_loss(head, hidden, targets, 7), head.weight)[0]
    loss = token_loss(head, hidden, targets, 7)
    (3 * loss).backward(retain_graph=True)
    (loss / 2).backward()
    assert (head.weight.grad - 3.5 * one).abs().max() < 1e-14


def test_hidden_states_need_not_be_contiguous():
    head, _, _ = problem()
    hidden = torch.randn(8, 5, 6, requires_grad=True).transpose(0, 2)
    targets = torch.randint(30, (6, 5))
    routes = [both_gradients(head, hidden, targets, chunk) for chunk in (7, None)]
    assert all(gap(a, b) < 1e-6 for a, b in zip(*routes, strict=True))


def test_transforms_and_wrong_dtypes_take_the_generic_route():
    head, hidden, targets = problem()
    both = torch.stack((hidden, 2 * hidden)).detach()
    each = torch.vmap(lambda h: token_loss(head, h, targets, 7))(both)
    assert gap(each, torch.stack([token_loss(head, h, targets) for h in both])) < 1e-6
    for chunk in (None, 7):
        with pytest.raises(RuntimeError, match="same dtype"):
            token_loss(head, hidden.double(), targets, chunk)


# PyTorch's compiler makes an object of an autograd.Function, of which it warns itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiling_changes_nothing():
    head, hidden, targets = problem()

    def gradients(loss_of):
        loss = loss_of(head, hidden, targets, 16)
        return (loss, *torch.autograd.grad(loss, (hidden, head.weight)))

    routes = gradients(torch.compile(token_loss, backend="aot_eager")), gradients(token_loss)
    assert all(gap(a, b) < 1e-6 for a, b in zip(*routes, strict=True))


def test_no_scored_target_gives_nan_and_moves_nothing():
    head, hidden, targets = problem()
    for chunk in (None, 7):
        loss, *slopes = both_gradients(head, hidden, torch.full_like(targets, -100), chunk)
        assert loss.isnan()
        assert all((slope == 0).all() for slope in slopes)


def test_large_logits_stay_finite():
    head, hidden, targets = problem()
    routes = [both_gradients(head, 1e4 * hidden, targets, chunk) for chunk in (7, None)]
    assert all(gap(a, b) < 1e-5 for a, b in zip(*routes, strict=True))


def test_autocast_keeps_sums_in_float32():
    head, hidden, targets = problem(tokens=512, vocab=500)
    exact = both_gradients(head, hidden, targets, None)
    with torch.autocast("cpu", torch.bfloat16):
        low = both_gradients(head, hidden, targets, 32)
        generic = both_gradients(sliced(head), hidden, targets, 32)
    assert [x.dtype for x in low] == [torch.float32] * 3
    assert abs(low[0] - exact[0]) < 1e-3
    assert abs(low[0] - generic[0]) < 1e-6
    ours, theirs = (
        [(a - b).norm() / b.norm() for a, b in zip(route, exact, strict=True)]
        for route in (low, generic)
    )
    assert all(a < 5e-3 and a < 1.01 * b + 1e-6 for a, b in zip(ours[1:], theirs[1:], strict=True))


class Doubled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def test_only_plain_linear_heads_are_taken_apart():
    plain = nn.Linear(8, 30, bias=False)
    table = nn.Embedding(30, 8)
    assert linear_weight(plain) is plain.weight
    assert linear_weight(TiedHead(table)) is table.weight
    own = nn.Linear(8, 30, bias=False)
    own.forward = lambda hidden: hidden
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 30, bias=False))
    for head in (nn.Linear(8, 30), Doubled(8, 30, bias=False), own, spectral, sliced(plain)):
        assert linear_weight(head) is None


@pytest.mark.parametrize(
    "hook",
    [
        lambda head: head.register_forward_hook(lambda *call: 2 * call[-1]),
        lambda head: head.register_forward_pre_hook(lambda *call: (2 * call[-1][0],)),
        lambda head: nn.modules.module.register_module_forward_hook(lambda *call: 2 * call[-1]),
    ],
)
def test_hooks_are_never_bypassed(hook):
    head, hidden, targets = problem()
    handle = hook(head)
    routes = [both_gradients(head, hidden, targets, chunk) for chunk in (7, None)]
    assert linear_weight(head) is None
    handle.remove()
    assert linear_weight(head) is head.weight
    assert all(gap(a, b) < 1e-6 for a, b in zip(*routes, strict=True))
    assert abs(routes[0][0] - token_loss(head, hidden, targets)) > 1e-3


def test_a_backward_hook_sees_every_chunk():
    head, hidden, targets = problem()
    seen = []
    head.register_full_backward_hook(lambda *call: seen.append(call))
    token_loss(head, hidden, targets, 10).backward()
    assert len(seen) == 4


def test_any_head_and_any_leading_shape():
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 30))
    hidden, targets = torch.randn(2, 3, 5, 8), torch.randint(30, (2, 3, 5))
    each = token_loss(head, hidden, targets, 4, "none")
    assert each.shape == (2, 3, 5)
    assert gap(each, token_loss(head, hidden, targets, None, "none")) < 1e-6


def peak(head, hidden, targets, chunk):
    with PeakBytes() as bytes_:
        token_loss(head, hidden, targets, chunk).backward()
    hidden.grad = None
    return bytes_.peak


def test_chunks_hold_a_fraction_of_the_memory():
    head, hidden, targets = problem(tokens=512, dim=16, vocab=4096)
    logits = 512 * 4096 * 4
    full, generic, one_pass = (
        peak(head, hidden, targets, None),
        peak(sliced(head), hidden, targets, 32),
        peak(head, hidden, targets, 32),
    )
    assert 3 * logits <= full < 3.2 * logits
    assert generic < full / 10
    assert one_pass < generic / 2


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
