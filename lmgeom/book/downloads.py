"""What a reader takes away: clean notebooks, notebooks ready for Colab, the whole book in a zip.

This module is a Sphinx extension, too: it adds the notebook for Colab to a page's download button.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from lmgeom import __version__
from lmgeom.book.execute import Workspace
from lmgeom.book.settings import notebook_names, notebook_path

__all__ = ["colab_notebook", "offer_notebooks", "zip_book"]

COLAB = "colab.ipynb"  # ending of the second notebook of a page
SETUP = """# Colab only: the released library, and the book's claims and records beside it.
import sys

if "google.colab" in sys.modules:
    import os
    import subprocess
    import tarfile

    pip, release = [sys.executable, "-m", "pip"], "lmgeom-{version}"
    fetch = ["download", "--quiet", "--no-deps", "--no-binary", "lmgeom", "lmgeom=={version}"]
    subprocess.run([*pip, *fetch], check=True)
    with tarfile.open(f"{{release}}.tar.gz") as file:
        file.extractall(filter="data")
    needs = [f"./{{release}}[{extra}]", "matplotlib>=3.9"]
    subprocess.run([*pip, "install", "--quiet", *needs], check=True)
    os.environ["LMGEOM_ROOT"] = os.path.abspath(release)
"""
HUB = re.compile(r"^\s*(import|from) (transformers|lm_eval|lmgeom\.hub)\b", re.MULTILINE)
MADE = (1980, 1, 1, 0, 0, 0)  # of every file in a zip: the same pages give the same bytes
NOT_ZIPPED = {".buildinfo", "_print.html"}


def colab_notebook(path: Path) -> NotebookNode:
    """Give a clean notebook a first cell that installs the library, in Colab and nowhere else.

    Args:
        path: A clean notebook.

    Returns:
        The notebook without outputs, its first cell the installation.
    """
    notebook = nbformat.read(path, as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    extra = "hub" if any(HUB.search(source) for source in code) else "data"
    source = SETUP.format(version=__version__, extra=extra).rstrip()
    notebook.cells.insert(0, new_code_cell(source, id="colab"))
    return notebook


def offer_notebooks(work: Workspace) -> None:
    """Put beside each built page its clean notebook, in place of the executed one, and Colab's.

    Args:
        work: Folders of the profile, with the pages built.
    """
    for name in notebook_names(work.root):
        target = work.html / "_sources" / f"{name}.ipynb"
        if target.is_file():
            clean = notebook_path(work.root, name)
            shutil.copyfile(clean, target)
            nbformat.write(colab_notebook(clean), target.with_suffix(f".{COLAB}"))


def zip_book(folder: Path, out: Path) -> Path:
    """Pack the built pages; the same pages give the same bytes.

    Args:
        folder: Folder of the built pages.
        out: The zip file, written whole or not at all.

    Returns:
        The zip file. Unpacked, its `index.html` opens without a server or a network.
    """
    unfinished = out.with_name(f"{out.name}.part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if path.name in NOT_ZIPPED:
                continue
            name = PurePosixPath(out.stem, path.relative_to(folder).as_posix())
            entry = zipfile.ZipInfo(str(name), MADE)
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            entry.external_attr = 0o644 << 16
            file.writestr(entry, path.read_bytes())
    return unfinished.replace(out)


def _add_button(app: Any, pagename: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Offer the notebook for Colab after the clean one."""
    source = str(context.get("sourcename", ""))
    if not source.endswith(".ipynb"):
        return
    for button in context.get("header_buttons", ()):
        if button.get("label") == "download-buttons":
            colab = source.removesuffix("ipynb") + COLAB
            link = {
                "type": "link",
                "url": f"{context['pathto']('_sources', 1)}/{colab}",
                "text": ".ipynb, Colab",
                "tooltip": "Download a notebook that installs the library in Colab",
                "icon": "fas fa-file",
                "label": "download-colab-button",
            }
            button["buttons"].insert(1, link)


def setup(app: Any) -> dict[str, bool]:
    """Connect this extension to Sphinx, after the theme has made its buttons."""
    app.connect("html-page-context", _add_button, priority=502)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
