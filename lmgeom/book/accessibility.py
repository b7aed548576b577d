"""Hold pages to what every reader needs: axe's rules, and a keyboard in place of a mouse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lmgeom.book.assets import axe_script
from lmgeom.book.chromium import Chromium

__all__ = ["keyboard_faults", "violations", "walk"]

# Formulas are left out: MathJax sets each twice, for the eye and for a screen reader, and axe would
# spend most of its time on their glyphs, which have the color of the text around them.
RUN_AXE = """
(async () => {
  const found = await axe.run(
    {exclude: ['mjx-container']}, {resultTypes: ['violations'], preload: false});
  return found.violations.filter(v => ['serious', 'critical'].includes(v.impact)).map(v => {
    const [node] = v.nodes;
    const why = [...node.any, ...node.all, ...node.none].map(check => check.message);
    return `${v.id} (${v.impact}) at ${v.nodes.length} place(s), such as ${node.target.join(' ')}: `
      + (why[0] || v.help);
  });
})()
"""


@cache
def _axe() -> str:
    """The script that finds barriers, ending in a value that a browser can return."""
    return f"{axe_script()};true"


def violations(browser: Chromium) -> list[str]:
    """Run axe on the page as it stands: its width, its color scheme.

    Args:
        browser: A browser with an open page.

    Returns:
        One line a rule broken with serious or critical impact, with the first place.
    """
    if not browser.evaluate("Boolean(window.axe)"):
        browser.evaluate(_axe())
    found: list[str] = browser.evaluate(RUN_AXE)
    return found


@dataclass(frozen=True)
class Control:
    """Something a reader works: what to call it, where it is, and whether it worked.

    Attributes:
        name: What it is, for messages.
        selector: Its elements.
        key: Key that works it once it has the focus; empty where reaching it is all.
        effect: JavaScript of a value that must change by the key; `e` is the focused element.
    """

    name: str
    selector: str
    key: str = ""
    effect: str = ""


SEARCH_IS_OPEN = "document.querySelector('#pst-search-dialog').open"
VISIBLE = "checkVisibility({visibilityProperty: true})"
MENU_SHOWS = f"document.querySelector('nav.bd-links').{VISIBLE}"
CONTROLS = (
    Control("link that skips to the text", "#pst-skip-link a"),
    Control("menu", ".primary-toggle", "Enter", MENU_SHOWS),
    Control("menu link", "nav.bd-links a"),
    Control("search", ".search-button__button", "Enter", SEARCH_IS_OPEN),
    Control("color mode", ".theme-switch-button", "Enter", "document.documentElement.dataset.mode"),
    Control("link of the text", "article a:not(.headerlink)"),
    Control("fold", "article details > summary", "Enter", "e.parentElement.open"),
    Control("solution", "article .toggle-button", "Enter", "e.closest('.admonition').className"),
    Control("next page", ".prev-next-area a"),
)
PAGES = ("index.html", "lev/01_spline.html")
WINDOWS = {"desktop": (1280, 900), "phone": (390, 844)}
ENOUGH = 600  # presses of Tab that must lead through any page
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}
# Everything of a kind that a reader sees; what the Tab key has reached of it is noted.
SEEN = "[...document.querySelectorAll('{}')].filter(e => e.{})"
NOTE = """
(() => {
  window.reached = new Set();
  document.addEventListener('focusin', event => window.reached.add(event.target));
})()
"""
# A box around the focused element, with room for its outline.
BOX = """
(() => {
  const e = document.activeElement;
  e.scrollIntoView({block: 'center', behavior: 'instant'});
  const box = e.getBoundingClientRect();
  const x = Math.max(0, box.left - 8), y = Math.max(0, box.top + scrollY - 8);
  return {x, y, width: box.right + 8 - x, height: box.bottom + scrollY + 8 - y, scale: 1};
})()
"""


def _press(browser: Chromium, key: str) -> None:
    """Press and release one key."""
    event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
    text = {"text": "\r"} if key == "Enter" else {}
    kind = "keyDown" if text else "rawKeyDown"
    browser.call("Input.dispatchKeyEvent", type=kind, **event, **text)
    browser.call("Input.dispatchKeyEvent", type="keyUp", **event)


def _focus_shows(browser: Chromium) -> bool:
    """Tell whether the focused element looks different without the focus; it keeps the focus."""
    browser.settle()  # some slide into the page when they get the focus
    box: dict[str, Any] = browser.evaluate(BOX)
    if min(box["width"], box["height"]) <= 0:
        return False  # it stays above or left of the page, where no picture can be taken

    def picture() -> str:
        browser.settle()
        data: str = browser.call("Page.captureScreenshot", format="png", clip=box)["data"]
        return data

    with_focus = picture()
    browser.evaluate("(() => { window.held = document.activeElement; held.blur(); })()")
    without = picture()
    browser.evaluate("held.focus({preventScroll: true})")
    return with_focus != without


def _works(browser: Chromium, control: Control) -> bool:
    """Tell whether the control's key changes what it should; and then undo it."""
    value = f"(e => {control.effect})(document.activeElement)"
    before = browser.evaluate(value)
    _press(browser, control.key)
    browser.settle()
    after = browser.evaluate(value)
    for key in ("Escape", control.key):  # undo it, as a reader would
        if browser.evaluate(value) != before:
            _press(browser, key)
            browser.settle()
    return bool(before != after)


def walk(browser: Chromium, page: Path) -> tuple[set[Control], list[str]]:
    """Go through a page by the Tab key alone, and work the first control of each kind.

    Args:
        browser: An open browser, with the width of its window set.
        page: An HTML file.

    Returns:
        The controls met, and one line a fault: places that the key does not reach, a focus that
        cannot be seen, a control that its key does not work.
    """
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
    browser.open(page)
    browser.evaluate(NOTE)
    found, met = [], set()
    for _ in range(ENOUGH):
        _press(browser, "Tab")
        if browser.evaluate("document.activeElement === document.body"):
            break
        for control in CONTROLS:
            here = f"document.activeElement.matches({control.selector!r})"
            if control in met or not browser.evaluate(here):
                continue
            met.add(control)
            if not _focus_shows(browser):
                found.append(f"the focus of the {control.name} cannot be seen")
            if control.key and not _works(browser, control):
                found.append(f"{control.key} does not work the {control.name}")
    else:
        found.append(f"{ENOUGH} presses of Tab do not lead through the page")
    for control in CONTROLS:
        missed = f"{SEEN.format(control.selector, VISIBLE)}.filter(e => !window.reached.has(e))"
        if count := browser.evaluate(f"{missed}.length"):
            found.append(f"Tab does not reach {count} place(s) of the kind: {control.name}")
    return met, found


def keyboard_faults(folder: Path, names: Iterable[str] = PAGES) -> list[str]:
    """Use some pages by keyboard, at desktop and at phone width.

    Args:
        folder: Folder of the built pages.
        names: Pages that together have every kind of control.

    Returns:
        One line a fault; a kind of control that no page has is one, too.

    Raises:
        BookError: There is no browser, or it stopped.
    """
    found, met = [], set()
    with Chromium() as browser:
        for name in names:
            for width, size in WINDOWS.items():
                browser.resize(*size)
                controls, faults = walk(browser, folder / name)
                met |= controls
                found += [f"{name}: {width}, keyboard: {fault}" for fault in faults]
    return found + [f"keyboard: no {c.name} on any page" for c in CONTROLS if c not in met]
