"""What the benchmarks share: times in alternation, peak memory, and a record with its machine."""

import json
import os
import statistics
import time
from pathlib import Path

import torch

from lmgeom.figures import device
from lmgeom.study.paths import results
from lmgeom.study.records import provenance


def processor_seconds(function):
    """Processor seconds that one call takes."""
    start = time.process_time()
    function()
    return time.process_time() - start


def alternate(jobs, rounds, seconds=processor_seconds):
    """Seconds of each job by name and round, in alternation, after a round of warm-up."""
    taken = {name: [] for name in jobs}
    for repetition in range(rounds + 1):
        for name, job in jobs.items():
            spent = seconds(job)
            if repetition:
                taken[name].append(spent)
    return taken


def medians(jobs, rounds, seconds=processor_seconds):
    """Median seconds of each job by name, as `alternate` takes them."""
    taken = alternate(jobs, rounds, seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def peak_bytes(step):
    """Memory that a call adds to this process at its peak. Linux only: it is read from /proc."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(field):
    """One memory figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status")


def record_file(name, out=None):
    """Where a record goes, by default the book's; its folder is made before measuring starts."""
    path = out or results() / "benchmarks" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_record(path, name, figures):
    """Write and print the figures with the machine they were measured on."""
    record = {
        "benchmark": name,
        **figures,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "machine": {"processor": device(), "cores": os.cpu_count(), **provenance()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
