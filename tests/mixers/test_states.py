"""A state continues the mixer that it was made for; a held one stays what it is."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lmgeom.errors import ConfigError, DataError
from lmgeom.lm import Config, LanguageModel
from lmgeom.mixers import MIXERS, NeuralMemory

TITANS = ["titans-lmm", "titans-mag", "titans-mal", "titans-mac"]
DEEP = {"depth": 2, "chunk": 4}
# mixer and options of a state, and those of the mixer that is given it
FOREIGN = [
    *((name, {}, name, DEEP, r"LinearState.*DeepState|tuple of 1.* of 2") for name in TITANS),
    *((name, DEEP, name, {}, r"DeepState.*LinearState|tuple of 2.* of 1") for name in TITANS),
    *((n, DEEP, n, DEEP | {"depth": 3}, "tuple of 2: must be a tuple of 3") for n in TITANS),
    *((name, DEEP, name, DEEP | {"chunk": 9}, r"chunk is 4: must be 9") for name in TITANS),
    ("titans-mac", {"chunk": 4}, "titans-mac", {"chunk": 9}, "chunk is 4: must be 9"),
    ("titans-mac", {"chunk": 4}, "titans-mac", {"chunk": 2}, "chunk is 4: must be 2"),
    ("hope", {"chunk": 4}, "hope", {"chunk": 9}, "state.chunk is 4: must be 9"),
    ("hope", {"chunk": 4}, "hope", {"chunk": 2}, "state.chunk is 4: must be 2"),
    ("titans-mac", {}, "titans-mag", {}, "state is a SegmentState of 5: must be a TitansState"),
    ("titans-mac", {}, "titans-mal", {}, "state is a SegmentState of 5: must be a TitansState"),
    ("attention", {"window": 3}, "attention", {}, "state.window is 3: must be None"),
    ("attention", {}, "gated-attention", {"window": 3}, "state.window is None: must be 3"),
    ("attention", {}, "hope", {}, "state is a KeyValues of 4: must be a HopeState of 3"),
    ("titans-mag", {"window": 3}, "titans-mag", {"window": 4}, "window is 3: must be 4"),
]


def stepped(layer, batch=2, tokens=5):
    weight = next(layer.parameters())
    x = torch.randn(batch, tokens, 16, dtype=weight.dtype)
    return layer.step(x, layer.initial_state(batch))[1]


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(("name", "options", "other", "own", "message"), FOREIGN)
def test_a_state_of_another_mixer_is_refused(name, options, other, own, message, tokens):
    made = MIXERS[name](16, 2, **options)
    state = stepped(made, tokens=tokens) if tokens else made.initial_state(2)
    with pytest.raises(DataError, match=message):
        MIXERS[other](16, 2, **own).step(torch.zeros(2, 1, 16), state)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("size", [(16, 4), (32, 2), (32, 4)])
def test_a_state_of_other_sizes_is_refused(name, size):
    state = stepped(MIXERS[name](16, 2))
    with pytest.raises(DataError, match=r"state.* of shape \(texts, .*: must be torch.float32 of"):
        MIXERS[name](*size).step(torch.zeros(2, 1, size[0]), state)


@pytest.mark.parametrize("name", MIXERS)
def test_a_state_of_another_dtype_is_refused(name):
    layer = MIXERS[name](16, 2)
    state = stepped(layer)
    with pytest.raises(DataError, match=r"is torch.float32 of .*: must be torch.float64 of"):
        layer.double().step(torch.zeros(2, 1, 16, dtype=torch.float64), state)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("state", [None, 3, (), "state", torch.zeros(2)])
def test_what_is_no_state_is_refused(name, state):
    with pytest.raises(DataError, match=r"state is .*: must be a (\w+State|KeyValues) of"):
        MIXERS[name](16, 2).step(torch.zeros(2, 1, 16), state)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("batch", [-1, 0, True, 2.0])
def test_impossible_numbers_of_texts_are_refused(name, batch):
    with pytest.raises(ConfigError, match=r"batch=.*: must be a positive integer"):
        MIXERS[name](16, 2).initial_state(batch)


def test_a_linear_memory_may_change_its_chunk():
    """To it the chunk is a matter of speed, so its state does not carry it."""
    torch.manual_seed(0)
    one, other = (MIXERS["titans-lmm"](16, 2, chunk=chunk).double() for chunk in (3, 5))
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    _, state = one.step(x[:, :7], one.initial_state(2))
    assert (other.step(x[:, 7:], state)[0] - one(x)[:, 7:]).abs().max() < 1e-12


@pytest.mark.parametrize("name", MIXERS)
def test_states_pass_between_autocasting_and_full_precision_only_down(name):
    layer, x = MIXERS[name](16, 2), torch.randn(2, 3, 16)
    state = stepped(layer)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            _, state = layer.step(x, state)
    with pytest.raises(DataError, match=r"is torch.bfloat16 of .*: must be torch.float32"):
        layer.step(x, state)


@pytest.mark.parametrize("name", MIXERS)
def test_the_whole_text_needs_no_check(name, monkeypatch):
    """Training never pays for the check of a state."""
    monkeypatch.setattr("lmgeom.mixers.attention.check_state", None)
    assert MIXERS[name](16, 2)(torch.zeros(2, 3, 16)).shape == (2, 3, 16)


CONFIG = Config(97, 16, 2, 2, 30, 32, mixer="titans-lmm")


def test_a_model_refuses_the_state_of_another():
    model, ids = LanguageModel(CONFIG), torch.zeros(2, 3, dtype=torch.int64)
    deep = LanguageModel(replace(CONFIG, mixer_options=DEEP))
    with pytest.raises(
        DataError, match=r"state\.memory is a LinearState of 2: must be a DeepState"
    ):
        deep.step(ids, model.initial_state(2))
    with pytest.raises(DataError, match="state of a model of 3 layers: must be one of 2"):
        model.step(ids, LanguageModel(replace(CONFIG, layers=3)).initial_state(2))
    with pytest.raises(DataError, match="state is a MemoryState: must be a ModelState"):
        model.step(ids, model.initial_state(2).mixers[0])
    with pytest.raises(ConfigError, match="batch=True: must be a positive integer"):
        model.initial_state(True)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_held_state_and_the_parameters_are_independent(name, tokens, frozen):
    """Made without gradients; deep memories keep the weights of their start as anchors."""
    options = DEEP if name in TITANS else {}
    layer = MIXERS[name](16, 2, **options).requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        state = stepped(layer, tokens=tokens) if tokens else layer.initial_state(2)
    before = [leaf.clone() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    weights = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(1.0)
        after = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        layer.load_state_dict(weights)
        for leaf in after:
            leaf.zero_()
    assert all(torch.equal(w, weights[key]) for key, w in layer.state_dict().items())


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_state_made_without_gradients_can_be_copied(name, depth):
    layer = MIXERS[name](16, 2, **({"depth": depth} if name in TITANS else {}))
    x = torch.randn(2, 4, 16)
    with torch.no_grad():
        for state in (layer.initial_state(2), stepped(layer)):
            first, _ = layer.step(x, copy.deepcopy(state))
            assert torch.equal(first, layer.step(x, state)[0])


def test_with_gradients_a_state_is_part_of_the_graph():
    memory = NeuralMemory(16, 2, depth=2)
    y, _ = memory.step(torch.randn(1, 3, 16), memory.initial_state(1))
    y.sum().backward()
    assert all(w.grad.abs().sum() > 0 for w in memory.start)
