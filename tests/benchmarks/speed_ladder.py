"""Tokens a second of the training loop on this processor as lever after lever is pulled.

``python -m tests.benchmarks.speed_ladder`` writes ``book/results/benchmarks/speed-ladder.json``,
which the chapter on speed draws where no GPU has been checked. All rungs train one model of about
10 million parameters, in alternation. Times are processor seconds of one thread, which a busy
machine does not stretch; the peak is by the clock, the best of several products. It takes about
three minutes.
"""

import argparse
from pathlib import Path

import torch

from lmgeom.lm.config import Config, parameters
from lmgeom.lm.speed import fastest_peak, levers, machine, row_of, rung
from tests.benchmarks.measuring import medians, record_file, write_record

MODEL = Config(16_384, 256, 8, 4, 256, 704)
CHUNK = 512


def main():
    """Measure the ladder and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each rung")
    parser.add_argument("--sequences", type=int, default=8, help="sequences a step")
    parser.add_argument("--out", type=Path, help="the record; by default the book's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out, cpu = record_file("speed-ladder", args.out), torch.device("cpu")
    peak, _ = fastest_peak(cpu)
    rungs = levers(cpu, CHUNK)
    jobs = {lever.name: rung(MODEL, lever, cpu, args.sequences) for lever in rungs}
    seconds, tokens = medians(jobs, args.rounds), args.sequences * MODEL.context
    rows = [row_of(MODEL, lever, tokens, seconds[lever.name], peak) for lever in rungs]
    figures = {
        "parameters": parameters(MODEL).total,
        "model": MODEL.to_dict(),
        "tokens": tokens,
        "rounds": args.rounds,
        "whole_ladder": rows[-1]["tokens_a_second"] / rows[0]["tokens_a_second"],
        "peak_flops": peak,
        "ladder": rows,
        "note": machine(cpu)["note"],
    }
    write_record(out, "speed-ladder", figures)


if __name__ == "__main__":
    main()
