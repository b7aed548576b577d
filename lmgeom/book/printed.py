"""Print the whole book as one PDF: its pages joined to one document that a browser prints."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from bs4 import BeautifulSoup, Tag

from lmgeom import __version__
from lmgeom.book.chromium import Chromium
from lmgeom.errors import BookError

__all__ = ["compose", "destinations", "parts", "print_book"]

PAGE_WIDTH = 643  # CSS pixels between the margins of the paper, as print.css sets them
# What a reader of paper cannot use, and the tables behind the figures, which the pages fold.
LEFT_OUT = ".headerlink, .copybtn, .only-dark, details.figure-table, script"
DOCUMENT = """<!doctype html>
<html lang="en" data-theme="light"><head><meta charset="utf-8"><title>{title}</title>
{styles}<style>{running}</style>
<script>window.MathJax = {{options: {{enableMenu: false, processHtmlClass: "math",
  ignoreHtmlClass: "book-print"}}}}</script>
<script defer src="_static/mathjax/tex-mml-chtml.js"></script></head>
<body class="book-print bd-article-container">
<header class="print-title"><h1 aria-level="1">{title}</h1><p>{author}</p><p>{edition}</p></header>
<nav class="bd-article print-contents"><h1 aria-level="1">Contents</h1>{contents}</nav>
{articles}</body></html>
"""
# Formulas wider than the paper are set smaller; anything else that is cut off is reported.
FIT = """
(() => {
  const formulas = [...document.querySelectorAll('mjx-container[display="true"]')];
  const shares = formulas.map(e => e.clientWidth / e.scrollWidth);
  formulas.forEach((e, i) => {
    if (shares[i] < 1) e.style.fontSize = `${Math.floor(100 * shares[i] - 1)}%`;
  });
  const name = e => (e.closest('article') || document.body).id + ' ' + e.tagName.toLowerCase() +
    (e.classList.length ? '.' + e.classList[0] : '') + ' ' + e.textContent.trim().slice(0, 40);
  const cut = e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 &&
    getComputedStyle(e).overflowX !== 'visible' && !e.closest('mjx-container *');
  const out = e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1 &&
    e.checkVisibility() && !e.closest('mjx-container');
  return [...document.querySelectorAll('article *')].filter(e => cut(e) || out(e)).map(name);
})()
"""
NUMBERS = """
(pages => {
  for (const link of document.querySelectorAll('.print-contents a'))
    link.dataset.page = pages[link.hash.slice(1)];
})
"""


@dataclass(frozen=True)
class Part:
    """A part of the book, with the names of its pages in reading order.

    Attributes:
        caption: Its title; empty for the front page.
        pages: Names, as `lev/01_spline`.
    """

    caption: str
    pages: tuple[str, ...]


def _files(node: Any) -> Iterator[str]:
    """Names of the pages in a part of the table of contents."""
    for chapter in node:
        yield str(chapter["file"])
        yield from _files(chapter.get("sections", ()))


def parts(toc: Path) -> list[Part]:
    """Parts of the book by its table of contents, the front page first."""
    content = yaml.safe_load(toc.read_text(encoding="utf-8"))
    found = [Part("", (str(content["root"]),))]
    for part in content.get("parts", ()):
        found.append(Part(str(part["caption"]), tuple(_files(part["chapters"]))))
    return found


def _anchor(page: str, fragment: str = "") -> str:
    """Name of a place in the one document."""
    return f"{page}--{fragment}" if fragment else page


def _link(page: str, address: str, pages: set[str]) -> str | None:
    """Where a link of a page leads in the one document; None to a file that is not in it."""
    link = urlsplit(address)
    if link.scheme or link.netloc:
        return address
    path = unquote(link.path)
    target = normpath(os.path.join(os.path.dirname(page), path)) if path else f"{page}.html"
    name = target.removesuffix(".html")
    return f"#{_anchor(name, unquote(link.fragment))}" if name in pages else None


def _article(folder: Path, page: str, pages: set[str]) -> Tag:
    """Article of a page, its names and links made fit for the one document."""
    path = folder / f"{page}.html"
    if not path.is_file():
        raise BookError(f"page {page} is in the table of contents but was not built")
    article = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser").select_one("article")
    assert article is not None
    for element in article.select(LEFT_OUT):
        element.decompose()
    for element in article.select("[id]"):
        element["id"] = _anchor(page, str(element["id"]))
    for element in article.select("a[href]"):
        target = _link(page, str(element["href"]), pages)
        if target is None:
            del element["href"]
        else:
            element["href"] = target
    for element in article.select("[src]"):
        source = str(element["src"])
        if not urlsplit(source).scheme:
            element["src"] = normpath(os.path.join(os.path.dirname(page), source))
        element.attrs.pop("loading", None)
    for element in article.select("details:not(.claim)"):  # the ledger's lines stay lines
        element["open"] = ""
    for element in article.select("h1, h2, h3, h4"):
        element["aria-level"] = str(int(element.name[1]) + 1)  # below the heading of the part
    article["id"] = _anchor(page)
    article["class"] = "bd-article"
    return article


def _words(element: Tag) -> str:
    """Text of an element on one line."""
    return " ".join(element.get_text().split())


def compose(folder: Path, book: Path) -> str:
    """Join the built pages to one HTML document for printing.

    Args:
        folder: Folder of the built pages; the document belongs into it.
        book: Folder with `_toc.yml` and `_config.yml`.

    Returns:
        HTML: a title, contents, and every page in reading order.

    Raises:
        BookError: A page of the table of contents was not built.
    """
    config = yaml.safe_load((book / "_config.yml").read_text(encoding="utf-8"))
    whole = parts(book / "_toc.yml")
    pages = {page for part in whole for page in part.pages}
    front = BeautifulSoup((folder / "index.html").read_text(encoding="utf-8"), "html.parser")
    styles = "\n".join(str(link) for link in front.select("head link[rel=stylesheet]"))
    contents, articles, running = [], [], []
    for number, part in enumerate(whole):
        chapters = [_article(folder, page, pages) for page in part.pages]
        titles = [_words(chapter.h1) if chapter.h1 else str(chapter["id"]) for chapter in chapters]
        entries = "".join(
            f'<li><a href="#{chapter["id"]}">{html.escape(title)}</a></li>'
            for chapter, title in zip(chapters, titles, strict=True)
        )
        caption = html.escape(part.caption)
        contents.append(f"<p>{caption}</p>" * bool(caption) + f"<ul>{entries}</ul>")
        if caption:
            articles.append(f'<h1 class="print-part" aria-level="1">{caption}</h1>')
        elif chapters[0].h1:
            chapters[0].h1["aria-level"] = "1"
        for place, (chapter, title) in enumerate(zip(chapters, titles, strict=True)):
            name = f"chapter-{number}-{place}"
            chapter["style"] = f"page: {name}"
            text = title.replace("\\", "\\\\").replace('"', '\\"')
            running.append(f'@page {name} {{ @top-center {{ content: "{text}" }} }}')
            articles.append(str(chapter))
    return DOCUMENT.format(
        title=html.escape(config["title"]),
        author=html.escape(config["author"]),
        edition=f"lmgeom {__version__}",
        styles=styles,
        running="\n".join(running),
        contents="".join(contents),
        articles="\n".join(articles),
    )


def _objects(pdf: bytes) -> dict[str, str]:
    """Objects of a PDF as Chromium writes it, by number, without their streams."""
    text = re.sub(rb"\bstream\r?\n.*?\bendstream\b", b"", pdf, flags=re.DOTALL).decode("latin-1")
    return dict(re.findall(r"(?m)^(\d+) 0 obj\s(.*?)\sendobj", text, flags=re.DOTALL))


def destinations(pdf: bytes) -> dict[str, int]:
    """Page numbers of the named places in a PDF that Chromium wrote.

    Args:
        pdf: Content of the file.

    Returns:
        Page, from 1, by the name of each place that a link leads to.

    Raises:
        BookError: The file has no table of pages.
    """
    objects = _objects(pdf)
    root = next((x for x in objects.values() if "/Type /Catalog" in x), "")
    tree = re.search(r"/Pages (\d+) 0 R", root)
    if tree is None:
        raise BookError("the browser's PDF has no table of pages")

    def leaves(number: str) -> Iterator[str]:
        kids = re.search(r"/Kids \[(.*?)\]", objects[number], flags=re.DOTALL)
        if kids is None:
            yield number
            return
        for child in re.findall(r"(\d+) 0 R", kids[1]):
            yield from leaves(child)

    order = {number: place for place, number in enumerate(leaves(tree[1]), 1)}
    named = re.search(r"/Dests (\d+) 0 R", root)
    places = re.findall(r"/(\S+) \[(\d+) 0 R /XYZ", objects[named[1]] if named else "")
    return {_name(name): order[page] for name, page in places}


def _name(text: str) -> str:
    """Read a name of a PDF, in which `#2F` is a slash."""
    data = re.sub(rb"#([0-9A-Fa-f]{2})", lambda m: bytes([int(m[1], 16)]), text.encode("latin-1"))
    return data.decode("utf-8", errors="replace")


def _print(browser: Chromium, *, outline: bool) -> bytes:
    """Print the open document on print.css's paper, with an outline of its headings or without."""
    options = {"preferCSSPageSize": True, "printBackground": True}
    options |= {"generateDocumentOutline": outline, "generateTaggedPDF": outline}
    return base64.b64decode(browser.call("Page.printToPDF", **options)["data"])


def print_book(folder: Path, book: Path, out: Path) -> list[str]:
    """Print the built pages to one PDF with an outline, contents and page numbers.

    Args:
        folder: Folder of the built pages.
        book: Folder with `_toc.yml` and `_config.yml`.
        out: The file to write, whole or not at all.

    Returns:
        Names of the elements that do not fit the paper; none for a good book.

    Raises:
        BookError: A page is missing, there is no browser, or it stopped.
    """
    source = folder / "_print.html"
    try:
        source.write_text(compose(folder, book), encoding="utf-8")
        with Chromium(timeout=3600) as browser:
            browser.call("Emulation.setEmulatedMedia", media="print")
            browser.resize(PAGE_WIDTH, 900)
            browser.open(source)
            cut = browser.evaluate(FIT)
            numbers = destinations(_print(browser, outline=False))
            browser.evaluate(f"({NUMBERS})({numbers})")
            content = _print(browser, outline=True)
    finally:
        source.unlink(missing_ok=True)
    unfinished = out.with_name(f"{out.name}.part")
    unfinished.write_bytes(content)
    os.replace(unfinished, out)
    return [str(name) for name in cut]
