"""The optimizer: every parameter in exactly one role, the schedule, one step of AdamW by hand."""

import itertools
import math

import pytest
import torch

from lmgeom.errors import ConfigError
from lmgeom.head.optimizer import HEAD_RULES, Equispread, Together
from lmgeom.lm.config import Config, presets
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.optim import (
    BODY_RULES,
    DECAYED,
    adamw,
    hidden_matrices,
    make_optimizer,
    parameter_groups,
    role,
    schedule,
)

SMALL = Config(64, 16, 2, 2, 16, 32)


@pytest.mark.parametrize("name", list(presets))
def test_every_parameter_of_every_preset_has_one_role(name):
    with torch.device("meta"):
        model = LanguageModel(presets[name])
    grouped = [p for group in parameter_groups(model) for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped})
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("name", ["tied-small", "untied-small", "leviathan-small"])
def test_roles_of_a_preset(name):
    with torch.device("meta"):
        model = LanguageModel(presets[name])
    roles = {n: role(n, tuple(p.shape)) for n, p in model.named_parameters()}
    kinds = {"embedding", "matrix", "gain"}
    kinds |= {"head"} if name != "tied-small" else set()
    kinds |= {"spline"} if name == "leviathan-small" else set()
    assert set(roles.values()) == kinds
    assert all(roles[n] == "gain" for n in roles if "norm" in n)
    assert {n for n in roles if roles[n] == "head"} <= {"head.weight"}
    inputs = {n for n in roles if roles[n] == "embedding"}
    assert len(inputs) == 1
    assert next(iter(inputs)).startswith("input.")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("input.norm_gain", (4, 64), "gain"),
        ("input.norm_bias", (4, 64), "gain"),
        ("input.spline_delta", (4, 64, 16, 32), "spline"),
        ("input.codebooks", (3, 26, 64), "embedding"),
        ("input.projection", (4, 64, 64), "matrix"),
        ("input.weight", (64, 16), "embedding"),
        ("head.weight", (64, 16), "head"),
        ("blocks.0.mixer.output.weight", (16, 16), "matrix"),
        ("blocks.0.mixer.gate", (16,), "gain"),
    ],
)
def test_role(name, shape, expected):
    assert role(name, shape) == expected


def test_only_tables_and_matrices_decay():
    decay = {g["role"]: g["weight_decay"] for g in parameter_groups(LanguageModel(SMALL), 0.3)}
    assert decay == {"embedding": 0.3, "matrix": 0.3, "gain": 0.0}
    assert set(DECAYED) >= set(decay)


def test_frozen_parameters_are_left_out():
    model = LanguageModel(SMALL)
    model.input.weight.requires_grad_(False)
    assert "embedding" not in {g["role"] for g in parameter_groups(model)}


def test_schedule_rises_to_one_and_ends_at_the_floor():
    factors = [schedule(step, 100, 10, 0.1) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == 1.0
    assert factors[99] == pytest.approx(0.1)
    assert factors[54] == pytest.approx(0.55)  # the middle of the cosine
    assert all(a >= b for a, b in itertools.pairwise(factors[9:]))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (5, 5), (3, 2)])
def test_schedule_at_the_edges(steps, warmup):
    factors = [schedule(step, steps, warmup, 0.2) for step in range(steps)]
    assert all(0 < factor <= 1 and math.isfinite(factor) for factor in factors)
    assert factors[-1] == (1.0 if warmup == steps else pytest.approx(0.2))


def test_adamw_equals_the_formula_in_float64():
    torch.manual_seed(0)
    model = LanguageModel(SMALL).double()
    names = dict(model.named_parameters())
    lr, decay, (b1, b2), eps = 1e-2, 0.1, (0.9, 0.95), 1e-8
    optimizer = adamw(model, lr, decay, (b1, b2))
    w = {n: p.detach().clone() for n, p in names.items()}
    m, v = ({n: torch.zeros_like(p) for n, p in names.items()} for _ in range(2))
    for t in range(1, 4):
        for n, p in names.items():
            p.grad = torch.randn_like(p)
            m[n] = b1 * m[n] + (1 - b1) * p.grad
            v[n] = b2 * v[n] + (1 - b2) * p.grad**2
            step = (m[n] / (1 - b1**t)) / ((v[n] / (1 - b2**t)).sqrt() + eps)
            shrink = decay if DECAYED[role(n, tuple(p.shape))] else 0.0
            w[n] = w[n] - lr * shrink * w[n] - lr * step
        optimizer.step()
    for n, p in names.items():
        torch.testing.assert_close(p.detach(), w[n], rtol=0, atol=1e-14)


# A rule for each role ------------------------------------------------------------------------


def on_meta(name):
    with torch.device("meta"):
        return LanguageModel(presets[name])


def parts(optimizer):
    """Roles of each part, by the name of its class."""
    return {
        type(part).__name__: [group["role"] for group in part.param_groups]
        for part in getattr(optimizer, "parts", [optimizer])
    }


@pytest.mark.parametrize("name", ["tied-small", "untied-small", "leviathan-small"])
@pytest.mark.parametrize("body", BODY_RULES)
@pytest.mark.parametrize("head", HEAD_RULES)
def test_every_choice_of_rules_is_a_partition(name, body, head):
    model = on_meta(name)
    made = make_optimizer(model, body_optimizer=body, head_optimizer=head, head_lr=0.1)
    grouped = [id(p) for group in made.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    found = parts(made)
    assert ("Muon" in found) == ("muon" in (body, head))
    own = made.parts[0].param_groups[0]
    assert own["params"] == [model.head.weight]
    if HEAD_RULES[head].size == "budget":
        assert own["center"] == (name != "tied-small")
        assert own["weight_decay"] == 0
        assert own["budget"] == 0.1
    else:
        assert own["weight_decay"] == 0.1
        assert own["lr"] == 0.1


def test_the_default_is_adamw_alone():
    model = LanguageModel(SMALL)
    made, plain = make_optimizer(model, 0.01, 0.3), adamw(model, 0.01, 0.3)
    assert type(made) is torch.optim.AdamW
    for one, other in zip(made.param_groups, plain.param_groups, strict=True):
        assert one.keys() == other.keys()
        assert all(one[key] == other[key] for key in one if key != "params")
        assert all(p is q for p, q in zip(one["params"], other["params"], strict=True))


def test_muon_moves_linear_layers_of_the_blocks_and_nothing_else():
    model = LanguageModel(presets["leviathan-small"])
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split(".")[0] for p in hidden_matrices(model)} == {"blocks"}
    made = make_optimizer(model, lr=0.01, weight_decay=0.2, body_optimizer="muon")
    assert parts(made)["Muon"] == ["matrix"]
    assert set(parts(made)["AdamW"]) == {"matrix", "gain", "embedding", "spline", "head"}
    (group,) = made.parts[0].param_groups
    assert (group["lr"], group["weight_decay"]) == (0.01, 0.2)
    assert len(group["params"]) == 4 * len(model.blocks)


@pytest.mark.parametrize("mixer", ["titans-mag", "hope", "gated-attention"])
def test_taps_gates_and_starts_of_memories_stay_with_adamw(mixer):
    model = LanguageModel(Config(64, 16, 1, 2, 16, 64, mixer=mixer))
    made = make_optimizer(model, body_optimizer="muon")
    moved = {id(p) for p in made.parts[0].param_groups[0]["params"]}
    for name, p in model.named_parameters():
        assert (id(p) in moved) == (
            name.startswith("blocks.") and name.endswith("weight") and "norm" not in name
        ), name


def test_the_radius_follows_the_gain_of_the_last_norm():
    torch.manual_seed(0)
    model = LanguageModel(Config(64, 16, 1, 2, 16, 32, head="untied"))
    made = make_optimizer(model, head_optimizer="rownorm", head_lr=0.5, weight_decay=0.0)
    steps = []
    for gain in (1.0, -4.0):
        with torch.no_grad():
            model.norm.weight[3] = gain
        before = model.head.weight.detach().clone()
        model(torch.arange(16)[None]).square().mean().backward()
        made.parts[0].step()
        steps.append((model.head.weight.detach() - before).norm(dim=1).max().item())
    assert steps[0] == pytest.approx(0.5 / (2 * 4), rel=1e-4)
    assert steps[1] == pytest.approx(0.5 / (2 * 16), rel=1e-4)


def test_a_tied_head_cannot_be_centered():
    with pytest.raises(ConfigError, match=r"head_options=.*a tied head is an input table too"):
        make_optimizer(
            LanguageModel(SMALL),
            head_optimizer="sign",
            head_lr=0.1,
            head_options={"center": True},
        )


def test_periods_need_a_chain_of_as_many_levels():
    with pytest.raises(ConfigError, match="no MLP of the model is a chain of levels"):
        make_optimizer(LanguageModel(SMALL), level_periods=(1, 2))
    chain = Config(64, 16, 1, 2, 16, 64, mixer="hope-attention", mixer_options={"levels": 2})
    with pytest.raises(ConfigError, match=r"periods=\[1, 2, 4\]: needs one for each of 2 levels"):
        make_optimizer(LanguageModel(chain), level_periods=(1, 2, 4))


def test_options_reach_the_rule():
    options = {"whiten": 0.5, "sweeps": 2, "momentum": 0.8, "cap": True, "weight_decay": 0.1}
    model = LanguageModel(SMALL)
    made = make_optimizer(model, head_optimizer="equispread", head_lr=0.2, head_options=options)
    assert type(made) is Together
    assert type(made.parts[0]) is Equispread
    group = made.parts[0].param_groups[0]
    assert {name: group[name] for name in options} == options
