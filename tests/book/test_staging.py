"""Staging: directives become tags, parameters are checked and stand where the notebook's own do."""

from __future__ import annotations

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from lmgeom.book.settings import load_profile, notebook_names
from lmgeom.book.staging import check_parameters, parameters_of, stage
from lmgeom.errors import ConfigError

PARAMETERS = "seed: int = 0  # of the draw\nrate: float = 0.5\nnames: list = ['a']\nword: str = 'x'"


@pytest.fixture
def write(tmp_path):
    """Write a notebook of some code cells; a cell is a source or a pair of source and tags."""

    def _write(*cells):
        made = [new_markdown_cell("# Title", id="title")]
        for i, cell in enumerate(cells):
            source, tags = cell if isinstance(cell, tuple) else (cell, [])
            metadata = {"tags": tags} if tags else {}
            made.append(new_code_cell(source, id=f"cell-{i}", metadata=metadata))
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        path = tmp_path / "notebook.ipynb"
        nbformat.write(new_notebook(cells=made, metadata={"kernelspec": kernel}), path)
        return path

    return _write


@pytest.mark.parametrize(
    ("directive", "tag"),
    [
        ("#| hide", "remove-cell"),
        ("#| default_exp lev.spline", "remove-cell"),
        ("#| hide_input", "remove-input"),
        ("#| hide_output", "remove-output"),
        ("#| eval: false", "skip-execution"),
        ("#|eval: false", "skip-execution"),
    ],
)
def test_directive_becomes_tag(write, directive, tag):
    cell = stage("n", write(f"{directive}\nx = 1"), {}, "smoke").cells[1]
    assert cell.source == "x = 1"
    assert cell.metadata.tags == [tag]


@pytest.mark.parametrize("directive", ["#| export", "#| exports", "#| eval: true"])
def test_directive_of_the_export_leaves_no_trace(write, directive):
    cell = stage("n", write(f"{directive}\nx = 1"), {}, "smoke").cells[1]
    assert cell.source == "x = 1"
    assert "tags" not in cell.metadata


def test_directives_add_to_the_tags_of_the_cell(write):
    path = write(("#| hide_input\n#| hide_output\n\nx = 1", ["keep", "remove-input"]))
    assert stage("n", path, {}, "smoke").cells[1].metadata.tags == [
        "keep",
        "remove-input",
        "remove-output",
    ]


def test_comments_and_texts_that_look_similar_stay(write):
    source = "# | hide\nx = '''\n  #| hide\n'''  #| hide"
    assert stage("n", write(source), {}, "smoke").cells[1].source == source


@pytest.mark.parametrize("directive", ["#| hidden", "#| eval: maybe"])
def test_unknown_directive_is_refused_by_name(write, directive):
    with pytest.raises(ConfigError, match=r"n, cell cell-0: .*(hidden|maybe)"):
        stage("n", write(directive), {}, "smoke")


def test_outputs_are_dropped(write):
    path = write("x = 1")
    notebook = nbformat.read(path, 4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="old")]
    nbformat.write(notebook, path)
    assert stage("n", path, {}, "smoke").cells[1].outputs == []


def test_parameters_are_those_papermill_finds(write):
    path = write((PARAMETERS, ["parameters"]), "y = seed")
    assert parameters_of(path) == {"seed": 0, "rate": 0.5, "names": ["a"], "word": "x"}


def test_parameters_stand_after_the_tagged_cell_and_decide(write, tmp_path):
    path = write("first = 1", (PARAMETERS, ["parameters"]), "(seed, rate, names, word)")
    given = {"seed": 3, "rate": 1, "names": ["b", "c"], "word": "y"}
    staged = stage("n", path, given, "smoke")
    ids = [cell.id for cell in staged.cells]
    assert ids == ["title", "cell-0", "cell-1", "injected-parameters", "cell-2"]
    assert "profile smoke" in staged.cells[3].source
    nbformat.write(staged, tmp_path / "staged.ipynb")
    done = papermill.execute_notebook(
        str(tmp_path / "staged.ipynb"), None, kernel_name="python3", progress_bar=False
    )
    assert done.cells[4].outputs[0].data["text/plain"] == "(3, 1, ['b', 'c'], 'y')"


def test_parameters_equal_to_the_defaults_add_no_cell(write):
    path = write((PARAMETERS, ["parameters"]))
    assert len(stage("n", path, {"seed": 0, "rate": 0.5}, "smoke").cells) == 2


def test_skipped_cell_does_not_run(write, tmp_path):
    path = write("#| eval: false\nraise SystemError", "2 + 2")
    nbformat.write(stage("n", path, {}, "smoke"), tmp_path / "staged.ipynb")
    done = papermill.execute_notebook(
        str(tmp_path / "staged.ipynb"), None, kernel_name="python3", progress_bar=False
    )
    assert done.cells[1].outputs == []
    assert done.cells[2].outputs[0].data["text/plain"] == "4"


def test_unknown_parameter_fails_with_the_known_ones(write):
    path = write((PARAMETERS, ["parameters"]))
    with pytest.raises(ConfigError, match=r"n: unknown parameter 'sede', known: seed, rate, names"):
        check_parameters("n", path, {"sede": 3})


def test_notebook_without_parameters_takes_none(write):
    with pytest.raises(ConfigError, match="unknown parameter 'seed', known: none"):
        check_parameters("n", write("x = 1"), {"seed": 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 1.5), ("seed", True), ("seed", "3"), ("rate", "0.1"), ("names", "a"), ("word", 1)],
)
def test_parameter_of_another_type_is_refused(write, name, value):
    with pytest.raises(ConfigError, match=f"{name} = .* is a {type(value).__name__}"):
        check_parameters("n", write((PARAMETERS, ["parameters"])), {name: value})


# ------------------------------------------------------------------ settings.ini
GENERAL = "workers = 2\ntimeout = 60\ntokenizers = ['bpe-8k']\n"


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one notebook, and a writer of its settings."""
    (tmp_path / "nbs" / "lev").mkdir(parents=True)
    (tmp_path / "nbs" / "lev" / "01_spline.ipynb").write_text("{}")

    def _checkout(text):
        (tmp_path / "settings.ini").write_text(text)
        return tmp_path

    return _checkout


def test_profile_is_read(checkout):
    root = checkout(f"[project]\na = b\n[smoke]\n{GENERAL}lev/01_spline.seed = 3\n")
    profile = load_profile(root, "smoke")
    assert (profile.workers, profile.timeout, profile.tokenizers) == (2, 60, ["bpe-8k"])
    assert profile.parameters == {"lev/01_spline": {"seed": 3}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lev/01_splines.seed = 3", "unknown notebook 'lev/01_splines', known: lev/01_spline"),
        ("lev/01_spline.seed = three", "no Python literal"),
        ("worker = 2", "unknown key 'worker' in .smoke., known: workers, timeout"),
    ],
)
def test_bad_line_is_refused_by_name(checkout, line, message):
    with pytest.raises(ConfigError, match=message):
        load_profile(checkout(f"[smoke]\n{GENERAL}{line}\n"), "smoke")


@pytest.mark.parametrize("line", ["workers = 0", "workers = True", "timeout = 1.5"])
def test_bad_number_is_refused(checkout, line):
    key = line.split()[0]
    text = "\n".join(x for x in GENERAL.splitlines() if not x.startswith(key))
    with pytest.raises(ConfigError, match=f"{key} = .* must be a whole number"):
        load_profile(checkout(f"[smoke]\n{text}\n{line}\n"), "smoke")


def test_unknown_profile_is_refused_with_the_known_ones(checkout):
    with pytest.raises(ConfigError, match="unknown profile 'smok', known: smoke"):
        load_profile(checkout(f"[smoke]\n{GENERAL}"), "smok")


def test_missing_setting_is_named(checkout):
    with pytest.raises(ConfigError, match="lacks timeout, tokenizers"):
        load_profile(checkout("[smoke]\nworkers = 1\n"), "smoke")


def test_hidden_folders_hold_no_notebooks(checkout):
    root = checkout("")
    (root / "nbs" / ".ipynb_checkpoints").mkdir()
    (root / "nbs" / ".ipynb_checkpoints" / "01.ipynb").write_text("{}")
    assert notebook_names(root) == ["lev/01_spline"]
