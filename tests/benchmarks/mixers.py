"""Time of every recurrent mixer in parallel against its own token loop, and against a library.

``python -m tests.benchmarks.mixers`` writes ``book/results/benchmarks/mixers.json``. Times are
processor seconds of one thread, forward and backward pass. The library is ``titans-pytorch``, which
is needed for this comparison alone and must be installed by hand (``pip install titans-pytorch``).
Its memory takes gradients where its ``batch_size`` begins, so that is set to our chunk. Both have
heads of 64 features and the same matrices in each memory.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import time
from pathlib import Path

import torch

from lmgeom.figures import device
from lmgeom.mixers import MIXERS
from lmgeom.study.paths import results
from lmgeom.study.records import provenance

DIM, HEADS, CHUNK = 256, 4, 64
CASES = {
    "titans-lmm": ("titans-lmm", {}),
    "titans-lmm, depth 2": ("titans-lmm", {"depth": 2}),
    "titans-mag": ("titans-mag", {}),
    "titans-mal": ("titans-mal", {}),
    "titans-mac": ("titans-mac", {}),
    "hope": ("hope", {}),
}


def build(case, tokens):
    """One layer of a case."""
    torch.manual_seed(0)
    name, options = CASES[case]
    return MIXERS[name](DIM, HEADS, context=tokens, chunk=CHUNK, **options)


def token_loop(layer, x):
    """The layer's outputs, one token at a time."""
    state, parts = layer.initial_state(len(x)), []
    for token in x.split(1, dim=1):
        y, state = layer.step(token, state)
        parts.append(y)
    return torch.cat(parts, dim=1)


def library(depth):
    """The library's layer with memories of our shapes."""
    from titans_pytorch import MemoryMLP, NeuralMemory

    memory = NeuralMemory(
        dim=DIM,
        heads=HEADS,
        dim_head=DIM // HEADS,
        chunk_size=CHUNK,
        batch_size=CHUNK,
        model=MemoryMLP(DIM // HEADS, depth=depth, expansion_factor=2.0),
    )
    return lambda x: memory(x)[0]


def median_seconds(routes, x, rounds):
    """Median processor seconds, forward and backward, of each route, in alternation."""
    seconds = {name: [] for name in routes}
    goal = torch.randn_like(x)
    for repetition in range(rounds + 1):
        for name, route in routes.items():
            start = time.process_time()
            route(x).backward(goal)
            if repetition:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(tokens, rounds):
    """Seconds and ratios of all cases."""
    x = torch.randn(1, tokens, DIM, requires_grad=True)
    loops, others = {}, {}
    for case in CASES:
        layer = build(case, tokens)
        routes = {"parallel": layer, "loop": lambda x, layer=layer: token_loop(layer, x)}
        loops[case] = median_seconds(routes, x, rounds)
        loops[case]["ratio"] = loops[case]["loop"] / loops[case]["parallel"]
        print(case, loops[case], flush=True)
    for case, depth in (("titans-lmm", 1), ("titans-lmm, depth 2", 2)):
        routes = {"ours": build(case, tokens), "library": library(depth)}
        others[case] = median_seconds(routes, x, rounds)
        others[case]["ratio"] = others[case]["library"] / others[case]["ours"]
        print(case, others[case], flush=True)
    return loops, others


def main():
    """Measure all cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the text")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each route")
    parser.add_argument("--out", type=Path, help="the record; by default the book's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = args.out or results() / "benchmarks" / "mixers.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    loops, others = measure(args.tokens, args.rounds)
    record = {
        "benchmark": "mixers",
        "tokens": args.tokens,
        "dim": DIM,
        "heads": HEADS,
        "chunk": CHUNK,
        "rounds": args.rounds,
        "loops": loops,
        "loop_ratio": min(case["ratio"] for case in loops.values()),
        "library": importlib.metadata.version("titans-pytorch"),
        "libraries": others,
        "library_ratio": min(case["ratio"] for case in others.values()),
        "threads": 1,
        "load_average": round(os.getloadavg()[0], 2),
        "machine": {"processor": device(), "cores": os.cpu_count(), **provenance()},
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
