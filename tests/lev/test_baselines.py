"""Laws of LEV's rivals: what they compute, what they cost, how they start, what they refuse."""

import copy
import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lmgeom.lev import LEV, FactoredMLP, FactorizedEmbedding, FlatMLP, PermutedLEV, lev_parameters
from lmgeom.lev.baselines import (
    factored_parameters,
    factorized_parameters,
    flat_parameters,
    match_factored,
    match_factorized,
    match_flat,
    nearest_count,
    permuted_parameters,
)
from lmgeom.lev.digits import digits

V, D = 300, 6
TINY_LEV = {"seed_dim": 10, "rank": 4, "heads": 3}
RIVALS = {
    FactorizedEmbedding: (factorized_parameters, {"rank": 5}),
    FlatMLP: (flat_parameters, {"code_dim": 3, "inner": 11}),
    FactoredMLP: (factored_parameters, {"n_digits": 2, "seed_dim": 8, "inner": 11}),
    PermutedLEV: (permuted_parameters, {"permutation_seed": 2, **TINY_LEV}),
}
SHAPES = {
    "small": (16_384, 128, {"seed_dim": 64, "rank": 32, "heads": 4}),
    "200m": (200_376, 640, {}),
    "400m": (200_376, 1024, {}),
    "1.2b": (200_376, 2048, {}),
}
each = pytest.mark.parametrize("kind", RIVALS)
sizes = st.integers(1, 12)


def build(kind, vocab_size=V, dim=D, **changes):
    torch.manual_seed(0)
    return kind(vocab_size, dim, **RIVALS[kind][1] | changes)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_factorized_is_a_table_times_a_matrix():
    layer = build(FactorizedEmbedding).double()
    stock = nn.Sequential(nn.Embedding(V, 5), nn.Linear(5, D, bias=False)).double()
    with torch.no_grad():
        stock[0].weight.copy_(layer.weight)
        stock[1].weight.copy_(layer.output.T)
    ids = torch.randint(V, (4, 9))
    assert torch.allclose(layer(ids), stock(ids), rtol=1e-12)


@pytest.mark.parametrize("kind", [FlatMLP, FactoredMLP])
def test_mlps_are_tables_of_digits_and_a_network(kind):
    layer = build(kind).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    k, b, s = layer.codebooks.shape
    assert k == (1 if kind is FlatMLP else 2)
    stock = nn.Sequential(nn.Linear(s, 11), nn.GELU(), nn.Linear(11, D, bias=False)).double()
    with torch.no_grad():
        stock[0].weight.copy_(layer.hidden.T / (0.02 * math.sqrt(k)))
        stock[0].bias.copy_(layer.bias)
        stock[2].weight.copy_(layer.output.T)
    ids = torch.randint(V, (4, 9))
    places = digits(ids, b, k)
    z = sum(layer.codebooks[q][places[..., q]] for q in range(k))
    assert torch.allclose(layer(ids), stock(z), rtol=1e-10, atol=1e-12)


@given(st.integers(1, 400), sizes, sizes)
def test_a_flat_mlp_is_a_factored_one_of_one_digit(vocab_size, code_dim, inner):
    torch.manual_seed(0)
    flat = FlatMLP(vocab_size, 4, code_dim=code_dim, inner=inner)
    torch.manual_seed(0)
    one = FactoredMLP(vocab_size, 4, n_digits=1, seed_dim=code_dim, inner=inner)
    assert torch.equal(flat.table(), one.table())


def test_the_permuted_table_is_levs_in_another_order():
    torch.manual_seed(0)
    plain, after_plain = LEV(V, D, **TINY_LEV), torch.rand(1)
    torch.manual_seed(0)
    control, after_control = PermutedLEV(V, D, permutation_seed=2, **TINY_LEV), torch.rand(1)
    assert torch.equal(control.table(), plain.table()[control.order])
    assert torch.equal(control.order.sort().values, torch.arange(V))
    assert not torch.equal(control.order, torch.arange(V))
    assert torch.equal(after_plain, after_control), "the permutation takes no global randomness"


def test_the_permutation_follows_its_seed_alone():
    orders = []
    for seed, global_seed in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(global_seed)
        orders.append(PermutedLEV(V, D, permutation_seed=seed, **TINY_LEV).order)
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


@pytest.mark.parametrize("fill", ["load", "reset"])
def test_the_permutation_survives_the_meta_device(fill):
    source = build(PermutedLEV)
    with torch.device("meta"):
        hollow = PermutedLEV(V, D, **RIVALS[PermutedLEV][1])
    assert hollow.order.is_meta
    layer = hollow.to_empty(device="cpu")
    layer.order.fill_(-7)
    if fill == "load":
        layer.load_state_dict(source.state_dict())
        assert torch.equal(layer.table(), source.table())
    else:
        for module in layer.modules():
            module.reset_parameters()
        assert torch.equal(layer.order, source.order)
        assert layer.table().isfinite().all()


def test_the_permutation_is_not_trained_and_not_cast():
    layer = build(PermutedLEV).bfloat16()
    assert layer.order.dtype == torch.int64
    assert "order" not in dict(layer.named_parameters())
    assert "order" in layer.state_dict()


def test_the_control_has_every_option_of_lev():
    options = set(inspect.signature(PermutedLEV).parameters) - {"permutation_seed"}
    assert options == set(inspect.signature(LEV).parameters)


@each
def test_it_is_called_as_an_embedding(kind):
    layer = build(kind)
    with torch.no_grad():
        table = layer.table()
    assert table.shape == (V, D)
    for shape in ((), (0,), (3, 0), (5,), (2, 3, 4)):
        for dtype in (torch.int32, torch.int64):
            ids = torch.randint(V, shape).to(dtype)
            assert torch.allclose(layer(ids), table[ids.long()], atol=1e-6)


@each
def test_gradients_of_repeated_ids_add_up(kind):
    layer, ids = build(kind).double(), torch.randint(V, (60,))
    pull = torch.randn(60, D, dtype=torch.float64)
    weights = list(layer.parameters())
    one = torch.autograd.grad(layer(ids), weights, pull)
    two = torch.autograd.grad(layer.table()[ids], weights, pull)
    for a, b in zip(one, two, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        assert a.abs().max() > 0


@each
def test_what_is_saved_comes_back(kind):
    layer, other = build(kind), kind(V, D, **RIVALS[kind][1])
    assert not torch.equal(layer.table(), other.table())
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer.table(), other.table())
    assert torch.equal(layer.table(), copy.deepcopy(layer).table())


@each
def test_it_returns_the_dtype_of_its_parameters(kind):
    layer, ids = build(kind), torch.arange(40)
    assert layer.bfloat16()(ids).dtype == layer.table().dtype == torch.bfloat16
    layer = build(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(ids)
    assert low.dtype == torch.float32
    assert torch.allclose(low, layer(ids), rtol=0.05, atol=0.02)


@each
def test_compiled_models_may_hold_it(kind):
    model, ids = nn.Sequential(build(kind), nn.Linear(D, 2)), torch.arange(9)
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(ids), model(ids), atol=1e-6)


@each
@pytest.mark.parametrize("bad", [-1, V, 10**12])
def test_ids_outside_the_vocabulary_are_named(kind, bad):
    with pytest.raises(IndexError, match=rf"token id {bad} is outside \[0, {V}\)"):
        build(kind)(torch.tensor([[0, bad]]))


@each
@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), [1, 2], 3])
def test_ids_must_be_integers(kind, ids):
    with pytest.raises(TypeError, match="ids must be a tensor of integers"):
        build(kind)(ids)


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        (FactorizedEmbedding, {"rank": 0}, ValueError, "rank must be at least 1, got 0"),
        (FactorizedEmbedding, {"rank": 1.5}, TypeError, "rank must be an integer, got 1.5"),
        (FactorizedEmbedding, {"vocab_size": 0}, ValueError, "vocab_size must be at least 1"),
        (FlatMLP, {"code_dim": 0}, ValueError, "code_dim must be at least 1, got 0"),
        (FlatMLP, {"code_dim": True}, TypeError, "code_dim must be an integer, got True"),
        (FlatMLP, {"vocab_size": -2}, ValueError, "vocab_size must be at least 1, got -2"),
        (FactoredMLP, {"inner": 0}, ValueError, "inner must be at least 1, got 0"),
        (FactoredMLP, {"dim": "8"}, TypeError, "dim must be an integer, got '8'"),
        (FactoredMLP, {"n_digits": 0}, ValueError, "n_digits must be at least 1, got 0"),
        (PermutedLEV, {"permutation_seed": -1}, ValueError, "permutation_seed must be at least 0"),
        (PermutedLEV, {"permutation_seed": 2**63}, ValueError, "permutation_seed must be at most"),
        (PermutedLEV, {"rank": 0}, ValueError, "rank must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_are_named(kind, change, error, message):
    with pytest.raises(error, match=message):
        build(kind, **change)


@each
def test_fresh_rows_have_their_spread(kind):
    torch.manual_seed(0)
    vocab_size, dim, lev = SHAPES["small"]
    target = lev_parameters(vocab_size, dim, **lev)["total"]
    options = {
        FactorizedEmbedding: match_factorized(vocab_size, dim, target),
        FlatMLP: match_flat(vocab_size, dim, target),
        FactoredMLP: match_factored(vocab_size, dim, target, seed_dim=64),
        PermutedLEV: lev,
    }
    with torch.no_grad():
        spread = kind(vocab_size, dim, **options[kind]).table().std().item()
    expected = {FactorizedEmbedding: 0.02, PermutedLEV: 0.16}.get(kind, 0.2)
    assert spread == pytest.approx(expected, rel=0.15)


@each
def test_resetting_draws_again(kind):
    layer = build(kind)
    before = layer.table()
    torch.manual_seed(1)
    for module in layer.modules():
        module.reset_parameters()
    assert not torch.equal(before, layer.table())
    assert before.std().item() == pytest.approx(layer.table().std().item(), rel=0.5)


@each
def test_repr_names_the_sizes(kind):
    text = repr(build(kind))
    for name, value in RIVALS[kind][1].items():
        assert f"{name}={value}" in text


@given(st.integers(1, 10**6), st.integers(1, 300), sizes, sizes, st.integers(1, 4))
def test_parameters_follow_the_formula(vocab_size, dim, width, inner, n_digits):
    options = {
        FactorizedEmbedding: {"rank": width},
        FlatMLP: {"code_dim": width, "inner": inner},
        FactoredMLP: {"n_digits": n_digits, "seed_dim": width, "inner": inner},
        PermutedLEV: {"seed_dim": width, "rank": inner, "n_digits": n_digits},
    }
    for kind, (formula, _) in RIVALS.items():
        with torch.device("meta"):
            layer = kind(vocab_size, dim, **options[kind])
        parts = formula(vocab_size, dim, **options[kind])
        assert parts["total"] == count(layer)
        if kind is not PermutedLEV:
            del parts["total"]
            assert parts == {name: weight.numel() for name, weight in layer.named_parameters()}


@pytest.mark.parametrize("name", SHAPES)
def test_both_mlps_match_lev_within_half_a_percent(name):
    vocab_size, dim, lev = SHAPES[name]
    target = lev_parameters(vocab_size, dim, **lev)["total"]
    seed_dim = lev.get("seed_dim", 128)
    flat = flat_parameters(vocab_size, dim, **match_flat(vocab_size, dim, target))
    found = match_factored(vocab_size, dim, target, seed_dim=seed_dim)
    factored = factored_parameters(vocab_size, dim, **found)
    for parts in (flat, factored):
        assert abs(1000 * parts["total"] - 1000 * target) <= 5 * target
    assert 2 * flat["codebooks"] <= target < 2 * flat["codebooks"] + 2 * vocab_size
    assert factored["codebooks"] == lev_parameters(vocab_size, dim, **lev)["codebooks"]


def test_albert_gets_the_nearest_rank():
    ranks = {}
    for name, (vocab_size, dim, lev) in SHAPES.items():
        target = lev_parameters(vocab_size, dim, **lev)["total"]
        ranks[name] = match_factorized(vocab_size, dim, target)["rank"]
        error = {
            rank: abs(factorized_parameters(vocab_size, dim, rank=rank)["total"] - target)
            for rank in range(1, 30)
        }
        assert ranks[name] == min(error, key=error.get)
    assert ranks == {"small": 10, "200m": 8, "400m": 9, "1.2b": 11}


@pytest.mark.parametrize(
    ("function", "arguments", "options", "error", "message"),
    [
        (match_flat, (0, D, 100), {}, ValueError, "vocab_size must be at least 1, got 0"),
        (match_flat, (V, D, 1e3), {}, TypeError, r"target must be an integer, got 1000\.0"),
        (match_factorized, (V, -D, 100), {}, ValueError, "dim must be at least 1, got -6"),
        (match_factored, (V, D, 100), {"seed_dim": "8"}, TypeError, "seed_dim must be an integer"),
        (match_factored, (V, D, 100), {"seed_dim": 8}, ValueError, "the smallest has 183"),
        (nearest_count, (5, -1, 1), {}, ValueError, "fixed must be at least 0, got -1"),
        (nearest_count, (5, 1, 0), {}, ValueError, "each must be at least 1, got 0"),
        (factorized_parameters, (V, D), {"rank": -3}, ValueError, "rank must be at least 1"),
        (flat_parameters, (V, D), {"code_dim": 0, "inner": 1}, ValueError, "code_dim must be"),
        (factored_parameters, (V, True), {"inner": 1}, TypeError, "dim must be an integer"),
    ],
)
def test_impossible_counts_are_named(function, arguments, options, error, message):
    with pytest.raises(error, match=message):
        function(*arguments, **options)


@given(st.integers(1, 10**15), st.integers(0, 10**15), st.integers(1, 10**6))
def test_nearest_count_is_nearest(target, fixed, each_one):
    if fixed + each_one > target:
        with pytest.raises(ValueError, match=f"cannot match {target} parameters: the smallest has"):
            nearest_count(target, fixed, each_one)
        return
    n = nearest_count(target, fixed, each_one)
    assert n >= 1
    assert 2 * abs(fixed + n * each_one - target) <= each_one
