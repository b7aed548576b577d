"""The glossary: in order, used, and closed under its own references."""

import re
from pathlib import Path

import nbformat
import pytest

from lmgeom.book.build import chapters

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "book" / "glossary.md").read_text(encoding="utf-8")
BODY = re.search(r"^```\{glossary\}\n(.*?)^```$", TEXT, re.M | re.S)[1]
ENTRIES = dict(re.findall(r"^(\S.*)\n((?:  .*\n?)+)", BODY, re.M))


@pytest.fixture(scope="module")
def prose():
    """Markdown of every page but the glossary, in lower case on one line."""
    texts = []
    for page in chapters(ROOT / "book" / "_toc.yml"):
        notebook, file = ROOT / "nbs" / f"{page}.ipynb", ROOT / "book" / f"{page}.md"
        if notebook.is_file():
            cells = nbformat.read(notebook, as_version=4).cells
            texts += [cell.source for cell in cells if cell.cell_type == "markdown"]
        elif file.is_file() and page != "glossary":
            texts.append(file.read_text(encoding="utf-8"))
    return " ".join(" ".join(texts).lower().split())


def test_entries_are_in_order():
    assert len(ENTRIES) > 80
    assert list(ENTRIES) == sorted(ENTRIES, key=str.lower)


@pytest.mark.parametrize("term", ENTRIES)
def test_a_term_is_used_by_a_chapter(term, prose):
    stem = re.escape(term.lower())
    assert re.search(rf"\b{stem}", prose) or re.search(rf"\b{stem.replace('-', '')}", prose)


def test_references_lead_to_entries():
    for text in ENTRIES.values():
        for target in re.findall(r"\{term\}`(?:[^`<]*<)?([^`<>]+)>?`", text):
            assert target.strip() in ENTRIES
