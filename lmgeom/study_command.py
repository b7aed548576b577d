"""The commands `lmgeom study ...`: what runs there are, run them, compare with ours, judge."""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from lmgeom.console import columns, filled, number
from lmgeom.errors import ConfigError

__all__ = ["add_commands", "duration"]

PARTS = ("input", "depth", "output", "together")
KINDS = ("identity", "budget", "mechanism", "cost", "empirical")
ANSWERED = ("holds exactly", "holds", "direction only", "no effect found", "fails")
VERDICTS = (*ANSWERED, "not at our scale", "not attempted", "not checked here")


def duration(seconds: float) -> str:
    """Say how long something takes, in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _folder(args: argparse.Namespace) -> Path | None:
    return Path(args.results) if args.results else None


def _list(args: argparse.Namespace) -> None:
    from lmgeom.study.run import load_study, status, studies

    rows = []
    for name in studies():
        study = load_study(name)
        done = sum(row["state"] == "done" for row in status(study))
        rows.append((name, f"{done}/{len(study.runs)}", study.question))
    print(columns([("study", "done", "question"), *rows]))


def _show(args: argparse.Namespace) -> None:
    _print_status(args.study, _folder(args), 1)


def _print_status(name: str, folder: Path | None, workers: int) -> None:
    """Print what is done, running, failed and missing of a study, and how long the rest takes."""
    from lmgeom.study.run import load_study, status, time_left

    study = load_study(name)
    rows = status(study, folder)
    print(columns([list(rows[0]), *(list(row.values()) for row in rows)]))
    counts = Counter(row["state"] for row in rows)
    words = [f"{counts[state]} {state}" for state in ("done", "running", "failed", "missing")]
    left = time_left(study, folder, workers)
    rest = "no record to judge the time by" if left is None else f"about {duration(left)} left"
    with_ = f" with {workers} workers" if workers > 1 else ""
    end = "" if counts["done"] == len(rows) else f"; {rest}{with_}"
    print(f"{study.name}: {', '.join(words)}{end}")


def _run(args: argparse.Namespace) -> int:
    from lmgeom.study.run import execute, load_study, run_study, studies

    folder = _folder(args)
    if args.run:
        if args.study is None or args.all or args.list:
            raise ConfigError("--run takes one study, without --all or --list")
        execute(load_study(args.study).run(args.run), folder)
        return 0
    if (args.study is None) == (not args.all):
        raise ConfigError("name one study, or give --all")
    names = studies() if args.all else [args.study]
    if args.list:
        for name in names:
            _print_status(name, folder, args.workers)
        return 0
    failed = []
    for name in names:
        failed += run_study(load_study(name), workers=args.workers, folder=folder)
    return 1 if failed else 0


def _check(args: argparse.Namespace) -> int:
    from lmgeom.study.band import check_path

    found = check_path(Path(args.record), args.metric, _folder(args))
    print("\n".join(map(str, found)))
    return 1 if any(one.outside for one in found) else 0


def _claims(args: argparse.Namespace) -> int:
    from lmgeom.study.claims import check_tests, judge, load_claims

    claims = {
        name: claim
        for name, claim in load_claims().items()
        if args.part in (None, claim["part"]) and args.kind in (None, claim["kind"])
    }
    outcomes = check_tests(claims.values()) if args.check else None
    rows = []
    for name, claim in claims.items():
        found = judge(claim, outcomes=outcomes)
        if args.verdict in (None, found.verdict):
            rows.append((name, found.verdict, found.evidence))
    print(columns(rows) if rows else "no claim is of this kind")
    return 1 if outcomes and "failed" in outcomes.values() else 0


def _gpu_check(args: argparse.Namespace) -> int:
    from lmgeom.lm.speed import LARGE, TINY, gpu_check, write_whole
    from lmgeom.study.paths import results
    from lmgeom.study.records import provenance

    path = Path(args.out) if args.out else results() / "benchmarks" / "gpu-check.json"
    if args.out is None and args.device == "cpu":
        raise ConfigError("--device cpu needs --out: the book's record is that of a GPU")
    record = gpu_check(args.device, TINY if args.tiny else LARGE)
    write_whole(path, record | {"provenance": provenance()})
    print(f"{path}: {len(record['failed'])} failed, {len(record['left_out'])} left out")
    for name, reason in record["failed"].items():
        print(f"{name}: {reason}")
    return 1 if record["failed"] else 0


def add_commands(verbs: Any) -> None:
    """Add the verbs of ``lmgeom study`` to a parser's subparsers."""
    results = {"type": filled, "help": "folder of records (default: book/results)"}
    verb = verbs.add_parser("list", help="the studies and how much of each is done")
    verb.set_defaults(call=_list)
    verb = verbs.add_parser("show", help="the runs of one study and the time of the rest")
    verb.add_argument("study", help="a name of `lmgeom study list`, or a YAML file")
    verb.add_argument("--results", **results)
    verb.set_defaults(call=_show)
    verb = verbs.add_parser("run", help="run what has no record yet; resumes what was cut off")
    verb.add_argument("study", nargs="?", help="a name of `lmgeom study list`, or a YAML file")
    verb.add_argument("--all", action="store_true", help="every study of the book")
    verb.add_argument("--run", help="only this run, in this process")
    verb.add_argument("--workers", type=number(int, 1), default=2, help="default: %(default)s")
    verb.add_argument("--list", action="store_true", help="only show what there is to do")
    verb.add_argument("--results", **results)
    verb.set_defaults(call=_run)
    verb = verbs.add_parser("check", help="compare curves with ours: exit code 1 if one is off")
    verb.add_argument("record", help="a record of `lmgeom study run`, or a folder of records")
    verb.add_argument("--metric", default="val", help="loss to compare (default: %(default)s)")
    word = "folder of the records to compare with (default: ours)"
    verb.add_argument("--results", type=filled, help=word)
    verb.set_defaults(call=_check)
    verb = verbs.add_parser("claims", help="every claim with its computed verdict")
    verb.add_argument("--check", action="store_true", help="first run the tests behind them")
    verb.add_argument("--part", choices=PARTS, help="only claims about this part of a model")
    verb.add_argument("--kind", choices=KINDS, help="only claims of this kind")
    verb.add_argument("--verdict", choices=VERDICTS, help="only claims with this verdict")
    verb.set_defaults(call=_claims)
    verb = verbs.add_parser("gpu-check", help="check speed and exactness of one GPU in 4 minutes")
    word = "a CUDA device, or cpu to try the check without one (default: cuda)"
    verb.add_argument("--device", default="cuda", help=word)
    verb.add_argument("--tiny", action="store_true", help="sizes that take seconds, to try it")
    word = "the record to write (default: that of the book)"
    verb.add_argument("--out", type=filled, help=word)
    verb.set_defaults(call=_gpu_check)
