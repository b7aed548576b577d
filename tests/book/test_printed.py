"""Printing: the pages become one document, and the PDF has an outline and page numbers."""

from __future__ import annotations

import re

import pytest

from lmgeom.book.printed import compose, destinations, parts, print_book
from lmgeom.errors import BookError

TOC = """format: jb-book
root: index
parts:
- caption: Input
  chapters:
  - file: lev/01
    sections:
    - file: lev/02
- caption: Rest
  chapters:
  - file: end
"""
PAGE = """<!doctype html><html><head><link rel="stylesheet" href="_static/print.css"></head>
<body><nav>navigation</nav><article class="bd-article"><section>{body}</section></article></body>
</html>"""
BODIES = {
    "index": '<h1 id="top">A book</h1><p><a href="lev/02.html#eq">an equation</a></p>',
    "lev/01": '<h1>One<a class="headerlink" href="#x">#</a></h1><h2>Of κ</h2><p id="eq">first</p>'
    '<img src="../_images/a.svg"><details><summary>a bar</summary>bars</details>'
    '<details class="figure-table">numbers</details><details class="claim">a line</details>',
    "lev/02": '<h1>Two "quoted"</h1><p id="eq">second <a href="#eq">here</a></p>'
    '<a href="../_sources/lev/02.ipynb">notebook</a><a href="https://example.org/">out</a>',
    "end": '<h1>End</h1><a href="lev/01.html">back</a>',
}


@pytest.fixture
def built(tmp_path):
    """A built book of four pages: its folder and that of its sources."""
    folder, book = tmp_path / "html", tmp_path / "book"
    for name, body in BODIES.items():
        path = folder / f"{name}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PAGE.format(body=body), encoding="utf-8")
    book.mkdir()
    (book / "_toc.yml").write_text(TOC)
    (book / "_config.yml").write_text("title: A book\nauthor: Us\n")
    return folder, book


def test_parts_hold_their_pages_in_reading_order(built):
    found = parts(built[1] / "_toc.yml")
    assert [part.caption for part in found] == ["", "Input", "Rest"]
    assert [part.pages for part in found] == [("index",), ("lev/01", "lev/02"), ("end",)]


def test_links_lead_to_places_in_the_one_document(built):
    text = compose(*built)
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))
    links = re.findall(r'href="([^"]+)"', text.partition("<body")[2])
    assert {link[1:] for link in links if link.startswith("#")} <= set(names)
    assert [link for link in links if not link.startswith("#")] == ["https://example.org/"]
    assert '<p id="lev/02--eq">second <a href="#lev/02--eq">here' in text


def test_what_paper_cannot_use_is_left_out_and_folds_are_open(built):
    text = compose(*built)
    assert "headerlink" not in text
    assert "navigation" not in text
    assert "numbers" not in text
    assert '<details open="">' in text
    assert '<details class="claim">' in text
    assert 'src="_images/a.svg"' in text


def test_running_heads_survive_quotes(built):
    assert 'content: "Two \\"quoted\\""' in compose(*built)


def test_page_that_was_not_built_is_named(built):
    (built[0] / "end.html").unlink()
    with pytest.raises(BookError, match="page end is in the table of contents but was not built"):
        compose(*built)


def test_foreign_file_is_refused():
    with pytest.raises(BookError, match="no table of pages"):
        destinations(b"%PDF-1.4\n")


@pytest.mark.usefixtures("chromium")
def test_pdf_has_outline_contents_and_page_numbers(built, tmp_path, root):
    folder, book = built
    (folder / "_static").mkdir()
    style = (root / "book" / "_static" / "print.css").read_text(encoding="utf-8")
    (folder / "_static" / "print.css").write_text(style, encoding="utf-8")
    out = tmp_path / "book.pdf"
    assert print_book(folder, book, out) == []
    pdf = out.read_bytes()
    pages = destinations(pdf)
    assert pages["index"] == 3, "after the title and the contents"
    assert pages["lev/01"] == 5, "after the part's own page"
    assert pages["lev/02"] == pages["lev/02--eq"] == 6
    titles = re.findall(rb"/Title \((.*?)\)", pdf)
    assert {b"Contents", b"Input", b"One", b"End"} <= set(titles)
    kappa = "Of κ".encode("utf-16-be").hex().upper().encode()
    assert kappa in pdf, "a heading with a symbol"
    assert [path.name for path in folder.glob("_print*")] == []


@pytest.mark.usefixtures("chromium")
def test_element_wider_than_the_paper_is_named(built, tmp_path):
    folder, book = built
    wide = '<h1>Wide</h1><p class="wide" style="width: 900px">too wide</p>'
    (folder / "end.html").write_text(PAGE.format(body=wide), encoding="utf-8")
    assert print_book(folder, book, tmp_path / "book.pdf") == ["end p.wide too wide"]
