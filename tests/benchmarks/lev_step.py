"""Time of a whole training step with LEV against the tied table, on real text, in one run.

``python -m tests.benchmarks.lev_step`` writes ``book/results/benchmarks/lev-step.json``. A step is
the training loop's own: loss in chunks, backward pass, clipped AdamW, on 8,192 tokens and with a
body of 10 million parameters. Times are processor seconds of one thread, which a busy machine does
not stretch. The smaller vocabulary takes about five minutes, the larger a quarter of an hour.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from lmgeom.figures import device
from lmgeom.lev import lev_parameters
from lmgeom.lm import Config, LanguageModel
from lmgeom.lm.config import parameters
from lmgeom.lm.device import loss_function, make_plan
from lmgeom.lm.optim import adamw
from lmgeom.lm.train import update
from lmgeom.study.paths import results
from lmgeom.study.records import provenance
from tests.benchmarks.lev_speed import TOKENIZERS, real_text

SHAPE = {"dim": 256, "layers": 10, "heads": 4, "context": 256, "mlp_width": 1024}
ARMS = {"tied": {}, "leviathan": {"input": "lev", "head": "untied"}}
TOKENS = 8192
LOSS_CHUNK = 1024


def seconds(function):
    """Run a function, and give the processor seconds it took."""
    start = time.process_time()
    function()
    return time.process_time() - start


def build(arm, vocab_size, batch):
    """The training step of one arm, and its input's own forward and backward pass."""
    torch.manual_seed(0)
    model = LanguageModel(Config(vocab_size, **SHAPE, **ARMS[arm]))
    optimizer = adamw(model)
    loss_of = loss_function(model, make_plan("cpu", "float32", False), LOSS_CHUNK)
    goal = torch.randn(*batch[0].shape, SHAPE["dim"])

    def input_only():
        model.input(batch[0]).backward(goal)
        model.zero_grad(set_to_none=True)

    return {"step": lambda: update(model, optimizer, loss_of, batch), "input": input_only}


def medians(steps, rounds):
    """Median processor seconds of each part of each arm, in alternation, after one warm-up each."""
    times = {(arm, part): [] for arm in steps for part in steps[arm]}
    for repetition in range(rounds + 1):
        for arm, part in times:
            taken = seconds(steps[arm][part])
            if repetition:
                times[arm, part].append(taken)
    return {key: statistics.median(values) for key, values in times.items()}


def measure(vocab_size, rounds, tokens):
    """All figures of one vocabulary."""
    flat = real_text(vocab_size, tokens + 256).flatten()
    batch = flat[:tokens].view(-1, 256), flat[1 : tokens + 1].view(-1, 256)
    steps = {arm: build(arm, vocab_size, batch) for arm in ARMS}
    found = medians(steps, rounds)
    ratio = found["leviathan", "step"] / found["tied", "step"]
    return {
        "vocab_size": vocab_size,
        "tokens": tokens,
        "distinct": batch[0].unique().numel(),
        "rounds": rounds,
        "body_parameters": parameters(Config(vocab_size, **SHAPE)).body,
        "lev_parameters": lev_parameters(vocab_size, SHAPE["dim"])["total"],
        "table_parameters": vocab_size * SHAPE["dim"],
        **{f"{arm}_{part}_seconds": value for (arm, part), value in found.items()},
        "step_ratio": ratio,
        "lev_share": found["leviathan", "input"] / found["leviathan", "step"],
        "throughput_loss": 1 - 1 / ratio,
    }


def main():
    """Measure the vocabularies and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each arm")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens a step")
    choice = {"type": int, "nargs": "+", "choices": list(TOKENIZERS), "default": list(TOKENIZERS)}
    parser.add_argument("--vocabularies", **choice, help="sizes of vocabulary")
    parser.add_argument("--out", type=Path, help="the record; by default the book's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = args.out or results() / "benchmarks" / "lev-step.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    cases = [measure(size, args.rounds, args.tokens) for size in args.vocabularies]
    record = {
        "benchmark": "lev-step",
        "largest_ratio": max(case["step_ratio"] for case in cases),
        "cases": cases,
        "shape": SHAPE,
        "loss_chunk": LOSS_CHUNK,
        "threads": 1,
        "load_average": round(os.getloadavg()[0], 2),
        "machine": {"processor": device(), "cores": os.cpu_count(), **provenance()},
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
