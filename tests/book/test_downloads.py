"""What a reader takes away: notebooks for Colab, and the book in a zip."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import types
import zipfile

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from lmgeom import __version__
from lmgeom.book import downloads
from lmgeom.book.execute import Workspace
from lmgeom.cli import main


@pytest.fixture
def notebook(tmp_path):
    """Write a notebook of one code cell."""

    def _notebook(source="x = 1"):
        path = tmp_path / "nbs" / "lev" / "01_spline.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(new_notebook(cells=[new_code_cell(source, id="one")]), path)
        return path

    return _notebook


def test_outside_colab_the_first_cell_does_nothing(notebook):
    first = downloads.colab_notebook(notebook()).cells[0]
    assert first.outputs == []
    names = {}
    exec(first.source, names)
    assert set(names) == {"__builtins__", "sys"}


def test_in_colab_the_first_cell_installs_this_release_and_shows_its_book(
    notebook, monkeypatch, tmp_path
):
    release, calls = f"lmgeom-{__version__}", []

    def run(command, check):
        assert check
        calls.append(command[3:])
        if command[3] == "download":
            with tarfile.open(f"{release}.tar.gz", "w:gz") as file:
                info = tarfile.TarInfo(f"{release}/settings.ini")
                file.addfile(info, io.BytesIO())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("LMGEOM_ROOT", "")
    exec(downloads.colab_notebook(notebook()).cells[0].source, {})
    assert calls[0][-1] == f"lmgeom=={__version__}"
    assert calls[1][-2:] == [f"./{release}[data]", "matplotlib>=3.9"]
    assert os.environ["LMGEOM_ROOT"] == str(tmp_path / release)
    assert (tmp_path / release / "settings.ini").is_file()


@pytest.mark.parametrize(
    ("source", "extra"),
    [("import torch", "data"), ("x = 1\nfrom transformers import AutoModel", "hub")],
)
def test_colab_gets_the_packages_that_the_chapter_imports(notebook, source, extra):
    assert f"[{extra}]" in downloads.colab_notebook(notebook(source)).cells[0].source


def test_pages_offer_both_notebooks_without_outputs(notebook, tmp_path):
    clean = notebook()
    work = Workspace(tmp_path, "smoke")
    offered = work.html / "_sources" / "lev" / "01_spline.ipynb"
    offered.parent.mkdir(parents=True)
    offered.write_text("executed")
    downloads.offer_notebooks(work)
    assert offered.read_bytes() == clean.read_bytes()
    colab = nbformat.read(offered.with_name("01_spline.colab.ipynb"), 4)
    nbformat.validate(colab)
    assert [cell.id for cell in colab.cells] == ["colab", "one"]


def test_button_stands_after_the_one_of_the_clean_notebook():
    first, last = {"text": ".ipynb"}, {"text": ".pdf"}
    group = {"label": "download-buttons", "buttons": [first, last]}
    context = {"sourcename": "lev/01_spline.ipynb", "header_buttons": [group]}
    context["pathto"] = lambda name, kind: f"../{name}"
    downloads._add_button(None, "lev/01_spline", "page.html", context, None)
    assert [button["text"] for button in group["buttons"]] == [".ipynb", ".ipynb, Colab", ".pdf"]
    assert group["buttons"][1]["url"] == "../_sources/lev/01_spline.colab.ipynb"


def test_page_without_a_notebook_gets_no_button():
    group = {"label": "download-buttons", "buttons": [{"text": ".md"}]}
    context = {"sourcename": "index.md", "header_buttons": [group]}
    downloads._add_button(None, "index", "page.html", context, None)
    assert len(group["buttons"]) == 1


def test_same_pages_give_the_same_zip(tmp_path):
    written = []
    for name, order in (("a", ["index.html", "lev/x.html"]), ("b", ["lev/x.html", "index.html"])):
        folder = tmp_path / name
        for place, page in enumerate(order):
            (folder / page).parent.mkdir(parents=True, exist_ok=True)
            (folder / page).write_text(f"<p>{page}</p>")
            os.utime(folder / page, (place, place))
        (folder / ".buildinfo").write_text(json.dumps(order))
        out = tmp_path / f"{name}-out" / "book.zip"
        out.parent.mkdir()
        written.append(downloads.zip_book(folder, out))
    assert written[0].read_bytes() == written[1].read_bytes()
    with zipfile.ZipFile(written[0]) as file:
        assert file.namelist() == ["book/index.html", "book/lev/x.html"]
    assert [path.name for path in written[0].parent.iterdir()] == ["book.zip"]


def test_command_packs_the_built_pages_once_there_are_some(tmp_path, monkeypatch, capsys):
    settings = "[smoke]\nworkers = 1\ntimeout = 60\ntokenizers = []\n"
    (tmp_path / "settings.ini").write_text(settings)
    monkeypatch.chdir(tmp_path)
    assert main(["book", "zip"]) == 2
    assert "run make book PROFILE=smoke first" in capsys.readouterr().err
    folder = Workspace(tmp_path, "smoke").html
    folder.mkdir(parents=True)
    (folder / "index.html").write_text("<p>front</p>")
    assert main(["book", "zip"]) == 0
    out = tmp_path / "_build" / "smoke" / "lmgeom-book.zip"
    assert str(out) in capsys.readouterr().out
    assert zipfile.ZipFile(out).namelist() == ["lmgeom-book/index.html"]
