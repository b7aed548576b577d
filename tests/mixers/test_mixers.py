"""Laws every mixer obeys, whatever its options."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lmgeom.errors import ConfigError, DataError
from lmgeom.lm import Config, LanguageModel, complete, parameters, token_loss
from lmgeom.mixers import MIXERS

CASES = [
    ("attention", {}),
    ("attention", {"window": 5, "qk_norm": True}),
    ("attention", {"window": 4, "persistent": 3}),
    ("gated-attention", {}),
    ("gated-attention", {"gate": "headwise", "window": 1, "qk_norm": True}),
    ("titans-lmm", {}),
    ("titans-lmm", {"chunk": 7, "momentum": 0.0}),
    ("titans-lmm", {"depth": 2, "chunk": 5, "momentum": 0.9}),
    ("titans-mag", {"window": 5, "chunk": 7}),
    ("titans-mag", {"window": None, "persistent": 0, "depth": 3, "chunk": 3}),
    ("titans-mal", {"window": 5, "qk_norm": True, "chunk": 4}),
    ("titans-mac", {"chunk": 5, "qk_norm": True}),
    ("titans-mac", {"chunk": 8, "depth": 2, "persistent": 0}),
    ("hope-attention", {}),
    ("hope-attention", {"levels": 3, "window": 4, "qk_norm": True}),
    ("hope", {}),
    ("hope", {"levels": 1, "chunk": 5}),
]
every_case = pytest.mark.parametrize(("name", "options"), CASES)


def make(name, options, dim=16, heads=2, context=24):
    """Layer in float64 whose every weight matters."""
    torch.manual_seed(0)
    layer = MIXERS[name](dim, heads, context=context, rope_base=10000.0, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def text(rows=2, length=24, dim=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, length, dim, dtype=torch.float64, generator=generator)


def piecewise(layer, x, pieces):
    state, parts = layer.initial_state(len(x)), []
    for piece in x.split(pieces, dim=1):
        y, state = layer.step(piece, state)
        parts.append(y)
    return torch.cat(parts, dim=1)


def test_every_mixer_has_a_case():
    assert {name for name, _ in CASES} == set(MIXERS)


@every_case
@pytest.mark.parametrize("t", [0, 1, 11, 22, 23])
def test_causal(name, options, t):
    layer, x = make(name, options), text()
    changed = x.clone()
    changed[:, t] += torch.randn(16, dtype=torch.float64)
    before, after = layer(x), layer(changed)
    assert torch.equal(before[:, :t], after[:, :t])
    assert (before[:, t] != after[:, t]).any()


@every_case
def test_batch_rows_are_independent(name, options):
    layer, x = make(name, options), text(3)
    alone = torch.cat([layer(row[None]) for row in x])
    assert (layer(x) - alone).abs().max() < 1e-12


@every_case
def test_gradient_reaches_every_parameter(name, options):
    layer = make(name, options)
    layer(text()).square().sum().backward()
    silent = [n for n, w in layer.named_parameters() if w.grad is None or not w.grad.abs().sum()]
    assert not silent


@every_case
def test_a_prefix_gives_the_same_answer(name, options):
    layer, x = make(name, options), text()
    assert (layer(x[:, :9]) - layer(x)[:, :9]).abs().max() < 1e-12


@every_case
@settings(deadline=None, max_examples=4)
@given(pieces=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_cut_with_the_state_carried_over_is_the_whole(name, options, pieces):
    layer, x = make(name, options, context=36).requires_grad_(False), text(length=sum(pieces))
    whole = layer(x)
    assert (whole - piecewise(layer, x, pieces)).abs().max() < 1e-10
    low = copy.deepcopy(layer).float()
    assert (whole - piecewise(low, x.float(), pieces)).abs().max() < 1e-4


@every_case
def test_a_state_is_not_changed_by_the_step(name, options):
    layer, x = make(name, options), text()
    _, state = layer.step(x[:, :10], layer.initial_state(2))
    first, _ = layer.step(x[:, 10:], state)
    again, _ = layer.step(x[:, 10:], state)
    assert torch.equal(first, again)


@every_case
def test_costs_agree_with_the_counters(name, options):
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        layer = MIXERS[name](64, 4, context=32, rope_base=10000.0, **options)
        layer(torch.empty(3, 32, 64))
    count = layer.parameter_count(64, 4, **options)
    assert sum(w.numel() for w in layer.parameters()) == count
    beyond = layer.flops_per_token(64, 4, 32, **options)
    assert counter.get_total_flops() // 96 == 2 * count + beyond


NOT_OPTIONS = [
    *(("depth", name) for name in MIXERS if not name.startswith("titans")),
    *(("persistent", name) for name in ("gated-attention", "hope-attention", "titans-lmm", "hope")),
    *(("window", name) for name in ("titans-lmm", "titans-mac", "hope")),
    *(("dpth", name) for name in MIXERS),
]


@pytest.mark.parametrize(("option", "name"), NOT_OPTIONS)
def test_costs_refuse_the_options_that_the_constructor_refuses(option, name):
    mixer = MIXERS[name]
    for refused in (
        lambda: mixer(32, 2, **{option: 2}),
        lambda: mixer.parameter_count(32, 2, **{option: 2}),
        lambda: mixer.flops_per_token(32, 2, 10, **{option: 2}),
    ):
        with pytest.raises(TypeError, match=f"argument '{option}'"):
            refused()


@every_case
def test_bfloat16_stays_close(name, options):
    layer, x = make(name, options).float(), text().float()
    exact = layer(x)
    scale = exact.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert (layer(x) - exact).abs().max() < 0.1 * scale
        y, state = layer.step(x[:, :9], layer.initial_state(2))
        rest, _ = layer.step(x[:, 9:], state)
    assert (torch.cat([y, rest], 1) - exact).abs().max() < 0.1 * scale
    low = layer.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16


@every_case
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e2])
def test_extreme_streams_give_finite_outputs_and_gradients(name, options, scale):
    layer, x = make(name, options).float(), (scale * text().float()).requires_grad_()
    assert layer(1e4 * text().float()).isfinite().all()
    layer(x).square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(w.grad.isfinite().all() for w in layer.parameters())


@every_case
@pytest.mark.parametrize("shape", [(2, 0, 16), (2, 24), (2, 24, 8)])
def test_a_stream_of_another_shape_is_refused(name, options, shape):
    layer, x = make(name, options), torch.zeros(shape, dtype=torch.float64)
    for refused in (lambda: layer(x), lambda: layer.step(x, layer.initial_state(2))):
        with pytest.raises(
            DataError, match=r"stream of shape \(2, .*: must be \(texts, tokens, 16\)"
        ):
            refused()


@every_case
@pytest.mark.parametrize("texts", [1, 3])
def test_a_state_of_other_texts_is_refused(name, options, texts):
    layer, x = make(name, options), text()
    _, state = layer.step(x[:, :5], layer.initial_state(2))
    with pytest.raises(DataError, match=f"stream of {texts} texts: the state is that of 2"):
        layer.step(x[:1, 5:].expand(texts, -1, -1), state)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(
    ("dim", "heads", "wrong"),
    [(16, 0, "heads=0"), (16, -2, "heads=-2"), (16, True, "heads=True"), (16.0, 2, r"dim=16\.0")],
)
def test_impossible_sizes_are_refused(name, dim, heads, wrong):
    with pytest.raises(ConfigError, match=f"{wrong}: must be a positive integer"):
        MIXERS[name](dim, heads)
    with pytest.raises(ConfigError, match="heads=3: must divide dim=16"):
        MIXERS[name](16, 3)


def small_config(name, options):
    torch.manual_seed(0)
    return Config(
        vocab_size=31,
        dim=16,
        layers=2,
        heads=2,
        context=24,
        mlp_width=(40, 24),
        mixer=name,
        mixer_options=options,
    )


@every_case
def test_greedy_generation_is_the_argmax_of_the_whole_text(name, options):
    model = LanguageModel(small_config(name, options)).double()
    ids = torch.randint(31, (2, 5))
    whole = complete(model, ids, 16, temperature=0)
    for t in range(5, 21):
        assert torch.equal(whole[:, t], model(whole[:, :t])[:, -1].argmax(-1))


@every_case
def test_recomputed_blocks_give_the_same_gradients(name, options):
    model = LanguageModel(small_config(name, options))
    ids, grads = torch.randint(31, (2, 24)), []
    for recompute in (False, True):
        loss = model.hidden(ids, recompute=recompute)[..., 0].sum()
        body = list(model.blocks.parameters())
        grads.append(torch.autograd.grad(loss, body))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@every_case
def test_a_language_model_of_it_counts_and_learns(name, options):
    config = small_config(name, options)
    assert Config.from_json(config.to_json()) == config
    torch.manual_seed(0)
    model = LanguageModel(config)
    assert sum(w.numel() for w in model.parameters()) == parameters(config).total
    ids = torch.randint(31, (4, 25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = token_loss(model.head, model.hidden(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
