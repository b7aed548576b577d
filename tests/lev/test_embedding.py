"""Laws of the LEV layer: its routes, its product, its counts, and what it refuses."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lmgeom.lev import LEV, base, digits, embedding, lev_parameters
from lmgeom.lev.embedding import coordinates, seed
from lmgeom.lev.product import (
    SplineProduct,
    product_gradient,
    scaled_product,
    scaled_product_gradient,
)
from lmgeom.lm import Config, LanguageModel

SIZES = st.fixed_dictionaries(
    {
        "n_digits": st.integers(1, 4),
        "seed_dim": st.integers(1, 12),
        "n_knots": st.integers(3, 9),
        "rank": st.integers(1, 5),
        "heads": st.integers(1, 3),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "learned_spacing": st.booleans(),
        "sigmoid_slope": st.sampled_from([0.5, 1.0, 2]),
        "normalize_basis": st.booleans(),
        "gradient_checkpointing": st.booleans(),
    }
)
FACTORS = st.lists(
    st.one_of(st.just(0.0), st.floats(-4, 4, allow_subnormal=False)), min_size=1, max_size=40
)


def build(vocab_size=300, dim=6, *, spread=0.5, dtype=torch.float64, **sizes):
    """A small layer whose products have both signs."""
    torch.manual_seed(0)
    layer = LEV(vocab_size, dim, **({"seed_dim": 10, "rank": 4, "heads": 3} | sizes)).to(dtype)
    for name, parameter in layer.named_parameters():
        middle = layer.spline_delta.shape[2] - 1 if name == "spline_scale" else 0
        nn.init.normal_(parameter, mean=middle, std=spread * max(1, middle))
    return layer


def values_and_gradients(layer, route, ids):
    """The embeddings of a route, and the gradient of every parameter under a fixed pull."""
    out = route(ids)
    goal = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, list(layer.parameters()), goal.to(out.dtype))]


def assert_close(one, other, tolerance):
    for a, b in zip(one, other, strict=True):
        assert (a - b).abs().max() <= tolerance * a.abs().max()


def routes(layer):
    return [lambda i: layer(i), lambda i: layer(i, chunk=3), lambda i: layer.table()[i]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"seed_dim": 37, "rank": 8},
        {"heads": 1, "n_digits": 1},
        {"learned_spacing": True},
        {"sigmoid_slope": 1.0},
        {"normalize_basis": False},
        {"gradient_checkpointing": True},
        {"learned_spacing": True, "sigmoid_slope": 1, "normalize_basis": False},
    ],
)
def test_routes_agree(dtype, tolerance, sizes):
    layer = build(dtype=dtype, **sizes)
    ids = torch.randint(300, (4, 25))
    expected = values_and_gradients(layer, layer.direct, ids)
    for route in routes(layer):
        assert_close(expected, values_and_gradients(layer, route, ids), tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_routes_agree_at_the_default_size(dtype):
    torch.manual_seed(0)
    layer = LEV(50_257, 16).to(dtype)
    ids = torch.randint(50_257, (12,))
    expected = values_and_gradients(layer, layer.direct, ids)
    found = values_and_gradients(layer, layer, ids)
    assert_close(expected, found, 1e-12 if dtype == torch.float64 else 1e-5)


@given(SIZES, OPTIONS, st.integers(1, 200), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_routes_agree_for_any_size(sizes, options, vocab_size, chunk):
    layer = build(vocab_size, 3, **sizes, **options)
    ids = torch.randint(vocab_size, (7,))
    expected = values_and_gradients(layer, layer.direct, ids)
    found = values_and_gradients(layer, lambda i: layer(i, chunk=chunk), ids)
    largest = max(a.abs().max() for a in expected)  # a seed of width 1 has gradients of rounding
    for a, b in zip(expected, found, strict=True):
        assert (a - b).abs().max() <= 1e-11 * largest


def test_table_under_no_grad_is_the_same_table():
    layer = build(5000, 3)
    with torch.no_grad():
        plain = layer.table()
    assert not plain.requires_grad
    assert torch.equal(plain, layer.table())
    assert torch.allclose(plain, layer(torch.arange(5000)), rtol=1e-12, atol=1e-12)


def in_numpy(layer, i, scale, slope, normalize):
    """One embedding from the definitions: knots of head and coordinate are 1 / scale apart."""
    values = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    books, result = values["codebooks"], 0
    z = sum(books[q, d] for q, d in enumerate(np.unravel_index(i, books.shape[1:2] * len(books))))
    heads, _, n_knots, _ = values["spline_delta"].shape
    for head in range(heads):
        u = values["projection"][head] @ z
        u = (u - u.mean()) / np.sqrt(u.var() + 1e-5)
        t = 1 / (1 + np.exp(-slope * (u * values["norm_gain"][head] + values["norm_bias"][head])))
        knots = 0.5 + (np.arange(n_knots) - (n_knots - 1) / 2) / scale[head, :, None]
        t = np.clip(t, knots.min(1), knots.max(1))  # beyond the last knot a curve stays level
        x = np.abs((t[:, None] - knots) * scale[head, :, None])
        bump = np.where(x < 0.5, 0.75 - x**2, np.clip(1.5 - x, 0, None) ** 2 / 2)
        if normalize:
            bump = bump / bump.sum(1, keepdims=True)
        factors = np.einsum("jg,jgm->jm", bump, 1 + values["spline_delta"][head])
        result = result + factors.prod(0) @ values["output"][head]
    return result


@given(SIZES, OPTIONS, st.integers(1, 200))
@settings(deadline=None, max_examples=30)
def test_options_mean_what_they_say(sizes, options, vocab_size):
    layer = build(vocab_size, 3, **sizes, **options)
    scale = layer.spline_scale
    if scale is None:
        scale = torch.full(layer.norm_gain.shape, sizes["n_knots"] - 1.0)
    how = options["sigmoid_slope"], options["normalize_basis"]
    rows = [in_numpy(layer, i, scale.detach().double().numpy(), *how) for i in range(vocab_size)]
    found, expected = layer.table().detach().numpy(), np.stack(rows)
    assert np.abs(found - expected).max() <= 1e-10 * np.abs(expected).max()


def test_a_fresh_spacing_is_the_fixed_one():
    torch.manual_seed(0)
    fixed = LEV(300, 6, seed_dim=10, rank=4, heads=3).double()
    torch.manual_seed(0)
    learned = LEV(300, 6, seed_dim=10, rank=4, heads=3, learned_spacing=True).double()
    assert torch.equal(learned.spline_scale, torch.full_like(learned.spline_scale, 15))
    assert torch.allclose(learned.table(), fixed.table(), rtol=1e-12, atol=0)
    learned.table().square().sum().backward()
    assert (learned.spline_scale.grad != 0).all()


def test_coordinates_beyond_the_last_knot_stay_on_level_curves():
    layer = build(learned_spacing=True)
    with torch.no_grad():
        layer.spline_scale.fill_(1e6)
    layer.table().square().sum().backward()
    assert layer.codebooks.grad.abs().max() == 0
    assert layer.spline_delta.grad.abs().max() > 0


@pytest.mark.parametrize("options", [{}, {"learned_spacing": True, "normalize_basis": False}])
def test_gradients_pass_gradcheck(options):
    layer = build(20, 2, seed_dim=4, n_knots=4, rank=2, heads=2, n_digits=2, **options)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    ids = torch.tensor([3, 3, 17])

    def call(*values):
        return torch.func.functional_call(
            layer, dict(zip(names, values, strict=True)), (ids,), {"chunk": 1}
        )

    assert torch.autograd.gradcheck(call, parameters)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("name", ["codebooks", "projection", "norm_gain", "spline_delta"])
def test_second_derivative_is_refused(name, power):
    layer = build()
    parameter = getattr(layer, name)
    loss = (layer(torch.tensor([1, 2])) ** power).sum()
    [gradient] = torch.autograd.grad(loss, parameter, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice; LEV\.direct can"):
        torch.autograd.grad(gradient.square().sum(), parameter, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"twice; LEV\.direct can"):
        gradient.square().sum().backward()


@given(FACTORS)
@settings(deadline=None)
def test_product_gradient_leaves_one_out(values):
    factors = torch.tensor(values, dtype=torch.float64)[:, None]
    found = product_gradient(factors, torch.tensor([2.0], dtype=torch.float64))
    for j in range(len(values)):
        others = math.prod(values[:j] + values[j + 1 :])
        assert math.isclose(found[j].item(), 2 * others, rel_tol=1e-12, abs_tol=1e-300)


@given(FACTORS)
@settings(deadline=None)
def test_scaled_product_is_the_product(values):
    factors = torch.tensor(values, dtype=torch.float64)[:, None]
    one = torch.ones(1, dtype=torch.float64)
    assert torch.allclose(scaled_product(factors), factors.prod(0), rtol=1e-12, atol=1e-300)
    plain, scaled = product_gradient(factors, one), scaled_product_gradient(factors, one)
    assert torch.allclose(scaled, plain, rtol=1e-12, atol=1e-300)


@given(st.lists(st.floats(-120, 120), min_size=2, max_size=60), st.randoms())
@settings(deadline=None)
def test_scaled_product_never_overflows_on_the_way(exponents, random):
    """Factors of any magnitude whose product, and every product but one, is near one."""
    halves = [round(e) for e in exponents]
    exponents = halves + [-e for e in halves]
    random.shuffle(exponents)
    values = [random.choice((-1, 1)) * random.uniform(1, 2) ** 0.1 * 2.0**e for e in exponents]
    factors = torch.tensor(values, dtype=torch.float32)[:, None]
    exact = [Fraction(value) for value in factors[:, 0].tolist()]
    truth = math.prod(exact)
    assert math.isclose(scaled_product(factors).item(), float(truth), rel_tol=1e-6)
    found = scaled_product_gradient(factors, torch.ones(1))[:, 0].tolist()
    for value, factor in zip(found, exact, strict=True):
        assert math.isclose(value, float(truth / factor), rel_tol=1e-6, abs_tol=2e-45)


def test_three_codebooks_of_59_rows_address_the_papers_vocabulary():
    layer = LEV(200_376, 8)
    assert layer.codebooks.shape[:2] == (3, 59)
    assert layer.codebooks.shape[:2].numel() == 177 < 200_376 <= 59**3


@pytest.mark.parametrize("power", [100, -100])
def test_a_product_outside_the_range_is_what_float_arithmetic_says(power):
    factors = torch.full((4, 1), 2.0**power)
    assert scaled_product(factors).item() == (math.inf if power > 0 else 0.0)


def extreme_layer(exponents):
    """A layer whose factors are these powers of two for every token."""
    layer = LEV(50, 3, seed_dim=len(exponents), n_knots=4, rank=2, heads=2)
    with torch.no_grad():
        factors = 2.0 ** torch.tensor(exponents, dtype=torch.float32)
        layer.spline_delta.copy_(factors[:, None, None].expand_as(layer.spline_delta) - 1)
    return layer


@pytest.mark.parametrize("large_first", [True, False])
def test_the_layer_survives_factors_that_overflow_together(large_first):
    exponents = [20] * 10 + [-20] * 10 if large_first else [-20] * 10 + [20] * 10
    layer = extreme_layer(exponents)
    out = layer(torch.arange(7))
    expected = layer.output.sum((0, 1)).expand_as(out)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-7)
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    assert layer.spline_delta.grad.abs().max() > 0


def test_zero_factors_give_exact_gradients():
    """A product of one zero has no value but a gradient, which division by it would lose."""
    t = torch.full((1, 1, 5), 0.5, dtype=torch.float64, requires_grad=True)
    delta = torch.zeros(1, 5, 5, 2, dtype=torch.float64)
    delta[0, 2, :, 0] = -1
    delta[0, 1:3, :, 1] = -1
    delta.requires_grad_()
    out = SplineProduct.apply(t, delta, 1)
    assert out.tolist() == [[[0.0, 0.0]]]
    out.sum().backward()
    assert delta.grad[0, 2, :, 0].sum().item() == pytest.approx(1)
    assert delta.grad[0, :, :, 1].abs().max() == 0


def test_parameter_count():
    with torch.device("meta"):
        layer = LEV(200_376, 2048)
    assert lev_parameters(200_376, 2048)["total"] == 2_252_928
    assert sum(parameter.numel() for parameter in layer.parameters()) == 2_252_928


@given(SIZES, OPTIONS, st.integers(1, 10**6), st.integers(1, 300))
@settings(deadline=None)
def test_parameters_follow_the_formula(sizes, options, vocab_size, dim):
    with torch.device("meta"):
        layer = LEV(vocab_size, dim, **sizes, **options)
    parts = lev_parameters(vocab_size, dim, **sizes, **options)
    assert parts["total"] == sum(parameter.numel() for parameter in layer.parameters())
    assert parts["codebooks"] == layer.codebooks.numel()
    assert parts["projection"] == layer.projection.numel()
    assert parts["norm"] == layer.norm_gain.numel() + layer.norm_bias.numel()
    assert parts["spline"] == layer.spline_delta.numel()
    assert parts["spacing"] == (layer.norm_gain.numel() if options["learned_spacing"] else 0)
    assert parts["output"] == layer.output.numel()


def test_init_statistics():
    torch.manual_seed(0)
    layer = LEV(200_376, 256)
    ids = torch.randint(200_376, (1024,))
    with torch.no_grad():
        z = seed(ids, layer.codebooks)
        t = coordinates(z, layer.projection, layer.norm_gain, layer.norm_bias)
        product = SplineProduct.apply(t, layer.spline_delta, 64)
        rows = layer(ids)
    low, high = t.flatten().quantile(torch.tensor([0.01, 0.99])).tolist()
    assert (low, high) == pytest.approx((0.26, 0.75), abs=0.02)
    assert product.mean().item() == pytest.approx(1, abs=0.1)
    assert product.std().item() == pytest.approx(1, abs=0.15)
    assert product.median().item() == pytest.approx(0.7, abs=0.05)
    assert rows.std().item() == pytest.approx(0.22, abs=0.04)
    common = rows.mean(0)
    share = common.square().sum() / rows.square().sum(1).mean()
    assert share.item() == pytest.approx(0.58, abs=0.08)
    centered = torch.cosine_similarity(rows[:512] - common, rows[512:] - common)
    assert centered.mean().abs() < 0.02
    assert centered.max() < 0.9


@pytest.mark.parametrize("seed_dim", [16, 64, 256])
def test_the_spread_of_products_does_not_depend_on_the_width_of_the_seed(seed_dim):
    torch.manual_seed(0)
    layer = LEV(5000, 4, seed_dim=seed_dim)
    with torch.no_grad():
        z = seed(torch.randint(5000, (300,)), layer.codebooks)
        t = coordinates(z, layer.projection, layer.norm_gain, layer.norm_bias)
        product = SplineProduct.apply(t, layer.spline_delta, 64)
    assert product.std().item() == pytest.approx(1, abs=0.2)


@given(SIZES, st.integers(0, 3), st.randoms())
@settings(deadline=None, max_examples=30)
def test_renaming_digits_and_codebook_rows_alike_changes_nothing(sizes, position, random):
    layer = build(1, 3, **(sizes | {"n_digits": 3}))
    b, position = random.randint(1, 4), position % 3
    layer = build(b**3, 3, **(sizes | {"n_digits": 3}))
    order = list(range(b))
    random.shuffle(order)
    renamed = copy.deepcopy(layer)
    with torch.no_grad():
        renamed.codebooks[position, order] = layer.codebooks[position]
    places = digits(torch.arange(b**3), b, 3)
    places[:, position] = torch.tensor(order)[places[:, position]]
    new_ids = places @ b ** torch.arange(2, -1, -1)
    assert torch.allclose(renamed(new_ids), layer.table(), rtol=1e-12, atol=1e-12)


def test_state_dict_round_trip():
    layer, other = build(), LEV(300, 6, seed_dim=10, rank=4, heads=3).double()
    assert list(layer.state_dict()) == [
        "codebooks",
        "projection",
        "norm_gain",
        "norm_bias",
        "spline_delta",
        "output",
    ]
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.table(), layer.table())


def test_the_same_seed_gives_the_same_layer():
    tables = []
    for _ in range(2):
        torch.manual_seed(3)
        tables.append(LEV(100, 4, seed_dim=8, rank=4, heads=2).table())
    assert torch.equal(*tables)
    assert not torch.equal(tables[0], LEV(100, 4, seed_dim=8, rank=4, heads=2).table())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3), (2, 3, 4)])
def test_ids_of_any_shape_and_integer_dtype(shape, dtype):
    layer = build()
    ids = torch.randint(200, shape).to(dtype)
    out = layer(ids)
    assert out.shape == (*shape, 6)
    assert torch.allclose(out, layer.direct(ids), rtol=1e-12, atol=1e-12)
    out.sum().backward()


def test_ids_need_not_be_contiguous():
    layer, ids = build(), torch.randint(300, (6, 8))
    assert torch.allclose(layer(ids.T[::2]), layer(ids).transpose(0, 1)[::2], rtol=1e-12)


@pytest.mark.parametrize("call", [lambda m, i: m(i), lambda m, i: m.direct(i)])
@pytest.mark.parametrize("bad", [-1, 300, 10**12])
def test_ids_outside_the_vocabulary_are_named(call, bad):
    with pytest.raises(IndexError, match=rf"token id {bad} is outside \[0, 300\)"):
        call(build(), torch.tensor([[0, bad]]))


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), [1, 2], 3])
def test_ids_must_be_integers(ids):
    with pytest.raises(TypeError, match="ids must be a tensor of integers"):
        build()(ids)


@pytest.mark.parametrize("chunk", [0, -4])
def test_chunk_must_be_positive(chunk):
    with pytest.raises(ValueError, match=f"chunk must be at least 1, got {chunk}"):
        build()(torch.tensor([1]), chunk=chunk)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim must be at least 1, got 0"),
        ({"n_knots": 2}, ValueError, "n_knots must be at least 3, got 2"),
        ({"heads": -1}, ValueError, "heads must be at least 1, got -1"),
        ({"rank": 1.5}, TypeError, "rank must be an integer, got 1.5"),
        ({"seed_dim": True}, TypeError, "seed_dim must be an integer, got True"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
        ({"n_digits": 0}, ValueError, "n_digits must be at least 1, got 0"),
        ({"learned_spacing": 1}, TypeError, "learned_spacing must be True or False, got 1"),
        ({"normalize_basis": "no"}, TypeError, "normalize_basis must be True or False, got 'no'"),
        ({"gradient_checkpointing": 0}, TypeError, "gradient_checkpointing must be True or False"),
        ({"sigmoid_slope": 0}, ValueError, "sigmoid_slope must be positive and finite, got 0"),
        ({"sigmoid_slope": math.inf}, ValueError, "sigmoid_slope must be positive and finite"),
        ({"sigmoid_slope": "1"}, TypeError, "sigmoid_slope must be a number, got '1'"),
    ],
)
@pytest.mark.parametrize("use", [LEV, lev_parameters])
def test_impossible_sizes_are_named(use, sizes, error, message):
    with pytest.raises(error, match=message):
        use(**({"vocab_size": 10, "dim": 4} | sizes))


def test_sizes_may_be_numpy_integers():
    sizes = {"seed_dim": np.int64(4), "rank": np.int32(2), "sigmoid_slope": np.float32(1)}
    layer = LEV(np.int64(10), np.int64(4), **sizes)
    assert layer(torch.tensor([0, 9], dtype=torch.uint16)).shape == (2, 4)


def test_a_layer_on_the_meta_device_says_so():
    layer = build().to("meta")
    with pytest.raises(ValueError, match="ids must have values"):
        layer(torch.arange(3, device="meta"))
    with pytest.raises(ValueError, match="ids must have values"):
        layer.table()


def test_an_address_space_larger_than_the_vocabulary_has_no_rows_for_it():
    layer = build(28)
    assert base(28, 3) == 4
    assert layer.table().shape == (28, 6)
    with pytest.raises(IndexError):
        layer(torch.tensor(30))


def test_autocast_does_not_lower_the_precision():
    layer, ids = build(dtype=torch.float32), torch.arange(50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(ids)
    assert low.dtype == torch.float32
    assert torch.equal(low, layer(ids))


def test_half_precision_parameters_are_computed_in_float32():
    layer, ids = build(dtype=torch.float32).bfloat16(), torch.arange(50)
    out = layer(ids)
    out.float().sum().backward()
    assert out.dtype == layer.codebooks.grad.dtype == torch.bfloat16
    assert torch.equal(out, copy.deepcopy(layer).float()(ids).bfloat16())


def test_compiled_models_call_it_as_it_is(monkeypatch):
    model, compiling = nn.Sequential(build(dtype=torch.float32), nn.Linear(6, 2)), []
    rows = embedding.lev_rows

    def watched(*args):
        compiling.append(torch.compiler.is_compiling())
        return rows(*args)

    monkeypatch.setattr(embedding, "lev_rows", watched)
    compiled = torch.compile(model, backend="eager")
    for n in (9, 5, 12):
        assert torch.allclose(compiled(torch.arange(n)), model(torch.arange(n)), atol=1e-6)
    compiled(torch.arange(9)).sum().backward()
    assert compiling == 7 * [False]


def test_repr_names_the_sizes_and_options():
    text = repr(build(learned_spacing=True, sigmoid_slope=1))
    assert "seed_dim=10, n_knots=16, rank=4, heads=3" in text
    assert "learned_spacing=True, sigmoid_slope=1, normalize_basis=True" in text


def test_checkpointing_keeps_little():
    """Bytes that autograd saves do not grow with the distinct ids, but for the rows' own."""
    saved = {}
    for option in (False, True):
        layer, kept = build(2000, gradient_checkpointing=option), {}
        with saved_tensors_hooks(lambda x, k=kept: k.update({x.data_ptr(): x.nbytes}) or x, id):
            out = layer(torch.arange(2000))
        del out
        saved[option] = sum(kept.values())
    assert saved[True] < saved[False] / 20


def test_checkpointing_in_several_blocks(monkeypatch):
    layer = build(gradient_checkpointing=True)
    monkeypatch.setattr("lmgeom.lev.embedding.BLOCK", 7 * layer.norm_gain.numel())
    ids = torch.randint(300, (4, 25))
    expected = values_and_gradients(layer, layer.direct, ids)
    assert_close(expected, values_and_gradients(layer, layer, ids), 1e-12)
    assert layer(torch.empty(0, dtype=torch.int64)).shape == (0, 6)


class Operations(TorchDispatchMode):
    """The names of the operations that run, views and allocations included."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_frozen_layer_is_one_lookup(dtype):
    layer = build(dtype=torch.float32).to(dtype)
    table, ids = layer.freeze(), torch.randint(300, (4, 25))
    with torch.no_grad():
        expected = layer(ids)
    with Operations() as operations:
        found = table(ids)
    assert operations.names == ["aten.embedding.default"]
    assert torch.allclose(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert [(name, p.shape) for name, p in table.named_parameters()] == [("weight", (300, 6))]
    assert found.dtype == table.weight.dtype == dtype
    assert not table.weight.requires_grad
    assert all(parameter.requires_grad for parameter in layer.parameters())


def test_a_frozen_layer_keeps_its_rows_while_the_layer_trains_on():
    layer = build()
    table = layer.freeze()
    before = table.weight.clone()
    with torch.no_grad():
        layer.output += 1
    assert torch.equal(table.weight, before)
    assert not torch.allclose(layer.freeze().weight, before)


def test_a_frozen_language_model_gives_the_same_logits():
    options = {"seed_dim": 8, "rank": 4, "heads": 2, "learned_spacing": True}
    shape = Config(100, 16, 2, 2, 12, 24, input="lev", input_options=options, head="untied")
    torch.manual_seed(0)
    model, ids = LanguageModel(Config.from_json(shape.to_json())), torch.randint(100, (2, 12))
    before, trained = model(ids), {name for name, _ in model.named_parameters()}
    model.input = model.input.freeze()
    assert torch.allclose(model(ids), before, atol=1e-6)
    assert "input.spline_scale" in trained
    assert [name for name, _ in model.named_parameters() if name.startswith("input")] == [
        "input.weight"
    ]
