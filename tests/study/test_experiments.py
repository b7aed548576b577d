"""The experiment notebooks with whatever records there are: none, some, all."""

import json
import shutil

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from lmgeom import figures
from lmgeom.study import paths

NOTEBOOK = paths.root() / "nbs" / "experiments" / "01_leviathan.ipynb"
NEEDS_TEXT = {"exp-seen", "exp-yours", "exp-yours-figure", "exp-yours-table", "exp-footer"}


def cells():
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = {c["id"]: "".join(c["source"]) for c in found if c["cell_type"] == "code"}
    assert code.keys() > NEEDS_TEXT
    return {name: source for name, source in code.items() if name not in NEEDS_TEXT}


@pytest.mark.parametrize("pattern", ["no record", "leviathan-tied/tied-*", "leviathan-*/*tied-*"])
def test_a_notebook_shows_what_is_on_record(tmp_path, monkeypatch, pattern):
    """All cells but those that read the text itself, with a part of the committed records."""
    for path in paths.results().glob(f"{pattern}.json"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.parent.name)
    monkeypatch.setattr(paths, "results", lambda: tmp_path)
    monkeypatch.setattr(figures, "use", lambda: None)
    mpl.use("agg")
    space = {}
    for name, source in cells().items():
        exec(compile(source, name, "exec"), space)
    plt.close("all")
    there = len(space["screening"]) + len(space["records"])
    assert f"{there} of {len(space['planned'])} planned runs" in space["text"]
    assert "Missing: tied-lr" in space["text"] or "Missing: lev" in space["text"]
    assert space["compared"] == (["untied"] if "*tied-*" in pattern else [])
