"""Self-modifying memories against five separate ones; the chain of MLPs and its clocks."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lmgeom.errors import ConfigError
from lmgeom.lm import Config, LanguageModel, SwiGLU
from lmgeom.mixers import (
    Cadence,
    ContinuumMemory,
    Hope,
    HopeAttention,
    chain,
    level_periods,
    level_widths,
)
from lmgeom.mixers.hope import SharedState, Start, self_modifying_memory, shared_step_ceiling

SIZE = 5


def five_memories(u, q, start, ceiling, chunk):
    """Keys, values, content, step and retention: five memories of one sequence, token by token."""
    weights = [*start.maps[:, 0], *start.rows[0].split(1)]
    eye, answers = torch.eye(u.shape[1], dtype=u.dtype), []
    for t in range(len(u)):
        if t % chunk == 0:
            anchors = [w.detach().requires_grad_() for w in weights]
            maps = [w + eye for w in anchors[:3]] + anchors[3:]
        k, v = (F.normalize(w @ u[t], dim=0).detach() for w in maps[:2])
        eta, alpha = (
            torch.sigmoid(w @ u[t] + b).item() for w, b in zip(maps[3:], start.bias[0], strict=True)
        )
        answers.append(q[t] + weights[2] @ q[t])
        decay = alpha * eye - ceiling * eta * torch.outer(k, k)
        for i, m in enumerate(maps):
            loss = (m @ k - (m @ v).detach()).square().sum() / 2
            gradient = torch.autograd.grad(loss, anchors[i], retain_graph=True)[0]
            weights[i] = weights[i] @ decay - ceiling * eta * gradient
    return torch.stack(answers).detach(), weights


def example(tokens=19):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    u, q = normal(2, tokens, SIZE)
    start = Start(normal(3, 1, SIZE, SIZE) / 2, normal(1, 2, SIZE), normal(1, 2), 0.4)
    return u, q, start


def fresh(dtype=torch.float64):
    one = torch.eye(SIZE, dtype=dtype)[None, None]
    return SharedState(one, 0 * one, one, 0 * one, 0)


@pytest.mark.parametrize("chunk", [1, 4, 19, 64])
def test_two_matrices_are_five_memories(chunk):
    u, q, start = example()
    slow, weights = five_memories(u, q, start, 0.4, chunk)
    y, state = self_modifying_memory(u[None, None], q[None, None], start, fresh(), chunk)
    assert (y[0, 0] - slow).abs().max() < 1e-10
    turn, shift = state.turn[0, 0], state.shift[0, 0]
    for i in range(3):
        assert (start.maps[i, 0] @ turn + shift - weights[i]).abs().max() < 1e-10
    for i in range(2):
        assert (start.rows[0, i] @ turn - weights[3 + i]).abs().max() < 1e-10
    low = Start(*(z.float() for z in start[:3]), start.ceiling)
    single = u[None, None].float(), q[None, None].float(), low, fresh(torch.float32)
    assert (self_modifying_memory(*single, chunk)[0][0, 0] - slow).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("text", ["random", "one key", "minus the key"])
@pytest.mark.parametrize("retention", [5.0, -3.0])  # logits of 0.993 and 0.047
def test_long_texts_stay_bounded(chunk, text, retention):
    torch.manual_seed(0)
    u = torch.randn(1, 1, 1024 if chunk == 1 else 16_384, SIZE)
    if text != "random":
        u = u[:, :, :1].expand_as(u)
    maps = torch.randn(3, 1, SIZE, SIZE) / SIZE**0.5
    if text == "minus the key":
        maps[0], maps[1] = 0, -2 * torch.eye(SIZE)
    start = Start(maps, torch.zeros(1, 2, SIZE), torch.tensor([[50.0, retention]]), 1.0)
    start = start._replace(ceiling=shared_step_ceiling(chunk))
    q = F.normalize(u, dim=-1)
    y, _ = self_modifying_memory(u, q, start, fresh(torch.float32), chunk)
    assert y.abs().max() < 20


@given(st.integers(1, 3000), st.integers(1, 12))
def test_level_widths_sum_exactly(width, levels):
    if width < levels:
        with pytest.raises(ConfigError, match=f"levels={levels}: must be at most the MLP's width"):
            level_widths(width, levels)
        return
    widths = level_widths(width, levels)
    unit = 16 if width % 16 == 0 and width >= 16 * levels else 1
    assert sum(widths) == width
    assert len(widths) == levels
    assert widths == sorted(widths, reverse=True)
    assert widths[0] - widths[-1] <= unit
    assert all(w % unit == 0 and w > 0 for w in widths)


def test_a_chain_adds_what_each_level_says():
    levels = [SwiGLU(6, 8) for _ in range(3)]
    x = torch.randn(4, 6)
    stream = x
    for level in levels:
        stream = stream + level(stream)
    assert (x + ContinuumMemory(levels)(x) - stream).abs().max() < 1e-5


def test_one_level_is_the_plain_mlp_bit_for_bit():
    shape = {"vocab_size": 31, "dim": 16, "layers": 2, "heads": 2, "context": 8, "mlp_width": 24}
    models = []
    for mixer, options in (("attention", {}), ("hope-attention", {"levels": 1})):
        torch.manual_seed(0)
        models.append(LanguageModel(Config(**shape, mixer=mixer, mixer_options=options)))
    ids, x = torch.randint(31, (2, 8)), torch.randn(2, 8, 16)
    plain, chained = models
    assert plain.state_dict().keys() == chained.state_dict().keys()
    assert torch.equal(plain(ids), chained(ids))
    assert torch.equal(ContinuumMemory([plain.blocks[0].mlp])(x), plain.blocks[0].mlp(x))


def test_levels_of_a_model_share_the_layer_width_and_start_small():
    config = Config(31, 16, 2, 2, 8, (64, 32), "hope-attention", {"levels": 2})
    torch.manual_seed(0)
    model = LanguageModel(config)
    widths = [[level.down.in_features for level in b.mlp.levels] for b in model.blocks]
    assert widths == [[32, 32], [16, 16]]
    for block in model.blocks:
        for level in block.mlp.levels:
            assert abs(level.down.weight.std() / (0.02 / 2) - 1) < 0.2


def test_periods_move_levels_by_summed_gradients():
    torch.manual_seed(0)
    fast = ContinuumMemory(SwiGLU(6, 8) for _ in range(3)).double()
    hand = copy.deepcopy(fast)
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    Cadence(optimizer, level_periods(fast, [1, 2, 4]))
    sums = {p: torch.zeros_like(p) for p in hand.parameters()}
    for step in range(1, 9):
        x = torch.randn(4, 6, dtype=torch.float64)
        for model in (fast, hand):
            model.zero_grad()
            (x + model(x)).square().mean().backward()
        optimizer.step()
        for level, period in zip(hand.levels, (1, 2, 4), strict=True):
            for p in level.parameters():
                sums[p] += p.grad
                if step % period == 0:
                    p.data -= 0.1 * sums[p]
                    sums[p].zero_()
        for a, b in zip(fast.parameters(), hand.parameters(), strict=True):
            assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_cadence_resumes_where_it_was(rule, stop):
    """The optimizer's own state has what is held, also before the rule has made its first step."""

    def build():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = rule(model.parameters(), lr=0.1)
        Cadence(optimizer, {model.weight: 3})
        return model, optimizer

    def steps(model, optimizer, inputs):
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    inputs = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1))
    whole, first, second = build(), build(), build()
    steps(*whole, inputs)
    steps(*first, inputs[:stop])
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    steps(*second, inputs[stop:])
    assert torch.equal(whole[0].weight, second[0].weight)
    assert torch.equal(whole[0].bias, second[0].bias)


def test_a_parameter_without_gradients_waits_in_vain():
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    Cadence(optimizer, {model.weight: 2})
    for _ in range(4):
        optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("steps", [0, 1])
def test_an_optimizer_with_a_cadence_cannot_be_copied(rule, twin, steps):
    """Its copy would have no hooks, and move the weight too early."""
    model = nn.Linear(2, 2)
    optimizer = rule(model.parameters(), lr=0.1)
    twin(optimizer)
    Cadence(optimizer, {model.weight: 3})
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with pytest.raises(ConfigError, match="copy or pickle of an optimizer with a Cadence: must be"):
        twin(optimizer)
    assert optimizer.state_dict()["param_groups"]


def test_only_own_parameters_can_wait():
    model, other = nn.Linear(2, 2), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"shape \(2, 3\) waits: must be one of the optimizer's"):
        Cadence(optimizer, {model.weight: 2, other.weight: 2})
    Cadence(optimizer, {model.weight: 2, other.weight: 1})  # it does not wait
    optimizer.step()
    assert optimizer.state_dict()["state"].keys() == {0}


@pytest.mark.parametrize("period", [0, 1.5, True])
def test_impossible_periods_are_refused(period):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"period=.*: must be a positive integer"):
        Cadence(optimizer, {model.weight: period})
    with pytest.raises(ConfigError, match=r"periods=\[1\]: needs one for each of 2 levels"):
        level_periods(chain(SwiGLU, 8, 32, 2), [1])
    with pytest.raises(ConfigError, match=r"periods=\[1, 2\]: no MLP of the model is a chain"):
        level_periods(SwiGLU(8, 32), [1, 2])


@pytest.mark.parametrize("mixer", [Hope, HopeAttention])
@pytest.mark.parametrize("levels", [0, 2.0, None])
def test_impossible_levels_are_refused(mixer, levels):
    with pytest.raises(ConfigError, match=r"levels=.*: must be a positive integer"):
        mixer(16, 2, levels=levels)


@pytest.mark.parametrize("levels", [-2, 0, 2.0])
def test_impossible_splits_are_refused(levels):
    for split in (lambda: level_widths(64, levels), lambda: chain(SwiGLU, 4, 64, levels)):
        with pytest.raises(ConfigError, match=r"levels=.*: must be a positive integer"):
            split()
    with pytest.raises(ConfigError, match="width=-64: must be a positive integer"):
        level_widths(-64, 2)


def test_no_tokens_have_no_answers_and_no_chunk_is_none():
    u, q, start = example(0)
    y, state = self_modifying_memory(u[None, None], q[None, None], start, fresh())
    assert y.shape == (1, 1, 0, SIZE)
    assert torch.equal(state.turn, fresh().turn)
    with pytest.raises(ConfigError, match="chunk=0: must be a positive integer"):
        self_modifying_memory(u[None, None], q[None, None], start, fresh(), 0)
