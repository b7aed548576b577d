"""A tapered model and its uniform twin have one budget: by formula, by counting, by the counter."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lmgeom.errors import ConfigError
from lmgeom.lm import Config, LanguageModel, SwiGLU, parameters, presets, tapered, token_loss
from lmgeom.lm.config import ARCHITECTURES, depth_arms

SIZES = ("440m", "760m", "1.3b", "small")


def count(config, tokens):
    """Parameters; FLOPs of a training step, of a prompt and of one token, on the meta device."""
    with torch.device("meta"):
        model = LanguageModel(replace(config, context=tokens))
        ids = torch.empty(1, tokens, dtype=torch.int64)
        with FlopCounterMode(display=False) as training:
            model(ids).sum().backward()
        with torch.no_grad(), FlopCounterMode(display=False) as prompt:
            model(ids)
        with torch.no_grad(), FlopCounterMode(display=False) as token:
            model(ids[:, :1])
    entries = sum(weight.numel() for weight in model.parameters())
    return entries, *(counter.get_total_flops() for counter in (training, prompt, token))


@pytest.mark.parametrize("name", [f"{name}-{size}" for size in SIZES for name in ARCHITECTURES])
def test_same_parameters_and_flops(name):
    """The uniform, the tapered and the mirrored model of a preset, built and run."""
    uniform, taper = presets[name], presets[f"{name}-tapered"]
    assert len(set(taper.widths)) > uniform.layers // 2
    mirror = replace(taper, mlp_width=taper.mlp_width[::-1])
    expected = count(uniform, 64)
    assert count(taper, 64) == count(mirror, 64) == expected
    budget = parameters(replace(uniform, context=64))
    assert expected[0] == budget.total
    assert expected[2] == 64 * budget.flops


def shapes_in(state):
    """Shapes of the tensors in what a model remembers of a text."""
    if isinstance(state, torch.Tensor):
        return [tuple(state.shape)]
    parts = [getattr(state, f.name) for f in fields(state)] if is_dataclass(state) else state
    return [s for part in parts for s in shapes_in(part)] if isinstance(parts, list | tuple) else []


@pytest.mark.parametrize("architecture", [*ARCHITECTURES])
def test_nothing_but_the_width_of_the_mlps_varies(architecture):
    """Every other parameter, and what the model remembers of a text, is as in the uniform one."""
    weights, states = [], []
    for name in (f"{architecture}-small", f"{architecture}-small-tapered"):
        with torch.device("meta"):
            model = LanguageModel(replace(presets[name], context=64))
        weights.append({k: v.shape for k, v in model.state_dict().items() if ".mlp." not in k})
        model = LanguageModel(replace(presets[name], context=64, vocab_size=64))
        ids = torch.zeros(1, 5, dtype=torch.int64)
        states.append(shapes_in(model.step(ids, model.initial_state(1))[1]))
    assert weights[0] == weights[1]
    assert states[0] == states[1] != []


TAPERED = [f"{name}-{size}-tapered" for size in SIZES for name in ARCHITECTURES]


def test_all_four_architectures_come_at_every_size():
    assert [*ARCHITECTURES] == ["transformer", "gated-attention", "titans", "hope-attention"]
    assert set(TAPERED) == {name for name in presets if name.endswith("-tapered")}
    mixers = {name.rpartition("-")[0]: presets[name].mixer for name in presets}
    assert mixers["titans"] == "titans-lmm"
    assert presets["titans-440m"].mixer_options == {"depth": 2}
    assert presets["titans-small"].mixer_options == {"depth": 1}


@pytest.mark.parametrize("name", TAPERED)
def test_formula_gives_one_budget(name):
    uniform, taper = presets[name.removesuffix("-tapered")], presets[name]
    assert parameters(uniform) == parameters(taper)
    assert replace(taper, mlp_width=uniform.mlp_width) == uniform
    assert taper.widths[0] == 3 * taper.widths[-1] == 1.5 * uniform.mlp_width


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_wider_layer_costs_what_the_formula_says(architecture):
    """Three matrices of a layer: 2 FLOPs a weight and token forward, 6 in training."""
    narrow = replace(presets[f"{architecture}-small"], vocab_size=64, layers=3, mlp_width=64)
    tokens, more = 32, 3 * narrow.dim * 16
    for layer in range(3):
        sizes = [64 + 16 * (i == layer) for i in range(3)]
        wide = replace(narrow, mlp_width=tuple(sizes))
        grown = [b - a for a, b in zip(count(narrow, tokens), count(wide, tokens), strict=True)]
        assert grown == [more, 6 * more * tokens, 2 * more * tokens, 2 * more]


@settings(max_examples=8)
@given(
    st.integers(2, 12),
    st.integers(1, 4),
    st.integers(0, 7),
    st.sampled_from(["cosine", "linear", "sigmoid"]),
)
def test_any_taper_of_any_small_model(layers, units, eighths, schedule):
    uniform = Config(32, 8, layers, 2, 8, 64 * units)
    ends = {"start": 1 + eighths / 8, "end": 1 - eighths / 8}
    taper = tapered(uniform, schedule=schedule, multiple=8, **ends)
    assert count(taper, 8) == count(uniform, 8)
    assert parameters(taper) == parameters(uniform)


def test_only_a_uniform_model_can_be_tapered():
    taper = presets["transformer-small-tapered"]
    with pytest.raises(ConfigError, match="one width to taper around"):
        tapered(taper)
    with pytest.raises(ConfigError, match="multiple=1000: must divide"):
        tapered(presets["transformer-small"], multiple=1000)
    with pytest.raises(ConfigError, match="config='small': must be a Config, as in presets"):
        tapered("small")
    with pytest.raises(ConfigError, match="config='small': must be a Config, as in presets"):
        parameters("small")


def test_every_architecture_comes_uniform_and_tapered():
    arms = depth_arms("x", 32, 16, 4, 2, 8, 64)
    assert set(arms) == {f"{n}-x{end}" for n in ARCHITECTURES for end in ("", "-tapered")}
    for name in ARCHITECTURES:
        assert arms[f"{name}-x-tapered"]() == tapered(arms[f"{name}-x"]())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_three_lines_build_a_tapered_model_that_learns(architecture):
    config = replace(presets[f"{architecture}-small-tapered"], vocab_size=64, context=32)
    model = LanguageModel(config)
    ids = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(0))
    token_loss(model.head, model.hidden(ids[:, :-1]), ids[:, 1:]).backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
    inner = [
        sum(m.down.in_features for m in block.mlp.modules() if isinstance(m, SwiGLU))
        for block in model.blocks
    ]
    assert tuple(inner) == config.widths
