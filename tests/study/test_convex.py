"""Softmax regression on states that are drawn, not read: small, and with a known answer."""

import json
from dataclasses import replace

import pytest
import torch

from lmgeom.errors import RecordError
from lmgeom.study import convex
from lmgeom.study.convex import RULES, Problem, Settings, Trial, descend, optimum
from lmgeom.study.records import load_records

TINY = Settings(
    vocab_size=12, dim=4, states=96, held_out=32, batch_size=24, steps=20, evaluations=2
)


@pytest.fixture(scope="module")
def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(128, 4, generator=generator)
    hidden = 2 * hidden / hidden.norm(dim=1, keepdim=True)
    logits = hidden @ torch.randn(4, 12, generator=generator)
    targets = torch.distributions.Gumbel(0.0, 1.0).sample(logits.shape).add(logits).argmax(1)
    return Problem(hidden[:96], targets[:96], hidden[96:], targets[96:], 12, 1e-2)


def newton(problem):
    """The least value by Newton's method with the whole Hessian, in float64."""
    problem = replace(problem, hidden=problem.hidden.double())
    W = torch.zeros(12, 4).double()
    for _ in range(30):
        grad = torch.autograd.functional.jacobian(problem.objective, W)
        hessian = torch.autograd.functional.hessian(problem.objective, W).reshape(48, 48)
        W = W - torch.linalg.solve(hessian, grad.flatten()).view(12, 4)
    return problem.objective(W).item()


def test_the_optimum_is_found_and_certified(problem):
    best, exact = optimum(problem), newton(problem)
    assert best.lower <= exact + 1e-6
    assert exact - 1e-6 <= best.value <= exact + 1e-4
    assert best.value - best.lower < 1e-4


def test_the_certificate_is_valid_far_from_the_optimum(problem):
    early = optimum(problem, iterations=2)
    assert early.lower < newton(problem) < early.value - 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_descends(problem, rule):
    size = {"sgd": 0.5, "adamw": 0.1}.get(rule, 1.0)
    found = descend(problem, rule, size, 0, TINY)
    start = problem.objective(torch.zeros(12, 4)).item()
    least = newton(problem)
    assert least < found["losses"]["train"] < start - 0.3 * (start - least)
    assert found["curve"][-1] == {"tokens": 480} | found["losses"]
    assert found["watched"]["step"] == list(range(2, 21, 2))
    assert "watched" not in descend(problem, rule, size, 0, TINY, watch=False)


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"sgd", "adamw"}))
def test_a_budget_bounds_the_step_and_convexity_the_decrease(problem, rule):
    columns = descend(problem, rule, 0.5, 0, TINY)["watched"]
    for seen in (
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ):
        assert seen["diameter"] * problem.rho <= 0.5 * seen["factor"] * (1 + 1e-4)
        assert seen["hilbert_rms"] <= 0.5 * seen["factor"] * (1 + 1e-4)
        assert seen["actual"] <= seen["predicted"] + 1e-5


def test_rules_are_what_their_names_say():
    torch.manual_seed(0)
    gradient = torch.randn(12, 4)
    gradient -= gradient.mean(0)
    steps = {}
    for rule, make in RULES.items():
        W = torch.nn.Parameter(torch.zeros(12, 4))
        W.grad = gradient.clone()
        make([W], 1.0, rho=2.0).step()
        steps[rule] = -W.detach()
    assert torch.allclose(steps["sgd"] / steps["sgd"].norm(), gradient / gradient.norm())
    assert torch.equal(steps["sign"].sign(), gradient.sign())
    values = torch.linalg.svdvals(steps["polar"])
    assert torch.allclose(values, values[:1].expand(4), rtol=1e-4)
    for rule in ("rownorm", "polar-rownorm", "equispread"):
        lengths = steps[rule].norm(dim=1)
        assert torch.allclose(lengths, torch.tensor(0.25), rtol=1e-4)
    cosine = (steps["polar-rownorm"] * steps["polar"]).sum(1) / steps["polar"].norm(dim=1) / 0.25
    assert torch.allclose(cosine, torch.ones(12), rtol=1e-4)


def test_batches_take_each_state_once_a_pass():
    batches = list(convex._batches(96, 3, TINY))
    assert len(batches) == 20
    for k in range(0, 20, 4):
        assert torch.cat(batches[k : k + 4]).sort().values.tolist() == list(range(96))
    assert not torch.equal(torch.cat(batches[:4]), torch.cat(batches[4:8]))


def test_a_finished_trial_is_not_run_again(problem, tmp_path):
    trial = Trial("s", "polar", 1, "polar", 1.0, TINY)
    first = trial.run(problem, tmp_path)
    assert trial.run(None, tmp_path)["losses"] == first["losses"]
    assert [r["id"] for r in load_records("s", tmp_path)] == [first["id"]]
    assert replace(trial, size=2.0).entry["id"] != first["id"]


def test_the_confirmation_takes_the_best_size_of_a_whole_screening(problem, tmp_path):
    with pytest.raises(RecordError, match="sgd: 0 of 6 sizes"):
        convex.confirmation(TINY, tmp_path)
    for trial in convex.screening(replace(TINY, steps=10)):
        trial.run(problem, tmp_path)
    records = load_records(convex.SCREENING, tmp_path)
    assert len(records) == 42
    for trial in convex.confirmation(TINY, tmp_path):
        tried = [r for r in records if r["config"]["train"]["rule"] == trial.rule]
        best = min(tried, key=lambda r: r["losses"]["train"])
        assert trial.size == best["config"]["train"]["lr"]
        assert trial.seed != convex.SCREENING_SEED


def test_the_reference_is_stored_once(problem, tmp_path):
    found = convex.reference(problem, TINY, tmp_path)
    assert found["lower"] <= found["optimum"] < found["at_zero"]
    assert json.loads((tmp_path / "benchmarks/head-convex.json").read_text()) == found
    assert convex.reference(None, TINY, tmp_path) == found
