"""How long the pages take to read, counted from their words, and the short path through them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import yaml

from lmgeom.errors import BookError

__all__ = ["WORDS_A_MINUTE", "Stop", "reading_page", "short_path", "words"]

WORDS_A_MINUTE = 200
FENCE = re.compile(r"^(```|:::).*?^\1", re.M | re.S)
MATH = re.compile(r"\$\$.*?\$\$|\$[^$]*\$", re.S)
SOLUTION = re.compile(r"^```\{solution-start\}.*?^```\{solution-end\}\s*^```", re.M | re.S)
MARKUP = re.compile(r"\{[\w:-]+\}`[^`]*`|\]\([^)]*\)|^\|?[-| ]+\|?$|[<>#*`|\[]", re.M)


@dataclass(frozen=True)
class Stop:
    """A page on the short path, or the one section of it that is meant."""

    page: str
    why: str
    section: str | None = None


def _text(root: Path, page: str) -> str:
    """Markdown of a page: a notebook's Markdown cells, or a file of the book."""
    notebook, prose = root / "nbs" / f"{page}.ipynb", root / "book" / f"{page}.md"
    if notebook.is_file():
        cells = nbformat.read(notebook, as_version=4).cells
        return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    if prose.is_file():
        return prose.read_text(encoding="utf-8")
    raise BookError(f"no page {page!r} to read")


def _section(text: str, heading: str, page: str) -> str:
    """Part of a text below a heading, up to the next of its level or a higher one."""
    parts = re.split(r"^(#{1,6}) +(.+)$", text, flags=re.M)
    levels, titles, bodies = parts[1::3], [t.strip() for t in parts[2::3]], parts[3::3]
    if heading not in titles:
        raise BookError(f"{page} has no section {heading!r}; it has: {', '.join(titles)}")
    first = titles.index(heading)
    found = [bodies[first]]
    for level, body in zip(levels[first + 1 :], bodies[first + 1 :], strict=True):
        if len(level) <= len(levels[first]):
            break
        found.append(body)
    return "\n".join(found)


def words(root: Path, page: str, section: str | None = None) -> int:
    """Count the words of a page's prose.

    Args:
        root: Checkout of the repository.
        page: Name of the page, as in the table of contents.
        section: Heading of the one section that counts.

    Returns:
        Words in running text; formulas, code, outputs and folded solutions are left out.

    Raises:
        BookError: There is no such page or section.
    """
    text = SOLUTION.sub(" ", _text(root, page))
    if section is not None:
        text = _section(FENCE.sub(" ", text), section, page)
    for pattern in (FENCE, MATH, MARKUP):
        text = pattern.sub(" ", text)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def short_path(root: Path) -> list[Stop]:
    """Read the stops of the short path from ``book/path.yml``."""
    rows = yaml.safe_load((root / "book" / "path.yml").read_text(encoding="utf-8"))
    return [Stop(**row) for row in rows]


def _link(page: str, root: Path) -> str:
    """MyST link to a page from anywhere in the book."""
    suffix = "ipynb" if (root / "nbs" / f"{page}.ipynb").is_file() else "md"
    return f"[](/{page}.{suffix})"


def reading_page(root: Path) -> str:
    """Write the short path and the reading time of every chapter, part by part.

    Args:
        root: Checkout of the repository.

    Returns:
        MyST Markdown with two tables.
    """
    lines = ["| minutes | read | to know |", "|---|---|---|"]
    total = 0.0
    for stop in short_path(root):
        minutes = words(root, stop.page, stop.section) / WORDS_A_MINUTE
        total += minutes
        where = f", *{stop.section}*" if stop.section else ""
        lines.append(f"| {minutes:.1f} | {_link(stop.page, root)}{where} | {stop.why} |")
    lines += [f"| **{total:.1f}** | **in all** | |", "", "## Every chapter", ""]
    lines += ["| part | minutes | chapters |", "|---|---|---|"]
    toc = yaml.safe_load((root / "book" / "_toc.yml").read_text(encoding="utf-8"))
    for part in toc["parts"]:
        pages = [chapter["file"] for chapter in part["chapters"]]
        pages = [page for page in pages if (root / "nbs" / f"{page}.ipynb").is_file()]
        times = [words(root, page) / WORDS_A_MINUTE for page in pages]
        if pages:
            listed = ", ".join(
                f"{_link(page, root)} ({time:.0f})" for page, time in zip(pages, times, strict=True)
            )
            lines.append(f"| {part['caption']} | {sum(times):.0f} | {listed} |")
    return "\n".join(lines) + "\n"
