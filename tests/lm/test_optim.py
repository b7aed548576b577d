"""The optimizer: every parameter in exactly one role, the schedule, one step of AdamW by hand."""

import itertools
import math

import pytest
import torch

from lmgeom.lm.config import Config, presets
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.optim import DECAYED, adamw, parameter_groups, role, schedule

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
