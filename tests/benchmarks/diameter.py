"""The exact diameter of the rows of a matrix against tiled brute force, in one run.

``python -m tests.benchmarks.diameter`` writes ``book/results/benchmarks/diameter.json``, in about
25 minutes. Both routes work in float32 by matrix products of the same tiles. Times are processor
seconds of one thread, which a busy machine does not stretch. At the largest size brute force is
not run: its time is that of the size before it, scaled by the square of the number of rows.
"""

import argparse
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from lmgeom.head import diameter, diameter_bounds
from tests.benchmarks.measuring import processor_seconds, record_file, write_record

TILE = 1024
CLOUDS = ("gaussian", "whitened", "gradient", "embedding", "Adam step", "spectrum")


def cloud(name, n, d):
    """One kind of rows that occur in training; the same for every call."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    if name == "gradient":  # of cross-entropy at the unigram prediction, targets after Zipf
        p = 1 / (torch.arange(n) + 10)
        p = p / p.sum()
        targets = torch.multinomial(p, 4096, True, generator=generator)
        hidden = normal(4096, d) + 0.5
        seen = torch.zeros(n, d).index_add(0, targets, hidden / 4096)
        return p[:, None] * hidden.mean(0) - seen
    if name == "embedding":
        return (0.3 * normal(n, 1)).exp() * normal(n, d) + normal(d)
    if name == "Adam step":
        return (0.1 * normal(n, 1)).exp() * normal(n, d).sign() + 0.3 * normal(d)
    if name == "spectrum":
        return F.normalize(normal(n, d) * torch.arange(1, d + 1).rsqrt())
    return F.normalize(normal(n, d)) if name == "whitened" else normal(n, d)


def brute_force(W):
    """The diameter from all tiles of the upper triangle, in float32."""
    X = W - W.mean(0)
    squares = X.square().sum(1, keepdim=True)
    ones = torch.ones_like(squares)
    left, right = torch.cat([-2 * X, ones, squares], 1), torch.cat([X, squares, ones], 1)
    highest = 0.0
    for a in range(0, len(W), TILE):
        for b in range(a, len(W), TILE):
            highest = max(highest, (left[a : a + TILE] @ right[b : b + TILE].T).max().item())
    return math.sqrt(highest)


def measure(name, n, d, rounds, brute):
    """All figures of one cloud; the routes alternate, after a warm-up of the fast ones."""
    W = cloud(name, n, d)
    times, values = {"exact": [], "bounds": [], "brute": []}, []
    (low, high), found = diameter_bounds(W), diameter(W)
    for repetition in range(rounds):
        times["exact"].append(processor_seconds(lambda: diameter(W)))
        times["bounds"].append(processor_seconds(lambda: diameter_bounds(W)))
        if repetition < brute:
            times["brute"].append(processor_seconds(lambda: values.append(brute_force(W))))
            assert abs(values[-1] / found.value - 1) < 1e-3, (name, values, found)
    assert low <= found.value * (1 + 1e-12) <= high * (1 + 2e-12), (name, low, found, high)
    figures = {f"{key}_seconds": statistics.median(t) for key, t in times.items() if t}
    free = 2 * torch.linalg.vector_norm(W, dim=1).max().item()
    return figures | {
        "diameter": found.value,
        "pair": found.pair,
        "bounds_ratio": high / low,
        "share_of_free_bound": found.value / free,
        "exact_rounds": rounds,
        "brute_rounds": brute,
    }


def compare(n, found, earlier):
    """Complete the figures of one size: brute force extrapolated if not run, and the ratio."""
    for name, figures in found.items():
        if "brute_seconds" not in figures:
            size, before = earlier
            figures["brute_seconds"] = before[name]["brute_seconds"] * (n / size) ** 2
        figures["speed_ratio"] = figures["brute_seconds"] / figures["exact_seconds"]


def claimed(clouds):
    """What the claims read: ratios of times up to 50,257 rows, ratios of bounds at all sizes."""
    judged = [clouds["8192"], clouds["50257"]]
    bounds = [row["bounds_ratio"] for rows in clouds.values() for row in rows.values()]
    return {
        "least_speed_ratio": min(judged[1][k]["speed_ratio"] for k in ("gradient", "embedding")),
        "least_any_ratio": min(row["speed_ratio"] for rows in judged for row in rows.values()),
        "least_bounds_margin": math.sqrt(2) / max(bounds),
    }


def main():
    """Measure every cloud at every size and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 50_257, 200_000])
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of the fast routes")
    parser.add_argument("--brute", type=int, default=5, help="timed calls of brute force")
    parser.add_argument("--quadratic", type=int, default=60_000, help="largest size of slow calls")
    parser.add_argument("--out", type=Path, help="the record; by default the book's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = record_file("diameter", args.out)
    clouds, earlier = {}, None
    for n in args.rows:
        small = n <= args.quadratic
        names = CLOUDS if small else ("gradient", "embedding")
        found = {
            name: measure(name, n, args.dim, args.rounds, args.brute if small else 0)
            for name in names
        }
        compare(n, found, earlier)
        clouds[str(n)], earlier = found, (n, found)
    figures = {
        "dim": args.dim,
        "clouds": clouds,
    }
    if {8192, 50_257, 200_000} <= set(args.rows):  # the sizes that the claims name
        figures |= claimed(clouds)
    write_record(out, "diameter", figures)


if __name__ == "__main__":
    main()
