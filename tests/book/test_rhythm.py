"""The rhythm of the chapters: printed, within its limits, and each outlier with a reason."""

from __future__ import annotations

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lmgeom.book.rhythm import check_rhythm, measure_rhythm
from lmgeom.errors import BookError

FIGURE = {"mystnb": {"figure": {"name": "fig-x", "caption": "A line."}}}
TEXT = "word " * 40


@pytest.fixture
def tree(tmp_path):
    """Write a checkout with one notebook, and the reasons."""

    def _tree(*sources, reasons="[]"):
        (tmp_path / "settings.ini").write_text("")
        cells = [new_markdown_cell(TEXT)]
        for source in sources:
            cells += [new_markdown_cell(TEXT), new_code_cell(source)]
        cells[2].metadata.update(FIGURE)
        path = tmp_path / "nbs" / "lev" / "01_x.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(new_notebook(cells=cells), path)
        (tmp_path / "book").mkdir(exist_ok=True)
        (tmp_path / "book" / "rhythm.yaml").write_text(reasons)
        return tmp_path

    return _tree


def code(lines):
    return "x = 1\n" * lines


def test_every_outlier_of_the_book_has_a_reason(root, capsys):
    with capsys.disabled():
        print()
        check_rhythm(root)


def test_figures_of_a_chapter(tree):
    function = 'def f():\n    """Say\n    something."""\n\n    return 1'
    hidden = "#| hide\n" + code(60)
    whole = "#| export\nclass A:\n" + "    x = 1\n" * 39
    root = tree(code(4), function, hidden, "#| export\n" + code(9), whole)
    found = measure_rhythm(root / "nbs" / "lev" / "01_x.ipynb")
    assert (found.cells, found.words, found.figures) == (11, 40, 1)
    assert (found.median, found.ninth, found.lesson, found.longest) == (6.5, 4, 4, 40)


ENTRY = "- {{chapters: [lev/01_x], figures: [{}], reason: {}}}\n"


@pytest.mark.parametrize(
    ("lines", "reasons", "fault"),
    [
        (8, "[]", None),
        (26, "[]", "lev/01_x: lesson is 26, outside 0 to 25: mend it, or say why"),
        (26, ENTRY.format("median, ninth, lesson", "It must."), None),
        (8, ENTRY.format("lesson", "It must."), "lev/01_x is no longer an outlier in lesson"),
        (8, ENTRY.format("lesson", "''"), "an entry has chapters, figures and reason"),
        (26, ENTRY.format("lesson", "a") * 2, "two reasons for lev/01_x lesson"),
    ],
)
def test_outlier_without_reason_and_reason_without_outlier(tree, capsys, lines, reasons, fault):
    root = tree(code(lines), reasons=reasons)
    if fault is None:
        check_rhythm(root)
    else:
        with pytest.raises(BookError, match=fault):
            check_rhythm(root)
    assert "lev/01_x" in capsys.readouterr().out
