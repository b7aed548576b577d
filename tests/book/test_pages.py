"""Looking at pages: each fault that the browser pass and the link check are for is found."""

from __future__ import annotations

import pytest

from lmgeom.book.accessibility import keyboard_faults, walk
from lmgeom.book.build import build, chapters, status_page
from lmgeom.book.chromium import Chromium
from lmgeom.book.cost import Cost, measure, report
from lmgeom.book.execute import Execution, Workspace
from lmgeom.book.pages import audit, broken_links, html_pages, screenshots, search_faults
from lmgeom.errors import BookError

PAGE = """<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8">
<title>page</title><style>body {{ background: #fff; color: #000; margin: 0 }}
html[data-theme=dark] body {{ background: #000; color: #fff }} {style}</style>
<script>const dark = matchMedia('(prefers-color-scheme: dark)');
const follow = () => {{ document.documentElement.dataset.theme = dark.matches ? 'dark' : 'light' }};
dark.onchange = follow; follow();</script></head>
<body><main><article>{body}</article></main></body></html>"""
DOT = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="


@pytest.fixture
def page(tmp_path):
    """Write a page."""

    def _page(body, style="", name="index.html"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PAGE.format(body=body, style=style), encoding="utf-8")
        return path

    return _page


@pytest.mark.usefixtures("chromium")
def test_good_page_has_no_fault(page, tmp_path):
    body = f'<h1>Title</h1><p>Text</p><img src="{DOT}" alt="a dot">'
    body += '<div style="overflow-x: auto"><div style="width: 3000px">wide</div></div>'
    faults, (cost,) = audit([page(body)], tmp_path)
    assert faults == []
    assert cost.page == "index.html"


@pytest.mark.usefixtures("chromium")
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<mjx-merror data-mjx-error='Undefined control sequence'>x</mjx-merror>", "TeX error"),
        ("<span class='math'>\\(x^2\\)</span>", "formula not set"),
        ("<img src='missing.png' alt='a missing image'>", "broken image: missing.png"),
        (f"<img src='{DOT}' alt=' '>", "image without alt text"),
        ("<script src='https://example.org/a.js'></script>", "asks for https://example.org"),
        ("<link rel='stylesheet' href='http://example.org/a.css'>", "asks for http://example.org"),
        ("<script>fetch('https://example.org/').catch(() => 0)</script>", "asks for https"),
        ("<script>undefinedFunction()</script>", "script error: ReferenceError"),
        ("<script>console.error('broken')</script>", "console error: broken"),
        ("<div style='width: 600px'>wide</div>", "phone: the page is 600 px wide"),
        ("<div style='width: 2000px'>wide</div>", "desktop: the page is 2000 px wide"),
        (
            "<button></button>",
            "light, desktop: button-name (critical) at 1 place(s), such as button",
        ),
        ("<p style='color: #aaa'>pale</p>", "light, desktop: color-contrast (serious)"),
        ("<p style='color: #555'>dim</p>", "dark, desktop: color-contrast (serious)"),
        ("<p style='color: #555'>dim</p>", "dark, phone: color-contrast (serious)"),
        (f"<!-- {'x' * 2_000_000} -->", "the page has 2.00 MB of its own, above 2"),
    ],
)
def test_fault_is_found(page, tmp_path, body, fault):
    found = audit([page(body)], tmp_path).faults
    assert any(line.startswith(f"index.html: {fault}") for line in found), found


@pytest.mark.usefixtures("chromium")
def test_text_cut_off_at_the_edge_is_found(page, tmp_path):
    path = page("<p style='margin-left: -60px'>cut</p>", "main { overflow: hidden }")
    assert audit([path], tmp_path).faults[-1] == "index.html: phone: p sticks out of 390 px"


@pytest.mark.usefixtures("chromium")
def test_page_that_does_not_follow_the_dark_scheme_is_found(page, tmp_path):
    path = page("<p>Text</p>", "html[data-theme=dark] body { color: #000; background: #fff }")
    expected = ["index.html: dark mode: the text is darker than the page"]
    assert audit([path], tmp_path).faults == expected


@pytest.mark.usefixtures("chromium")
def test_two_browsers_find_what_one_finds_in_the_order_of_the_pages(page, tmp_path):
    names = ["c.html", "a.html", "b.html"]
    pages = [page("<button></button>", name=name) for name in names]
    faults, costs = audit(pages, tmp_path, workers=2)
    assert [line.partition(":")[0] for line in faults[::2]] == names
    assert [cost.page for cost in costs] == names


@pytest.mark.usefixtures("chromium")
def test_cost_counts_what_a_page_has_of_its_own_and_what_it_shares(page, tmp_path):
    (tmp_path / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    page("", name="_static/style.css")
    path = page("<link rel='stylesheet' href='_static/style.css'><img src='a.svg' alt='a'>")
    busy = page("<script>for (let i = 0; i < 3e8; i++) Math.sqrt(i)</script>", name="busy.html")
    with Chromium() as browser:
        browser.open(path)
        cost = measure(browser, path, tmp_path)
        browser.open(busy)
        other = measure(browser, busy, tmp_path)
    assert cost.own == path.stat().st_size + (tmp_path / "a.svg").stat().st_size
    assert cost.shared == (tmp_path / "_static" / "style.css").stat().st_size
    assert 0 < cost.work < other.work <= other.wall


def test_slow_page_is_a_fault_and_the_report_begins_with_it():
    costs = [Cost(f"{k}.html", 1000 * k, 0, 0.5 * k, 1.0) for k in range(7)]
    assert [cost.faults() for cost in costs[:5]] == [[]] * 5
    assert costs[5].faults() == ["the page answers after 2.50 s of work, above 2"]
    lines = report(costs).splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [f"{k}.html" for k in (6, 5, 4, 3, 2)]


STUCK = "<script>onkeydown = e => { if (e.key === 'Enter') e.preventDefault() }</script>"
FOLD = "<details><summary>numbers</summary><p>1, 2, 3</p></details>"


@pytest.mark.usefixtures("chromium")
@pytest.mark.parametrize(
    ("body", "style", "faults"),
    [
        (FOLD, "", []),
        (FOLD, "summary { outline: none }", ["the focus of the fold cannot be seen"]),
        (f"{FOLD}{STUCK}", "", ["Enter does not work the fold"]),
        (f"{FOLD}<a href='#x' tabindex='-1' id='x'>x</a>", "",
         ["Tab does not reach 1 place(s) of the kind: link of the text"]),
    ],
)  # fmt: skip
def test_keyboard_alone(page, body, style, faults):
    with Chromium() as browser:
        met, found = walk(browser, page(body, style))
    assert "fold" in {control.name for control in met}
    assert found == faults


@pytest.mark.usefixtures("chromium")
def test_kind_of_control_that_no_page_has_is_a_fault(page, tmp_path):
    page(FOLD)
    found = keyboard_faults(tmp_path, ["index.html"])
    assert "keyboard: no search on any page" in found
    assert not any("fold" in fault for fault in found)


@pytest.mark.usefixtures("chromium")
def test_browser_says_what_it_refuses(page):
    with Chromium() as browser:
        browser.open(page("<p>Text</p>"))
        assert browser.evaluate("1 + 1") == 2
        with pytest.raises(BookError, match="ReferenceError"):
            browser.evaluate("missing")
        with pytest.raises(BookError, match=r"refused Page\.nothing"):
            browser.call("Page.nothing")


@pytest.mark.usefixtures("chromium")
@pytest.mark.parametrize(("script", "faults"), [("", 1), ("list.innerHTML = '<li><a>x</a>'", 0)])
def test_search_without_results_is_a_fault(page, tmp_path, script, faults):
    body = f"<ul class='search'></ul><script>const list = document.querySelector('ul'); {script}"
    page(f"{body}</script>", name="search.html")
    assert len(search_faults(tmp_path, "word")) == faults


@pytest.mark.usefixtures("chromium")
def test_screenshots_show_four_views(page, tmp_path):
    written = screenshots([page("<p>Text</p>")], tmp_path, tmp_path / "out")
    assert [path.name for path in written] == [
        f"index-{kind}-{scheme}.png"
        for scheme in ("light", "dark")
        for kind in ("desktop", "phone")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_without_a_browser_the_message_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("CHROMIUM", "no-such-program")
    with pytest.raises(BookError, match="sudo apt install chromium"), Chromium():
        pass


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("other.html", None),
        ("other.html#there", None),
        ("#here", None),
        ("https://example.org/page?x=1", None),
        ("mailto:someone@example.org", None),
        ("missing.html", "leads to no file"),
        ("other.html#gone", "leads to no anchor"),
        ("#gone", "leads to no anchor"),
        ("https:///page", "is no well-formed address"),
    ],
)
def test_links(page, tmp_path, link, fault):
    page(f"<p id='here'><a href='{link}'>link</a></p>")
    page("<p id='there'>Text</p>", name="other.html")
    assert broken_links(tmp_path) == ([f"index.html: {link} {fault}"] if fault else [])


def test_script_from_outside_is_a_fault(page, tmp_path):
    page("<script src='https://example.org/a.js'></script>")
    assert broken_links(tmp_path) == ["index.html: https://example.org/a.js is loaded from outside"]


def test_private_folders_are_no_pages(page, tmp_path):
    page("", name="_static/macros.html")
    page("", name="lev/01.html")
    assert [path.name for path in html_pages(tmp_path)] == ["01.html"]


def test_chapters_are_in_reading_order(tmp_path):
    toc = tmp_path / "_toc.yml"
    toc.write_text(
        "format: jb-book\nroot: index\nparts:\n- caption: A\n  chapters:\n  - file: a\n"
        "    sections:\n    - file: b\n- caption: B\n  chapters:\n  - file: c\n"
    )
    assert chapters(toc) == ["index", "a", "b", "c"]


def test_status_page_shows_each_notebook_and_each_stack_once():
    def ran(name, device):
        versions = {"Python": "3.11.7", "torch": "2.13.0"}
        return Execution(name, "0", "smoke", {"seed": 3}, 1.25, versions, device, "abc")

    text = status_page([ran("lev/01_spline", "one"), ran("lev/02_digits", "two")])
    assert "2 notebooks, 2 s" in text
    assert "| [](/lev/01_spline.ipynb) | 1.2 s |" in text
    assert "`seed = 3`" in text
    assert "- [](/lev/02_digits.ipynb): two; Python 3.11.7, torch 2.13.0." in text
    assert "- All pages: one;" in status_page([ran("lev/01_spline", "one")])


def test_warning_of_sphinx_is_a_fault(tmp_path):
    work = Workspace(tmp_path, "smoke")
    work.sources.mkdir(parents=True)
    (work.sources / "_toc.yml").write_text("format: jb-book\nroot: index\n")
    (work.sources / "_config.yml").write_text("title: t\nauthor: a\n")
    (work.sources / "index.md").write_text("# Title\n\n[](missing-page)\n")
    for _ in range(2):  # the second build must not look clean because nothing changed since
        with pytest.raises(BookError, match=r"1 fault.*\n.*missing-page"):
            build(work)
