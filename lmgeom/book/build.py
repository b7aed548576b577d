"""Assemble the executed notebooks and the prose pages, and build the book from them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import nbformat
import yaml

from lmgeom.book.assets import web_assets
from lmgeom.book.dark import draw_for_dark
from lmgeom.book.downloads import offer_notebooks
from lmgeom.book.execute import Execution, Workspace, executed_notebook
from lmgeom.book.library import Library
from lmgeom.book.reading import reading_page
from lmgeom.book.reference import annotate, reference_pages
from lmgeom.book.settings import notebook_names
from lmgeom.book.summary import front_table
from lmgeom.errors import BookError
from lmgeom.study import claims
from lmgeom.study.shown import shown_claims

__all__ = ["assemble", "build", "chapters", "place_sources", "status_page"]

PROSE = ("*.md", "*.bib", "_config.yml", "_toc.yml", "_static/**/*")
PARTS = {
    "input": "Input: token ids on a smooth surface",
    "depth": "Depth: width where it works",
    "output": "Output: a step measured by what it moves",
    "together": "Together: the three parts in one model",
}


def chapters(toc: Path) -> list[str]:
    """Names of all pages in a table of contents, in reading order."""
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("root", "file"):
                    found.append(str(value))
                else:
                    walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(yaml.safe_load(toc.read_text(encoding="utf-8")))
    return found


def _row(cells: Iterable[object]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def status_page(executions: Iterable[Execution]) -> str:
    """Write the status page: what ran, when, how long, on what.

    Args:
        executions: One record a notebook, in reading order.

    Returns:
        MyST Markdown.
    """
    rows = list(executions)
    if not rows:
        raise BookError("no notebook has been executed: there is no status to show")
    head = ("Page", "Run time", "Finished (UTC)", "Commit", "Parameters set by the profile")
    lines = [
        "# Status",
        "",
        "Every page of this book that shows a number was executed from a clean notebook before the "
        f"pages were built: {len(rows)} notebooks, {sum(row.seconds for row in rows):.0f} s of "
        f"run time in all, one thread each, profile *{rows[0].profile}*.",
        "",
        _row(head),
        _row("---" for _ in head),
    ]
    for row in rows:
        values = ", ".join(f"`{key} = {value!r}`" for key, value in row.parameters.items())
        finished = row.finished[:16].replace("T", " ")
        cells = (f"[](/{row.name}.ipynb)", f"{row.seconds:.1f} s", finished, row.commit)
        lines.append(_row((*cells, values or "none")))
    lines += ["", "## Versions and devices", ""]
    stacks: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        stack = tuple(f"{name} {version}" for name, version in row.versions.items())
        stacks.setdefault((row.device, *stack), []).append(row.name)
    for (device, *found), names in stacks.items():
        where = "All pages" if len(stacks) == 1 else ", ".join(f"[](/{n}.ipynb)" for n in names)
        lines += [f"- {where}: {device}; {', '.join(found)}."]
    return "\n".join(lines) + "\n"


def claims_page() -> str:
    """Write the claims ledger with its computed verdicts, part by part, for the front page."""
    rows = list(claims.load_claims().values())
    known = [*PARTS, *sorted({row["part"] for row in rows} - PARTS.keys())]
    chapters, lines = shown_claims(), []
    for part in known:
        if mine := [row for row in rows if row["part"] == part]:
            lines += [f"### {PARTS.get(part, part)}", ""]
            lines += ["```{raw} html", claims.overview(mine, chapters), "```", ""]
    return "\n".join(lines)


def _replace(folder: Path, files: dict[PurePosixPath, bytes]) -> None:
    """Make a folder hold exactly some files; unchanged ones keep their time of change."""
    for path in sorted(folder.rglob("*"), reverse=True):
        name = PurePosixPath(path.relative_to(folder).as_posix())
        if path.is_file() and name not in files:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def place_sources(
    work: Workspace, patterns: Iterable[str], made: Mapping[PurePosixPath, bytes]
) -> None:
    """Make the folder that Jupyter Book reads hold some of the book's files and some made ones.

    Args:
        work: Folders of the profile.
        patterns: Which files below `book` to take.
        made: Content by path of the other files; web assets are added.

    Raises:
        BookError: An asset cannot be downloaded.
    """
    book = work.root / "book"
    taken = {path for pattern in patterns for path in book.glob(pattern) if path.is_file()}
    files = {PurePosixPath(p.relative_to(book).as_posix()): p.read_bytes() for p in taken}
    files |= {PurePosixPath("_assets/_static") / name: data for name, data in web_assets().items()}
    _replace(work.sources, {**files, **made})


def assemble(work: Workspace) -> None:
    """Put together the folder that Jupyter Book reads: prose, chapters, reference, web assets.

    Args:
        work: Folders of the profile, with every notebook executed.

    Raises:
        BookError: A notebook has not been executed, or an asset cannot be downloaded.
    """
    files: dict[PurePosixPath, bytes] = {}
    order = chapters(work.root / "book" / "_toc.yml")
    names = notebook_names(work.root)
    if absent := [name for name in names if name not in order]:
        raise BookError(f"book/_toc.yml lacks {', '.join(absent)}")
    library, executions = Library(work.root), []
    for name in sorted(names, key=order.index):
        execution = work.execution(name)
        if execution is None:
            raise BookError(f"{name} has not been executed in profile {work.profile}")
        executions.append(execution)
        page = annotate(executed_notebook(work, name), name, library)
        files[PurePosixPath(f"{name}.ipynb")] = (nbformat.writes(page) + "\n").encode()
    files |= reference_pages(library)
    files[PurePosixPath("status.md")] = status_page(executions).encode()
    files[PurePosixPath("_generated/claims.md")] = claims_page().encode()
    files[PurePosixPath("_generated/found.md")] = front_table().encode()
    files[PurePosixPath("_generated/reading.md")] = reading_page(work.root).encode()
    place_sources(work, PROSE, files)


def build(work: Workspace, *, strict: bool = True) -> Path:
    """Build the pages; any warning of Sphinx is an error.

    Args:
        work: Folders of the profile, assembled.
        strict: Let warnings count. A part of the book alone refers to pages that are not there.

    Returns:
        Path of the front page.

    Raises:
        BookError: Sphinx found fault; the message has its warnings.
    """
    out = work.base / "out"
    program = Path(sys.executable).with_name("jupyter-book")
    command: list[str | Path] = [program, "build", work.sources]
    command += ["--path-output", out, "-q", *(("-W", "-n", "--keep-going") if strict else ())]
    environment = {**os.environ, "LMGEOM_ROOT": str(work.root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stderr + done.stdout)
        lines = [x for x in text.splitlines() if re.search("WARNING|ERROR|Error", x)]
        lines = lines or text.splitlines()[-20:]
        # Sphinx warns only about pages it reads anew: forget them, or the next build looks clean.
        shutil.rmtree(out / "_build" / ".doctrees", ignore_errors=True)
        raise BookError("\n".join([f"the book has {len(lines)} fault(s)", *lines[:40]]))
    draw_for_dark(work.html)
    offer_notebooks(work)
    return work.html / "index.html"
