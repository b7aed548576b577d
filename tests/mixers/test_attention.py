"""Laws every mixer obeys, and attention against a loop over tokens in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lmgeom.errors import ConfigError, DataError
from lmgeom.mixers import MIXERS, Attention, Rotary, rotary_angles, rotate

every_mixer = pytest.mark.parametrize("name", MIXERS)


def make(name, dim=16, heads=2, context=24):
    torch.manual_seed(0)
    return MIXERS[name](dim, heads, context=context, rope_base=10000.0).double()


def one_token_at_a_time(layer, x):
    """Attention for x (T, D) by loops; pairs of features are complex numbers."""
    q, k, v = (x @ w.T for w in layer.qkv.weight.chunk(3))
    size = x.shape[1] // layer.heads
    theta = layer.rotary.base ** (-2 * torch.arange(size // 2, dtype=x.dtype) / size)
    out = torch.zeros_like(x)
    for own in torch.arange(x.shape[1]).split(size):
        query, key = (torch.complex(*z[:, own].chunk(2, dim=1)) for z in (q, k))
        for t in range(len(x)):
            turned = [key[s].conj() * torch.exp(1j * theta * (t - s)) for s in range(t + 1)]
            scores = torch.stack([(query[t] * z).sum().real for z in turned]) / size**0.5
            out[t, own] = scores.softmax(0) @ v[: t + 1, own]
    return out @ layer.output.weight.T


@pytest.mark.parametrize(
    ("dim", "heads", "tokens"), [(16, 2, 24), (12, 1, 7), (8, 4, 1), (6, 3, 5)]
)
def test_matches_the_token_loop(dim, heads, tokens):
    layer = make("attention", dim, heads).requires_grad_(False)
    layer.qkv.weight.normal_()
    x = torch.randn(tokens, dim, dtype=torch.float64)
    slow = one_token_at_a_time(layer, x)
    assert (layer(x[None])[0] - slow).abs().max() < 1e-10
    assert (layer.float()(x[None].float())[0] - slow).abs().max() < 1e-4


@every_mixer
@pytest.mark.parametrize("t", [0, 1, 11, 22, 23])
def test_causal(name, t):
    layer, x = make(name), torch.randn(2, 24, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, t] += torch.randn(16, dtype=torch.float64)
    before, after = layer(x), layer(changed)
    assert torch.equal(before[:, :t], after[:, :t])
    assert (before[:, t] != after[:, t]).any()


@every_mixer
def test_batch_rows_are_independent(name):
    layer, x = make(name), torch.randn(3, 24, 16, dtype=torch.float64)
    alone = torch.cat([layer(row[None]) for row in x])
    assert (layer(x) - alone).abs().max() < 1e-12


@every_mixer
def test_gradient_reaches_every_parameter(name):
    layer = make(name)
    layer(torch.randn(2, 24, 16, dtype=torch.float64)).square().sum().backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in layer.parameters())


@every_mixer
def test_a_prefix_gives_the_same_answer(name):
    layer, x = make(name), torch.randn(2, 24, 16, dtype=torch.float64)
    assert (layer(x[:, :9]) - layer(x)[:, :9]).abs().max() < 1e-12


@every_mixer
def test_costs_agree_with_the_counters(name):
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        layer = MIXERS[name](64, 4, context=32, rope_base=10000.0)
        layer(torch.empty(3, 32, 64))
    count = layer.parameter_count(64, 4)
    assert sum(w.numel() for w in layer.parameters()) == count
    assert counter.get_total_flops() == 96 * (2 * count + layer.flops_per_token(64, 4, 32))


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


def test_bfloat16_stays_close():
    layer = make("attention").float()
    x = torch.randn(2, 24, 16)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert (layer(x) - exact).abs().max() < 0.02
    low = layer.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert (low - exact).abs().max() < 0.02


@pytest.mark.parametrize(("heads", "message"), [(3, "heads=3: must divide dim=16"), (16, "even")])
def test_impossible_heads_are_refused(heads, message):
    with pytest.raises(ConfigError, match=message):
        Attention(16, heads)


def test_too_long_a_sequence_names_both_lengths():
    with pytest.raises(DataError, match="25 tokens: must fit the context of 24"):
        make("attention")(torch.zeros(1, 25, 16, dtype=torch.float64))
