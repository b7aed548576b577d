"""Neural memories against loops over tokens, gradients by automatic differentiation."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgeom.errors import ConfigError
from lmgeom.mixers import (
    MIXERS,
    DeepState,
    Gates,
    LinearState,
    NeuralMemory,
    deep_memory,
    linear_memory,
    step_ceiling,
)
from lmgeom.mixers.memory import chunk_sizes, segment_products, token_gradients


def network(weights, u):
    for weight in weights[:-1]:
        u = F.silu(weight @ u)
    return weights[-1] @ u


def token_loop(q, k, v, gates, weights, chunk=1, bounded=False):
    """The rule for one sequence (T, d): every gradient and every token's weights exist."""
    pushes, answers = [torch.zeros_like(w) for w in weights], []
    for t in range(len(q)):
        if t % chunk == 0:
            anchors = [w.detach().requires_grad_() for w in weights]
        loss = (network(anchors, k[t]) - v[t]).square().sum()
        gradients = torch.autograd.grad(loss, anchors)
        steep = sum(g.square().sum() for g in gradients) / (4 * loss.detach())
        step = gates.step[t] / (max(1.0, steep.item()) if bounded else 1.0)
        pushes = [gates.momentum[t] * s - step * g for s, g in zip(pushes, gradients, strict=True)]
        weights = [(1 - gates.forget[t]) * w + s for w, s in zip(weights, pushes, strict=True)]
        answers.append(network(weights, q[t]))
    return torch.stack(answers).detach(), weights, pushes


def example(tokens=23, size=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, tokens, size, dtype=torch.float64, generator=generator)
    gates = torch.rand(3, tokens, dtype=torch.float64, generator=generator)
    gates[1:][torch.rand(2, tokens, generator=generator) < 0.1] = 0.0
    gates[1:][torch.rand(2, tokens, generator=generator) < 0.1] = 1.0
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, Gates(*gates)


def layers(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = zip(sizes[1:], sizes[:-1], strict=True)
    return [torch.randn(s, dtype=torch.float64, generator=generator) / s[1] ** 0.5 for s in shapes]


def batched(*tensors):
    return [z[None, None] for z in tensors]


def deep_state(weights):
    weights = tuple(batched(*weights))
    return DeepState(weights, tuple(torch.zeros_like(w) for w in weights), weights, 0)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 9))
def test_linear_memory_is_the_online_rule_for_any_chunk(seed, tokens, chunk):
    q, k, v, gates = example(tokens, seed=seed)
    start = layers([5, 5], seed)
    slow, weights, pushes = token_loop(q, k, v, gates, start)
    state = LinearState(*batched(start[0], torch.zeros(5, 5).double()))
    y, after = linear_memory(*batched(q, k, v), Gates(*batched(*gates)), state, chunk)
    for ours, exact in ((y, slow), (after.weight, weights[0]), (after.push, pushes[0])):
        assert (ours[0, 0] - exact).abs().max() < 1e-10


@pytest.mark.parametrize("sizes", [[5, 5], [5, 7, 5], [5, 6, 7, 5]])
@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("bounded", [True, False])
def test_deep_memory_matches_the_token_loop(sizes, chunk, bounded):
    q, k, v, gates = example()
    gates = gates._replace(step=0.1 * gates.step)
    start = layers(sizes)
    slow, weights, pushes = token_loop(q, k, v, gates, start, chunk, bounded)
    case = batched(q, k, v), Gates(*batched(*gates)), deep_state(start)
    y, after = deep_memory(*case[0], *case[1:], chunk, bounded)
    low = [z.float() for z in case[0]], Gates(*(z.float() for z in case[1]))
    single, _ = deep_memory(*low[0], low[1], deep_state([w.float() for w in start]), chunk, bounded)
    assert (y[0, 0] - slow).abs().max() < 1e-10
    assert (single[0, 0] - slow).abs().max() < 1e-4
    for ours, exact in ((after.weights, weights), (after.pushes, pushes)):
        for a, b in zip(ours, exact, strict=True):
            assert (a[0, 0] - b).abs().max() < 1e-10


def test_a_deep_memory_of_one_matrix_and_chunk_one_is_the_linear_one():
    q, k, v, gates = example()
    start = layers([5, 5])
    state = LinearState(*batched(start[0], torch.zeros(5, 5).double()))
    gates = Gates(*batched(*gates))
    linear, _ = linear_memory(*batched(q, k, v), gates, state)
    deep, _ = deep_memory(*batched(q, k, v), gates, deep_state(start), 1)
    assert (linear - deep).abs().max() < 1e-10


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=1, max_size=7))
def test_segment_products_are_products(factors):
    table = segment_products(torch.tensor(factors, dtype=torch.float64))
    for i in range(len(factors)):
        for j in range(len(factors)):
            exact = torch.tensor(factors[j + 1 : i + 1], dtype=torch.float64).prod()
            assert table[i, j] == (exact if j <= i else 0)


def test_token_gradients_are_those_of_automatic_differentiation():
    _, k, v, _ = example()
    weights = [w.requires_grad_() for w in layers([5, 6, 7, 5])]
    factors = token_gradients(tuple(weights), k, v)
    for t in range(len(k)):
        exact = torch.autograd.grad((network(weights, k[t]) - v[t]).square().sum(), weights)
        for (e, h), gradient in zip(factors, exact, strict=True):
            assert (torch.outer(e[t], h[t]) - gradient).abs().max() < 1e-12


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.01, 0.95))
def test_below_the_ceiling_the_energy_never_grows(seed, momentum):
    generator = torch.Generator().manual_seed(seed)
    keys = F.normalize(torch.randn(8, 3, generator=generator, dtype=torch.float64), dim=-1)
    weight = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    push, last = torch.randn(3, 3, generator=generator, dtype=torch.float64), torch.inf
    for i in torch.randint(8, (60,), generator=generator).tolist():
        rest = weight + momentum / (1 - momentum) * push
        energy = rest.square().sum() + (rest - weight).square().sum() / momentum
        assert energy <= last * (1 + 1e-9)
        last = energy
        step = step_ceiling(momentum) * torch.rand((), generator=generator)
        push = momentum * push - 2 * step * torch.outer(weight @ keys[i], keys[i])
        weight = weight + push


HOSTILE = {
    "one key": lambda k, v: (k[:, :1].expand_as(k), v),
    "shared direction": lambda k, v: (F.silu(k) + 0.5, 10 * v),
    "contradiction": lambda k, v: (
        k[:, :1].expand_as(k),
        v[:, :1] * (1 - 2 * (torch.arange(k.shape[1]) // 64 % 2))[:, None],
    ),
}


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("text", HOSTILE)
def test_16384_hostile_tokens_stay_bounded(text, momentum, depth):
    torch.manual_seed(0)
    memory = NeuralMemory(16, 2, depth=depth, momentum=momentum).requires_grad_(False)
    k, v = HOSTILE[text](*torch.randn(2, 2, 16_384, 8))
    k = F.normalize(k, dim=-1)
    shares = torch.rand(3, 1, 2, 16_384)
    shares[0] = 1.0
    gates = Gates(memory.ceiling * shares[0], momentum * shares[1].round(), 0.001 * shares[2])
    state = memory.initial_state(1).memory
    run = linear_memory if depth == 1 else deep_memory
    y, _ = run(k[None], k[None], v[None], gates, state, 64)
    assert y.abs().max() < 3 * v.abs().max()


@pytest.mark.parametrize(
    ("name", "options"), [("titans-lmm", {"depth": 2}), ("titans-mac", {}), ("hope", {})]
)
def test_a_thousand_training_steps_stay_finite_and_learn(name, options):
    torch.manual_seed(0)
    layer = MIXERS[name](8, 1, chunk=16, **options)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=4e-4)
    goal = torch.nn.Linear(8, 8).requires_grad_(False)
    losses = []
    for step in range(1000):
        x = torch.randn(2, 24, 8) * (10.0 if step % 100 == 0 else 1.0)
        loss = (layer(x) - goal(x.roll(1, 1))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(w.isfinite().all() for w in layer.parameters())
    assert sum(losses[901:]) < sum(losses[1:100])  # neither part has one of the large inputs


def test_gates_stay_below_their_ceilings():
    memory = NeuralMemory(8, 2, momentum=0.9).requires_grad_(False)
    memory.gates.weight.normal_(std=100)
    qkv, gates, _ = memory.read_stream(torch.randn(2, 30, 8), memory.initial_state(2).recent)
    assert gates.step.max() <= step_ceiling(0.9) / 2
    assert gates.momentum.max() <= 0.9
    assert all((z.norm(dim=-1) < 1 + 1e-6).all() for z in qkv[:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads=3: must divide dim=8"),
        ({"depth": 0}, "depth=0: must be a positive integer"),
        ({"chunk": 2.0}, r"chunk=2\.0: must be a positive integer"),
        ({"momentum": 1.0}, r"momentum=1\.0: must be a number from 0 to below 1"),
        ({"momentum": True}, "momentum=True: must be a number"),
    ],
)
@pytest.mark.parametrize("name", ["titans-lmm", "titans-mag", "titans-mal", "titans-mac"])
def test_impossible_settings_are_refused_by_name(name, options, message):
    options = {"heads": 2} | options
    with pytest.raises(ConfigError, match=message):
        MIXERS[name](8, **options)


@given(st.integers(1, 500), st.integers(0, 63), st.integers(1, 64))
def test_pieces_end_where_chunks_do(tokens, offset, chunk):
    offset %= chunk
    sizes = chunk_sizes(tokens, offset, chunk)
    assert min(sizes) > 0
    assert max(sizes) <= chunk
    assert sum(sizes) == tokens
    ends = (offset + torch.tensor(sizes).cumsum(0)) % chunk
    assert (ends[:-1] == 0).all()


@pytest.mark.parametrize("run", [linear_memory, deep_memory])
def test_no_tokens_have_no_answers_and_no_chunk_is_none(run):
    q, k, v, gates = example(0)
    start = layers([5, 5])
    linear = LinearState(*batched(start[0], torch.zeros(5, 5).double()))
    state = linear if run is linear_memory else deep_state(start)
    case = *batched(q, k, v), Gates(*batched(*gates)), state
    y, after = run(*case)
    assert y.shape == (1, 1, 0, 5)
    assert after == state
    for chunk in (0, -3, 2.0):
        with pytest.raises(ConfigError, match=r"chunk=.*: must be a positive integer"):
            run(*case, chunk)
