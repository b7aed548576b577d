"""Equispread: the promise in nats, its symmetries, bad input, checkpoints, and its company."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lmgeom.errors import ConfigError, TrainingError
from lmgeom.head.equidistance import equidistance
from lmgeom.head.optimizer import HEAD_RULES, Equispread, SignRows, Together, centered, norm_radius
from lmgeom.lm import checkpoint

SEEDS = st.integers(0, 2**32 - 1)
WHITEN = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)


def rows(seed, V, D, tail=0.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(V, D, generator=generator, dtype=torch.float64)
    G *= torch.exp(tail * torch.randn(V, 1, generator=generator, dtype=torch.float64))
    return G.to(dtype)


def zipf(seed, V, D, tokens=400):
    """Gradient of a softmax head for a batch of Zipf tokens: most rows never occur, and agree."""
    generator = torch.Generator().manual_seed(seed)
    chances = 1 / torch.arange(1, V + 1, dtype=torch.float64)
    ids = torch.multinomial(chances, tokens, replacement=True, generator=generator)
    hidden = torch.randn(tokens, D, generator=generator, dtype=torch.float64) + 1
    errors = torch.full((tokens, V), 1 / V, dtype=torch.float64)
    errors[range(tokens), ids] -= 1
    return errors.T @ hidden / tokens


def run(gradients, start=None, rule=Equispread, dtype=None, **options):
    """The weight after some steps from `start`, or from zero."""
    W = nn.Parameter(torch.zeros_like(gradients[0]) if start is None else start.clone())
    optimizer = rule([W], **options)
    for G in gradients:
        W.grad = G.to(dtype or W.dtype)
        optimizer.step()
    return W.detach()


def step_of(G, **options):
    """The first step, exactly as computed: the weight starts at zero."""
    return run([G], **options)


def widest(S):
    """The exact diameter in float64."""
    S = S.double()
    return torch.cdist(S, S, compute_mode="donot_use_mm_for_euclid_dist").max().item()


# ---------------------------------------------------------------- the update


def by_hand(W, gradients, *, lr, budget, rho, momentum, whiten, sweeps, decay):
    """Float64 reference in NumPy, from the formulas."""
    W, M = W.numpy().copy(), 0.0
    for G in gradients:
        M = momentum * M + (1 - momentum) * G.numpy()
        X = M - M.mean(0)
        B = np.eye(X.shape[1])
        for _ in range(sweeps):
            moved = X @ B
            scaled = X / np.linalg.norm(moved, axis=1, keepdims=True)
            values, axes = np.linalg.eigh(scaled.T @ scaled)
            B = axes * values ** (-whiten / 2) @ axes.T
        U = X @ B / np.linalg.norm(X @ B, axis=1, keepdims=True)
        r = lr * budget / (2 * rho)
        W = (1 - r * decay) * W - r * U
    return W


@given(SEEDS, WHITEN, st.integers(1, 3), st.floats(0, 0.99), st.floats(0, 1))
@settings(max_examples=25)
def test_steps_follow_the_reference(seed, whiten, sweeps, momentum, decay):
    gradients = [rows(seed + k, 30, 4, 1) for k in range(5)]
    start = rows(seed + 9, 30, 4)
    size = {"lr": 0.7, "budget": 0.4, "rho": 3.0, "momentum": momentum, "whiten": whiten}
    expected = by_hand(start, gradients, **size, sweeps=sweeps, decay=decay)
    found = run(gradients, start, **size, sweeps=sweeps, weight_decay=decay)
    assert abs(found.numpy() - expected).max() < 1e-8
    single = run([G.float() for G in gradients], start.float(), **size, sweeps=sweeps)
    plain = by_hand(start, gradients, **size, sweeps=sweeps, decay=0.0)
    assert abs(single.numpy() - plain).max() < 1e-3


def test_steps_are_deterministic():
    gradients = [rows(k, 200, 8, 1, torch.float32) for k in range(10)]
    assert torch.equal(run(gradients), run(gradients))


# ---------------------------------------------------------------- the promise


CLOUDS = {
    "random": rows(0, 400, 16, 0.0, torch.float32),
    "low rank": (rows(1, 400, 2) @ rows(2, 2, 16)).float(),
    "zipf": zipf(3, 400, 16).float(),
    "heavy tail": rows(4, 400, 16, 4.0, torch.float32),
    "wide": rows(5, 20, 64, 1.0, torch.float32),
    "on a line": rows(6, 300, 1, 1.0, torch.float32),
}


def test_step_diameter_is_at_most_twice_the_row_length(real_gradients):
    clouds = [*CLOUDS.values(), *(G.float() for G in real_gradients)]
    for G in clouds:
        ways = ({"whiten": 0.0}, {"whiten": 0.5}, {}, {"sweeps": 3}, {"center": False})
        for options in ways:
            for budget, rho, lr in ((0.3, 4.0, 1.0), (1e-3, 27.7, 0.1), (50.0, 0.01, 1.0)):
                S = step_of(G, budget=budget, rho=rho, lr=lr, **options)
                assert S.dtype == torch.float32
                assert widest(S) <= 2 * (lr * budget / (2 * rho))
                assert rho * widest(S) <= lr * budget
        assert widest(step_of(G, rule=SignRows, budget=0.3, rho=4.0)) * 4.0 <= 0.3


@given(SEEDS, WHITEN)
@settings(max_examples=20)
def test_no_log_odds_move_by_more_than_the_budget(seed, whiten):
    S = step_of(rows(seed, 50, 6, 2, torch.float32), budget=0.5, rho=3.0, whiten=whiten).double()
    hidden = rows(seed + 1, 500, 6)
    hidden = torch.cat([3 * hidden / hidden.norm(dim=1, keepdim=True), S[0:1] - S])
    hidden *= (3 / hidden.norm(dim=1, keepdim=True)).clamp(max=1)
    moved = hidden @ S.T
    assert (moved.amax(1) - moved.amin(1)).max() <= 0.5


@pytest.mark.parametrize("width", [1, 2, 3, 768, 4096])
def test_the_slack_covers_rounding_at_every_width(width):
    S = step_of(rows(width, 50, width, 1, torch.float32), budget=0.3, rho=1.0, whiten=0.0)
    lengths = S.double().norm(dim=1)
    assert lengths.max() <= 0.15
    assert lengths.min() >= 0.15 * (1 - 1e-3)


# ---------------------------------------------------------------- symmetries and descent


@given(SEEDS, WHITEN, st.integers(1, 3))
@settings(max_examples=25)
def test_symmetries(seed, whiten, sweeps):
    G = rows(seed, 30, 4, 1)
    how = {"whiten": whiten, "sweeps": sweeps, "budget": 2.0, "rho": 1.0}
    S = step_of(G, **how)
    assert (step_of(G + rows(seed + 1, 1, 4), **how) - S).abs().max() < 1e-7
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    assert (step_of(G[order], **how) - S[order]).abs().max() < 1e-7
    Q = torch.linalg.qr(rows(seed + 2, 4, 4))[0]
    assert (step_of(G @ Q, **how) - S @ Q).abs().max() < 1e-7
    assert (step_of(1e-12 * G, **how) - S).abs().max() < 1e-9


@given(SEEDS, WHITEN, st.integers(1, 3), st.booleans())
@settings(max_examples=25)
def test_steps_descend_along_the_momentum(seed, whiten, sweeps, center):
    G = rows(seed, 20, 6, 2)
    S = step_of(G, whiten=whiten, sweeps=sweeps, center=center)
    assert ((centered(G) if center else G) * S).sum() < 0


def test_excess_over_the_floor():
    """Three sweeps come within 5 % for distinct directions; equal rows cannot be separated."""
    for k, G in enumerate((rows(0, 500, 8, 1), rows(1, 2000, 16), rows(2, 300, 4, 0.5))):
        assert equidistance(step_of(G, sweeps=3)).excess < 1.05, k
    low = rows(3, 600, 3) @ rows(4, 3, 12)
    found = equidistance(step_of(low, sweeps=3), rank=3)
    assert math.sqrt(found.total / found.floor) < 1.05
    G = zipf(5, 1000, 16)
    absent = (G - G.median(0).values).norm(dim=1) < 1e-12  # the gradient of most is the same
    assert absent.sum() > 500
    assert equidistance(step_of(G, sweeps=3)).excess > 2
    assert widest(step_of(G, sweeps=3)[absent]) < 1e-9


# ---------------------------------------------------------------- the cap


@given(SEEDS, st.sampled_from([0.0, 0.9]), WHITEN)
@settings(max_examples=15)
def test_cap_keeps_the_promise_of_the_descent_lemma(seed, momentum, whiten):
    V, D = 30, 5
    hidden, targets = 2 * rows(seed, 40, D), torch.arange(40) % V
    rho = hidden.norm(dim=1).max().item()
    W = nn.Parameter(rows(seed + 1, V, D))
    options = {"budget": 1e3, "rho": rho, "momentum": momentum, "whiten": whiten, "cap": True}
    optimizer = Equispread([W], **options)
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(hidden @ W.T, targets)
        loss.backward()
        before = W.detach().clone()
        optimizer.step()
        promise = (W.grad * (before - W.detach())).sum() / 2
        after = nn.functional.cross_entropy(hidden @ W.detach().T, targets)
        assert promise >= 0
        assert loss.detach() - after >= promise - 1e-12


def test_cap_skips_a_step_uphill():
    G = rows(0, 20, 4)
    W = nn.Parameter(torch.zeros_like(G))
    optimizer = Equispread([W], momentum=0.9, cap=True, budget=1e-3)
    W.grad = G
    optimizer.step()
    moved = W.detach().clone()
    W.grad = -0.1 * G
    optimizer.step()
    assert moved.any()
    assert torch.equal(W.detach(), moved)


# ---------------------------------------------------------------- settings and groups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "budget must be a positive number of nats, got 0.0"),
        ({"budget": -1}, "budget must be"),
        ({"budget": math.inf}, "budget must be"),
        ({"budget": None}, "budget must be a positive number of nats, got None"),
        ({"budget": True}, "budget must be"),
        ({"budget": [1.0]}, "budget must be"),
        ({"budget": np.ones(2)}, "budget must be"),
        ({"budget": torch.ones(2)}, "budget must be"),
        ({"rho": 0.0}, "rho must be a positive number, a function or None, got 0.0"),
        ({"rho": math.nan}, "rho must be"),
        ({"rho": True}, "rho must be"),
        ({"rho": torch.tensor(1j)}, "rho must be"),
        ({"sweeps": 0}, "sweeps must be a positive integer, got 0"),
        ({"sweeps": 1.5}, "sweeps must be"),
        ({"sweeps": math.inf}, "sweeps must be"),
        ({"sweeps": True}, "sweeps must be"),
        ({"whiten": 1.5}, "whiten must be a number from 0 to 1"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"momentum": torch.tensor(0.9)}, "momentum must be"),
        ({"lr": -1.0}, "lr must be"),
        ({"lr": None}, "lr must be a number of at least 0, got None"),
        ({"lr": 1j}, "lr must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"vocab_size": 3.0}, "vocab_size must be a positive integer or None, got 3.0"),
        ({"center": "no"}, "center must be True or False, got 'no'"),
        ({"cap": 2}, "cap must be True or False, got 2"),
        ({"whiten": "1"}, "whiten must be a number from 0 to 1, got '1'"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        Equispread([nn.Parameter(torch.ones(3, 2))], **options)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.ones(2, 2, 2),
        torch.ones(0, 2),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(2, 2, dtype=torch.int32),
        torch.ones(2, 2).to(torch.float8_e4m3fn),
        torch.eye(2).to_sparse(),
    ],
)
def test_only_dense_real_matrices(tensor):
    with pytest.raises(ValueError, match="head must be a dense real matrix") as error:
        Equispread([("head", tensor)])
    assert str(tuple(tensor.shape)) in str(error.value)


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    optimizer = Equispread([nn.Parameter(torch.ones(3, 2))])
    with pytest.raises(ValueError, match="budget"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))], "budget": 0})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="dense gradient"):
        Equispread(table.parameters()).step()


def test_groups_have_their_own_budget_and_a_scheduler_moves_them():
    parts = [nn.Parameter(torch.zeros(20, 3)) for _ in range(2)]
    groups = [{"params": [parts[0]]}, {"params": [parts[1]], "budget": 0.6, "rho": 2.0}]
    optimizer = Equispread(groups, budget=0.2, rho=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    lengths = []
    for _ in range(3):
        before = [p.detach().clone() for p in parts]
        for p in parts:
            p.grad = rows(0, 20, 3, 0, torch.float32)
        optimizer.step()
        scheduler.step()
        pairs = zip(parts, before, strict=True)
        lengths.append([(p.detach() - b).norm(dim=1).max().item() for p, b in pairs])
    expected = torch.tensor([[0.1, 0.15]]) * torch.tensor([[1.0], [0.5], [0.25]])
    assert torch.allclose(torch.tensor(lengths), expected, rtol=1e-4)


def test_radius_may_be_a_function_a_tensor_or_left_out():
    G, gain = rows(0, 20, 4, 0, torch.float32), torch.tensor([0.5, -3.0, 1.0, 1.0])
    bias = torch.tensor([0.0, 3.0, 4.0, 0.0])
    by_number = step_of(G, rho=6.0)
    assert torch.allclose(step_of(G, rho=norm_radius(gain)), by_number)
    assert torch.allclose(step_of(G, rho=lambda: 6.0), by_number)
    assert norm_radius(gain, bias)() == 11
    assert torch.equal(step_of(G, rho=None), step_of(G, rho=2.0))
    trained = nn.Parameter(torch.ones(4))
    radius = norm_radius(trained)
    with torch.no_grad():
        trained[2] = -5
    assert radius() == 10
    assert not radius().requires_grad


def test_radius_goes_with_a_copy_of_its_model():
    norm = nn.LayerNorm(4)
    optimizer = Equispread(
        [nn.Parameter(torch.ones(3, 4))], rho=norm_radius(norm.weight, norm.bias)
    )
    twin, copied = copy.deepcopy((norm, optimizer))
    pickled = pickle.loads(pickle.dumps(optimizer))
    with torch.no_grad():
        twin.weight[1] = 5
    assert [o._radii[0]() for o in (optimizer, copied, pickled)] == [2, 10, 2]


@pytest.mark.parametrize(
    ("vectors", "found"),
    [
        ((nn.RMSNorm(4),), "got RMSNorm"),
        ((None,), "got NoneType"),
        ((torch.ones(2, 3),), r"got shape \(2, 3\)"),
        ((torch.ones(()),), r"got shape \(\)"),
        ((torch.ones(3), torch.ones(4)), r"got shape \(4,\)"),
    ],
)
def test_radius_needs_vectors(vectors, found):
    with pytest.raises(TypeError, match="gain and bias must be vectors .*" + found):
        norm_radius(*vectors)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "None"),
        ("2", "'2'"),
        ([2.0], "[2.0]"),
        (True, "True"),
        (2j, "2j"),
        (torch.ones(2), "a tensor (2,)"),
        (torch.tensor(2j), "a tensor ()"),
    ],
)
def test_a_function_must_give_one_number(given, found):
    with pytest.raises(TypeError) as error:
        step_of(rows(0, 5, 3), rho=lambda: given)
    assert str(error.value) == f"rho must give one number, got {found}"


def test_numbers_of_other_kinds_are_numbers():
    G = rows(0, 20, 4, 0, torch.float32)
    expected = step_of(G, budget=0.5, rho=2.0)
    for kind in (torch.tensor, lambda x: torch.tensor([x]), np.float32, np.float64):
        for rho in (kind(2.0), lambda kind=kind: kind(2.0)):
            S = step_of(G, lr=kind(1.0), budget=kind(0.5), rho=rho)
            assert torch.allclose(S, expected, rtol=1e-6)


def test_closure_and_weight_decay():
    W = nn.Parameter(torch.ones(10, 2))
    optimizer = Equispread([W], budget=0.4, rho=1.0, weight_decay=0.5)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = W.square().sum() * 0 + 7
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) == 7
    assert len(calls) == 1
    assert torch.allclose(W, torch.full_like(W, 1 - 0.2 * 0.5), rtol=1e-5)
    assert Equispread([W]).step() is None


@pytest.mark.parametrize("decay", [20.0, 1e30, 1e300])
def test_weight_decay_takes_at_most_all(decay):
    gradients = [rows(k, 10, 3, 0, torch.float32) for k in range(3)]
    W = run(gradients, 5 * gradients[0], budget=0.4, rho=1.0, weight_decay=decay)
    assert torch.allclose(W.norm(dim=1), torch.full((10,), 0.2), rtol=1e-4)


def test_weight_decay_bounds_the_rows():
    W = run([rows(0, 10, 3)] * 200, budget=0.5, rho=1.0, weight_decay=0.5)
    assert W.norm(dim=1).max() <= 2 + 1e-9
    assert W.norm(dim=1).min() > 1.9


# ---------------------------------------------------------------- bad and degenerate gradients


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_gradient_changes_nothing_and_is_counted(bad, dtype):
    W = nn.Parameter(rows(0, 10, 3).to(dtype))
    optimizer = Equispread([W], weight_decay=0.1)
    W.grad = rows(1, 10, 3).to(dtype)
    optimizer.step()
    optimizer.check()
    before, state = W.detach().clone(), copy.deepcopy(optimizer.state[W])
    W.grad = rows(2, 10, 3).to(dtype)
    W.grad[4, 1] = bad
    optimizer.step()
    assert torch.equal(W, before)
    assert torch.equal(optimizer.state[W]["momentum"], state["momentum"])
    with pytest.raises(TrainingError, match="1 steps of the head were skipped: a gradient that is"):
        optimizer.check()
    W.grad = rows(3, 10, 3).to(dtype)
    optimizer.step()
    assert W.isfinite().all()
    assert not torch.equal(W, before)


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_radius_changes_nothing(radius):
    G = rows(0, 10, 3)
    assert not step_of(G, rho=lambda: torch.tensor(radius)).any()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1e300},
        {"budget": 1e300},
        {"rho": 1e300},
        {"rho": 1e-300},
        {"lr": torch.tensor(-1.0)},
        {"budget": torch.tensor(math.nan)},
    ],
)
def test_a_length_that_float32_cannot_hold_changes_nothing(options):
    W = nn.Parameter(rows(0, 10, 3, 0, torch.float32))
    before, W.grad = W.detach().clone(), rows(1, 10, 3, 0, torch.float32)
    optimizer = Equispread([W], weight_decay=1e300, **options)
    optimizer.step()
    assert torch.equal(W, before)
    assert not optimizer.state[W]["momentum"].any()
    with pytest.raises(TrainingError, match=r"1 steps .* lr, budget or rho out of range"):
        optimizer.check()


def test_a_finite_gradient_gives_a_finite_step():
    """Or none, if its rows cannot be added up."""
    for scale in (1e-44, 1e-30, 1e30, 3e36, 1e37, 3e38):
        G = scale * rows(0, 40, 3).clamp(-1, 1).float()
        for options in ({"momentum": 0.0}, {"cap": True}, {"center": False}):
            S = step_of(G, **options)
            assert S.isfinite().all()
            assert S.any() == (1e-40 < scale < 1e37 or (scale < 1 and "momentum" in options))
    assert not step_of(torch.zeros(4, 3), cap=True, rho=1e-25).any()


def test_zero_rows_and_padding_do_not_move():
    G = rows(0, 12, 3, 0, torch.float32)
    G[5] = 0
    G[10:] *= 1e-9
    S = step_of(G, vocab_size=10)
    assert not S[[5, 10, 11]].any()
    kept = [i for i in range(10) if i != 5]
    assert torch.allclose(S[kept], step_of(G[kept]), atol=1e-6)
    assert step_of(G).norm(dim=1).gt(0).sum() == 11
    assert not step_of(torch.zeros(4, 3)).any()
    start = rows(1, 12, 3, 0, torch.float32)
    W = run([G] * 3, start, vocab_size=10, weight_decay=1.0)
    assert torch.equal(W[10:], start[10:])
    assert (W[5] / start[5]).max() < 1


@pytest.mark.parametrize("center", [True, False])
def test_one_token(center):
    S = step_of(torch.tensor([[3.0, 4.0]]), center=center, budget=2.0, rho=1.0)
    expected = torch.tensor([[-0.6, -0.8]]) * (not center)
    assert torch.allclose(S, expected, atol=1e-3)


@pytest.mark.parametrize("shape", [(2, 5), (5, 5), (6, 5), (3, 1), (9, 1)])
@pytest.mark.parametrize("whiten", [0.0, 1.0])
def test_small_vocabularies_and_widths(shape, whiten):
    S = step_of(rows(0, *shape), whiten=whiten, budget=2.0, rho=1.0)
    assert (S.norm(dim=1) - 1).abs().max() < 1e-12
    assert widest(S) <= 2


def test_tied_head_is_not_centered():
    table = nn.Embedding(20, 4)
    hidden = table(torch.tensor([1, 2, 3]))
    nn.functional.cross_entropy(hidden @ table.weight.T, torch.tensor([4, 5, 6])).backward()
    before, G = table.weight.detach().clone(), table.weight.grad
    assert G.sum(0).abs().max() > 1e-3
    Equispread(table.parameters(), center=False, budget=0.1).step()
    assert (G * (table.weight.detach() - before)).sum() < 0


# ---------------------------------------------------------------- precision, state, devices


def test_half_precision_weights_keep_a_float32_original():
    W = nn.Parameter(torch.ones(10, 2).bfloat16())
    optimizer = Equispread([W], budget=1e-3, rho=1.0)
    for _ in range(40):
        W.grad = rows(0, 10, 2).bfloat16()
        optimizer.step()
    state = optimizer.state[W]
    assert state["momentum"].dtype == state["weight"].dtype == torch.float32
    single = run([rows(0, 10, 2).bfloat16().float()] * 40, torch.ones(10, 2), budget=1e-3, rho=1.0)
    assert torch.allclose(state["weight"], single, atol=1e-6)
    assert torch.equal(W, single.bfloat16())
    with torch.no_grad():
        W[3, 0] = 5
    optimizer.step()
    assert abs(W[3, 0].item() - 5) < 0.05
    assert torch.equal(W, state["weight"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_continues_the_run(dtype):
    gradients = [rows(k, 20, 3).to(dtype) for k in range(6)]

    def fresh():
        W = nn.Parameter(rows(9, 20, 3).to(dtype))
        return W, Equispread([W], rho=lambda: 2.0, weight_decay=0.1)

    def go(W, optimizer, part):
        for W.grad in part:
            optimizer.step()

    W, optimizer = fresh()
    go(W, optimizer, gradients)
    half, first = fresh()
    go(half, first, gradients[:3])
    file = io.BytesIO()
    torch.save({"weight": half.detach(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, second = fresh()
    with torch.no_grad():
        other.copy_(saved["weight"])
    second.load_state_dict(saved["optimizer"])
    assert second.state[other]["momentum"].dtype == torch.float32
    assert second.state[other]["skipped"].dtype == torch.int64
    go(other, second, gradients[3:])
    assert torch.equal(W, other)
    clone = copy.deepcopy(second)
    assert clone._radii[0]() == 2.0


@pytest.mark.parametrize("join", [lambda rule: rule, Together])
@pytest.mark.parametrize(
    ("group", "entry", "message"),
    [
        ({"budget": -1}, {}, "budget must be a positive number of nats, got -1"),
        ({"sweeps": "x"}, {}, "sweeps must be"),
        ({}, {"momentum": torch.ones(5, 3)}, r"momentum of matrix 0 must be .*\(6, 3\).*\(5, 3\)"),
        ({}, {"momentum": torch.ones(6, 3).bfloat16()}, "momentum of .* got torch.bfloat16"),
        ({}, {"momentum": "x"}, "momentum of matrix 0 must be a tensor .*, got 'x'"),
        ({}, {"weight": torch.ones(6, 4)}, "weight of matrix 0 must be a tensor"),
        ({}, {"skipped": None}, "skipped of matrix 0 must be a tensor .*, got None"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(group, entry, message, join):
    W = nn.Parameter(rows(9, 6, 3, 0, torch.float32))
    optimizer, W.grad = join(Equispread([W])), rows(0, 6, 3, 0, torch.float32)
    optimizer.step()
    saved, damaged = (copy.deepcopy(optimizer.state_dict()) for _ in range(2))
    damaged["param_groups"][0] |= group
    damaged["state"][0] |= entry
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damaged)
    assert optimizer.state_dict()["param_groups"] == saved["param_groups"]
    assert torch.equal(optimizer.state[W]["momentum"], saved["state"][0]["momentum"])


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.Muon])
def test_the_state_of_another_optimizer_is_refused(other):
    W = nn.Parameter(torch.ones(6, 3))
    with pytest.raises(ValueError, match="not a state of Equispread: a group has no 'budget'"):
        Equispread([W]).load_state_dict(other([W]).state_dict())


def test_a_step_asks_the_host_for_nothing():
    """Fake tensors have no values: reading one raises."""
    with FakeTensorMode():
        for options in ({}, {"cap": True, "vocab_size": 8, "sweeps": 2}, {"whiten": 0.0}):
            for dtype in (torch.float32, torch.bfloat16):
                W = nn.Parameter(torch.ones(10, 3, dtype=dtype))
                for rho in (None, 2.0, torch.tensor(2.0), norm_radius(torch.ones(3))):
                    optimizer = Equispread([W], torch.tensor(1.0), rho=rho, **options)
                    for _ in range(2):
                        W.grad = torch.ones(10, 3, dtype=dtype)
                        optimizer.step()


def batch(step):
    return rows(step, 16, 4, 0, torch.float32), torch.arange(16)


def fit(wrap, rank, processes):
    """The head that three steps make, each process on its own part of the batches."""
    torch.manual_seed(0)
    head = wrap(nn.Linear(4, 21, bias=False))
    optimizer, each = Equispread(head.parameters(), budget=0.5), 16 // processes
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step)
        own = slice(each * rank, each * (rank + 1))
        nn.functional.cross_entropy(head(x[own]), y[own]).backward()
        optimizer.step()
    return next(head.parameters()).detach()


# Vocabulary, dtype and options of steps that shards must make as a whole matrix does.
SHARDED = {
    "plain": (20, torch.float64, {}),
    "uneven": (21, torch.float64, {"sweeps": 2, "weight_decay": 0.1}),
    "one has padding only": (20, torch.float64, {"vocab_size": 9}),
    "both have tokens": (20, torch.float64, {"vocab_size": 17, "whiten": 0.5}),
    "no row for one": (1, torch.float64, {"center": False}),
    "rows alone": (20, torch.float64, {"whiten": 0.0}),
    "capped": (20, torch.float64, {"cap": True, "budget": 50.0}),
    "half precision": (20, torch.bfloat16, {}),
}


def gradients_of(case):
    """Three gradients of a case; one entry of the second, in the last row, is no number."""
    V, dtype, _ = SHARDED[case]
    found = [rows(k, V, 4, 1).to(dtype) for k in range(3)]
    found[1][-1, 0] = math.nan
    return found


def steps_of(case, share=lambda whole: whole):
    """The weight that the gradients of a case make, and the optimizer; `share` makes shards."""
    V, dtype, options = SHARDED[case]
    W = nn.Parameter(share(rows(9, V, 4).to(dtype)))
    gain = share(torch.tensor([1.0, -2.0, 0.5]).to(dtype))
    optimizer = Equispread([W], rho=norm_radius(gain), **options)
    for G in gradients_of(case):
        W.grad = share(G)
        optimizer.step()
    return W, optimizer


def in_a_group(rank, folder):
    """What each of two processes does: data parallel, FSDP2, and steps on shards."""
    address = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    mesh, found = init_device_mesh("cpu", (2,)), {}
    found["DDP"] = fit(nn.parallel.DistributedDataParallel, rank, 2)
    found["FSDP2"] = fit(lambda head: fully_shard(head, mesh=mesh), rank, 2).full_tensor()

    def share(whole):
        return distribute_tensor(whole, mesh, [Shard(0)])

    for case in SHARDED:
        W, optimizer = steps_of(case, share)
        assert optimizer.state[W]["momentum"].placements == (Shard(0),)
        again = Equispread([W])
        again.load_state_dict(optimizer.state_dict())
        momenta = [o.state[W]["momentum"].to_local() for o in (optimizer, again)]
        assert torch.equal(*momenta)
        found[case] = W.detach().full_tensor()
        with pytest.raises(TrainingError, match="1 steps"):
            again.check()
    columns = nn.Parameter(distribute_tensor(torch.ones(20, 4), mesh, [Shard(1)]))
    with pytest.raises(TypeError, match=r"head\.weight is sharded as .*Shard\(dim=1\)"):
        Equispread([("head.weight", columns)])
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_data_parallel_and_sharded_weights(tmp_path):
    torch.multiprocessing.spawn(in_a_group, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for case, weight in first.items():
        assert torch.equal(weight, second[case]), case
        whole = steps_of(case)[0] if case in SHARDED else fit(lambda head: head, 0, 1)
        close = 1e-4 if case in ("DDP", "FSDP2") else 1e-2 if case == "half precision" else 1e-9
        assert torch.allclose(whole, weight, atol=close), case


# ---------------------------------------------------------------- company


class Model(nn.Module):
    """A body and a head, without names that a checkpoint would not know."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 12, bias=False)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def both(rule, **options):
    torch.manual_seed(0)
    model = Model()
    body = torch.optim.AdamW(model.body.parameters(), lr=1e-2)
    return model, Together(body, HEAD_RULES[rule](model.head.parameters(), 0.1, **options))


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        x = rows(step, 16, 3, 0, torch.float32)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), torch.arange(16) % 12)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("rule", HEAD_RULES)
def test_each_rule_trains_resumes_and_is_scheduled(rule, tmp_path):
    model, optimizer = both(rule)
    whole = train(model, optimizer, range(8))
    model, optimizer = both(rule)
    start = train(model, optimizer, range(4))
    checkpoint.save(tmp_path, 4, model, optimizer)
    other, resumed = both(rule)
    checkpoint.load(tmp_path / "step-00000004", other, resumed)
    assert start + train(other, resumed, range(4, 8)) == whole
    saved = resumed.state_dict()
    again = both(rule)[1]
    again.load_state_dict(saved)
    for part in again.parts:
        assert part.state is again.state
        assert all(any(g is h for h in again.param_groups) for g in part.param_groups)
    before = [p.detach().clone() for p in other.parameters()]
    for group in resumed.param_groups:
        group["lr"] = 0.0
    train(other, resumed, range(2))
    assert all(torch.equal(p, b) for p, b in zip(other.parameters(), before, strict=True))


def test_together_runs_a_closure_once_and_copies():
    model, optimizer = both("equispread", rho=lambda: 2.0)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        calls.append(1)
        return loss

    assert optimizer.step(closure) > 0
    assert calls == [1]
    twin = copy.deepcopy(optimizer)
    assert twin.parts[1].param_groups[0] is twin.param_groups[1]


def test_together_asks_its_parts_for_skipped_steps():
    model, optimizer = both("equispread")
    train(model, optimizer, range(1))
    optimizer.check()
    model.head.weight.grad[0, 0] = math.nan
    optimizer.step()
    with pytest.raises(TrainingError, match="1 steps of the head were skipped"):
        optimizer.check()
    both("muon")[1].check()


def test_together_is_saved_whole_and_keeps_its_groups():
    model, optimizer = both("equispread")
    train(model, optimizer, range(1))
    for part in optimizer.parts:
        with pytest.raises(TypeError, match="part of a Together: save and load the whole"):
            part.state_dict()
        with pytest.raises(TypeError, match="part of a Together: save and load the whole"):
            part.load_state_dict({"state": {}, "param_groups": part.param_groups})
    with pytest.raises(TypeError, match="add the group to a part, before Together joins it"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
    for wrong in (model, [optimizer.parts[0]], optimizer):
        with pytest.raises(TypeError, match=f"single optimizers, got {type(wrong).__name__}"):
            Together(wrong)


@pytest.mark.parametrize(
    ("rule", "size", "options", "message"),
    [
        ("rownorm", 0.1, {"whiten": 0.5}, "option 'whiten': unknown; known: momentum, weight_dec"),
        ("muon", 0.1, {"center": False}, "option 'center': unknown; known: momentum, weight_decay"),
        ("adamw", 0.1, {"typo": 1}, "option 'typo': unknown; known: betas, weight_decay"),
        ("equispread", 0.0, {}, "size=0.0, options={}: budget must be a positive number of nats"),
        ("adamw", -1.0, {}, "size=-1.0, options={}: Invalid learning rate"),
        ("sign", 0.1, {"momentum": 1}, "momentum must be a number from 0 to below 1, got 1"),
        ("muon", 0.1, {"momentum": "a"}, "size=0.1, options={'momentum': 'a'}"),
    ],
)
def test_a_rule_refuses_what_it_cannot_use(rule, size, options, message):
    with pytest.raises(ConfigError, match=message):
        HEAD_RULES[rule]([nn.Parameter(torch.ones(3, 2))], size, **options)


def test_rules_share_the_budget():
    G = rows(0, 40, 9, 1, torch.float32)
    for name in ("rownorm", "sign", "equispread"):
        W = nn.Parameter(torch.zeros_like(G))
        W.grad = G
        HEAD_RULES[name]([W], 0.6, rho=2.0).step()
        assert W.detach().norm(dim=1).max().item() == pytest.approx(0.15, rel=1e-4)
    assert torch.allclose(step_of(G, rule=SignRows).sign(), -(G - G.mean(0)).sign())
