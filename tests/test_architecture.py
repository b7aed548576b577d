"""Structure that holds across the whole repository."""

from __future__ import annotations

import ast
import configparser
import itertools
import sys
import tomllib
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml

from lmgeom.book.build import chapters
from lmgeom.book.dependencies import Modules
from lmgeom.book.library import PACKAGES
from lmgeom.book.settings import load_profile, notebook_names
from lmgeom.book.staging import check_parameters

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = notebook_names(ROOT)
PROFILES = ("smoke", "book", "gpu")
# What each part may import; errors is open to all. A part that is not listed stands on top of all.
ALLOWED = {
    "errors": set(),
    "console": set(),
    "lev": set(),
    "taper": set(),
    "mixers": set(),
    "head": set(),
    "data": set(),
    "figures": set(),
    "lm": {"lev", "taper", "mixers", "head", "data"},
    "study": {"lm", "lev", "taper", "mixers", "head", "data", "figures"},
    "hub": {"study", "lm", "lev", "taper", "mixers", "head", "data"},
    "book": {"study", "data", "figures", "console"},
}
MODELS = ("lev", "taper", "mixers", "head")
TORCH_ONLY = {"torch", "lmgeom"}


def cells(name: str, kind: str = "code") -> list[nbformat.NotebookNode]:
    """Cells of one kind of a notebook."""
    notebook = nbformat.read(ROOT / "nbs" / f"{name}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def modules(part: str) -> list[str]:
    """Names of the modules below one part of the library."""
    found = [ROOT / "lmgeom" / f"{part}.py", *(ROOT / "lmgeom" / part).rglob("*.py")]
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in found if p.is_file()]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_run_one_way(part):
    graph, wrong = Modules(ROOT), []
    for module in modules(part):
        tree = ast.parse(graph.path(module).read_text(encoding="utf-8"))
        parts = {name.split(".")[1] for name in graph.imported(tree, module) if "." in name}
        wrong += [f"{module} imports {p}" for p in parts - ALLOWED[part] - {part, "errors"}]
    assert not wrong


@pytest.mark.parametrize("part", MODELS)
def test_model_parts_know_only_torch(part):
    wrong = []
    for module in modules(part):
        tree = ast.parse(Modules(ROOT).path(module).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            tops = {name.split(".")[0] for name in names}
            wrong += [f"{module}: {t}" for t in tops - TORCH_ONLY - sys.stdlib_module_names]
    assert not wrong


def test_every_notebook_is_a_chapter_and_every_chapter_exists():
    listed = chapters(ROOT / "book" / "_toc.yml")
    assert len(listed) == len(set(listed))
    made = {"status", *(f"reference/{name}" for name in ("index", *PACKAGES))}
    prose = {path.stem for path in (ROOT / "book").glob("*.md")}
    assert set(listed) == set(NOTEBOOKS) | prose | made


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_committed_without_outputs(name):
    assert all(not cell.outputs and cell.execution_count is None for cell in cells(name))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cell_ids_are_short_and_unique(name):
    ids = [cell.id for kind in ("code", "markdown") for cell in cells(name, kind)]
    assert len(ids) == len(set(ids))
    assert all(len(identifier) <= 40 for identifier in ids)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_at_most_one_parameters_cell_and_papermill_reads_it(name):
    tagged = [c for c in cells(name) if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) <= 1
    found = papermill.inspect_notebook(str(ROOT / "nbs" / f"{name}.ipynb"))
    assigned = set()
    for cell in tagged:
        for node in ast.parse(cell.source).body:
            assert isinstance(node, (ast.Assign, ast.AnnAssign)), "no logic in a parameters cell"
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned.update(target.id for target in targets)
    assert set(found) == assigned


@pytest.mark.parametrize("profile", PROFILES)
def test_profile_names_real_notebooks_and_parameters(profile):
    for name, parameters in load_profile(ROOT, profile).parameters.items():
        check_parameters(name, ROOT / "nbs" / f"{name}.ipynb", parameters)


def test_settings_and_pyproject_agree():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "settings.ini")
    nbdev = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nbdev"]
    shared = dict(parser["project"])
    assert shared == {key: nbdev[key] for key in shared}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_exported_module_has_a_notebook_and_the_notebook_its_module(name):
    exports = [
        line.split()[-1]
        for cell in cells(name)
        for line in cell.source.splitlines()
        if line.startswith("#| default_exp")
    ]
    assert len(exports) <= (not name.startswith("experiments/"))
    if exports:  # a chapter that only examines exports nothing
        assert exports[0].split(".")[0] == name.split("/")[0]
        assert Modules(ROOT).path(f"lmgeom.{exports[0]}") is not None


def test_pinned_versions_satisfy_the_requirements():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            package, _, version = line.partition("==")
            pins[canonicalize_name(package)] = version
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    wanted = [*project["dependencies"], *extras]
    for text in wanted:
        requirement = Requirement(text)
        if (package := canonicalize_name(requirement.name)) != project["name"]:
            assert requirement.specifier.contains(pins[package]), text
    assert {"nbdev", "fastcore", "execnb", "ghapi", "torch"} <= pins.keys()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_chapter_has_one_title_and_no_skipped_heading_level(name):
    levels = []
    for cell in cells(name, "markdown"):
        fenced = False
        for line in cell.source.splitlines():
            fenced ^= line.lstrip().startswith("```")
            if not fenced and line.startswith("#"):
                levels.append(len(line) - len(line.lstrip("#")))
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_every_figure_with_a_caption_is_mentioned_and_has_alt_text():
    for name in NOTEBOOKS:
        text = "\n".join(cell.source for cell in cells(name, "markdown"))
        for cell in cells(name):
            options = cell.metadata.get("mystnb", {})
            if figure := options.get("figure"):
                assert figure["name"] in text, f"{name}: {figure['name']} is not mentioned"
                assert options.get("image", {}).get("alt", "").strip(), f"{name}: {cell.id}"


def test_nothing_asks_the_network_for_a_page():
    config = yaml.safe_load((ROOT / "book" / "_config.yml").read_text())
    assert not config["sphinx"]["config"]["mathjax_path"].startswith("http")
    assert "sphinx_thebe" not in config["sphinx"]["config"]["extensions"]
