"""Time of a whole training step with LEV against the tied table, on real text, in one run.

``python -m tests.benchmarks.lev_step`` writes ``book/results/benchmarks/lev-step.json``. A step is
the training loop's own: loss in chunks, backward pass, clipped AdamW, on 8,192 tokens and with a
body of 10 million parameters. Times are processor seconds of one thread, which a busy machine does
not stretch. The smaller vocabulary takes about five minutes, the larger a quarter of an hour.
"""

import argparse
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from lmgeom.lev import lev_parameters
from lmgeom.lm import Config, LanguageModel
from lmgeom.lm.config import parameters
from lmgeom.lm.device import loss_function, make_plan
from lmgeom.lm.optim import adamw
from lmgeom.lm.train import update
from tests.benchmarks.lev_speed import TOKENIZERS, real_text
from tests.benchmarks.measuring import medians, record_file, write_record

SHAPE = {"dim": 256, "layers": 10, "heads": 4, "context": 256, "mlp_width": 1024}
ARMS = {"tied": {}, "leviathan": {"input": "lev", "head": "untied"}}
TOKENS = 8192
LOSS_CHUNK = 1024


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

    step = partial(update, model, optimizer, loss_of, batch)
    return {(arm, "step"): step, (arm, "input"): input_only}


def measure(vocab_size, rounds, tokens):
    """All figures of one vocabulary."""
    flat = real_text(vocab_size, tokens + 256).flatten()
    batch = flat[:tokens].view(-1, 256), flat[1 : tokens + 1].view(-1, 256)
    jobs = [build(arm, vocab_size, batch).items() for arm in ARMS]
    found = medians(dict(chain(*jobs)), rounds)
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
    out = record_file("lev-step", args.out)
    cases = [measure(size, args.rounds, args.tokens) for size in args.vocabularies]
    figures = {
        "largest_ratio": max(case["step_ratio"] for case in cases),
        "cases": cases,
        "shape": SHAPE,
        "loss_chunk": LOSS_CHUNK,
    }
    write_record(out, "lev-step", figures)


if __name__ == "__main__":
    main()
