"""Softmax regression on frozen hidden states: the one problem of a head that is convex.

A small language model reads text; what its last norm returns is kept. To find the head that predicts
the next tokens from these states is then a convex problem, with one optimum once the weights pay a
small price. ``python -m lmgeom.study.convex`` lets rules of descent approach it and stores a record
of each run; one that is finished is never run twice.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lmgeom.data import byte_tokenizer, corpus, from_text
from lmgeom.errors import DataError, RecordError
from lmgeom.head import HEAD_RULES, Equispread, diameter, hilbert_shifts, polar, unit_rows
from lmgeom.lm import Config, LanguageModel, token_loss
from lmgeom.lm.optim import adamw, schedule
from lmgeom.study import paths
from lmgeom.study.records import load_records, only_writer, provenance, record, record_name, run_id

SCREENING, CONFIRMED = "head-convex-lr", "head-convex"
SCREENING_SEED, SEEDS = 0, (1, 2, 3)


@dataclass(frozen=True)
class Settings:
    """Everything that determines the problem and the length of a run.

    Args:
        vocab_size: Tokens V, the most frequent of a byte-pair encoding.
        dim: Width D of the hidden states.
        states: Hidden states of the problem, N.
        held_out: Hidden states that no rule sees.
        body_steps: Training steps of the language model before it is frozen.
        ridge: Price of the weights: half of it times their squared length joins the loss.
        batch_size: States a step.
        steps: Steps a run.
        evaluations: Points of a run at which the whole problem is evaluated.
    """

    vocab_size: int = 1024
    dim: int = 64
    states: int = 8192
    held_out: int = 2048
    body_steps: int = 300
    ridge: float = 1e-3
    batch_size: int = 256
    steps: int = 160
    evaluations: int = 8


@dataclass(frozen=True)
class Problem:
    """Hidden states (N, D) and targets (N,), those held out, and the price of the weights."""

    hidden: Tensor
    targets: Tensor
    held_hidden: Tensor
    held_targets: Tensor
    vocab_size: int
    ridge: float

    @property
    def rho(self) -> float:
        """The greatest length of a hidden state."""
        return float(self.hidden.norm(dim=1).max())

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of all tensors."""
        parts = (self.hidden, self.targets, self.held_hidden, self.held_targets)
        content = b"".join(part.numpy().tobytes() for part in parts)
        return hashlib.sha256(content).hexdigest()[:12]

    def objective(self, W: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Mean cross-entropy over some of the states, in nats, plus ridge / 2 times |W|^2."""
        loss = nn.functional.cross_entropy(self.hidden[rows] @ W.T, self.targets[rows])
        return loss + self.ridge / 2 * W.square().sum()

    def held_out_loss(self, W: Tensor) -> Tensor:
        """Mean cross-entropy over the states held out, in nats."""
        return nn.functional.cross_entropy(self.held_hidden @ W.T, self.held_targets)


def make_problem(settings: Settings) -> Problem:
    """Train a small language model on real text, freeze it, and keep its hidden states.

    The model has two layers, reads 32 tokens at a time, and is trained with AdamW on windows of the
    mixture's training text. The states come from validation text, of each domain by its weight.
    """
    core = corpus("minipile-core", "bpe-16k", quiet=True)
    whole = core.tokenizer or byte_tokenizer()
    tokenizer = whole.truncated(settings.vocab_size)
    windows = core.batch(0, 0, 512, 256)[0].tolist()
    data = from_text([whole.decode(window) for window in windows], tokenizer)
    torch.manual_seed(0)
    width = settings.dim
    model = LanguageModel(Config(tokenizer.vocab_size, width, 2, 4, 32, 2 * width, head="untied"))
    optimizer = adamw(model, lr=5e-3)
    scheduler = LambdaLR(optimizer, lambda step: schedule(step, settings.body_steps, 10))
    for step in range(settings.body_steps):
        x, y = data.batch(0, step, 16, 32)
        optimizer.zero_grad()
        token_loss(model.head, model.hidden(x), y).backward()
        optimizer.step()
        scheduler.step()
    hidden, targets = _states(model, core, tokenizer, settings.states + settings.held_out)
    n = settings.states
    parts = (hidden[:n], targets[:n], hidden[n:], targets[n:])
    return Problem(*parts, tokenizer.vocab_size, settings.ridge)


@torch.no_grad()
def _states(model: LanguageModel, core: Any, tokenizer: Any, n: int) -> tuple[Tensor, Tensor]:
    """Hidden states (n, D) and next tokens (n,) on shuffled windows of validation text."""
    windows = []
    for name, weight in core.weights.items():
        wanted = int(weight * n / 32) + 1
        tokens = core.splits[f"val/{name}"].tokens[: 64 * wanted]
        ids = tokenizer.encode(core.tokenizer.decode(tokens.tolist()))
        windows += list(torch.tensor(ids[: 33 * wanted]).split(33))[:wanted]
    whole = torch.stack([window for window in windows if len(window) == 33])
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    chosen = whole[order[: -(-n // 32)]]
    if 32 * len(chosen) < n:
        raise DataError(f"validation text gives {32 * len(chosen)} states, {n} are wanted")
    hidden = model.hidden(chosen[:, :-1]).flatten(0, 1)
    return hidden[:n].clone(), chosen[:, 1:].flatten()[:n].clone()


class Optimum(NamedTuple):
    """The best weights found, their objective, and a bound below which no weights can go."""

    weight: Tensor
    value: float
    lower: float


def optimum(problem: Problem, iterations: int = 250) -> Optimum:
    """Minimize by L-BFGS, and certify how far above the least value the result is.

    The objective F is convex and grows at least like ridge / 2 times a squared distance, so
    F(V) >= F(W) - |grad F(W)|^2 / (2 ridge) for all V (Nesterov 2004, theorem 2.1.10).
    """
    W = nn.Parameter(torch.zeros(problem.vocab_size, problem.hidden.shape[1]))
    rule = torch.optim.LBFGS(
        [W],
        max_iter=iterations,
        history_size=20,
        tolerance_grad=1e-7,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        rule.zero_grad()
        loss = problem.objective(W)
        loss.backward()
        return loss

    rule.step(closure)
    value = closure().item()
    slope = W.grad if W.grad is not None else torch.zeros_like(W)
    gap = float(slope.double().square().sum()) / (2 * problem.ridge)
    return Optimum(W.detach(), value, value - gap)


class PolarRows(Equispread):
    """The polar factor of the momentum, the exact form of Muon's step: rows of length up to 1."""

    def direction(
        self,
        M: Tensor,
        group: dict[str, Any],
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Give the polar factor."""
        return polar(M)


class PolarUnitRows(Equispread):
    """The polar factor of the momentum, its rows normalized."""

    def direction(
        self,
        M: Tensor,
        group: dict[str, Any],
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Give the polar factor with unit rows."""
        return unit_rows(polar(M))


def _sgd(params: Iterable[Any], size: float, **_: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=size, momentum=0.95, dampening=0.95)


# Every rule averages gradients with a factor of 0.95, but for AdamW's own 0.9.
RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": lambda params, size, **_: HEAD_RULES["adamw"](params, size, weight_decay=0.0),
    "sign": HEAD_RULES["sign"],
    "rownorm": HEAD_RULES["rownorm"],
    "polar": lambda params, size, **options: PolarRows(params, budget=size, **options),
    "polar-rownorm": lambda params, size, **options: PolarUnitRows(params, budget=size, **options),
    "equispread": HEAD_RULES["equispread"],
}
# The smallest of six sizes, each twice the one before: learning rates of SGD and AdamW, nats of the
# others.
SMALLEST = {"sgd": 0.25, "adamw": 2**-8, "sign": 0.25, "rownorm": 0.125}
SMALLEST |= {"polar": 0.5, "polar-rownorm": 0.25, "equispread": 0.25}


def sizes(rule: str) -> list[float]:
    """The six sizes that are tried for a rule."""
    return [SMALLEST[rule] * 2**k for k in range(6)]


def descend(
    problem: Problem, rule: str, size: float, seed: int, settings: Settings, watch: bool = True
) -> dict[str, Any]:
    """Let a rule approach the optimum from zero.

    Args:
        problem: States and targets.
        rule: A key of `RULES`.
        size: Its learning rate or budget at the peak of the schedule.
        seed: Order of the batches.
        settings: Batch size, steps and evaluations.
        watch: Also measure single steps, five between two evaluations.

    Returns:
        `curve`, the objective (`train`) and the held-out loss (`val`) along the way; `losses`, the
        same at the end; and, if asked for, `watched`, with a list for some steps of each of: the
        factor of the schedule, the decrease of the batch's objective that the gradient predicts
        and the one that came, the diameter, and the root mean square Hilbert change over the
        batch, in nats.
    """
    W = nn.Parameter(torch.zeros(problem.vocab_size, problem.hidden.shape[1]))
    optimizer = RULES[rule]([W], size, rho=problem.rho)

    def factor(step: int) -> float:
        return schedule(min(step, settings.steps - 1), settings.steps, 5, 0.01)

    scheduler = LambdaLR(optimizer, factor)
    every, curve, watched = settings.steps // settings.evaluations, [], []
    for step, rows in enumerate(_batches(len(problem.hidden), seed, settings)):
        optimizer.zero_grad()
        loss = problem.objective(W, rows)
        loss.backward()
        before = W.detach().clone()
        optimizer.step()
        scheduler.step()
        if watch and step % (every // 5) == every // 5 - 1:
            seen = _watch(problem, W.detach() - before, W, rows, loss.item())
            watched.append({"step": step + 1, "factor": round(factor(step), 6)} | seen)
        if (step + 1) % every == 0:
            curve.append({"tokens": (step + 1) * settings.batch_size} | _evaluate(problem, W))
    found = {"curve": curve, "losses": _evaluate(problem, W)}
    if watched:
        found["watched"] = {name: [seen[name] for seen in watched] for name in watched[0]}
    return found


def _batches(n: int, seed: int, settings: Settings) -> Iterable[Tensor]:
    """Batches of rows, without replacement within a pass."""
    generator = torch.Generator().manual_seed(seed)
    size, left = settings.batch_size, torch.empty(0, dtype=torch.int64)
    for _ in range(settings.steps):
        if len(left) < size:
            left = torch.randperm(n, generator=generator)
        yield left[:size]
        left = left[size:]


@torch.no_grad()
def _evaluate(problem: Problem, W: Tensor) -> dict[str, float]:
    values = {"train": problem.objective(W), "val": problem.held_out_loss(W)}
    return {name: round(value.item(), 6) for name, value in values.items()}


@torch.no_grad()
def _watch(problem: Problem, S: Tensor, W: Tensor, rows: Tensor, loss: float) -> dict[str, float]:
    shifts = hilbert_shifts(S, problem.hidden[rows])
    found = {
        "predicted": 0.0 if W.grad is None else -(W.grad * S).sum().item(),
        "actual": loss - problem.objective(W, rows).item(),
        "diameter": diameter(S).value,
        "hilbert_rms": shifts.square().mean().sqrt().item(),
    }
    return {name: float(f"{value:.5g}") for name, value in found.items()}


@dataclass(frozen=True)
class Trial:
    """One run of the experiment."""

    study: str
    arm: str
    seed: int
    rule: str
    size: float
    settings: Settings

    @property
    def entry(self) -> dict[str, Any]:
        """What names its record."""
        train = {"rule": self.rule, "lr": self.size}
        named = {"study": self.study, "arm": self.arm, "seed": self.seed}
        named["config"] = {"problem": asdict(self.settings), "train": train}
        return named | {"id": run_id(named)}

    def run(self, problem: Problem, folder: Path | None = None) -> dict[str, Any]:
        """Run it and store its record; a finished one is left alone."""
        entry, start = self.entry, time.process_time()
        path = (folder or paths.results()) / record_name(entry)
        with only_writer(path):
            if path.is_file():
                kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return kept
            watch = self.study == CONFIRMED
            entry |= descend(problem, self.rule, self.size, self.seed, self.settings, watch)
            entry["tokens"] = self.settings.steps * self.settings.batch_size
            entry["parameters"] = {"total": problem.vocab_size * problem.hidden.shape[1]}
            entry["fingerprint"] = problem.fingerprint
            entry["seconds"] = round(time.process_time() - start, 2)
            record(entry | provenance(), folder)
        return entry


def screening(settings: Settings) -> list[Trial]:
    """Six sizes of each rule, one seed."""
    return [
        Trial(SCREENING, f"{rule}-lr{k}", SCREENING_SEED, rule, size, settings)
        for rule in RULES
        for k, size in enumerate(sizes(rule))
    ]


def best_size(records: list[dict[str, Any]], rule: str) -> float:
    """The size with the lowest objective in the screening.

    Raises:
        RecordError: not all sizes of the rule are on record.
    """
    tried = [r for r in records if r["config"]["train"]["rule"] == rule]
    if len(tried) < len(sizes(rule)):
        raise RecordError(f"{rule}: {len(tried)} of {len(sizes(rule))} sizes are on record")
    best: float = min(tried, key=lambda r: r["losses"]["train"])["config"]["train"]["lr"]
    return best


def confirmation(settings: Settings, folder: Path | None = None) -> list[Trial]:
    """The best size of each rule on new seeds."""
    records = load_records(SCREENING, folder)
    best = {rule: best_size(records, rule) for rule in RULES}
    return [Trial(CONFIRMED, r, seed, r, best[r], settings) for r in RULES for seed in SEEDS]


def stored_problem(settings: Settings) -> Problem:
    """The problem, made once and kept in the build folder."""
    path = paths.build() / "convex" / f"{run_id(asdict(settings))}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(vars(make_problem(settings)), partial)
        os.replace(partial, path)  # whole or not at all
    return Problem(**torch.load(path, weights_only=True))


def load_reference(folder: Path | None = None) -> dict[str, Any]:
    """Read the optimum's values; empty before they are on record."""
    path = _reference_path(folder)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _reference_path(folder: Path | None) -> Path:
    return (folder or paths.results()) / "benchmarks" / "head-convex.json"


def reference(problem: Problem, settings: Settings, folder: Path | None = None) -> dict[str, Any]:
    """Find the optimum and store its values as a record of its own, once."""
    if found := load_reference(folder):
        return found
    start, best = time.process_time(), optimum(problem)
    at_zero = _evaluate(problem, torch.zeros_like(best.weight))["train"]
    found = {"benchmark": "head-convex", "problem": asdict(settings)}
    found |= {"fingerprint": problem.fingerprint, "at_zero": at_zero}
    found |= {"optimum": best.value, "lower": best.lower, "gap": best.value - best.lower}
    found |= {"held_out": _evaluate(problem, best.weight)["val"], "rho": problem.rho}
    found |= {"weight_rms_row": best.weight.square().sum(1).mean().sqrt().item()}
    found |= {"seconds": round(time.process_time() - start, 1), "machine": provenance()}
    path = _reference_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def run_all(settings: Settings, folder: Path | None = None, seconds: float = float("inf")) -> bool:
    """Run what has no record yet: the optimum, the screening, the confirmation.

    Args:
        settings: The problem and the length of a run.
        folder: The results folder; the committed one by default.
        seconds: Start no run after so many.

    Returns:
        Whether all is on record now.
    """
    start, problem = time.monotonic(), stored_problem(settings)
    reference(problem, settings, folder)
    for plan in (screening, lambda settings: confirmation(settings, folder)):
        for trial in plan(settings):
            if time.monotonic() - start > seconds:
                return False
            entry = trial.run(problem, folder)
            print(
                f"{trial.arm} seed {trial.seed} size {trial.size:g}: {entry['losses']}", flush=True
            )
    return True


def main() -> None:
    """Run what has no record yet, for a while."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no run after these")
    parser.add_argument("--results", type=Path, help="folder of the records; by default the book's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = run_all(Settings(), args.results, args.seconds)
    print("all is on record" if done else "stopped; start again to go on")


if __name__ == "__main__":
    main()
