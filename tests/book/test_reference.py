"""The reference covers every public name, and its links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lmgeom.book.library import PACKAGES, Library, imported_names, parse_docstring, public_names
from lmgeom.book.reference import annotate, docstring_faults, reference_pages

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(ROOT)


@pytest.fixture(scope="module")
def pages(library) -> dict[str, str]:
    return {path.stem: text.decode() for path, text in reference_pages(library).items()}


def promised(package: str) -> set[str]:
    tree = ast.parse((ROOT / "lmgeom" / package / "__init__.py").read_text(encoding="utf-8"))
    return {f"lmgeom.{package}.{name}" for name in public_names(tree)}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_entry(package, library, pages):
    entries = {entry.path for entry in library.entries if entry.promoted}
    assert promised(package) <= entries
    text = pages[package]
    heads = re.findall(r"^:+\{py:(?:function|class|data)\} (\w+)", text, flags=re.MULTILINE)
    assert promised(package) <= {f"lmgeom.{package}.{head}" for head in heads}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_chapter_and_a_test(package, library):
    mine = [e for e in library.entries if e.promoted and e.path.split(".")[1] == package]
    assert not [entry.path for entry in mine if library.chapter(entry) is None]
    assert not [entry.path for entry in mine if not library.tested_by(entry)[0]]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_docstring_is_complete(package, library):
    mine = [e for e in library.entries if e.promoted and e.path.split(".")[1] == package]
    assert not [fault for entry in mine for fault in docstring_faults(entry, library)]


def test_every_link_of_the_reference_has_its_target(library, pages):
    targets = {entry.path for entry in library.entries}
    for name in library.notebooks:
        notebook = nbformat.read(ROOT / "nbs" / f"{name}.ipynb", as_version=4)
        marked = annotate(notebook, name, library)
        text = "\n".join(cell.source for cell in marked.cells if cell.cell_type == "markdown")
        found = re.findall(r"^\((at-[\w-]+)\)=$", text, flags=re.MULTILINE)
        assert len(found) == len(set(found))
        targets |= set(found)
    links = {link for text in pages.values() for link in re.findall(r"\]\(#([^)]+)\)", text)}
    assert links
    assert links <= targets


def test_parts_of_the_trace(library):
    entry = next(entry for entry in library.entries if entry.path == "lmgeom.lev.digits")
    assert library.chapter(entry) == "lev/02_digits"
    assert library.equation(entry) == "eq-digits-digits"
    assert library.lesson(entry).cell == "digits-digits-lesson"
    assert "lev/test_digits.py" in library.tested_by(entry)[0]
    assert "lev-digits-bijection" in library.claims_of(entry)


def test_result_of_a_tested_function_is_tested_through_it(library):
    entry = next(entry for entry in library.entries if entry.path == "lmgeom.head.Diameter")
    files, way = library.tested_by(entry)
    assert "head/test_diameter.py" in files
    assert way == ["lmgeom.head.diameter"]


def test_chapter_gets_targets_and_the_way_back(library):
    cells = [
        new_markdown_cell("```{note}\nA box.\n```\n\n## Digits\n\nText."),
        new_code_cell("x", id="digits-digits"),
    ]
    notebook = annotate(new_notebook(cells=cells), "lev/02_digits", library)
    marked = "(at-lev-02-digits-digits-digits)=\n## Digits"
    assert notebook.cells[0].source == f"```{{note}}\nA box.\n```\n\n{marked}\n\nText."
    assert "[`digits`](#lmgeom.lev.digits)" in notebook.cells[-1].source
    assert cells[0].source.startswith("```{note}\nA box.\n```\n\n## Digits")


def test_docstring_is_taken_apart():
    doc = parse_docstring("""Do it.

    More.

    Args:
        x: A number,
            at least 1.
        **options: Others.

    Returns:
        Shape (3,).

    Raises:
        ValueError: x is 0.
    """)
    assert doc.text == "Do it.\n\nMore."
    assert doc.summary == "Do it."
    assert doc.items["Args"] == {"x": "A number, at least 1.", "**options": "Others."}
    assert doc.texts == {"Returns": "Shape (3,)."}
    assert doc.items["Raises"] == {"ValueError": "x is 0."}


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("", "no docstring"),
        ("Do it.\n\nArgs:\n    y: 1.\n\nReturns:\n    x.", "does not describe x"),
        ("Do it.\n\nArgs:\n    x: shape (3,).\n    y: 1.", "describes y, which is not there"),
        ("Do it.\n\nArgs:\n    x: A tensor.", "gives no shape for x"),
        ("Do it.\n\nArgs:\n    x: shape (3,).", "does not describe its result"),
        ("Do it.\n\nArgs:\n    x: shape (3,).", "does not describe ValueError"),
    ],
)
def test_what_a_docstring_lacks_is_named(docstring, fault, library):
    code = 'def f(x: Tensor) -> int:\n    """D"""\n    raise ValueError("no")'.replace(
        "D", docstring.replace("\n", "\n    ")
    )
    entry = library.entries[0].__class__(
        "f", "lmgeom.m", "lmgeom.m.f", ast.parse(code).body[0], None
    )
    assert any(fault in found for found in docstring_faults(entry, library))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from lmgeom.lev import digits", "lmgeom.lev.digits"),
        ("from lmgeom import lev\nlev.digits(1)", "lmgeom.lev.digits"),
        ("import lmgeom.lev as a\na.digits", "lmgeom.lev.digits"),
        ("import lmgeom.lev\nlmgeom.lev.digits", "lmgeom.lev.digits"),
    ],
)
def test_names_taken_from_the_library_are_found(code, name):
    assert name in set(imported_names(ast.parse(code)))
