"""The prose front says what is true: its code runs, its commands exist, its ledger is sound."""

import ast
import configparser
import re
from pathlib import Path

import pytest
import yaml

import lmgeom
from lmgeom.study.claims import load_claims

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "book/index.md", "book/how-to.md")


def blocks(page: str, language: str) -> list[str]:
    """Fenced blocks of one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.M | re.S)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page):
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)
    assert names["vectors"].shape == (1, 3, 256)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    used = {
        name for block in blocks(page, "bash") for name in re.findall(r"^make (\w+)", block, re.M)
    }
    assert used <= targets


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_named_files_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = set(re.findall(r"\b(?:nbs|tests|book)/[\w/.-]+\.(?:ipynb|yaml|py|md|bib)\b", text))
    assert not [path for path in paths if not (ROOT / path).is_file()]


def test_profiles_of_the_readme_are_those_of_the_settings():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert table == [name for name in settings.sections() if name != "project"]


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == lmgeom.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_every_claimed_test_exists():
    for claim in load_claims().values():
        if "test" in claim:
            path, _, name = claim["test"].partition("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in functions, claim["id"]


def test_ledger_vocabulary():
    for claim in load_claims().values():
        assert claim["part"] in {"input", "depth", "output", "together"}, claim["id"]
        assert claim["kind"] in {"identity", "budget", "mechanism", "empirical", "cost"}, claim[
            "id"
        ]
        assert claim.keys() & {"rule", "scale", "open"} or claim["kind"] != "empirical", claim["id"]
        assert re.fullmatch(r"[a-z0-9]+([-.][a-z0-9]+)*", claim["id"]), claim["id"]
