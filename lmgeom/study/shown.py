"""Which chapters show which claims, read from the cells of the notebooks that show them."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmgeom.errors import RecordError
from lmgeom.study import paths

SHOWING = ("claims_box", "claims_list")


def shown_claims(root: Path | None = None) -> dict[str, list[str]]:
    """Return the chapters that show each claim, by its id.

    The cells that show claims are run with functions that only note the names, so that a list
    which a chapter computes counts as well as one that it spells out.

    Args:
        root: Checkout of the repository; the book's own by default.

    Raises:
        RecordError: such a cell needs something that it does not define.
    """
    folder = (root or paths.root()) / "nbs"
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.ipynb")):
        chapter = path.relative_to(folder).with_suffix("").as_posix()
        for name in _shown_in(path):
            if chapter not in found.setdefault(name, []):
                found[name].append(chapter)
    return found


def _shown_in(path: Path) -> list[str]:
    names: list[str] = []
    note = dict.fromkeys(SHOWING, lambda *shown: names.extend(shown))
    space: dict[str, Any] = note | {"study": SimpleNamespace(**note)}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        shows = any(f"{name}(" in source for name in SHOWING)
        if cell["cell_type"] != "code" or not shows or "#| export" in source:
            continue
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                kept = [name for name in node.names if name.name not in SHOWING]
                node.names = kept or [ast.alias("paths")]
        ast.fix_missing_locations(tree)
        try:
            exec(compile(tree, f"{path.name}: {cell['id']}", "exec"), space)
        except NameError as error:
            message = f"{path.name}: cell {cell['id']} shows claims and needs more: {error}"
            raise RecordError(message) from None
    return names
