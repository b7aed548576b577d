"""Counting updates and pushing gradients, against sets, Jacobians and central differences."""

import itertools

import pytest
import torch
from torch.func import functional_call

from lmgeom.lev.baselines import PermutedLEV
from lmgeom.lev.digits import base, digits
from lmgeom.lev.embedding import LEV
from lmgeom.lev.sharing import gradient_step, movement, occurrences

# PyTorch loads its rules of forward mode through a compiler that it has itself deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

SUBSETS = [q for n in range(4) for q in itertools.combinations(range(3), n)]
SIZES = {"seed_dim": 8, "n_knots": 5, "rank": 3, "heads": 2}


def tiny(vocab_size=30, dim=4):
    """A LEV in float64 with all parameters random."""
    torch.manual_seed(0)
    layer = LEV(vocab_size, dim, **SIZES).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def jacobian(layer, token):
    """Gradients of the entries of one embedding by all parameters, shape (D, P)."""
    rows = []
    for entry in layer(torch.tensor([token]))[0]:
        found = torch.autograd.grad(entry, list(layer.parameters()), retain_graph=True)
        rows.append(torch.cat([part.flatten() for part in found]))
    return torch.stack(rows)


@pytest.mark.parametrize("vocab_size", [1, 2, 27, 28, 100])
def test_counts_against_sets(vocab_size):
    stream = [torch.randint(vocab_size, (3, 2)) for _ in range(6)]
    first, counts = occurrences(stream, vocab_size, SUBSETS)
    places = digits(torch.arange(vocab_size), base(vocab_size, 3), 3).tolist()
    read = [{tuple(places[i]) for i in ids.flatten().tolist()} for ids in stream]
    for i, kept in itertools.product(range(vocab_size), SUBSETS):
        reached = [any(all(a[q] == places[i][q] for q in kept) for a in batch) for batch in read]
        assert counts[kept][i] == sum(reached)
        if kept == (0, 1, 2):
            assert first[i] == (reached.index(True) if any(reached) else -1)


def test_no_step_and_any_shape_of_batch():
    first, counts = occurrences([], 50, [(0,)])
    assert (first == -1).all()
    assert not counts[0,].any()
    ids = torch.tensor([7, 7, 3])
    flat = occurrences([ids], 50, SUBSETS)
    square = occurrences([ids[None].int()], 50, SUBSETS)
    assert torch.equal(flat[0], square[0])
    assert all(torch.equal(flat[1][q], square[1][q]) for q in SUBSETS)


def test_fewer_shared_digits_are_reached_at_least_as_often():
    stream = [torch.randint(200, (5,)) for _ in range(20)]
    _, counts = occurrences(stream, 200, SUBSETS)
    for few, many in itertools.product(SUBSETS, SUBSETS):
        if set(few) <= set(many):
            assert (counts[few] >= counts[many]).all()


def test_kernel_against_the_jacobian():
    layer, every = tiny(), torch.arange(30)
    g = torch.randn(1, 4, dtype=torch.float64)
    step = gradient_step(layer, torch.tensor([11]), g)
    found = movement(layer, every, step)
    rate = jacobian(layer, 11).T @ g[0]
    for i in range(30):
        expected = jacobian(layer, i) @ rate
        assert torch.allclose(found[i], expected, rtol=1e-10, atol=1e-10 * expected.abs().max())


def test_movement_against_central_differences():
    layer, every = tiny(), torch.arange(30)
    step = gradient_step(layer, torch.tensor([3, 20]), torch.randn(2, 4, dtype=torch.float64))
    sides = [
        functional_call(layer, {n: p + t * step[n] for n, p in layer.named_parameters()}, (every,))
        for t in (1e-8, -1e-8)
    ]
    expected = (sides[0] - sides[1]).detach() / 2e-8
    found = movement(layer, every, step)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_steps_add_up():
    layer, ids = tiny(), torch.tensor([3, 20])
    g = torch.randn(2, 4, dtype=torch.float64)
    both = gradient_step(layer, ids, g)
    apart = [gradient_step(layer, ids[n : n + 1], g[n : n + 1]) for n in range(2)]
    for name, part in both.items():
        assert torch.allclose(part, apart[0][name] + apart[1][name])


def test_strangers_share_no_codebook_row():
    layer = tiny(64)
    step = gradient_step(layer, torch.tensor([0]), torch.ones(1, 4, dtype=torch.float64))
    only = {n: p if n == "codebooks" else torch.zeros_like(p) for n, p in step.items()}
    places = digits(torch.arange(64), 4, 3)
    moved = movement(layer, torch.arange(64), only).abs().sum(1) > 0
    assert torch.equal(moved, (places == 0).any(1))


def test_a_table_moves_one_row():
    table = torch.nn.Embedding(20, 4)
    step = gradient_step(table, torch.tensor([5]), torch.ones(1, 4))
    assert torch.equal(step["weight"], torch.eye(20)[5][:, None].expand(20, 4))


def test_renaming_permutes_the_kernel():
    torch.manual_seed(1)
    control = PermutedLEV(30, 4, **SIZES).double()
    plain, order = control.lev, control.order
    assert torch.equal(control.table(), plain.table()[order])
    g = torch.randn(1, 4, dtype=torch.float64)
    outside = gradient_step(control, torch.tensor([8]), g)
    inside = gradient_step(plain, order[8:9], g)
    assert all(torch.equal(outside[f"lev.{name}"], part) for name, part in inside.items())


def test_parameters_keep_their_gradients():
    layer = tiny()
    step = gradient_step(layer, torch.tensor([1]), torch.ones(1, 4, dtype=torch.float64))
    assert movement(layer, torch.arange(3), step).shape == (3, 4)
    assert all(parameter.grad is None for parameter in layer.parameters())
