"""Rerunning a chapter: what a reader may change, and their numbers beside the book's."""

from __future__ import annotations

import json
import re
import shutil

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lmgeom.book import rerun as module
from lmgeom.book.execute import Execution
from lmgeom.book.rerun import Cell, cells_of, read_parameters, rerun
from lmgeom.errors import BookError, ConfigError
from lmgeom.study import claims, paths

PARAMETERS = "seed: int = 0\nrate: float = 0.5\nnames: list = ['a']\nword: str = 'x'"
GENERAL = "workers = 1\ntimeout = 60\ntokenizers = []\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one parameterized chapter; data, claims and Sphinx are left out."""
    cells = [
        new_markdown_cell("# A chapter", id="title"),
        new_code_cell(PARAMETERS, id="parameters", metadata={"tags": ["parameters"]}),
        new_markdown_cell("## Sums", id="sums"),
        new_code_cell("{'twice': 2 * seed, 'fixed': 7}", id="twice"),
        new_code_cell("assert seed < 9, 'too large'\n1 + 1", id="same"),
        new_code_cell("import os\nos.environ.get('LMGEOM_RESULTS', 'ours')", id="records"),
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    path = tmp_path / "nbs" / "part" / "01_one.ipynb"
    path.parent.mkdir(parents=True)
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    (tmp_path / "settings.ini").write_text(f"[smoke]\n{GENERAL}part/01_one.rate = 0.25\n")
    (tmp_path / "book" / "results").mkdir(parents=True)
    (tmp_path / "book" / "_config.yml").write_text("title: t\nauthor: a\n")
    (tmp_path / "lmgeom").mkdir()
    monkeypatch.setattr(module, "prepare_data", lambda profile: tmp_path / "prepared")
    monkeypatch.setattr(module, "prepare_claims", lambda root: None)
    monkeypatch.setattr(module, "build", lambda work, strict: work.sources / "index.md")
    monkeypatch.setattr("lmgeom.book.build.web_assets", dict)
    monkeypatch.setattr(claims, "load_claims", dict)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("seed=3", {"seed": 3}),
        ("rate=1", {"rate": 1}),
        ("names=['b', 'c']", {"names": ["b", "c"]}),
        ("word=bpe-8k", {"word": "bpe-8k"}),
        ("word=3", {"word": "3"}),
        ("word=a=b", {"word": "a=b"}),
    ],
)
def test_parameters_are_read_as_the_chapter_needs_them(checkout, text, value):
    path = checkout / "nbs" / "part" / "01_one.ipynb"
    assert read_parameters([text], path, "part/01_one") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sede=3", "unknown parameter 'sede', known: seed, rate, names, word"),
        ("seed=1.5", "seed = 1.5 is a float"),
        ("seed=x", "seed = 'x' is a str"),
        ("seed", "'seed' is not NAME=VALUE, such as -p seed=3"),
        ("=3", "'=3' is not NAME=VALUE"),
    ],
)
def test_wrong_parameter_is_refused_in_one_line(checkout, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        rerun(checkout, "part/01_one", [text])
    assert "\n" not in str(caught.value)


def test_nothing_to_change_shows_what_could_be(checkout):
    with pytest.raises(ConfigError, match=r"part/01_one has seed = 0, rate = 0\.25"):
        rerun(checkout, "part/01_one", [])


def test_results_must_be_a_folder(checkout):
    with pytest.raises(ConfigError, match="'nowhere' is not a folder"):
        rerun(checkout, "part/01_one", [], results=checkout.__class__("nowhere"))


def test_page_sets_the_numbers_side_by_side(checkout, capsys):
    page = rerun(checkout, "part/01_one", ["seed=3"])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Your numbers beside ours: A chapter\n")
    assert "| `seed` | `0` | `3` |" in text
    assert "2 of 3 cells that print something print the same" in text
    assert "**Sums**, largest change 100.00%" in text
    assert "&#x27;twice&#x27;: <mark>6</mark>, &#x27;fixed&#x27;: 7" in text
    executed = nbformat.read(page.parent / "part" / "01_one.ipynb", 4)
    assert "seed = 3" in executed.cells[2].source
    assert "rate = 0.25" in executed.cells[2].source, "the profile's parameters hold as well"
    capsys.readouterr()
    rerun(checkout, "part/01_one", ["seed=3"])
    assert capsys.readouterr().out.count("1 up to date, 0 to run") == 2


def test_chapter_reads_the_readers_records_over_the_books(checkout):
    for name in ("book/results/a/x.json", "mine/b/y.json"):
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    page = rerun(checkout, "part/01_one", [], results=checkout / "mine")
    text = page.read_text(encoding="utf-8")
    assert "<pre>&#x27;ours&#x27;</pre>" in text
    records = page.parents[1] / "results"
    assert str(records) in text
    assert sorted(path.parent.name for path in records.rglob("*.json")) == ["a", "b"]
    assert "| parameter |" not in text


def test_records_are_looked_for_where_a_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("LMGEOM_RESULTS", str(tmp_path))
    assert paths.results() == tmp_path


def test_chapter_that_fails_leaves_no_page(checkout):
    with pytest.raises(BookError, match="part/01_one, cell same: AssertionError: too large"):
        rerun(checkout, "part/01_one", ["seed=9"])
    assert not list((checkout / "_build").rglob("index.md"))


@pytest.mark.parametrize(
    ("ours", "yours", "change"),
    [
        ("loss 2.0", "loss 2.0", 0.0),
        ("loss 2.0 of bpe-16k", "loss 1.0 of bpe-16k", 0.5),
        ("1,000 tokens", "1,250 tokens", 0.2),
        ("−0.5", "0.5", 2.0),
        ("4.4e-16", "2.2e-16", 0.0),
        ("holds", "fails", None),
        ("[1, 2]", "[1]", None),
        ("{1:2,3}", "{1:2,4}", 0.25),
    ],
)
def test_change_is_that_of_the_numbers(ours, yours, change):
    assert Cell("", ours, yours).change == change


def test_drawings_claims_and_provenance_are_not_numbers():
    def shown(*outputs):
        cell = new_code_cell("x", id="one")
        cell.outputs = list(outputs)
        return new_notebook(cells=[new_markdown_cell("## Head", id="head"), cell])

    def html(text):
        return new_output("display_data", data={"text/html": text, "text/plain": "<HTML>"})

    table = "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>22</td></tr></table>"
    figure = new_output("display_data", data={"image/svg+xml": "<svg/>", "text/plain": "Figure 1"})
    noise = new_output("stream", name="stderr", text="a warning")
    provenance = html("<table class='provenance'><tr><td>run time</td><td>3 s</td></tr></table>")
    judged = html("<div class='claims'><table><tr><td>holds</td></tr></table></div>")
    book = shown(html(table), figure, noise, provenance, judged)
    (cell,) = cells_of(book, shown(html(table.replace("22", "33"))))
    assert cell == Cell("Head", "a  b\n1  22", "a  b\n1  33")
    assert cells_of(shown(figure, provenance), shown(figure)) == []


def _record(folder, arm, seed, loss, root):
    """Write a record of a study like a committed one, with another loss."""
    template = next((root / "book" / "results" / "leviathan-tied").glob("tied-seed0-*.json"))
    entry = json.loads(template.read_text(encoding="utf-8"))
    entry |= {"arm": arm, "seed": seed, "losses": entry["losses"] | {"val": loss}}
    entry["curve"][-1]["val"] = loss
    path = folder / "leviathan-tied" / f"{arm}-seed{seed}-{entry['id']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entry))


def test_claims_are_judged_on_the_readers_records_by_the_same_bar(root, tmp_path):
    rows = claims.load_claims(root / "book" / "claims.yaml")
    for seed in range(3):
        _record(tmp_path, "tied", seed, 5.0 + 0.01 * seed, root)
        _record(tmp_path, "lev", seed, 4.0 + 0.01 * seed + 0.001 * seed**2, root)
    names = ("lev-vs-tied", "lev-speed", "taper-alignment", "lev-spline-local")
    mine = [rows[name] for name in names]
    text = module._claims_table(mine, root, tmp_path)
    first, second, third, _ = text.split("</tr>")[1:5]
    published = claims.judge(rows["lev-vs-tied"], folder=root / "book" / "results")
    assert f">{published.verdict}</strong>" in first
    assert ">holds</strong>" in first.rpartition("<td>")[2]
    assert "python -m tests.benchmarks.lev_speed --out FOLDER/benchmarks/lev-speed.json" in second
    assert "python -m tests.benchmarks.alignment --out FOLDER/alignment<" in third
    without = module._claims_table(mine, root, None)
    assert "lmgeom study run leviathan-tied --results FOLDER" in without


def test_readers_runs_stand_beside_those_of_the_book(root, tmp_path):
    _record(tmp_path, "tied", 0, 5.0, root)
    _record(tmp_path, "tied", 99, 5.5, root)
    known, new = module._runs_table(tmp_path, root)
    assert known.startswith("| leviathan-tied, tied, seed 0 | ")
    assert re.search(r"\| 1 of \d+ evaluations outside \|$", known), "the changed end of the curve"
    assert new.startswith("| leviathan-tied, tied, seed 99 | none | 5.5000 |  | ")
    _record(tmp_path, "newcomer", 0, 5.0, root)
    first, *_ = module._runs_table(tmp_path, root)
    assert "newcomer" in first
    assert first.count("|") == 6


def test_studies_without_records_of_the_reader_keep_the_books(tmp_path):
    for name in ("book/results/a/x.json", "book/results/b/y.json", "mine/b/z.json", "mine/_runs/l"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    found = module._overlay(tmp_path, tmp_path / "mine", tmp_path / "both")
    files = sorted(p.relative_to(found).as_posix() for p in found.rglob("*") if p.is_file())
    assert files == ["a/x.json", "b/z.json"]
    shutil.rmtree(tmp_path / "mine" / "b")
    found = module._overlay(tmp_path, tmp_path / "mine", tmp_path / "both")
    assert (found / "b" / "y.json").is_file()


def test_long_outputs_are_folded():
    text = "\n".join(map(str, range(40)))
    assert module._beside(Cell("", text, f"{text}!")).startswith("<details><summary>40 lines")
    assert module._beside(Cell("", "1", "2")).startswith("<table")


def test_folder_of_a_rerun_says_what_was_changed(tmp_path):
    assert module._slug("lev/01_spline", {"seed": 3}, None) == "lev-01_spline,seed=3"
    odd = module._slug("lev/01_spline", {"word": "a/../b"}, tmp_path)
    assert "/" not in odd
    assert odd != module._slug("lev/01_spline", {"word": "a/../c"}, tmp_path)


def test_origin_names_the_machine():
    run = Execution("n", "0", "smoke", {}, 1.25, {"torch": "2.13.0"}, "a processor", "abc")
    assert module._origin("Ours", run) == (
        "- Ours: 1.2 s on a processor; torch 2.13.0; commit abc."
    )
