"""Rerun one chapter with a reader's own parameters or records, and set the numbers beside ours.

The chapter is executed twice on the reader's machine: as the book has it, and as the reader asks.
What differs between the two is due to the reader's parameters and records, and to nothing else.
"""

from __future__ import annotations

import ast
import hashlib
import html
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
from bs4 import BeautifulSoup
from nbformat import NotebookNode

from lmgeom.book.build import build, place_sources
from lmgeom.book.execute import Execution, Workspace, execute, executed_notebook
from lmgeom.book.pipeline import prepare_claims, prepare_data
from lmgeom.book.settings import load_profile, notebook_path
from lmgeom.book.staging import check_parameters, parameters_of
from lmgeom.book.summary import benchmark
from lmgeom.errors import BookError, ConfigError, RecordError
from lmgeom.study import claims
from lmgeom.study.band import check_run
from lmgeom.study.records import load_record, load_records
from lmgeom.study.shown import shown_claims

__all__ = ["Cell", "cells_of", "read_parameters", "rerun"]

NUMBER = re.compile(r"(?<![\w.])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)
PROSE = ("references.bib", "bibliography.md", "_config.yml", "_static/*")
ROUNDING = 1e-12  # differences up to this are no change
FOLDED = 14  # lines of a cell's output that are shown without a fold
INTRODUCTION = """
[Your executed chapter](/{name}.ipynb) stands next to this page. *Ours* below is the same chapter as
the book has it, executed on this machine, so that a difference is due to your parameters and
records alone. Where a cell measures time, both columns are single readings.
"""
CLAIMS = """
The verdicts of *ours* follow from the committed records, and from tests that passed when the book
was released; those of *yours* from your records and from the tests on this machine. The bars are
the same.
"""
STYLE = """<style>
.beside { table-layout: fixed; width: 100%; }
.beside pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.beside mark { background: none; color: var(--book-bad); font-weight: 600; }
</style>"""


def read_parameters(texts: Iterable[str], path: Path, name: str) -> dict[str, Any]:
    """Read a reader's parameters and check them against the chapter's parameters cell.

    Args:
        texts: NAME=VALUE; the value is a Python literal, or plain text where a text belongs.
        path: The clean notebook.
        name: Its name, for messages.

    Returns:
        Name to value.

    Raises:
        ConfigError: No NAME=VALUE, an unknown name, or a value of another kind.
    """
    defaults, found = parameters_of(path), {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"-p {text!r} is not NAME=VALUE, such as -p seed=3")
        try:
            found[key] = value if isinstance(defaults.get(key), str) else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    check_parameters(name, path, found)
    return found


@dataclass(frozen=True)
class Cell:
    """What one cell shows in the two executions, as text without drawings.

    Attributes:
        section: Heading above it.
        ours: As the book has it.
        yours: As the reader asked.
    """

    section: str
    ours: str
    yours: str

    @property
    def change(self) -> float | None:
        """Largest relative change of a number beyond rounding; None if more than numbers differ."""
        if NUMBER.sub("#", self.ours) != NUMBER.sub("#", self.yours):
            return None
        pairs = zip(_numbers(self.ours), _numbers(self.yours), strict=True)
        return max(
            (abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if abs(a - b) > ROUNDING),
            default=0.0,
        )


def _numbers(text: str) -> list[float]:
    """Numbers in a text, in order."""
    return [float(x.replace(",", "").replace("−", "-")) for x in NUMBER.findall(text)]


def _html_text(source: str) -> str:
    """Words of an HTML output, a table's row a line; nothing of claims and provenance."""
    page = BeautifulSoup(source, "html.parser")
    for element in page.select(".claims, table.provenance, style, script"):
        element.decompose()
    rows = [[cell.get_text(" ", strip=True) for cell in r.select("th, td")] for r in page("tr")]
    if rows:
        widths = [max(map(len, column)) for column in zip(*rows, strict=False)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=False)) for r in rows)
        return "\n".join(line.rstrip() for line in lines)
    return page.get_text(" ", strip=True)


def _output_text(output: NotebookNode) -> str:
    """Words and numbers of one output; none of a drawing."""
    if output.output_type == "stream":
        return str(output.text) if output.name == "stdout" else ""
    data = output.get("data", {})
    if any(kind.startswith("image/") for kind in data):
        return ""
    if "text/html" in data:
        return _html_text(data["text/html"])
    return str(data.get("text/markdown") or data.get("text/plain", ""))


def _shown(notebook: NotebookNode) -> dict[str, str]:
    """Text that each code cell shows, by the cell's id."""
    return {
        cell.id: "\n".join(filter(None, map(_output_text, cell.outputs))).strip()
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def cells_of(ours: NotebookNode, yours: NotebookNode) -> list[Cell]:
    """Pair the cells of two executions of a chapter that show words or numbers.

    Args:
        ours: Executed as the book has it.
        yours: Executed as the reader asked; it may have a cell of parameters more.
    """
    theirs, mine = _shown(yours), _shown(ours)
    section, found = "", []
    for cell in ours.cells:
        if cell.cell_type == "markdown":
            section = (HEADING.findall(cell.source) or [section])[-1]
        elif cell.cell_type == "code" and (mine[cell.id] or theirs.get(cell.id)):
            found.append(Cell(section, mine[cell.id], theirs.get(cell.id, "")))
    return found


def _claims_of(name: str, root: Path) -> list[dict[str, Any]]:
    """Claims that a chapter shows, in the ledger's order."""
    shown = shown_claims(root)
    return [row for key, row in claims.load_claims().items() if name in shown.get(key, ())]


def _hint(claim: Mapping[str, Any], root: Path) -> str:
    """Say what a reader has to run to answer a claim."""
    if "rule" in claim:
        study = claim["rule"]["study"]
        ran = load_records(study, root / "book" / "results")
        took = f", which took us {sum(r['seconds'] for r in ran) / 3600:.1f} hours of one process"
        return f"lmgeom study run {study} --results FOLDER" + (took if ran else "")
    if "benchmark" in claim:
        module, out = benchmark(claim)
        if (root / "tests" / "benchmarks" / f"{module}.py").is_file():
            return f"python -m tests.benchmarks.{module} --out FOLDER/{out}"
    return ""


def _verdict_html(verdict: claims.Verdict) -> str:
    """A verdict and its evidence, as in the claims table of a chapter."""
    kind = verdict.verdict.replace(" ", "-")
    evidence = html.escape(verdict.evidence).replace("`", "")
    word = f'<strong class="verdict verdict-{kind}">{verdict.verdict}</strong>'
    return f"{word}<br><small>{evidence}</small>"


def _claims_table(rows: Sequence[Mapping[str, Any]], root: Path, results: Path | None) -> str:
    """Verdicts on the book's records beside those on the reader's, claim by claim."""
    lines = []
    for claim in rows:
        ours = {claim["test"]: "passed"} if "test" in claim else {}
        published = claims.judge(claim, outcomes=ours, folder=root / "book" / "results")
        yours = published
        if "test" in claim:
            yours = claims.judge(claim, folder=results)
        elif "rule" in claim or "benchmark" in claim:
            nothing = claims.Verdict("not run here", "")
            yours = claims.judge(claim, folder=results) if results else nothing
        cell = _verdict_html(yours)
        unanswered = yours.verdict in claims.UNANSWERED or yours.verdict == "not run here"
        if unanswered and (hint := _hint(claim, root)):
            command, comma, took = hint.partition(", ")
            cell += f"<br><small><code>{html.escape(command)}</code>{comma}{took}</small>"
        name = f"<br><small><code>{claim['id']}</code></small>"
        words = html.escape(claim["claim"]).replace("`", "")
        lines.append(f"<tr><td>{words}{name}</td><td>{_verdict_html(published)}</td>")
        lines.append(f"<td>{cell}</td></tr>")
    head = "<tr><th>the claim</th><th>ours</th><th>yours</th></tr>"
    table = f'<table class="beside"><thead>{head}</thead>{"".join(lines)}</table>'
    return f'<div class="claims">{table}</div>'


def _marked(text: str, other: str, same_shape: bool) -> str:
    """A cell's text with the numbers that differ from the other's marked."""
    if not same_shape:
        return html.escape(text)
    theirs, parts, last = iter(NUMBER.findall(other)), [], 0
    for found in NUMBER.finditer(text):
        parts.append(html.escape(text[last : found.start()]))
        number = html.escape(found[0])
        parts.append(number if found[0] == next(theirs) else f"<mark>{number}</mark>")
        last = found.end()
    return "".join([*parts, html.escape(text[last:])])


def _beside(cell: Cell) -> str:
    """One cell's two texts side by side, folded where they are long."""
    same = cell.change is not None
    pair = (_marked(cell.ours, cell.yours, same), _marked(cell.yours, cell.ours, same))
    body = "".join(f"<td><pre>{text}</pre></td>" for text in pair)
    head = "<thead><tr><th>ours</th><th>yours</th></tr></thead>"
    table = f'<table class="beside">{head}<tr>{body}</tr></table>'
    lines = max(text.count("\n") + 1 for text in pair)
    if lines > FOLDED:
        return f"<details><summary>{lines} lines</summary>{table}</details>"
    return table


def _curve_words(run: Mapping[str, Any], records: Sequence[dict[str, Any]]) -> str:
    """Say whether the curve of a reader's run lies in the band of ours, and what else differs."""
    try:
        found = check_run(run, records)
    except RecordError as error:
        return str(error)
    inside = f"all {found.compared} evaluations inside"
    word = f"{len(found.outside)} of {found.compared} evaluations outside"
    return "; ".join([word if found.outside else inside, *found.other])


def _runs_table(results: Path, root: Path) -> Iterator[str]:
    """Markdown rows of the reader's runs beside the book's of the same study, arm and seed."""
    for study in sorted(path for path in results.iterdir() if path.is_dir()):
        records = load_records(study.name, root / "book" / "results")
        ours = {(r["arm"], r["seed"]): r["losses"]["val"] for r in records}
        for path in sorted(study.glob("*-seed*.json")):
            run = load_record(path)
            known, loss = ours.get((run["arm"], run["seed"])), run["losses"]["val"]
            pair = ["none", f"{loss:.4f}", ""]
            if known is not None:
                pair = [f"{known:.4f}", f"{loss:.4f}", f"{loss - known:+.4f}"]
            cells = [f"{run['study']}, {run['arm']}, seed {run['seed']}", *pair]
            yield f"| {' | '.join([*cells, _curve_words(run, records)])} |"


def _origin(title: str, run: Execution) -> str:
    """One line about an execution."""
    stack = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"- {title}: {run.seconds:.1f} s on {run.device}; {stack}; commit {run.commit}."


def _raw(text: str) -> list[str]:
    """Lines of Markdown around a piece of HTML."""
    return ["```{raw} html", text, "```", ""]


def _numbers_section(cells: Sequence[Cell]) -> list[str]:
    """Lines about what the cells show in the two executions."""
    differ = [cell for cell in cells if cell.ours != cell.yours]
    count = f"{len(cells) - len(differ)} of {len(cells)} cells that print something print the same"
    lines = ["## Number by number", ""]
    lines += [f"{count} in both executions.{' The others:' if differ else ''}", ""]
    for cell in differ:
        change = cell.change
        if change is None:
            word = ""
        else:
            word = f", largest change {change:.2%}" if change else ", rounding alone"
        lines += [f"**{cell.section}**{word}", "", *_raw(_beside(cell))]
    return lines


def _page(
    name: str,
    pair: tuple[NotebookNode, NotebookNode],
    runs: tuple[Execution, Execution],
    given: Mapping[str, Any],
    results: Path | None,
    root: Path,
) -> str:
    """Write the page that sets the reader's numbers beside ours."""
    defaults = parameters_of(notebook_path(root, name)) | runs[0].parameters
    title = (HEADING.findall(pair[0].cells[0].source) or [name])[0]
    lines = [f"# Your numbers beside ours: {title}", "", *_raw(STYLE)]
    lines += [INTRODUCTION.format(name=name)]
    if given:
        lines += ["| parameter | ours | yours |", "| --- | --- | --- |"]
        lines += [f"| `{k}` | `{defaults[k]!r}` | `{value!r}` |" for k, value in given.items()]
    if results:
        lines += ["", f"Records: those in `{results}`, and ours of studies that you have not run."]
    if rows := _claims_of(name, root):
        lines += ["", "## Claim by claim", CLAIMS, *_raw(_claims_table(rows, root, results))]
    if results:
        lines += ["", "## Run by run", "", "| run | ours | yours | difference | our band |"]
        lines += ["| --- | ---: | ---: | ---: | --- |", *_runs_table(results, root)]
        lines += ["", "Losses at the end of training, in nats, on the validation text."]
    lines += ["", *_numbers_section(cells_of(*pair))]
    lines += ["## Where the numbers come from", "", _origin("Ours", runs[0])]
    return "\n".join([*lines, _origin("Yours", runs[1]), ""])


def _slug(name: str, given: Mapping[str, Any], results: Path | None) -> str:
    """Name of a rerun's folder: the chapter and what the reader changed."""
    words = [f"{key}={value}" for key, value in given.items()]
    if results:
        words.append(f"results={results}")
    text = ",".join(words)
    if not re.fullmatch(r"[\w.=,+-]{1,60}", text):
        text = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{name.replace('/', '-')},{text}"


def _overlay(root: Path, results: Path, target: Path) -> Path:
    """Copy the book's records, and over them each study that the reader has records of."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(root / "book" / "results", target)
    for folder in (path for path in results.iterdir() if path.is_dir()):
        if folder.name != "benchmarks":
            shutil.rmtree(target / folder.name, ignore_errors=True)
        if not folder.name.startswith("_"):
            shutil.copytree(folder, target / folder.name, dirs_exist_ok=True)
    return target


def rerun(
    root: Path,
    name: str,
    texts: Sequence[str],
    *,
    results: Path | None = None,
    profile: str = "smoke",
) -> Path:
    """Execute a chapter with a reader's parameters and records, and compare it with the book's.

    What is finished is not done again: each execution is kept with a hash of what determines it.

    Args:
        root: Checkout of the repository.
        name: The chapter, as `lev/01_spline`.
        texts: The reader's parameters, each NAME=VALUE.
        results: Folder of the reader's records, as `lmgeom study run --results` writes them.
        profile: The profile whose parameters hold where the reader gives none.

    Returns:
        The page that sets the reader's numbers beside ours; the executed chapter is linked there.

    Raises:
        ConfigError: Unknown chapter or parameter, a value of another kind, or nothing to change.
        BookError: The chapter failed with these parameters, or the pages cannot be built.
    """
    path = notebook_path(root, name)
    given = read_parameters(texts, path, name)
    settings = load_profile(root, profile)
    ours = settings.parameters.get(name, {})
    if not given and results is None:
        known = ", ".join(f"{k} = {v!r}" for k, v in (parameters_of(path) | ours).items())
        raise ConfigError(f"nothing to change: give -p or --results; {name} has {known or 'none'}")
    if results is not None and not results.is_dir():
        raise ConfigError(f"results {str(results)!r} is not a folder that exists")
    results = results and results.resolve()
    prepared = prepare_data(settings)
    prepare_claims(root)
    execute(root, settings, names=[name], prepared=prepared)
    label = f"rerun/{_slug(name, given, results)}"
    mine = replace(settings, name=label, parameters={name: ours | given})
    work = Workspace(root, label)
    records = _overlay(root, results, work.base / "results") if results else None
    execute(root, mine, names=[name], prepared=prepared, results=records)
    return _pages(root, name, Workspace(root, settings.name), work, given, results)


def _pages(
    root: Path,
    name: str,
    book: Workspace,
    work: Workspace,
    given: Mapping[str, Any],
    results: Path | None,
) -> Path:
    """Build the comparison, the executed chapter and the bibliography as a book of three pages."""
    ours, yours = book.execution(name), work.execution(name)
    if ours is None or yours is None:
        raise BookError(f"{name} has no finished execution")
    pair = executed_notebook(book, name), executed_notebook(work, name)
    text = _page(name, pair, (ours, yours), given, results, root)
    toc = f"format: jb-book\nroot: index\nchapters:\n  - file: {name}\n  - file: bibliography\n"
    files = {PurePosixPath("index.md"): text.encode(), PurePosixPath("_toc.yml"): toc.encode()}
    content = nbformat.writes(pair[1]) + "\n"
    files[PurePosixPath(f"{name}.ipynb")] = content.encode()
    place_sources(work, PROSE, files)
    return build(work, strict=False)
