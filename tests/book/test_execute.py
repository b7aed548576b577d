"""Execution: only what changed runs again, and a failure says where it happened."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lmgeom.book.dependencies import Modules, fingerprint
from lmgeom.book.execute import Workspace, execute, executed_notebook
from lmgeom.book.settings import Profile
from lmgeom.errors import BookError

PROFILE = Profile("smoke", 2, 60, [])


@pytest.fixture
def checkout(tmp_path):
    """A small checkout: a library of three modules and a writer of notebooks."""
    (tmp_path / "settings.ini").write_text("")
    files = {
        "__init__.py": "",
        "a.py": "X = 1\n",
        "b.py": "from .a import X\n\n\ndef twice():\n    return 2 * X\n",
        "pack/__init__.py": "from lmgeom.pack.c import used\nfrom .d import other\n",
        "pack/c.py": "def used():\n    return 1\n",
        "pack/d.py": "import lmgeom.b\n\n\ndef other():\n    return 2\n",
    }
    for name, text in files.items():
        path = tmp_path / "lmgeom" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def notebook(*sources, prose="# Title"):
    """A notebook of some code cells."""
    cells = [new_markdown_cell(prose, id="title")]
    cells += [new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def write(root, name, *sources, **options):
    """Write a notebook into a checkout."""
    path = root / "nbs" / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook(*sources, **options), path)


@pytest.mark.parametrize(
    ("source", "reached"),
    [
        ("import math", set()),
        ("import lmgeom.a", {"lmgeom.a"}),
        ("from lmgeom import b", {"lmgeom.b", "lmgeom.a"}),
        ("from lmgeom.b import twice", {"lmgeom.b", "lmgeom.a"}),
        ("from lmgeom.pack import used", {"lmgeom.pack.c"}),
        ("def f():\n    from lmgeom.pack import other", {"lmgeom.pack.d", "lmgeom.b", "lmgeom.a"}),
        ("%time 1\nimport lmgeom.a", {"lmgeom.a"}),
    ],
)
def test_modules_reached(checkout, source, reached):
    assert set(Modules(checkout).of_notebook(notebook(source))) == reached


@pytest.mark.parametrize("source", ["!python -m lmgeom", "import subprocess"])
def test_a_notebook_that_starts_programs_reaches_all(checkout, source):
    assert len(Modules(checkout).of_notebook(notebook(source))) == 6


def test_fingerprint_follows_meaning_and_not_layout(checkout):
    book = notebook("from lmgeom.b import twice")
    before = fingerprint(book, checkout)
    (checkout / "lmgeom" / "a.py").write_text("# a comment\nX   =   1\n")
    (checkout / "lmgeom" / "pack" / "c.py").write_text("def used():\n    return 5\n")
    assert fingerprint(book, checkout) == before
    book.cells[0].source = "# Another title"
    assert fingerprint(book, checkout) == before
    (checkout / "lmgeom" / "a.py").write_text("X = 2\n")
    changed = fingerprint(book, checkout)
    assert changed != before
    book.cells[1].source += "\ntwice()"
    assert fingerprint(book, checkout) != changed


def test_fingerprint_counts_records_and_data_of_those_who_read_them(checkout, tmp_path):
    for part in ("study", "data"):
        (checkout / "lmgeom" / f"{part}.py").write_text("")
    records, prepared = checkout / "book" / "results", tmp_path / "prepared"
    records.mkdir(parents=True)
    (prepared / "core").mkdir(parents=True)
    reads = notebook("import lmgeom.study, lmgeom.data")
    plain = notebook("import lmgeom.a")

    def now():
        return fingerprint(reads, checkout, prepared), fingerprint(plain, checkout, prepared)

    first = now()
    (records / "run.json").write_text("{}")
    second = now()
    (prepared / "core" / "manifest.json").write_text("{}")
    third = now()
    assert len({first[0], second[0], third[0]}) == 3
    assert first[1] == second[1] == third[1]


def test_runs_once_then_only_what_changed(checkout, capsys):
    write(checkout, "part/01_one", "1 + 1")
    write(checkout, "part/02_two", "2 + 2")
    assert sorted(execute(checkout, PROFILE)) == ["part/01_one", "part/02_two"]
    assert "0 up to date, 2 to run" in capsys.readouterr().out
    write(checkout, "part/01_one", "1 + 1", prose="# New prose")
    assert execute(checkout, PROFILE) == []
    work = Workspace(checkout, "smoke")
    shown = executed_notebook(work, "part/01_one")
    assert shown.cells[0].source == "# New prose"
    assert shown.cells[1].outputs[0].data["text/plain"] == "2"
    write(checkout, "part/02_two", "2 + 3")
    assert execute(checkout, PROFILE) == ["part/02_two"]
    record = work.execution("part/02_two")
    assert record.seconds > 0
    assert record.profile == "smoke"


def test_parameter_of_the_profile_changes_the_output(checkout):
    write(checkout, "part/01_one", "seed: int = 0", "seed")
    path = checkout / "nbs" / "part" / "01_one.ipynb"
    book = nbformat.read(path, 4)
    book.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(book, path)
    for seed in (1, 2):
        execute(checkout, Profile("smoke", 1, 60, [], {"part/01_one": {"seed": seed}}))
        shown = executed_notebook(Workspace(checkout, "smoke"), "part/01_one")
        assert shown.cells[-1].outputs[0].data["text/plain"] == str(seed)


def test_failure_names_the_cell_and_spares_the_others(checkout):
    write(checkout, "part/01_bad", "x = 1", "assert x == 2, 'x is not 2'")
    write(checkout, "part/02_good", "1")
    with pytest.raises(BookError) as caught:
        execute(checkout, PROFILE)
    message = str(caught.value)
    assert "part/01_bad, cell cell-1: AssertionError: x is not 2" in message
    assert len(message.splitlines()) < 20
    work = Workspace(checkout, "smoke")
    assert str(work.file("failed", "part/01_bad")) in message
    assert work.file("failed", "part/01_bad").is_file()
    assert work.execution("part/01_bad") is None
    assert work.execution("part/02_good") is not None


def test_cell_that_takes_too_long_fails(checkout):
    write(checkout, "part/01_slow", "import time\ntime.sleep(60)")
    with pytest.raises(BookError, match=r"part/01_slow, cell cell-0: CellTimeoutError"):
        execute(checkout, Profile("smoke", 1, 1, []))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ended_build_leaves_no_process(checkout, tmp_path, number):
    mark = tmp_path / "begun"
    write(checkout, "part/01_slow", f"import time\nopen({str(mark)!r}, 'w')\ntime.sleep(300)")
    script = tmp_path / "run.py"
    script.write_text(
        "import signal\n"
        "from pathlib import Path\n"
        "from lmgeom.book.execute import execute\n"
        "from lmgeom.book.settings import Profile\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it\n"
        f"    execute(Path({str(checkout)!r}), Profile('smoke', 1, 600, []))\n"
    )
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, script], **quiet) as process:
        deadline = time.monotonic() + 120
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.wait(60)
    assert len(family) >= 2, "a worker and its kernel"
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_table_below_a_captioned_figure_gets_its_own_cell(checkout):
    source = (
        "from IPython.display import HTML, SVG, display\n"
        "display(HTML('<p>before</p>'), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))"
    )
    write(checkout, "part/01_one", source)
    path = checkout / "nbs" / "part" / "01_one.ipynb"
    book = nbformat.read(path, 4)
    book.cells[1].metadata["mystnb"] = {"figure": {"name": "fig-x", "caption": "A caption"}}
    nbformat.write(book, path)
    execute(checkout, PROFILE)
    cells = executed_notebook(Workspace(checkout, "smoke"), "part/01_one").cells
    assert [next(iter(c.outputs[0].data)) for c in cells[1:]] == ["image/svg+xml", "text/html"]
    assert cells[2].metadata.tags == ["remove-input"]
    assert cells[2].source, "myst-nb drops a cell without source, and its outputs with it"


def test_caption_without_a_figure_is_a_fault(checkout):
    write(checkout, "part/01_one", "1")
    path = checkout / "nbs" / "part" / "01_one.ipynb"
    book = nbformat.read(path, 4)
    book.cells[1].metadata["mystnb"] = {"figure": {"name": "fig-x", "caption": "A caption"}}
    nbformat.write(book, path)
    execute(checkout, PROFILE)
    with pytest.raises(BookError, match="cell cell-0: one caption, but 0 drawings"):
        executed_notebook(Workspace(checkout, "smoke"), "part/01_one")
