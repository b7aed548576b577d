"""Time and peak memory of LEV against its direct route on real text, in one run.

``python -m tests.benchmarks.lev_speed`` writes ``book/results/benchmarks/lev-speed.json``. Times
are processor seconds of one thread, which a busy machine does not stretch. Linux only: the peak of
a process's memory is read from /proc.
"""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from lmgeom.data import corpus, packaged
from lmgeom.lev import LEV
from tests.benchmarks.measuring import medians, peak_bytes, record_file, write_record

CASES = {
    "default": {"size": (50_257, 256), "options": {}, "tokens": 4096},
    "small": {
        "size": (16_384, 128),
        "options": {"seed_dim": 64, "rank": 32, "heads": 4},
        "tokens": 2048,
    },
}
ROUTES = ("direct", "lev")
TOKENIZERS = {50_257: "gpt2", 200_376: "o200k"}


def real_text(vocab_size, n):
    """The first n token ids of a training batch, shape (n / 256, 256).

    For a larger vocabulary than the corpus' own, its text in that vocabulary's tokens.
    """
    data = corpus("minipile-core", "bpe-16k", quiet=True)
    if vocab_size == data.vocab_size:
        return data.batch(0, 0, n // 256, 256)[0]
    texts = [data.tokenizer.decode(row) for row in data.batch(0, 0, n // 256, 512)[0].tolist()]
    batches = packaged(TOKENIZERS[vocab_size]).encode_batch(texts)
    return torch.tensor([token for text in batches for token in text][:n]).view(-1, 256)


def real_text_of(case):
    """`real_text` of one case."""
    return real_text(CASES[case]["size"][0], CASES[case]["tokens"])


def build(case, ids):
    """Forward and backward passes of both routes of one layer."""
    torch.manual_seed(0)
    layer = LEV(*CASES[case]["size"], **CASES[case]["options"])
    goal = torch.randn(*ids.shape, layer.dim)

    def step(route):
        layer.zero_grad(set_to_none=True)
        (layer.direct if route == "direct" else layer)(ids).backward(goal)

    return step


def median_seconds(case, ids, rounds):
    """Median processor seconds of each route, in alternation, after one warm-up each."""
    step = build(case, ids)
    return medians({route: partial(step, route) for route in ROUTES}, rounds)


def peak_of(case, route):
    """Memory that the first forward and backward pass of this process adds at its peak."""
    step = build(case, real_text_of(case))
    return peak_bytes(partial(step, route))


def peak_in_fresh_process(case, route):
    """`peak_of` in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.lev_speed", "--peak", case, route]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(case, rounds):
    """All figures of one case."""
    ids = real_text_of(case)
    seconds = median_seconds(case, ids, rounds)
    peaks = {route: peak_in_fresh_process(case, route) for route in ROUTES}
    return {
        "vocab_size": CASES[case]["size"][0],
        "dim": CASES[case]["size"][1],
        "options": CASES[case]["options"],
        "tokens": ids.numel(),
        "distinct": ids.unique().numel(),
        "rounds": rounds,
        "direct_seconds": seconds["direct"],
        "lev_seconds": seconds["lev"],
        "speed_ratio": seconds["direct"] / seconds["lev"],
        "direct_peak_bytes": peaks["direct"],
        "lev_peak_bytes": peaks["lev"],
        "memory_ratio": peaks["direct"] / peaks["lev"],
    }


def main():
    """Measure both cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each route")
    parser.add_argument("--out", type=Path, help="the record; by default the book's")
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "ROUTE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print(peak_of(*args.peak))
        return
    out = record_file("lev-speed", args.out)
    cases = {case: measure(case, args.rounds) for case in CASES}
    figures = {
        **cases["default"],
        "small": cases["small"],
    }
    write_record(out, "lev-speed", figures)


if __name__ == "__main__":
    main()
