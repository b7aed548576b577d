"""Time of a training step of uniform, tapered and mirrored decoders of one budget, in one run.

``python -m tests.benchmarks.taper_speed`` writes ``book/results/benchmarks/taper-speed.json``.
Times are processor seconds of one thread, which a busy machine does not stretch.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lmgeom.lm import Config, LanguageModel, presets, tapered, token_loss
from lmgeom.study import paired
from tests.benchmarks.measuring import alternate, record_file, write_record

CASES = {
    "small": (presets["transformer-small"], 2),
    "wider": (Config(1024, 512, 4, 8, 256, 1536), 1),
}


def build(config, batch):
    """A training step without the optimizer, whose work does not depend on where weights are."""
    torch.manual_seed(0)
    model = LanguageModel(config)
    x, y = torch.randint(config.vocab_size, (2, batch, config.context))

    def step():
        model.zero_grad(set_to_none=True)
        token_loss(model.head, model.hidden(x), y).backward()

    return step


def seconds_of(config, batch, rounds):
    """Processor seconds of each arm by round, in alternation, after one warm-up each."""
    taper = tapered(config)
    arms = {"uniform": config, "tapered": taper}
    arms["mirrored"] = replace(taper, mlp_width=taper.mlp_width[::-1])
    steps = {name: build(arm, batch) for name, arm in arms.items()}
    return alternate(steps, rounds)


def faster(one, other):
    """95 % t-interval over rounds of how many times as fast the other is, from the logarithms."""
    found = paired(np.log(one).tolist(), np.log(other).tolist())
    return [float(np.exp(end)) for end in (found.low, found.high)]


def measure(case, rounds):
    """All figures of one case."""
    config, batch = CASES[case]
    taken = seconds_of(config, batch, rounds)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "dim": config.dim,
        "layers": config.layers,
        "mlp_width": config.mlp_width,
        "tapered_widths": tapered(config).widths,
        "tokens": batch * config.context,
        "rounds": rounds,
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "speed_ratio": seconds["uniform"] / seconds["tapered"],
        "speed_interval": faster(taken["uniform"], taken["tapered"]),
        "mirrored_speed_ratio": seconds["uniform"] / seconds["mirrored"],
        "mirrored_speed_interval": faster(taken["uniform"], taken["mirrored"]),
    }


def main():
    """Measure both cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds of each arm")
    parser.add_argument("--out", type=Path, help="the record; by default the book's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = record_file("taper-speed", args.out)
    cases = {case: measure(case, args.rounds) for case in CASES}
    figures = {
        **cases["small"],
        "wider": cases["wider"],
    }
    write_record(out, "taper-speed", figures)


if __name__ == "__main__":
    main()
