"""What a notebook's outputs depend on, as one hash.

A notebook is executed again only when something that determines its outputs has changed: its code
cells, the code of the lmgeom modules it imports (comments and layout do not count), the records and
claims it may read, the prepared data, or the versions of Python and the packages.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from lmgeom.figures import versions

__all__ = ["Modules", "fingerprint"]

PACKAGE = "lmgeom"


@lru_cache(maxsize=1024)
def _tree(path: Path, stat: tuple[int, int]) -> ast.Module:
    """Parse a file once per modification."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _parse(path: Path) -> ast.Module:
    """Parse a file, from the cache where it has not changed."""
    return _tree(path, _stat(path))


@lru_cache(maxsize=1024)
def _meaning(path: Path, stat: tuple[int, int]) -> str:
    """Hash of a module's code without comments and layout, once per modification."""
    return _sha256(ast.dump(_tree(path, stat)))


def _stat(path: Path) -> tuple[int, int]:
    """What tells one modification of a file from the next."""
    info = path.stat()
    return info.st_mtime_ns, info.st_size


def _sha256(*parts: str | bytes) -> str:
    """Hash of some texts, each set off from the next."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


class Modules:
    """The lmgeom modules of a checkout and who imports whom.

    A name that a package re-exports (`from lmgeom.lev import LEV`) counts as an import of the
    module that defines it, so that a change there does not touch the readers of its sisters.

    Args:
        root: Checkout that holds the lmgeom folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, module: str) -> Path | None:
        """File of a module or package, None where there is none."""
        base = self.root.joinpath(*module.split("."))
        for candidate in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def _is_package(self, module: str) -> bool:
        """Tell a package from a plain module."""
        path = self.path(module)
        return path is not None and path.name == "__init__.py"

    def _named(self, module: str, name: str) -> str | None:
        """Module that defines what `from module import name` binds."""
        if self.path(f"{module}.{name}"):
            return f"{module}.{name}"
        path = self.path(module)
        if path is None:
            return None
        if self._is_package(module):
            for node in _parse(path).body:
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        if (alias.asname or alias.name) == name:
                            source = self._absolute(node, module)
                            return self._named(source, alias.name) if source else None
        return module

    def _absolute(self, node: ast.ImportFrom, module: str) -> str | None:
        """Module that a `from` statement names, with leading dots resolved."""
        if not node.level:
            return node.module
        keep = module.split(".")
        if not self._is_package(module):
            keep = keep[:-1]
        keep = keep[: len(keep) - node.level + 1]
        return ".".join([*keep, node.module] if node.module else keep)

    def imported(self, tree: ast.AST, module: str = "") -> Iterator[str]:
        """lmgeom modules that some code imports, anywhere in it.

        Args:
            tree: Parsed code.
            module: Name of the module it is, for relative imports.

        Yields:
            Names of modules that exist in the checkout.
        """
        for node in ast.walk(tree):
            found: Iterable[str | None] = ()
            if isinstance(node, ast.Import):
                found = (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(node, module)
                if source and source.split(".")[0] == PACKAGE:
                    found = [self._named(source, alias.name) for alias in node.names]
            for name in found:
                if name and name.split(".")[0] == PACKAGE and self.path(name):
                    yield name

    def closure(self, modules: Iterable[str]) -> dict[str, Path]:
        """Modules reached from some modules, themselves included, with their files."""
        reached: dict[str, Path] = {}
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            path = self.path(module)
            if module in reached or path is None:
                continue
            reached[module] = path
            waiting.extend(self.imported(_parse(path), module))
        return dict(sorted(reached.items()))

    def of_notebook(self, notebook: NotebookNode) -> dict[str, Path]:
        """Modules that a notebook reaches; all of them where its code cannot tell."""
        modules: set[str] = set()
        for cell in notebook.cells:
            if cell.cell_type != "code":
                continue
            lines = cell.source.splitlines()
            if "subprocess" in cell.source or any(line.startswith("!") for line in lines):
                return self.closure(self._all())
            plain = "\n".join("" if line.startswith("%") else line for line in lines)
            modules.update(self.imported(ast.parse(plain)))
        return self.closure(modules)

    def _all(self) -> list[str]:
        """Every module of the checkout."""
        files = (self.root / PACKAGE).rglob("*.py")
        parts = [file.relative_to(self.root).with_suffix("").parts for file in files]
        return [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts]


def _files(folder: Path, *patterns: str) -> dict[str, str]:
    """Hashes of the files below a folder, by relative name."""
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return {
        path.relative_to(folder).as_posix(): _sha256(path.read_bytes())
        for path in found
        if path.is_file()
    }


def fingerprint(
    notebook: NotebookNode, root: Path, prepared: Path | None = None, results: Path | None = None
) -> str:
    """Hash of all that determines a staged notebook's outputs.

    Args:
        notebook: Staged notebook; Markdown cells do not count.
        root: Checkout that it runs in.
        prepared: Folder of prepared data sets, whose manifests count for notebooks that use data.
        results: Folder of the records it may read; the committed ones by default.

    Returns:
        Hexadecimal SHA-256.
    """
    modules = Modules(root).of_notebook(notebook)
    inputs: dict[str, Any] = {
        "cells": [
            (cell.id, cell.source, sorted(cell.metadata.get("tags", [])))
            for cell in notebook.cells
            if cell.cell_type == "code"
        ],
        "modules": {name: _meaning(path, _stat(path)) for name, path in modules.items()},
        "versions": versions(),
    }
    used = {name.split(".")[1] for name in modules if "." in name}
    if "figures" in used:
        inputs["style"] = _files(root / PACKAGE, "*.mplstyle")
    if "study" in used:
        inputs["plans"] = _files(root / "book", "claims.yaml", "negative.yaml", "studies/*")
        inputs["records"] = _files(results or root / "book" / "results", "**/*.json")
        inputs["tests"] = _files(root / "_build", "claim-tests.json")
    if "data" in used and prepared is not None:
        inputs["data"] = _files(prepared, "**/manifest.json")
    return _sha256(json.dumps(inputs, sort_keys=True))
