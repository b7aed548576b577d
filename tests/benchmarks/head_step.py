"""Time of one step of each rule for the head, at the size of GPT-2's head, in one run.

``python -m tests.benchmarks.head_step`` writes ``book/results/benchmarks/head-step.json``: seconds
of a step of AdamW, row normalization, Equispread and torch.optim.Muon on one matrix, in
alternation, and of the head's own forward and backward pass on a batch. On a CPU, times are
processor seconds, which a busy machine does not stretch.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

from lmgeom.head import HEAD_RULES
from tests.benchmarks.measuring import medians, processor_seconds, record_file, write_record

RULES = ("adamw", "rownorm", "sign", "equispread", "muon")


def heavy_tailed(vocab_size, dim):
    """A gradient with rows of very different lengths that sum to zero, as a head's."""
    rows = torch.randn(vocab_size, dim)
    rows *= torch.exp(2 * torch.randn(vocab_size, 1))
    return rows - rows.mean(0)


def cuda_seconds(run):
    """Time of one call, to the end of the device's work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def pass_of_the_head(vocab_size, dim, tokens, where):
    """Forward and backward pass of the head alone on a batch, in pieces of 1024 tokens."""
    head = nn.Linear(dim, vocab_size, bias=False, device=where)
    hidden = torch.randn(tokens, dim, device=where, requires_grad=True)
    targets = torch.randint(vocab_size, (tokens,), device=where)

    def run():
        head.zero_grad()
        for x, y in zip(hidden.split(1024), targets.split(1024), strict=True):
            nn.functional.cross_entropy(head(x), y, reduction="sum").backward()

    return run


def measure(vocab_size, dim, tokens, rounds, where):
    """Median seconds of a step of each rule and of the head's own pass."""
    torch.manual_seed(0)
    gradient = heavy_tailed(vocab_size, dim).to(where)
    jobs = {"head_pass": pass_of_the_head(vocab_size, dim, tokens, where)}
    for rule in RULES:
        W = nn.Parameter(0.02 * torch.randn_like(gradient))
        W.grad = gradient
        jobs[rule] = HEAD_RULES[rule]([W], 1e-3).step
    return medians(jobs, rounds, cuda_seconds if where == "cuda" else processor_seconds)


def main():
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the head's own pass")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="the record; by default the book's")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    out = record_file("head-step", args.out)
    median = measure(args.vocab_size, args.dim, args.tokens, args.rounds, args.device)
    figures = {
        "vocab_size": args.vocab_size,
        "dim": args.dim,
        "tokens": args.tokens,
        "rounds": args.rounds,
        **{f"{name}_seconds": value for name, value in median.items()},
        "muon_over_equispread": median["muon"] / median["equispread"],
        "muon_over_rownorm": median["muon"] / median["rownorm"],
        "equispread_share_of_head_pass": median["equispread"] / median["head_pass"],
    }
    write_record(out, "head-step", figures)


if __name__ == "__main__":
    main()
