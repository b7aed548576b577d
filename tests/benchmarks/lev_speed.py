"""Time and peak memory of LEV against its direct route on real text, in one run.

``python -m tests.benchmarks.lev_speed`` writes ``book/results/benchmarks/lev-speed.json``. Times
are processor seconds of one thread, which a busy machine does not stretch. Linux only: the peak of
a process's memory is read from /proc.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from lmgeom.data import corpus, packaged
from lmgeom.figures import device
from lmgeom.lev import LEV
from lmgeom.study.paths import results
from lmgeom.study.records import provenance

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
    seconds = {route: [] for route in ROUTES}
    for repetition in range(rounds + 1):
        for route in ROUTES:
            start = time.process_time()
            step(route)
            if repetition:
                seconds[route].append(time.process_time() - start)
    return {route: statistics.median(values) for route, values in seconds.items()}


def status(field):
    """One memory figure of this process in bytes, from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status")


def peak_bytes(case, route):
    """Memory that the first forward and backward pass of this process adds at its peak."""
    step = build(case, real_text_of(case))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    step(route)
    return status("VmHWM") - before


def peak_in_fresh_process(case, route):
    """`peak_bytes` in a process of its own."""
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
        print(peak_bytes(*args.peak))
        return
    out = args.out or results() / "benchmarks" / "lev-speed.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    cases = {case: measure(case, args.rounds) for case in CASES}
    record = {
        "benchmark": "lev-speed",
        **cases["default"],
        "small": cases["small"],
        "threads": 1,
        "load_average": round(os.getloadavg()[0], 2),
        "machine": {"processor": device(), "cores": os.cpu_count(), **provenance()},
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
