"""Execute the notebooks of a profile, two at a time, and only those whose inputs changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from lmgeom import figures
from lmgeom.book.dependencies import fingerprint
from lmgeom.book.settings import Profile, notebook_names, notebook_path
from lmgeom.book.staging import stage
from lmgeom.errors import BookError

__all__ = ["Execution", "Workspace", "execute", "executed_notebook", "pending"]

ANSI = re.compile(r"\x1b\[[0-9;]*m")
TRACEBACK_LINES = 8


@dataclass(frozen=True)
class Execution:
    """What is known about the last good execution of a notebook.

    Attributes:
        name: Notebook, as `lev/01_spline`.
        stamp: Hash of what determines the outputs.
        profile: Profile it ran in.
        parameters: Parameters that differ from the notebook's defaults.
        seconds: Wall time.
        versions: Package to version.
        device: Processor or GPU.
        commit: Commit that was checked out.
        finished: UTC time, ISO 8601.
    """

    name: str
    stamp: str
    profile: str
    parameters: dict[str, Any]
    seconds: float
    versions: dict[str, str]
    device: str
    commit: str
    finished: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


@dataclass(frozen=True)
class Workspace:
    """Folders of one profile below `_build`.

    Attributes:
        root: Checkout of the repository.
        profile: Name of the profile.
    """

    root: Path
    profile: str

    @property
    def base(self) -> Path:
        """Folder of everything this profile builds."""
        return self.root / "_build" / self.profile

    @property
    def sources(self) -> Path:
        """Folder that Jupyter Book reads."""
        return self.base / "book"

    @property
    def html(self) -> Path:
        """Folder of the finished pages."""
        return self.base / "out" / "_build" / "html"

    def file(self, kind: str, name: str, suffix: str = ".ipynb") -> Path:
        """Path of a notebook's file of a kind: staged, executed, failed, log."""
        path = self.base / kind / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def execution(self, name: str) -> Execution | None:
        """Record of a notebook's last good execution, None where there is none."""
        path = self.file("executed", name, ".json")
        try:
            return Execution(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def _start_worker(parent: int, results: Path | None) -> None:
    """Set the environment of a worker, which its kernels inherit, and end it with its parent."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONHASHSEED="0")
    if results is not None:
        os.environ["LMGEOM_RESULTS"] = str(results)
    os.environ.pop("MPLBACKEND", None)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(staged: Path, executed: Path, log: Path, folder: Path, timeout: int) -> float:
    """Execute one staged notebook in this process; its kernel's own messages go to a log."""
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        papermill.execute_notebook(
            str(staged),
            str(executed),
            kernel_name="python3",
            cwd=str(folder),
            execution_timeout=timeout,
            progress_bar=False,
        )
    return time.perf_counter() - started


def _excerpt(traceback: list[str]) -> list[str]:
    """The notebook's own frame of a traceback, and its end."""
    lines = [x for x in ANSI.sub("", "\n".join(traceback)).splitlines() if x.strip()]
    frames = [i for i, line in enumerate(lines) if line.startswith("Cell In[")]
    start = frames[-1] if frames else 0
    if len(lines) - start <= 2 * TRACEBACK_LINES:
        return lines[start:]
    return [*lines[start : start + TRACEBACK_LINES], "...", *lines[-TRACEBACK_LINES:]]


def _last_cell(copy: Path) -> str:
    """Say which cell was executed when papermill gave up: the last that is not pending."""
    begun: list[str] = []
    if copy.is_file():
        for cell in nbformat.read(copy, as_version=4).cells:
            if cell.metadata.get("papermill", {}).get("status", "pending") != "pending":
                begun.append(cell.id)
    return f", cell {begun[-1]}" if begun else ""


def _explain(name: str, error: BaseException, notebook: NotebookNode, copy: Path) -> str:
    """Say which cell failed and how, in a few lines."""
    if isinstance(error, PapermillExecutionError):
        cell = notebook.cells[error.cell_index]
        lines = [f"{name}, cell {cell.id}: {error.ename}: {error.evalue}".splitlines()[0]]
        lines += [f"    {line[:160]}" for line in _excerpt(error.traceback)]
    else:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        lines = [f"{name}{_last_cell(copy)}: {type(error).__name__}: {reason}"]
    return "\n".join([*lines, f"    executed copy: {copy}"])


def _keep(work: Workspace, name: str, error: BaseException) -> str:
    """Move a failed execution aside and explain it."""
    unfinished, failed = work.file("running", name), work.file("failed", name)
    if unfinished.exists():
        shutil.move(unfinished, failed)
    staged = nbformat.read(work.file("staged", name), as_version=4)
    return _explain(name, error, staged, failed)


def _plan(
    work: Workspace,
    profile: Profile,
    names: Iterable[str],
    prepared: Path | None,
    results: Path | None,
) -> tuple[list[str], list[Execution]]:
    """Stage every notebook; return the names that are up to date and what the others will be."""
    fresh, todo = [], []
    for name in names:
        path = notebook_path(work.root, name)
        parameters = profile.parameters.get(name, {})
        notebook = stage(name, path, parameters, profile.name)
        stamp = fingerprint(notebook, work.root, prepared, results)
        nbformat.write(notebook, work.file("staged", name))
        last = work.execution(name)
        if last and last.stamp == stamp and work.file("executed", name).is_file():
            fresh.append(name)
            continue
        todo.append(
            Execution(
                name,
                stamp,
                profile.name,
                parameters,
                last.seconds if last else float("inf"),
                figures.versions(),
                figures.device(),
                figures.commit(),
            )
        )
    return fresh, sorted(todo, key=lambda item: (-item.seconds, item.name.split("/")[0]))


def pending(root: Path, profile: Profile, *, prepared: Path | None = None) -> list[Execution]:
    """Executions that a profile lacks, the longest first.

    Args:
        root: Checkout of the repository.
        profile: Its parameters count.
        prepared: Folder of prepared data sets.

    Returns:
        What each would be; its `seconds` are those of the last time, infinite if there was none.
    """
    work = Workspace(root, profile.name)
    return _plan(work, profile, notebook_names(root), prepared, None)[1]


def _finish(work: Workspace, planned: Execution, seconds: float) -> None:
    """Put a good execution in place and write its record."""
    os.replace(work.file("running", planned.name), work.file("executed", planned.name))
    done = Execution(**{**asdict(planned), "seconds": round(seconds, 2)})
    path = work.file("executed", planned.name, ".json")
    path.write_text(json.dumps(asdict(done), indent=1) + "\n", encoding="utf-8")
    work.file("failed", planned.name).unlink(missing_ok=True)


def execute(
    root: Path,
    profile: Profile,
    *,
    names: Iterable[str] = (),
    prepared: Path | None = None,
    results: Path | None = None,
) -> list[str]:
    """Execute the notebooks whose inputs changed, with a line of progress each.

    Args:
        root: Checkout of the repository.
        profile: Workers, time-out and parameters.
        names: Notebooks to execute; all by default.
        prepared: Folder of prepared data sets, part of what determines the outputs.
        results: Folder of records that the notebooks read; the committed ones by default.

    Returns:
        Names of the notebooks executed now.

    Raises:
        ConfigError: Unknown notebook, directive or parameter.
        BookError: A notebook failed; all others have run, and the message has each failure's cell
            and last lines.
    """
    work = Workspace(root, profile.name)
    fresh, todo = _plan(work, profile, list(names) or notebook_names(root), prepared, results)
    total, failures = len(fresh) + len(todo), []
    print(f"notebooks: {len(fresh)} up to date, {len(todo)} to run, {profile.workers} at a time")
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(profile.workers, spawn, _start_worker, (os.getpid(), results))
    running: dict[Future[float], Execution] = {}
    try:
        for item in todo:
            staged, now = (work.file(kind, item.name) for kind in ("staged", "running"))
            log = work.file("log", item.name, ".txt")
            folder = notebook_path(root, item.name).parent
            running[pool.submit(_run, staged, now, log, folder, profile.timeout)] = item
        for done, future in enumerate(as_completed(running), len(fresh) + 1):
            item = running[future]
            if error := future.exception():
                failures.append(_keep(work, item.name, error))
                print(f"  [{done}/{total}] {item.name}: FAILED", flush=True)
                continue
            seconds = future.result()
            _finish(work, item, seconds)
            print(f"  [{done}/{total}] {item.name}: {seconds:.1f} s", flush=True)
    except BaseException:  # interrupted: end the notebooks that still run, and do not wait for them
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if failures:
        raise BookError("\n".join([f"{len(failures)} notebook(s) failed", *failures]))
    return [item.name for item in todo]


def _is_image(output: NotebookNode) -> bool:
    """Tell whether an output is a drawing."""
    return any(kind.startswith("image/") for kind in output.get("data", {}))


def _split_figure(name: str, cell: NotebookNode) -> list[NotebookNode]:
    """Give a captioned drawing a cell of its own, so that a table below it takes no caption."""
    if "figure" not in cell.metadata.get("mystnb", {}):
        return [cell]
    images = [output for output in cell.outputs if _is_image(output)]
    if len(images) != 1:
        raise BookError(f"{name}, cell {cell.id}: one caption, but {len(images)} drawings")
    others = [output for output in cell.outputs if not _is_image(output)]
    cell.outputs = images
    if not others:
        return [cell]
    tags = ["remove-input"]
    source = "# numbers of the figure above"  # myst-nb drops a cell without source
    more = nbformat.v4.new_code_cell(source, id=f"{cell.id}-more"[:64], metadata={"tags": tags})
    more.outputs, more.execution_count = others, cell.execution_count
    return [cell, more]


def executed_notebook(work: Workspace, name: str) -> NotebookNode:
    """Staged notebook with the outputs of its last execution, laid out for the page.

    Prose is taken from the staged notebook, so that an edit of it needs no new execution.

    Args:
        work: Folders of the profile.
        name: Notebook.

    Returns:
        The notebook to show.

    Raises:
        BookError: A cell with the caption of a figure drew none, or several.
    """
    notebook = nbformat.read(work.file("staged", name), as_version=4)
    executed = nbformat.read(work.file("executed", name), as_version=4)
    ran = {cell.id: cell for cell in executed.cells if cell.cell_type == "code"}
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = ran[cell.id].outputs
            cell.execution_count = ran[cell.id].execution_count
            cells += _split_figure(name, cell)
        else:
            cells.append(cell)
    notebook.cells = cells
    return notebook
