"""How far a step can move a prediction: bounds that hold and are reached, in float64."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgeom.data import synthetic
from lmgeom.head.bounds import (
    ball,
    certified_step,
    hilbert_bound,
    hilbert_shifts,
    layernorm,
    rmsnorm,
)
from lmgeom.head.diameter import diameter
from lmgeom.head.hilbert import hilbert_distance, range_seminorm
from lmgeom.lm import Config, LanguageModel, token_loss

SEED = st.integers(0, 2**32 - 1)
ROWS, DIM = st.integers(2, 40), st.integers(2, 10)


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sets(seed, d):
    """Every input set with a map from any vector into it."""
    gain, bias = normal(seed, 2, d)
    return {
        "ball": (ball(2.5), lambda v: 2.5 * v / v.norm(dim=-1, keepdim=True).clamp(min=1)),
        "sphere": (ball(2.5), lambda v: 2.5 * F.normalize(v, dim=-1)),
        "rmsnorm": (rmsnorm(gain), lambda v: F.rms_norm(v, (d,), gain)),
        "rmsnorm without gain": (rmsnorm(torch.ones(d)), lambda v: F.rms_norm(v, (d,))),
        "layernorm": (layernorm(gain), lambda v: F.layer_norm(v, (d,), gain, eps=0)),
        "layernorm, bias": (
            layernorm(gain, bias),
            lambda v: F.layer_norm(v, (d,), gain, bias, eps=0),
        ),
    }


def climb(S, extra, norm, starts=60, rounds=500):
    """Largest range found by gradient ascent through a norm that knows nothing of diameters."""
    x = normal(1, starts, S.shape[1]).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.1, maximize=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1e-6 ** (1 / rounds))
    for _ in range(rounds):
        optimizer.zero_grad()
        moved = range_seminorm(norm(x) @ S.T + extra)
        moved.sum().backward()
        optimizer.step()
        schedule.step()
    return moved.max().item()


@functools.cache
def trained(steps=12):
    """Head, last step, gradient, hidden states, targets and gain of a small trained model."""
    torch.manual_seed(0)
    data = synthetic(64)
    model = LanguageModel(Config(64, 16, 1, 2, 32, 32, head="untied"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        x, y = data.batch(0, step, 8, 32)
        optimizer.zero_grad()
        hidden = model.hidden(x)
        token_loss(model.head, hidden, y).backward()
        before = model.head.weight.detach().double()
        optimizer.step()
    after, G = model.head.weight.detach().double(), model.head.weight.grad.double()
    h, gain = hidden.detach().double().flatten(0, 1), model.norm.weight.detach().double()
    return before, after - before, G, h, y.flatten(), gain


@settings(max_examples=30)
@given(SEED, ROWS, DIM, st.sampled_from([1e-6, 1.0, 1e3]))
def test_no_hidden_state_exceeds_the_bound_and_one_reaches_it(seed, n, d, scale):
    S, extra = scale * normal(seed, n, d), scale * normal(seed + 1, n)
    for inputs, norm in sets(seed + 2, d).values():
        for change in (torch.zeros_like(extra), extra):
            value, (i, j), h = hilbert_bound(S, inputs, bias=change)
            moved = S @ h + change
            assert math.isclose(range_seminorm(moved).item(), value, rel_tol=1e-9)
            assert math.isclose(abs(moved[i] - moved[j]).item(), value, rel_tol=1e-9)
            random = norm(normal(seed + 3, 300, d))
            assert (range_seminorm(random @ S.T + change) <= value * (1 + 1e-9)).all()
            center = 0 if inputs.center is None else inputs.center
            u = (h - center) / inputs.scale
            assert u.norm() <= 1 + 1e-9
            assert not inputs.zero_sum or abs(u.sum()) < 1e-9


def test_an_adversary_reaches_the_bound_on_every_set_and_on_a_trained_head():
    S, extra = normal(0, 50, 6), normal(1, 50)
    for name, (inputs, norm) in sets(3, 6).items():
        for change in (torch.zeros_like(extra), extra):
            value, _, worst = hilbert_bound(S, inputs, bias=change)
            assert math.isclose(range_seminorm(S @ worst + change).item(), value)
            assert 1 - 1e-6 < climb(S, change, norm) / value < 1 + 1e-9, name
    panel = normal(4, 6, 6)
    largest = hilbert_shifts(S, panel, extra).max().item()
    found = climb(S, extra, lambda v: (20 * v).softmax(1) @ panel)
    assert 1 - 1e-6 < found / largest < 1 + 1e-9
    W, S, _, h, _, gain = trained()
    value, _, worst = hilbert_bound(S, rmsnorm(gain))
    assert hilbert_shifts(S, h).max() <= value
    predictions = [(head @ worst).log_softmax(0) for head in (W, W + S)]
    assert math.isclose(hilbert_distance(*predictions).item(), value, rel_tol=1e-9)
    found = climb(S, 0, lambda v: F.rms_norm(v, gain.shape, gain), rounds=1500)
    assert 1 - 1e-6 < found / value < 1 + 1e-9


@given(SEED, ROWS, DIM)
def test_no_average_of_a_panel_exceeds_its_states(seed, n, d):
    S, extra, panel = normal(seed, n, d), normal(seed + 1, n), normal(seed + 2, 7, d)
    averages = normal(seed + 3, 100, 7).mul(3).softmax(1) @ panel
    largest = hilbert_shifts(S, panel, extra).max()
    assert (hilbert_shifts(S, averages, extra) <= largest * (1 + 1e-12)).all()


@given(SEED, ROWS, DIM)
def test_the_head_and_common_rows_do_not_matter_and_steps_add(seed, n, d):
    W, S, T = normal(seed, 3, n, d)
    value = hilbert_bound(S, ball(2.0)).value
    assert math.isclose(value, 2 * diameter(S).value, rel_tol=1e-12)
    shifted = hilbert_bound(S + normal(seed + 1, d), ball(2.0)).value
    assert math.isclose(shifted, value, rel_tol=1e-9)
    assert math.isclose(hilbert_bound(-3.7 * S, ball(2.0)).value, 3.7 * value, rel_tol=1e-9)
    assert diameter(S + T).value <= (diameter(S).value + diameter(T).value) * (1 + 1e-9)
    h = 2 * F.normalize(normal(seed + 2, 50, d))
    total = hilbert_distance(h @ (W + S + T).T, h @ W.T)
    assert (total <= value + hilbert_bound(T, ball(2.0)).value + 1e-12).all()


@given(SEED, ROWS, DIM, st.floats(1e-4, 3.0))
def test_a_soft_cap_adds_a_virtual_token(seed, n, d, size):
    W, S = 20 * normal(seed, n, d), size * (normal(seed + 1, n, d) + 1)
    bound = hilbert_bound(S, ball(1.5), softcap=True)
    with_zero = diameter(torch.cat([S, torch.zeros(1, d, dtype=S.dtype)])).value
    assert math.isclose(bound.value, 1.5 * with_zero, rel_tol=1e-12)
    h = 1.5 * F.normalize(normal(seed + 2, 100, d))
    before, after = (30 * torch.tanh(h @ head.T / 30) for head in (W, W + S))
    assert (hilbert_distance(after, before) <= bound.value * (1 + 1e-9)).all()


def test_the_soft_cap_bound_is_reached_to_first_order():
    S = 1e-4 * (normal(0, 20, 4) + 3)
    value, (free, virtual), h = hilbert_bound(S, ball(1.0), softcap=True)
    assert virtual == 20
    logits = torch.full((20,), 1e3, dtype=torch.float64)
    logits[free] = 0
    before, after = (30 * torch.tanh(z / 30) for z in (logits, logits + S @ h))
    assert 0.999 < hilbert_distance(after, before).item() / value <= 1
    assert hilbert_bound(S, ball(1.0)).value < 0.9 * value


@given(SEED, ROWS, DIM)
def test_the_signal_to_the_trunk_is_bounded_and_the_bound_is_attained(seed, n, d):
    W, S = normal(seed, 2, n, d)
    value, (y, other) = diameter(S)
    r = normal(seed + 1, 40, n)
    r -= r.mean(1, keepdim=True)
    assert ((r @ S).norm(dim=1) <= r.abs().sum(1) / 2 * value * (1 + 1e-9)).all()
    p = torch.zeros(n, dtype=torch.float64)
    p[y], p[other] = 0.25, 0.75  # all that is wrong sits on the farthest row
    target = F.one_hot(torch.tensor(y), n)
    assert math.isclose((S.T @ (p - target)).norm().item(), 0.75 * value, rel_tol=1e-9)
    h = 1.5 * F.normalize(normal(seed + 2, 40, d))
    before, after = ((h @ head.T).softmax(1) for head in (W, W + S))
    change = (after - target) @ (W + S) - (before - target) @ W
    limit = (1 - after[:, y]) * value + math.tanh(1.5 * value / 4) * diameter(W).value
    assert (change.norm(dim=1) <= limit * (1 + 1e-9)).all()


@given(SEED, ROWS, DIM)
def test_the_whole_change_of_the_signal_needs_the_diameter_of_the_head_too(seed, n, d):
    """Not only the update moves what goes to the trunk: the head sends back other errors."""
    W, S = normal(seed, 2, n, d)
    h, rho = 1.5 * F.normalize(normal(seed + 1, 40, d)), 1.5
    before, after = ((h @ head.T).softmax(1) for head in (W, W + S))
    target = F.one_hot(torch.arange(40) % n, n)
    change = ((after - target) @ (W + S) - (before - target) @ W).norm(dim=1)
    value = diameter(S).value
    smaller = min(diameter(W).value, diameter(W + S).value)
    assert (change <= (value + math.tanh(rho * value / 4) * smaller) * (1 + 1e-9)).all()


def test_no_bound_on_the_signal_to_the_trunk_has_the_diameter_of_the_update_alone():
    """One update and one hidden state; a head with longer rows changes the signal at will."""
    S, h = torch.zeros(2, 2), torch.tensor([1.0, 0.0])
    S[0, 0] = 1.0
    changes = []
    for length in (1.0, 10.0, 100.0):
        W = torch.tensor([[0.0, length], [0.0, -length]])
        before, after = ((head @ h).softmax(0) for head in (W, W + S))
        target = torch.tensor([0.0, 1.0])
        changes.append(((after - target) @ (W + S) - (before - target) @ W).norm().item())
    assert changes[1] > 5 * changes[0]
    assert changes[2] > 9.5 * changes[1]


# ------------------------------------------------------------------ norms
@settings(max_examples=25)
@given(SEED, st.integers(2, 30), DIM, st.sampled_from([0.0, 1.0, 2.0]))
def test_relations_between_norms(seed, n, d, tail):
    S = normal(seed, n, d) * (tail * normal(seed + 1, n, 1)).exp()
    centered, value = S - S.mean(0), diameter(S).value * (1 + 1e-9)
    spectral = torch.linalg.matrix_norm(centered, 2)
    assert diameter(S).value / math.sqrt(2) <= spectral * (1 + 1e-9)
    assert spectral <= math.sqrt(n) / 2 * value
    assert centered.norm() <= math.sqrt((n - 1) / 2) * value
    assert centered.norm(dim=1).max() <= (1 - 1 / n) * value
    k = torch.linalg.matrix_rank(centered).item()
    assert radius(S) <= math.sqrt(k / (2 * (k + 1))) * value * (1 + 2e-2)
    assert radius(S) >= diameter(S).value / 2 * (1 - 1e-9)


def radius(S, rounds=2000):
    """Radius of the smallest ball, from above, by steps toward the farthest row."""
    center, best = S.mean(0), math.inf
    for t in range(1, rounds):
        distances = (S - center).norm(dim=1)
        best = min(best, distances.max().item())
        center = center + (S[distances.argmax()] - center) / (t + 1)
    return best


def test_constants_of_the_relations_are_attained():
    simplex = torch.eye(7, dtype=torch.float64)
    heaps, heap = torch.zeros(2, 8, 3, dtype=torch.float64)
    heaps[:4, 0] = heap[0, 0] = 1
    spectral = [torch.linalg.matrix_norm(S - S.mean(0), 2) for S in (simplex, heaps)]
    assert math.isclose(spectral[0].item(), diameter(simplex).value / math.sqrt(2))
    assert math.isclose(spectral[1].item(), math.sqrt(8) / 2)
    assert math.isclose((simplex - simplex.mean(0)).norm().item(), math.sqrt(3) * math.sqrt(2))
    assert math.isclose((heap - heap.mean(0)).norm(dim=1).max().item(), 1 - 1 / 8)
    mean_radius = (simplex - simplex.mean(0)).norm(dim=1).max().item()  # the smallest ball's
    assert math.isclose(mean_radius, math.sqrt(6 / 14) * math.sqrt(2))


# ------------------------------------------------------------------ column sums and descent
def column_sum(loss, head):
    head = head.clone().requires_grad_()
    [G] = torch.autograd.grad(loss(head), head)
    return (G.sum(0).norm() / G.norm(dim=1).sum()).item()


@given(SEED, ROWS, DIM)
def test_column_sums_vanish_for_cross_entropy_only(seed, n, d):
    W, h = normal(seed, n, d), normal(seed + 1, 30, d) + 0.5
    y = torch.randint(n, (30,), generator=torch.Generator().manual_seed(seed))
    weight = normal(seed + 2, n).exp()
    plain = (
        lambda head: F.cross_entropy(h @ head.T, y),
        lambda head: F.cross_entropy(h @ head.T, y, label_smoothing=0.1),
        lambda head: F.cross_entropy(h @ head.T, y, weight=weight),
        lambda head: F.cross_entropy(h @ head.T, y.where(y > 0, -100), reduction="sum"),
    )
    for loss in plain:
        assert not column_sum(loss, W) > 1e-12  # NaN where every token is masked
    assert column_sum(lambda head: (h @ head.T).logsumexp(1).square().mean(), W) > 1e-6
    assert column_sum(lambda head: F.cross_entropy((h @ head.T).tanh(), y), W) > 1e-6
    assert column_sum(lambda head: F.cross_entropy(h @ head.T, y) + head.square().sum(), W) > 1e-6
    assert column_sum(lambda head: F.cross_entropy(h @ head.T, y) + (head[y] * h).sum(), W) > 1e-6


def descends(W, S, G, h, y):
    """Change of the batch loss, and the descent lemma's two bounds on it."""
    change = F.cross_entropy(h @ (W + S).T, y) - F.cross_entropy(h @ W.T, y)
    first = (G * S).sum()
    ranges = hilbert_shifts(S, h).square().mean() / 8
    rho = h.norm(dim=1).max()
    return (
        change.item(),
        (first + ranges).item(),
        (first + rho**2 * diameter(S).value ** 2 / 8).item(),
    )


def directions(G):
    left, _, right = torch.linalg.svd(G, full_matrices=False)
    return G, F.normalize(G), left @ right, G.sign()


@pytest.mark.parametrize("batch", ["random", "real"])
@settings(max_examples=50)
@given(SEED, ROWS, DIM, st.sampled_from([1e-3, 0.1, 1.0, 10.0]))
def test_the_descent_lemma_holds_and_the_certified_step_delivers(batch, seed, n, d, size):
    if batch == "real":
        W, step, _, h, y, _ = trained()
        check_descent(W, size * (30 * step if seed % 2 else normal(seed, *W.shape)), h, y)
        return
    W, S, h = normal(seed, n, d), size * normal(seed + 1, n, d), normal(seed + 2, 25, d)
    y = torch.randint(n, (25,), generator=torch.Generator().manual_seed(seed))
    check_descent(W, S, h, y)


def check_descent(W, S, h, y):
    head = W.clone().requires_grad_()
    [G] = torch.autograd.grad(F.cross_entropy(h @ head.T, y), head)
    change, by_ranges, by_bound = descends(W, S, G, h, y)
    slack = 1e-12 * (1 + abs(by_bound))
    assert change <= by_ranges + slack
    assert by_ranges <= by_bound + slack
    for phi in directions(G):
        a, rho = (G * phi).sum().item(), h.norm(dim=1).max().item()
        for q in (hilbert_shifts(phi, h).square().mean().item(), (rho * diameter(phi).value) ** 2):
            step = certified_step(a, q)
            change = descends(W, -step.length * phi, G, h, y)[0]
            assert change <= -step.decrease + 1e-12
            assert step.length == pytest.approx(4 * a / q)
    total = G.norm(dim=1).sum().item()
    unit = descends(W, -total / rho**2 * F.normalize(G), G, h, y)[0]
    assert unit <= -(total**2) / (2 * rho**2) + 1e-12


def test_the_lemma_is_tight_for_small_steps():
    W, h = torch.zeros(2, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    S = torch.tensor([[0.5e-3], [-0.5e-3]], dtype=torch.float64)
    G = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)
    change, bound, _ = descends(W, S, G, h, torch.tensor([0]))
    assert change == pytest.approx(bound, rel=1e-6)
    assert change - (G * S).sum().item() == pytest.approx(1e-6 / 8, rel=1e-4)


def test_certified_step_refuses_and_stays():
    assert certified_step(-0.1, 1.0) == certified_step(0.0, 0.0) == (0.0, 0.0)
    assert certified_step(math.nan, 1.0) == (0.0, 0.0)
    for square in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="square must be positive"):
            certified_step(0.1, square)


def test_shifts_are_the_distances_of_predictions_in_any_chunks():
    W, S, extra = normal(0, 30, 5), normal(1, 30, 5), normal(2, 30)
    h = normal(3, 17, 5)
    expected = hilbert_distance(
        (h @ (W + S).T + extra).softmax(1).log(), (h @ W.T).softmax(1).log()
    )
    for chunk in (1, 5, 100):
        assert torch.allclose(hilbert_shifts(S, h, extra, chunk=chunk), expected)
    assert hilbert_shifts(S.bfloat16(), h.bfloat16()).dtype == torch.float32


def test_misuse():
    for radius in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"radius must be positive and finite, got {radius}"):
            ball(radius)
    for extra in (None, torch.ones(3)):
        with pytest.raises(ValueError, match="finite"):
            hilbert_bound(torch.full((3, 2), math.nan), ball(1.0), bias=extra)
    with pytest.raises(ValueError, match="bias must be finite"):
        hilbert_bound(torch.ones(3, 2), ball(1.0), bias=torch.tensor([0.0, math.inf, 0.0]))
    with pytest.raises(TypeError, match="floating-point"):
        hilbert_bound(torch.zeros(3, 2, dtype=torch.int64), ball(1.0))


@pytest.mark.parametrize("scale", [1e-13, 1e-100, 1e100])
def test_the_bound_scales_with_steps_of_any_size(scale):
    S = normal(0, 20, 4)
    for inputs, _ in sets(1, 4).values():
        for softcap in (False, True):
            value, _, h = hilbert_bound(S, inputs, softcap=softcap)
            scaled, _, far = hilbert_bound(scale * S, inputs, softcap=softcap)
            assert math.isclose(scaled, scale * value, rel_tol=1e-9)
            assert torch.allclose(far, h)


def test_one_token_and_equal_rows():
    assert hilbert_bound(torch.ones(1, 3), ball(2.0)).value == 0
    assert hilbert_bound(torch.ones(5, 3), ball(2.0)).value == 0
    assert hilbert_bound(torch.ones(5, 3), ball(2.0), softcap=True).value == pytest.approx(
        2 * math.sqrt(3)
    )
