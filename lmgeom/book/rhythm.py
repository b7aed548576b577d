"""Measure the rhythm of every chapter: how long its cells are, and how text and code take turns."""

from __future__ import annotations

import ast
import re
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

from lmgeom.book.settings import notebook_names, notebook_path
from lmgeom.errors import BookError

__all__ = ["LIMITS", "Rhythm", "check_rhythm", "measure_rhythm", "table"]

# Lowest and highest value of each figure; a chapter outside needs a reason in book/rhythm.yaml.
LIMITS: dict[str, tuple[float, float]] = {
    "cells": (0, 65),
    "median": (0, 12),
    "ninth": (0, 18),
    "lesson": (0, 25),
    "longest": (0, 85),
    "words": (25, 80),
    "figures": (1, 99),
}
CLASS = re.compile(r"^class ", re.MULTILINE)  # a class is one cell, however long
HAS_DOCSTRING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Rhythm:
    """Figures of one chapter.

    Attributes:
        cells: Cells in all.
        median: Lines of code in the middle one of its code cells; docstrings do not count.
        ninth: Lines that nine in ten code cells do not pass, of those that define no class.
        lesson: Lines of the longest cell that is not exported.
        longest: Lines of the longest cell.
        words: Words in the middle one of its text cells.
        figures: Figures with a number and a caption.
    """

    cells: int
    median: float
    ninth: float
    lesson: int
    longest: int
    words: float
    figures: int

    def outliers(self) -> list[str]:
        """Names of the figures that are outside their limits."""
        values = asdict(self)
        return [name for name, (low, high) in LIMITS.items() if not low <= values[name] <= high]


def code_lines(source: str) -> int:
    """Lines of a code cell that are neither empty, nor a directive, nor in a docstring."""
    lines = source.splitlines()
    kept = {i for i, line in enumerate(lines, 1) if line.strip() and not line.startswith("#|")}
    for node in ast.walk(ast.parse(source)):
        text = node.body[0] if isinstance(node, HAS_DOCSTRING) and node.body else None
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            kept -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(kept)


def measure_rhythm(path: Path) -> Rhythm:
    """Measure one clean notebook; cells that a reader does not see are left out.

    Raises:
        BookError: It has no code or no text that shows.
    """
    cells = nbformat.read(path, as_version=4).cells
    shown = [
        cell
        for cell in cells
        if cell.cell_type == "code"
        and not cell.source.lstrip().startswith(("#| default_exp", "#| hide"))
    ]
    lines = {cell.id: code_lines(cell.source) for cell in shown}
    words = [len(cell.source.split()) for cell in cells if cell.cell_type == "markdown"]
    if not lines or not words:
        raise BookError(f"{path.name} has no code or no text to show")
    ordered = sorted(lines.values())
    parts = [lines[cell.id] for cell in shown if not CLASS.search(cell.source)]
    lessons = [lines[cell.id] for cell in shown if "#| export" not in cell.source]
    return Rhythm(
        cells=len(cells),
        median=statistics.median(ordered),
        ninth=sorted(parts)[int(0.9 * (len(parts) - 1))],
        lesson=max(lessons, default=0),
        longest=ordered[-1],
        words=statistics.median(words),
        figures=sum("figure" in cell.metadata.get("mystnb", {}) for cell in shown),
    )


def reasons(root: Path) -> dict[tuple[str, str], str]:
    """Reasons of the outliers, by chapter and figure, from book/rhythm.yaml.

    Raises:
        BookError: An entry lacks something, or two entries give reasons for one outlier.
    """
    found: dict[tuple[str, str], str] = {}
    entries: list[dict[str, Any]] = yaml.safe_load((root / "book" / "rhythm.yaml").read_text())
    for entry in entries:
        if set(entry) != {"chapters", "figures", "reason"} or not str(entry["reason"]).strip():
            raise BookError(f"rhythm.yaml: an entry has chapters, figures and reason: {entry}")
        for key in ((name, figure) for name in entry["chapters"] for figure in entry["figures"]):
            if key in found:
                raise BookError(f"rhythm.yaml: two reasons for {' '.join(key)}")
            found[key] = str(entry["reason"]).strip()
    return found


def table(rhythms: dict[str, Rhythm]) -> str:
    """Lay out the figures of all chapters; a star marks each that is outside its limits."""
    lines = [f"{'chapter':<30}" + "".join(f"{name:>9}" for name in LIMITS)]
    for chapter, rhythm in rhythms.items():
        outliers, values = rhythm.outliers(), asdict(rhythm)
        cells = (f"{values[name]:g}{'*' if name in outliers else ' '}" for name in LIMITS)
        lines.append(f"{chapter:<30}" + "".join(f"{cell:>9}" for cell in cells))
    limits = (f"{low:g}-{high:g} " for low, high in LIMITS.values())
    return "\n".join([*lines, f"{'limits':<30}" + "".join(f"{cell:>9}" for cell in limits)])


def check_rhythm(root: Path) -> None:
    """Print the rhythm of every chapter and hold that each outlier has a reason.

    Args:
        root: Checkout of the repository.

    Raises:
        BookError: An outlier has no reason, or a reason no outlier; the message names each.
    """
    rhythms = {name: measure_rhythm(notebook_path(root, name)) for name in notebook_names(root)}
    print(table(rhythms))
    outside = {(name, figure) for name, one in rhythms.items() for figure in one.outliers()}
    known = reasons(root)
    faults = [
        f"{name}: {figure} is {asdict(rhythms[name])[figure]:g}, outside "
        f"{LIMITS[figure][0]:g} to {LIMITS[figure][1]:g}: mend it, or say why in book/rhythm.yaml"
        for name, figure in sorted(outside - known.keys())
    ]
    faults += [
        f"book/rhythm.yaml: {name} is no longer an outlier in {figure}: take its reason out"
        for name, figure in sorted(known.keys() - outside)
    ]
    if faults:
        raise BookError("\n".join(faults))
