"""Attention, plain and gated, against a loop over tokens in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgeom.errors import ConfigError, DataError
from lmgeom.mixers import (
    Attention,
    GatedAttention,
    HopeAttention,
    Rotary,
    rotary_angles,
    rotate,
    visible,
)


def make(mixer, dim=16, heads=2, context=24, **options):
    torch.manual_seed(0)
    return mixer(dim, heads, context=context, **options).double()


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def one_token_at_a_time(layer, x):
    """Attention for x (T, D) by loops; pairs of features are complex numbers."""
    q, k, v = (x @ w.T for w in layer.qkv.weight.chunk(3))
    size = x.shape[1] // layer.heads
    theta = layer.rotary.base ** (-2 * torch.arange(size // 2, dtype=x.dtype) / size)
    gate = torch.ones_like(x)
    if isinstance(layer, GatedAttention):
        gate = 1 / (1 + torch.exp(-x @ layer.gate.weight.T))
        gate = gate.repeat_interleave(x.shape[1] // gate.shape[1], dim=1)
    out = torch.zeros_like(x)
    for head, own in enumerate(torch.arange(x.shape[1]).split(size)):
        heads = q[:, own], k[:, own]
        if layer.qk_norm is not None:
            gains = layer.qk_norm.weight[:, 0]
            heads = [rms(z) * gain for z, gain in zip(heads, gains, strict=True)]
        query, key = (torch.complex(*z.chunk(2, dim=1)) for z in heads)
        for t in range(len(x)):
            first = 0 if layer.window is None else max(0, t + 1 - layer.window)
            turned = [key[s].conj() * torch.exp(1j * theta * (t - s)) for s in range(first, t + 1)]
            values = v[first : t + 1, own]
            if layer.persistent is not None:  # learned pairs at position zero
                learned = torch.complex(*layer.persistent[0, head].chunk(2, dim=1))
                turned = [z.conj() * torch.exp(1j * theta * t) for z in learned] + turned
                values = torch.cat((layer.persistent[1, head], values))
            scores = torch.stack([(query[t] * z).sum().real for z in turned]) / size**0.5
            out[t, own] = gate[t, own] * (scores.softmax(0) @ values)
    return out @ layer.output.weight.T


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        (Attention, {}),
        (Attention, {"window": 4}),
        (Attention, {"window": 1, "qk_norm": True}),
        (Attention, {"window": 4, "persistent": 3}),
        (Attention, {"qk_norm": True, "persistent": 1}),
        (HopeAttention, {"levels": 2, "window": 4, "qk_norm": True}),
        (GatedAttention, {}),
        (GatedAttention, {"window": 4, "qk_norm": True}),
        (GatedAttention, {"gate": "headwise", "window": 30}),
        (GatedAttention, {"gate": "headwise", "qk_norm": True}),
    ],
)
@pytest.mark.parametrize(
    ("dim", "heads", "tokens"), [(16, 2, 24), (12, 1, 7), (8, 4, 1), (6, 3, 5)]
)
def test_matches_the_token_loop(mixer, options, dim, heads, tokens):
    layer = make(mixer, dim, heads, **options).requires_grad_(False)
    for weight in layer.parameters():
        weight.normal_()
    layer.output.weight.normal_(std=dim**-0.5)
    x = torch.randn(tokens, dim, dtype=torch.float64)
    slow = one_token_at_a_time(layer, x)
    state, steps = layer.initial_state(1), []
    for token in x:
        y, state = layer.step(token[None, None], state)
        steps.append(y[0, 0])
    assert (layer(x[None])[0] - slow).abs().max() < 1e-10
    assert (torch.stack(steps) - slow).abs().max() < 1e-10
    assert (layer.float()(x[None].float())[0] - slow).abs().max() < 1e-4


@given(st.integers(1, 9), st.integers(0, 9), st.one_of(st.none(), st.integers(1, 12)))
def test_visible_is_its_definition(queries, before, window):
    keys = queries + before
    expected = [
        [s <= t and (window is None or s > t - window) for s in range(keys)]
        for t in range(before, keys)
    ]
    assert visible(queries, keys, window).tolist() == expected


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ConfigError, match="queries=5: must be at most keys=3"):
        visible(5, 3)


def test_a_windowed_state_stays_small():
    layer = make(Attention, window=5)
    state = layer.initial_state(2)
    for _ in range(3):
        _, state = layer.step(torch.randn(2, 8, 16, dtype=torch.float64), state)
    assert state.keys.shape == state.values.shape == (2, 2, 4, 8)
    assert state.tokens == 24


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(1, 8))
def test_scores_depend_on_distance_alone(t, s, shift, pairs):
    angles = rotary_angles(1001, 2 * pairs)
    q, k = torch.randn(2, 2 * pairs, dtype=torch.float64)

    def score(t, s):
        at = (rotate(v, angles[p].cos(), angles[p].sin()) for v, p in ((q, t), (k, s)))
        return torch.dot(*at)

    assert abs(score(t, s) - score(t + shift, s + shift)) < 1e-10


def test_rotation_keeps_length_and_dtype():
    angles = rotary_angles(50, 8)
    x = torch.randn(50, 8, dtype=torch.float64)
    turned = rotate(x, angles.cos(), angles.sin())
    assert (turned.norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-14
    assert torch.equal(turned[0], x[0])
    assert rotate(x.bfloat16(), angles.cos(), angles.sin()).dtype == torch.bfloat16


def test_the_cache_survives_moves_and_is_not_saved():
    exact = rotary_angles(4096, 16).cos()
    assert torch.equal(Rotary(16, 4096).double().cos, exact)
    assert torch.equal(Rotary(16, 4096).bfloat16().cos, exact.float())
    with torch.device("meta"):
        hollow = Rotary(16, 4096)
    assert torch.equal(hollow.to_empty(device="cpu").cos, exact.float())
    assert not Rotary(16, 8).state_dict()


@pytest.mark.parametrize(("heads", "message"), [(3, "heads=3: must divide dim=16"), (16, "even")])
def test_impossible_heads_are_refused(heads, message):
    with pytest.raises(ConfigError, match=message):
        Attention(16, heads)


@pytest.mark.parametrize("window", [0, -1, 2.0, True, "all"])
def test_impossible_windows_are_refused(window):
    with pytest.raises(ConfigError, match=r"window=.*: must be a positive integer, or None"):
        Attention(16, 2, window=window)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_norm": "false"}, "qk_norm='false': must be True or False"),
        ({"qk_norm": 1}, "qk_norm=1: must be True or False"),
        ({"persistent": -1}, "persistent=-1: must be an integer from 0 on"),
        ({"context": 0}, "context=0: must be a positive integer"),
        ({"context": 2.0}, r"context=2\.0: must be a positive integer"),
        ({"rope_base": 0}, "rotary base 0: must be a positive finite number"),
        ({"rope_base": float("nan")}, "rotary base nan: must be a positive finite number"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Attention(16, 2, **options)


def test_unknown_gates_are_refused():
    with pytest.raises(ConfigError, match="gate='both': known: elementwise, headwise"):
        GatedAttention(16, 2, gate="both")


def test_too_long_a_sequence_names_both_lengths():
    with pytest.raises(DataError, match="25 tokens: must fit the context of 24"):
        make(Attention)(torch.zeros(1, 25, 16, dtype=torch.float64))
    layer = make(Attention)
    _, state = layer.step(torch.zeros(1, 20, 16, dtype=torch.float64), layer.initial_state(1))
    with pytest.raises(DataError, match="25 tokens: must fit the context of 24"):
        layer.step(torch.zeros(1, 5, 16, dtype=torch.float64), state)
