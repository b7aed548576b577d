"""Where the book's files are: the folder with settings.ini, its claims, studies and records."""

import os
from pathlib import Path


def root() -> Path:
    """Return the book's root folder, the one that holds ``settings.ini``.

    Looks at the working directory and its parents, then at ``$LMGEOM_ROOT``, then at the folder
    of an editable installation.

    Raises:
        FileNotFoundError: none of them holds ``settings.ini`` and ``book/``.
    """
    here = Path.cwd()
    named = [Path(os.environ["LMGEOM_ROOT"])] if "LMGEOM_ROOT" in os.environ else []
    for folder in [here, *here.parents, *named, Path(__file__).resolve().parents[2]]:
        if (folder / "settings.ini").is_file() and (folder / "book").is_dir():
            return folder
    raise FileNotFoundError(
        f"no lmgeom book above {here}: run inside a clone, or set LMGEOM_ROOT to one"
    )


def results() -> Path:
    """Return the folder of run records: ``$LMGEOM_RESULTS``, or the committed ones."""
    named = os.environ.get("LMGEOM_RESULTS")
    return Path(named) if named else root() / "book" / "results"


def build() -> Path:
    """Return the folder for everything that can be made again."""
    return root() / "_build"
