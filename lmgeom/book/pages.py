"""Look at every page of the built book: what a reader's browser shows, and where its links lead."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from lmgeom.book.accessibility import violations
from lmgeom.book.chromium import Chromium
from lmgeom.book.cost import Cost, measure

__all__ = ["Audit", "audit", "broken_links", "html_pages", "screenshots", "search_faults"]

DESKTOP, PHONE = (1280, 900), (390, 844)
LOCAL = ("file", "data", "blob", "about", "chrome-extension")
# Elements of the text that stick out of the window and sit in no box that scrolls by itself.
OVERFLOW = """
(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = e => {
    for (let p = e; p && p !== document.body; p = p.parentElement)
      if (['auto', 'scroll'].includes(getComputedStyle(p).overflowX)) return true;
    return false;
  };
  const hidden = e => !e.checkVisibility() || e.closest('mjx-assistive-mml, .headerlink');
  const sticksOut = e => {
    const box = e.getBoundingClientRect();
    return box.width > 1 && (box.right > width + 1 || box.left < -1);
  };
  const name = e => e.tagName.toLowerCase() + (e.id ? '#' + e.id : '') +
    (e.classList.length ? '.' + e.classList[0] : '');
  const wide = [...document.querySelectorAll('main article *')].filter(
    e => sticksOut(e) && !hidden(e) && !scrolls(e));
  const all = document.documentElement.scrollWidth;
  const found = wide.slice(0, 3).map(e => `${name(e)} sticks out of ${width} px`);
  return all > width ? [`the page is ${all} px wide in ${width} px`, ...found] : found;
})()
"""
BROKEN_IMAGES = "[...document.images].filter(i => !i.naturalWidth).map(i => i.getAttribute('src'))"
NO_ALT = (
    "[...document.querySelectorAll('article img')].filter(i => !(i.alt || '').trim())"
    ".map(i => i.getAttribute('src'))"
)
TEX_ERRORS = (
    "[...document.querySelectorAll('mjx-merror, [data-mjx-error]')]"
    ".map(e => e.getAttribute('data-mjx-error') || e.textContent)"
)
RAW_TEX = (
    "[...document.querySelectorAll('.math')].filter(e => !e.querySelector('mjx-container'))"
    ".map(e => e.textContent.slice(0, 60))"
)
# Luminance of text and page: text must be the lighter of the two in dark mode only.
TEXT_IS_LIGHTER = """
(() => {
  const light = color => color.match(/[\\d.]+/g).slice(0, 3)
    .reduce((sum, x, i) => sum + Number(x) * [0.2126, 0.7152, 0.0722][i], 0);
  const style = getComputedStyle(document.querySelector('article') || document.body);
  const page = getComputedStyle(document.body).backgroundColor;
  return light(style.color) > light(page);
})()
"""


def html_pages(folder: Path) -> list[Path]:
    """Pages of a built book, in order of their names."""
    found = (path.relative_to(folder) for path in folder.rglob("*.html"))
    return sorted(folder / name for name in found if not name.parts[0].startswith("_"))


def _outside_and_errors(browser: Chromium) -> list[str]:
    """Faults among the events of the page just opened."""
    found = []
    for event in browser.events:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if urlsplit(url).scheme not in LOCAL:
                    found.append(f"asks for {url[:120]}")
            case "Network.loadingFailed" if not parameters.get("canceled"):
                found.append(f"a {parameters['type']} did not load: {parameters['errorText']}")
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                text = details.get("exception", {}).get("description", details["text"])
                found.append(f"script error: {text.splitlines()[0]}")
            case "Runtime.consoleAPICalled" if parameters["type"] == "error":
                values = [str(a.get("value", a.get("description"))) for a in parameters["args"]]
                found.append(f"console error: {' '.join(values)[:160]}")
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                entry = parameters["entry"]
                found.append(f"log: {entry['text'][:120]} {entry.get('url', '')[-60:]}")
    return found


def inspect(browser: Chromium, page: Path, folder: Path) -> tuple[Cost, list[str]]:
    """Open one page at desktop and phone width, light and dark, and list its faults.

    Args:
        browser: An open browser.
        page: An HTML file.
        folder: The book's folder.

    Returns:
        What the page costs, and one line a fault: TeX errors, broken images, images without
        alternative text, requests outside, script errors, horizontal overflow, barriers that axe
        finds, text no lighter than a dark page, and costs above their limits.
    """
    browser.prefer("light")
    browser.resize(*DESKTOP)
    browser.open(page)
    cost = measure(browser, page, folder)
    if cost.faults():  # once more, so that a moment's hitch of the machine is no fault
        browser.open(page)
        cost = min(cost, measure(browser, page, folder), key=lambda cost: cost.work)
    found = cost.faults()
    found += [f"TeX error: {text}" for text in browser.evaluate(TEX_ERRORS)]
    found += [f"formula not set: {text}" for text in browser.evaluate(RAW_TEX)]
    found += [f"broken image: {source}" for source in browser.evaluate(BROKEN_IMAGES)]
    found += [f"image without alt text: {source}" for source in browser.evaluate(NO_ALT)]
    found += [f"desktop: {text}" for text in browser.evaluate(OVERFLOW)]
    if browser.evaluate(TEXT_IS_LIGHTER):
        found.append("light mode: the text is lighter than the page")
    found += [f"light, desktop: {text}" for text in violations(browser)]
    if page == folder / "index.html":  # what only a wide window shows is the same on every page
        browser.prefer("dark")
        found += [f"dark, desktop: {text}" for text in violations(browser)]
    browser.resize(*PHONE)
    found += [f"phone: {text}" for text in browser.evaluate(OVERFLOW)]
    browser.prefer("dark")
    if not browser.evaluate(TEXT_IS_LIGHTER):
        found.append("dark mode: the text is darker than the page")
    found += [f"dark, phone: {text}" for text in violations(browser)]
    return cost, found + _outside_and_errors(browser)


def search_faults(folder: Path, word: str) -> list[str]:
    """Search the book for a word, from disk and without a server.

    Args:
        folder: Folder of the built pages.
        word: A word that stands in the book.

    Returns:
        What is wrong; nothing if pages are found.

    Raises:
        BookError: There is no browser, or it stopped.
    """
    with Chromium() as browser:
        browser.open(folder / "search.html", f"q={quote(word)}")
        found = browser.evaluate(
            "(async () => { const count = () => document.querySelectorAll('ul.search li a').length;"
            " for (let i = 0; i < 100 && !count(); i++)"
            " await new Promise(done => setTimeout(done, 50)); return count(); })()"
        )
        faults = [] if found else [f"the search finds no page with {word!r}"]
        return [f"search.html: {fault}" for fault in faults + _outside_and_errors(browser)]


class Audit(NamedTuple):
    """What looking at pages found.

    Attributes:
        faults: Lines `page: fault`; none for a good book.
        costs: What each page costs its reader.
    """

    faults: list[str]
    costs: list[Cost]


def audit(pages: Iterable[Path], folder: Path, workers: int = 1) -> Audit:
    """Open pages and list all their faults and costs.

    Args:
        pages: HTML files.
        folder: The book's folder, to name pages by.
        workers: Browsers at a time.

    Returns:
        Faults and costs, in order of the pages.

    Raises:
        BookError: There is no browser, or it stopped.
    """
    pages = list(pages)

    def look(share: list[Path]) -> dict[Path, tuple[Cost, list[str]]]:
        with Chromium() as browser:
            return {page: inspect(browser, page, folder) for page in share}

    with ThreadPoolExecutor(workers) as pool:
        shares = [pages[k::workers] for k in range(workers) if pages[k::workers]]
        found = {page: seen for part in pool.map(look, shares) for page, seen in part.items()}
    return Audit(
        [f"{page.relative_to(folder)}: {fault}" for page in pages for fault in found[page][1]],
        [found[page][0] for page in pages],
    )


def screenshots(pages: Iterable[Path], folder: Path, out: Path) -> list[Path]:
    """Write a picture of whole pages at desktop and phone width, light and dark.

    Args:
        pages: HTML files.
        folder: The book's folder, to name pictures by.
        out: Folder of the PNG files.

    Returns:
        The files written.
    """
    written = []
    out.mkdir(parents=True, exist_ok=True)
    with Chromium() as browser:
        for page in pages:
            for scheme in ("light", "dark"):
                browser.prefer(scheme)
                browser.resize(*DESKTOP)
                browser.open(page)
                for kind, (width, _) in (("desktop", DESKTOP), ("phone", PHONE)):
                    browser.resize(width, 900)
                    height = browser.evaluate("document.documentElement.scrollHeight")
                    browser.resize(width, min(height, 16000))
                    data = browser.call("Page.captureScreenshot", format="png")["data"]
                    name = "-".join(page.relative_to(folder).with_suffix("").parts)
                    written.append(out / f"{name}-{kind}-{scheme}.png")
                    written[-1].write_bytes(base64.b64decode(data))
    return written


@dataclass
class _Page(HTMLParser):
    """Anchors, links and loaded files of one page."""

    anchors: set[str] = field(default_factory=set)
    links: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors.update(values[key] for key in ("id", "name") if key in values)
        if tag == "link" and values.get("rel") in ("canonical", "author", "search", "index"):
            return
        for key in ("href", "src"):
            if key in values:
                self.links.append((tag, values[key]))


def _read(page: Path) -> _Page:
    """Parse one page."""
    parser = _Page()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


def _fault(page: Path, tag: str, link: str, anchors: dict[Path, set[str]]) -> str | None:
    """What is wrong with one link, None if nothing is."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        if tag != "a" and parts.scheme != "data":
            return "is loaded from outside"
        host = r"[\w-]+(\.[\w-]+)+(:\d+)?"
        good = parts.scheme in ("mailto", "data") or re.fullmatch(host, parts.netloc)
        return None if good else "is no well-formed address"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_file():
        return "leads to no file"
    fragment = unquote(parts.fragment)
    if fragment and target in anchors and fragment not in anchors[target]:
        return "leads to no anchor"
    return None


def broken_links(folder: Path) -> list[str]:
    """Check every link of a built book; addresses outside are checked for their form only.

    Args:
        folder: Folder of the built pages.

    Returns:
        Lines `page: link fault`; none for a good book.
    """
    folder = folder.resolve()
    parsed = {page: _read(page) for page in html_pages(folder)}
    anchors = {page: content.anchors for page, content in parsed.items()}
    found = []
    for page, content in parsed.items():
        for tag, link in content.links:
            if fault := _fault(page, tag, link, anchors):
                found.append(f"{page.relative_to(folder)}: {link} {fault}")
    return found
