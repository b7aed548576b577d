"""The decoder: an independent NumPy model, causality, ties that hold, one body for every arm."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmgeom.errors import DataError
from lmgeom.lm import INPUTS, Config, LanguageModel, RMSNorm, init_weights, token_loss
from lmgeom.lm.model import ModelState
from lmgeom.mixers import MIXERS, rotary_angles

TIED = Config(
    vocab_size=60, dim=16, layers=3, heads=2, context=20, mlp_width=(32, 24, 8), init_std=0.3
)
UNTIED = replace(TIED, head="untied")
LEV = replace(UNTIED, input="lev", input_options={"seed_dim": 8, "rank": 4, "heads": 2})
every_arm = pytest.mark.parametrize("config", [TIED, UNTIED, LEV], ids=["tied", "untied", "lev"])


def make(config, seed=0):
    torch.manual_seed(seed)
    return LanguageModel(config)


def text(rows=2, length=20):
    return torch.randint(60, (rows, length), generator=torch.Generator().manual_seed(1))


def rms(x, gain, eps):
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def numpy_logits(model, ids):
    """Logits (T, V) of one sequence from the saved tensors, without PyTorch."""
    c, w = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    x = w["input.weight"][ids]
    size = c.dim // c.heads
    angle = np.outer(np.arange(len(ids)), c.rope_base ** (-2 * np.arange(size // 2) / size))
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for b in (f"blocks.{layer}." for layer in range(c.layers)):
        u = rms(x, w[b + "mixer_norm.weight"], c.norm_eps)
        q, k, v = np.split(u @ w[b + "mixer.qkv.weight"].T, 3, axis=1)
        mixed = []
        for own in np.split(np.arange(c.dim), c.heads):
            one, two = np.split(own, 2)
            q_, k_ = ((z[:, one] + 1j * z[:, two]) * np.exp(1j * angle) for z in (q, k))
            a = np.exp((q_ @ k_.conj().T).real / size**0.5 + future)
            mixed.append(a / a.sum(-1, keepdims=True) @ v[:, own])
        x = x + np.concatenate(mixed, axis=1) @ w[b + "mixer.output.weight"].T
        u = rms(x, w[b + "mlp_norm.weight"], c.norm_eps)
        gate, up = np.split(u @ w[b + "mlp.gate_up.weight"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[b + "mlp.down.weight"].T
    return rms(x, w["norm.weight"], c.norm_eps) @ w.get("head.weight", w["input.weight"]).T


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_agrees_with_numpy(config):
    model, ids = make(config).double(), text(1)
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, RMSNorm)):
            norm.weight.normal_()
        exact = numpy_logits(model, ids[0].numpy())
        assert np.abs(model(ids)[0].numpy() - exact).max() < 1e-10
        assert np.abs(model.float()(ids)[0].numpy() - exact).max() < 1e-4


@every_arm
def test_causal(config):
    model, ids = make(config).double(), text()
    changed = ids.clone()
    changed[:, 12] = (ids[:, 12] + 1) % 60
    before, after = model(ids), model(changed)
    # not bit for bit: LEV's matrix products have a row for each distinct id of the batch
    assert (before[:, :12] - after[:, :12]).abs().max() < 1e-12
    assert (before[:, 12] - after[:, 12]).abs().max() > 1e-6


@every_arm
def test_batch_rows_are_independent(config):
    model, ids = make(config).double(), text(3)
    alone = torch.cat([model(row[None]) for row in ids])
    assert (model(ids) - alone).abs().max() < 1e-12


@every_arm
def test_gradient_reaches_every_parameter(config):
    model, ids = make(config), torch.arange(60).view(3, 20)
    token_loss(model.head, model.hidden(ids), ids.roll(1)).backward()
    still = [n for n, w in model.named_parameters() if w.grad is None or not w.grad.any()]
    assert not still


@every_arm
def test_one_seed_gives_one_body(config):
    ours, theirs = make(config).blocks.state_dict(), make(TIED).blocks.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_logits_are_the_head_of_the_hidden_states():
    for config in (TIED, UNTIED, LEV):
        model, ids = make(config), text()
        assert model.hidden(ids).shape == (2, 20, 16)
        assert torch.equal(model(ids), model.head(model.hidden(ids)))


def assign(model):
    """Load weights by replacing the parameters rather than copying into them."""
    model.load_state_dict(make(TIED, seed=1).state_dict(), assign=True)
    return model


MOVES = {
    "copy": copy.deepcopy,
    "double": lambda model: model.double(),
    "empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "assign": assign,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_the_tie_survives(move):
    model = move(make(TIED))
    assert model.head.weight is model.input.weight
    assert [name for name in model.state_dict() if not name.startswith("blocks")] == [
        "norm.weight",
        "input.weight",
    ]


@every_arm
def test_saved_weights_give_the_same_model(config):
    first, second = make(config), make(config, seed=1)
    assert not torch.equal(first(text()), second(text()))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(text()), second(text()))


def test_a_tied_step_moves_input_and_head_together():
    model = make(TIED)
    before = model(text()).detach()
    with torch.no_grad():
        model.input.weight[59 - text().max()] += 1
    assert model.head.weight.data_ptr() == model.input.weight.data_ptr()
    assert not torch.equal(model(text()), before)


def test_each_layer_has_its_width():
    assert [block.mlp.down.in_features for block in make(TIED).blocks] == [32, 24, 8]
    assert [block.mlp.gate_up.out_features for block in make(TIED).blocks] == [64, 48, 16]


def test_initial_scales():
    model = make(Config(4000, 128, 4, 4, 8, 256, head="untied"))
    scales = {n: w.std().item() for n, w in model.named_parameters() if w.dim() == 2}
    for name, scale in scales.items():
        writes = name.endswith(("mixer.output.weight", "mlp.down.weight"))
        assert scale == pytest.approx(0.02 / 8**0.5 if writes else 0.02, rel=0.05), name
    assert all((w == 1).all() for w in model.parameters() if w.dim() == 1)


@every_arm
def test_a_model_from_the_meta_device_can_be_filled(config):
    with torch.device("meta"):
        model = LanguageModel(config)
    model.to_empty(device="cpu")
    init_weights(model, config)
    logits = model(text())
    assert logits.isfinite().all()
    assert torch.equal(model.blocks[0].mixer.rotary.cos, rotary_angles(20, 8).cos().float())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 4), "dtype torch.float32: must be torch.int64 or torch.int32"),
        (torch.ones(1, 4, dtype=torch.bool), "dtype torch.bool"),
        (torch.zeros(4, dtype=torch.int64), r"shape \(4,\): must be \(batch, tokens\)"),
        (torch.zeros(0, 4, dtype=torch.int64), r"shape \(0, 4\)"),
        (torch.tensor([[3, 60]]), r"token id 60 is outside \[0, 60\)"),
        (torch.tensor([[3, -1]]), r"token id -1 is outside \[0, 60\)"),
        (torch.zeros(1, 21, dtype=torch.int64), "21 tokens: must fit the context of 20"),
    ],
)
def test_wrong_ids_are_refused(ids, message):
    with pytest.raises(DataError, match=message):
        make(TIED)(ids)


def test_int32_ids_and_single_tokens_work():
    model = make(TIED)
    assert torch.equal(model(text().int()), model(text()))
    assert model(text()[:, :1]).shape == (2, 1, 60)


def test_norm_is_computed_wide():
    norm, x = RMSNorm(512, 1e-6), torch.randn(64, 512).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert norm(x).dtype == torch.bfloat16
    assert ((norm(x).double() - exact) / exact).abs().max() <= 2**-8
    assert norm.double()(x.double()).sub(exact).abs().max() < 1e-14


@every_arm
def test_autocast_stays_close(config):
    model, ids = make(replace(config, init_std=0.02)), text()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(ids)
        low = token_loss(model.head, hidden, ids)
    assert low.dtype == torch.float32
    assert abs(low - token_loss(model.head, model.hidden(ids), ids)) < 0.01


SHORT = {"titans-lmm": {"chunk": 5}, "titans-mac": {"chunk": 5}, "hope": {"chunk": 5, "levels": 3}}
STEPPED = [(mixer, SHORT.get(mixer, {})) for mixer in MIXERS]
STEPPED += [("titans-mag", {"window": 4, "depth": 2, "chunk": 3}), ("attention", {"window": 4})]


def pieces(model, ids, sizes):
    state, parts = model.initial_state(len(ids)), []
    for piece in ids.split(sizes, dim=1):
        logits, state = model.step(piece, state)
        parts.append(logits)
    return torch.cat(parts, dim=1), state


@pytest.mark.parametrize(("mixer", "options"), STEPPED)
@pytest.mark.parametrize("input", ["table", "lev"])
@settings(deadline=None, max_examples=3)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4).filter(lambda n: sum(n) <= 20))
@example(sizes=[1] * 20)
def test_any_cut_of_a_text_gives_its_logits(mixer, options, input, sizes):
    arm = TIED if input == "table" else LEV
    config = replace(arm, mixer=mixer, mixer_options=options, init_std=0.1)
    model = make(config).requires_grad_(False).double()
    ids = text(2, sum(sizes))
    whole = model(ids)
    logits, state = pieces(model, ids, sizes)
    assert (logits - whole).abs().max() < 1e-10
    low, _ = pieces(copy.deepcopy(model).float(), ids, sizes)
    assert (low - whole).abs().max() < 1e-4
    assert isinstance(state, ModelState)
    assert all(hasattr(own, "_fields") for own in state.mixers)


def test_every_input_can_be_stepped():
    ids = text(2, 12)
    options = {
        "table": {},
        "factorized": {"rank": 4},
        "flat-mlp": {"code_dim": 4, "inner": 8},
        "factored-mlp": {"seed_dim": 4, "inner": 8},
        "lev": LEV.input_options,
        "lev-permuted": LEV.input_options,
    }
    assert options.keys() == INPUTS.keys()
    for kind, own in options.items():
        config = replace(UNTIED, input=kind, input_options=own)
        model = make(config).requires_grad_(False).double()
        assert (pieces(model, ids, [5, 1, 6])[0] - model(ids)).abs().max() < 1e-10


def test_a_step_leaves_the_state_and_keeps_its_batch():
    model, ids = make(TIED).requires_grad_(False), text(2, 8)
    _, state = model.step(ids[:, :5], model.initial_state(2))
    first, _ = model.step(ids[:, 5:], state)
    again, _ = model.step(ids[:, 5:], state)
    assert torch.equal(first, again)
    with pytest.raises(DataError, match="ids of 1 texts: the state is that of 2"):
        model.step(ids[:1], state)
    with pytest.raises(DataError, match=r"shape \(2, 0\)"):
        model.step(ids[:, :0], state)


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_limit_is_where_a_step_is_refused(mixer):
    model, ids = make(replace(TIED, mixer=mixer)).requires_grad_(False), text(1, 20)
    _, state = model.step(ids, model.initial_state(1))
    if model.limit is None:
        assert model.step(ids, state)[0].isfinite().all()
    else:
        assert model.limit == 20
        with pytest.raises(DataError, match="sequence of 21 tokens: must fit the context of 20"):
            model.step(ids[:, :1], state)


def test_the_limits_are_those_of_attention():
    limited = {mixer for mixer in MIXERS if make(replace(TIED, mixer=mixer)).limit}
    assert limited == set(MIXERS) - {"titans-lmm", "titans-mac", "hope"}
