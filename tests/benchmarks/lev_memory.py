"""Peak memory of LEV with and without gradient checkpointing, by the number of distinct ids.

``python -m tests.benchmarks.lev_memory`` writes ``book/results/benchmarks/lev-memory.json``. The
layer has the default size, width 256, and a vocabulary of 262,144 ids. Each forward and backward
pass runs in a process of its own, of one thread. Linux only: peaks are read from /proc. It takes up
to 12 GB, and about five minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

from lmgeom.lev import LEV
from tests.benchmarks.measuring import medians, peak_bytes, record_file, write_record

SIZE = (262_144, 256)
DISTINCT = (16_384, 65_536, 262_144)
TIMED = 4096  # distinct ids whose passes are timed


def build(distinct, checkpointing):
    """Forward and backward pass over the first distinct ids, each once."""
    torch.manual_seed(0)
    layer = LEV(*SIZE, gradient_checkpointing=checkpointing)
    ids, goal = torch.arange(distinct), torch.randn(distinct, layer.dim)

    def forward():
        layer.zero_grad(set_to_none=True)
        return layer(ids)

    return forward, lambda: forward().backward(goal)


def saved_bytes(forward):
    """Bytes of the distinct tensors that autograd keeps between the passes."""
    kept = {}
    with saved_tensors_hooks(lambda x: kept.update({x.data_ptr(): x.nbytes}) or x, lambda x: x):
        out = forward()
    del out
    return sum(kept.values())


def peaks_in_fresh_processes(distinct):
    """The peak without and with checkpointing, side by side, each in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.lev_memory", "--peak", str(distinct)]
    commands = [command, [*command, "--checkpointing"]]
    running = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for line in commands]
    found = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"a process for {distinct} distinct ids failed; its error is above")
    return [int(text) for text in found]


def measure(distinct):
    """Peaks at one number of distinct ids."""
    plain, checkpointed = peaks_in_fresh_processes(distinct)
    row = {"distinct": distinct, "plain_peak_bytes": plain, "checkpointed_peak_bytes": checkpointed}
    print(json.dumps(row), file=sys.stderr)
    return row | {"memory_ratio": plain / checkpointed}


def main():
    """Measure all sizes and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--distinct", type=int, nargs="+", default=DISTINCT, help="distinct ids")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each option")
    parser.add_argument("--out", type=Path, help="the record; by default the book's")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print(peak_bytes(build(args.peak, args.checkpointing)[1]))
        return
    out = record_file("lev-memory", args.out)
    times = medians({option: build(TIMED, option)[1] for option in (False, True)}, args.rounds)
    kept = {option: saved_bytes(build(TIMED, option)[0]) for option in (False, True)}
    figures = {
        "vocab_size": SIZE[0],
        "dim": SIZE[1],
        "rows": [measure(distinct) for distinct in args.distinct],
        "timed_distinct": TIMED,
        "rounds": args.rounds,
        "plain_saved_bytes": kept[False],
        "checkpointed_saved_bytes": kept[True],
        "plain_seconds": times[False],
        "checkpointed_seconds": times[True],
        "time_ratio": times[True] / times[False],
    }
    write_record(out, "lev-memory", figures)


if __name__ == "__main__":
    main()
