"""What a page costs its reader: bytes to load, and work until it answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lmgeom.book.chromium import Chromium

__all__ = ["LARGEST", "SLOWEST", "Cost", "measure", "report"]

LARGEST = 2_000_000  # bytes a page may have of its own
SLOWEST = 2.0  # seconds of work until a page answers
SHOWN = 5


@dataclass(frozen=True)
class Cost:
    """What one page costs.

    Attributes:
        page: Its name.
        own: Bytes of the page and its images.
        shared: Bytes of styles, scripts and fonts, which all pages share and a browser keeps.
        work: Seconds of the main thread until scripts have run and formulas are set.
        wall: Seconds by the clock until then; other programs on the machine lengthen it.
    """

    page: str
    own: int
    shared: int
    work: float
    wall: float

    def faults(self) -> list[str]:
        """What of it is above the limits."""
        found = []
        if self.own > LARGEST:
            found.append(
                f"the page has {self.own / 1e6:.2f} MB of its own, above {LARGEST / 1e6:g}"
            )
        if self.work > SLOWEST:
            found.append(f"the page answers after {self.work:.2f} s of work, above {SLOWEST:g}")
        return found


def measure(browser: Chromium, page: Path, folder: Path) -> Cost:
    """Measure the page that the browser has just opened, before anything is done with it.

    Args:
        browser: A browser with the open page.
        page: Its HTML file.
        folder: The book's folder; scripts and what lies in its `_static` are shared by all pages.
    """
    work, wall = browser.work(), browser.evaluate("performance.now() / 1000")
    static = folder.resolve() / "_static"
    sizes = {True: 0, False: 0}
    for path in browser.files():
        if path.is_file():
            sizes[static in path.parents or path.suffix == ".js"] += path.stat().st_size
    name = page.relative_to(folder).as_posix()
    return Cost(name, sizes[False], sizes[True], work, wall)


def report(costs: Iterable[Cost]) -> str:
    """Table of the slowest pages and of the largest."""
    rows = list(costs)
    slowest = sorted(rows, key=lambda cost: cost.work, reverse=True)[:SHOWN]
    largest = sorted(rows, key=lambda cost: cost.own, reverse=True)[:SHOWN]
    lines = []
    for title, chosen in (("slowest pages", slowest), ("largest pages", largest)):
        lines.append(f"{title:<34} {'own kB':>7} {'shared kB':>9} {'work s':>7} {'wall s':>7}")
        lines += [
            f"{c.page:<34} {c.own / 1e3:7.0f} {c.shared / 1e3:9.0f} {c.work:7.2f} {c.wall:7.2f}"
            for c in chosen
        ]
    return "\n".join(lines)
