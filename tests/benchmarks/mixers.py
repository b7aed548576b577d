"""Time of every recurrent mixer in parallel against its own token loop, and against a library.

``python -m tests.benchmarks.mixers`` writes ``book/results/benchmarks/mixers.json``. Times are
processor seconds of one thread, forward and backward pass. The library is ``titans-pytorch``, which
is needed for this comparison alone and must be installed by hand (``pip install titans-pytorch``).
Its memory takes gradients where its ``batch_size`` begins, so that is set to our chunk. Both have
heads of 64 features and the same matrices in each memory.
"""

import argparse
import importlib.metadata
from pathlib import Path

import torch

from lmgeom.mixers import MIXERS
from tests.benchmarks.measuring import medians, record_file, write_record

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
    goal = torch.randn_like(x)

    def both_ways(route):
        return lambda: route(x).backward(goal)

    return medians({name: both_ways(route) for name, route in routes.items()}, rounds)


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
    out = record_file("mixers", args.out)
    loops, others = measure(args.tokens, args.rounds)
    figures = {
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
    }
    write_record(out, "mixers", figures)


if __name__ == "__main__":
    main()
