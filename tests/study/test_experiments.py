"""The experiment notebooks with whatever records there are: none, some, all."""

import json
import shutil

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import yaml

from lmgeom import figures
from lmgeom.lm import parameters
from lmgeom.study import judge, load_claims, paths
from lmgeom.study.records import FIELDS, record
from lmgeom.study.run import load_study

NEEDS_TEXT = {"exp-seen", "exp-yours", "exp-yours-figure", "exp-yours-table", "exp-footer"}


def run_cells(name, results, monkeypatch, skip=frozenset()):
    """Run the code cells of a notebook on a folder of records; return its variables."""
    path = paths.root() / "nbs" / "experiments" / f"{name}.ipynb"
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = {c["id"]: "".join(c["source"]) for c in found if c["cell_type"] == "code"}
    assert code.keys() > skip
    monkeypatch.setattr(paths, "results", lambda: results)
    monkeypatch.setattr(figures, "use", lambda: None)
    mpl.use("agg")
    space = {}
    for cell, source in code.items():
        if cell not in skip:
            exec(compile(source, cell, "exec"), space)
    plt.close("all")
    return space


def copy_records(pattern, folder):
    """Copy a part of the committed records."""
    for path in paths.results().glob(f"{pattern}.json"):
        (folder / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, folder / path.parent.name)


@pytest.mark.parametrize("pattern", ["no record", "leviathan-tied/tied-*", "leviathan-*/*tied-*"])
def test_a_notebook_shows_what_is_on_record(tmp_path, monkeypatch, pattern):
    """All cells but those that read the text itself, with a part of the committed records."""
    copy_records(pattern, tmp_path)
    space = run_cells("01_leviathan", tmp_path, monkeypatch, NEEDS_TEXT)
    there = len(space["screening"]) + len(space["records"])
    assert f"{there} of {len(space['planned'])} planned runs" in space["text"]
    assert "Missing: tied-lr" in space["text"] or "Missing: lev" in space["text"]
    assert space["compared"] == (["untied"] if "*tied-*" in pattern else [])


SIZES, VOCABULARIES = "leviathan-scale", "leviathan-vocabulary"


def invent(run, loss, folder):
    """Store a record of a run with a made-up loss, the same in every split and stratum."""
    total = parameters(run.model).total
    entry = dict.fromkeys(FIELDS, "made up") | {"study": run.study, "arm": run.arm, "id": run.id}
    entry |= {"seed": run.seed, "config": run.config, "parameters": {"total": total}}
    entry |= {"tokens": 1000, "seconds": 3600.0}
    entry["losses"] = dict.fromkeys(("val", "wiki_ood", "c4_ood", "lambada"), loss)
    entry["curve"] = [{"tokens": t, "val": loss + 1000 / t - 1} for t in (250, 500, 1000)]
    split = {"counts": [[200] * 7] * 3, "nats": [[200 * loss] * 7] * 3}
    entry["strata"] = {"entries": [1] * 7, "weights": {"val/a": 1.0}, "splits": {"val/a": split}}
    record(entry, folder)


def test_the_sizes_are_planned_before_they_are_run(tmp_path, monkeypatch):
    space = run_cells("03_leviathan_scale", tmp_path, monkeypatch)
    planned = {name: len(load_study(name).runs) for name in space["missing"]}
    assert {name: len(runs) for name, runs in space["missing"].items()} == planned
    assert space["wanted"][1] == f"`lmgeom study run {SIZES}`"
    assert set(space["slopes"].values()) == {None}
    assert not space["drift"] | space["rare"] | space["half"]


def test_the_sizes_show_a_trend_that_was_put_into_records(tmp_path, monkeypatch):
    """A gap of -0.02 nats a doubling over sizes, and one of -0.1 at every vocabulary."""
    runs = load_study(SIZES).runs
    total = {run.arm: parameters(run.model).total for run in runs}
    for run in runs:
        size = np.log2(total[run.arm.replace("lev", "tied")])
        gap = 0.3 - 0.02 * size + 0.001 * run.seed if run.arm.endswith("lev") else 0
        invent(run, 6.0 + 0.1 * run.seed + gap, tmp_path)
    for run in load_study(VOCABULARIES).runs:
        gap = -0.1 + 0.001 * run.seed if run.arm.endswith("lev") else 0
        invent(run, 7.0 + 0.1 * run.seed + gap, tmp_path)
    space = run_cells("03_leviathan_scale", tmp_path, monkeypatch)
    assert [p.mean for p in space["slopes"].values()] == pytest.approx([-0.02] * 4)
    assert space["wanted"] == [f"`lmgeom study run {name}-lr`" for name in (SIZES, VOCABULARIES)]
    assert set(space["drift"]) == {"s", "m", "l"}
    assert list(space["rare"].values()) == [3 / 7] * 3
    claims = load_claims()
    assert {judge(claims[name]).verdict for name in space["JUDGED"]} == {"holds"}


def test_runs_with_another_rate_than_the_best_are_refused(tmp_path, monkeypatch):
    for run in load_study(f"{SIZES}-lr").runs:
        invent(run, 6.0 - run.train.lr, tmp_path)
    run_cells("03_leviathan_scale", tmp_path, monkeypatch)
    invent(load_study(SIZES).runs[0], 5.0, tmp_path)
    with pytest.raises(AssertionError, match="s-tied"):
        run_cells("03_leviathan_scale", tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("screening", "study", "prefix"),
    [(f"{SIZES}-lr", SIZES, ""), (f"{VOCABULARIES}-lr", VOCABULARIES, "50k-")],
)
def test_the_screened_models_are_those_of_the_study(screening, study, prefix):
    models = {run.arm: run.model for run in load_study(study).runs}
    tried = {}
    for run in load_study(screening).runs:
        arm = run.arm.rsplit("-lr", 1)[0]
        assert run.model == models[prefix + arm], run.arm
        tried.setdefault(run.model.dim, {}).setdefault(arm, set()).add(run.train.lr)
    for arms in tried.values():  # the same trials for every arm of a size
        rates = next(iter(arms.values()))
        assert rates >= {0.001, 0.002, 0.004, 0.008}
        assert all(own == rates for own in arms.values())


TOGETHER = "combination"
TRAINS = {"combine-yours", "combine-footer"}


def add_up(run, interaction=0.0):
    """Loss of an arm of the combination in which gains add up, but for LEV and the head."""
    parts = set(run.arm.split("-"))
    put = 0.2 * ("lev" in parts) - 0.01 * ("taper" in parts) - 0.1 * ("head" in parts)
    noise = 0.001 * (hash_of(run.arm) % 3) * run.seed
    return 6.0 + put + interaction * ({"lev", "head"} <= parts) + 0.1 * run.seed + noise


def hash_of(name):
    """A number that a name always has."""
    return sum(map(ord, name))


def test_the_combination_says_what_is_missing(tmp_path, monkeypatch):
    space = run_cells("07_combination", tmp_path, monkeypatch, TRAINS)
    runs = load_study(TOGETHER).runs
    assert len(space["missing"]) == len(runs)
    assert set(space["found"]) == {None}
    assert space["waiting"]
    assert not space["wrong"]


@pytest.mark.parametrize(("interaction", "verdict"), [(0.0, "holds"), (0.2, "fails")])
def test_the_combination_shows_the_effects_that_were_put_in(
    tmp_path, monkeypatch, interaction, verdict
):
    for run in load_study(TOGETHER).runs:
        invent(run, add_up(run, interaction), tmp_path)
    space = run_cells("07_combination", tmp_path, monkeypatch, TRAINS)
    found = dict(zip(space["EFFECTS"], space["found"], strict=True))
    assert found[("lev",)].mean == pytest.approx(0.2 + interaction / 2, abs=0.01)
    assert found[("lev", "head")].mean == pytest.approx(interaction, abs=0.01)
    assert space["complete"] == [0, 1, 2, 3, 4]
    claims = load_claims()
    assert judge(claims["together-lev-head"]).verdict == verdict
    assert judge(claims["together-lev-taper"]).verdict == "holds"


def test_the_combination_refuses_other_rates_than_the_screened(tmp_path, monkeypatch):
    for run in load_study("leviathan-tied-lr").runs:
        invent(run, 6.0 + abs(np.log2(run.train.lr / 0.001)), tmp_path)
    space = run_cells("07_combination", tmp_path, monkeypatch, TRAINS)
    assert space["of_input"] == {False: 0.001, True: 0.001}
    for run in load_study("taper-lr").runs:
        invent(run, 6.0 + abs(np.log2(run.train.lr / 0.002)), tmp_path)
    space = run_cells("07_combination", tmp_path, monkeypatch, TRAINS)
    assert set(space["wrong"]) == set(space["ARMS"])
    invent(load_study(TOGETHER).runs[0], 5.0, tmp_path)
    with pytest.raises(AssertionError, match="runs with other rates"):
        run_cells("07_combination", tmp_path, monkeypatch, TRAINS)


def test_notes_on_negative_results_are_about_claims():
    claims, path = load_claims(), paths.root() / "book" / "negative.yaml"
    notes = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert not notes.keys() - claims.keys()
    assert all(set(note) == {"hope", "means", "mind"} for note in notes.values())
    negative = {"fails", "no effect found", "direction only"}
    found = {name for name, claim in claims.items() if judge(claim).verdict in negative}
    assert not found - notes.keys()


def test_a_negative_result_stands_on_its_page_as_long_as_it_is_one(tmp_path, monkeypatch):
    """LEV behind the tied table is negative, and is gone when other records have it ahead."""
    for sign, there in ((1, True), (-1, False)):
        folder = tmp_path / str(sign)
        for run in load_study("leviathan-tied").runs:
            gap = 0.1 + 0.001 * run.seed if run.arm.startswith("lev") else 0.0
            invent(run, 6.0 + sign * gap, folder)
        space = run_cells("08_negative", folder, monkeypatch)
        assert ("lev-vs-tied" in space["negative"]) is there
        shown = space["entries"]("fails").data
        assert ("`lev-vs-tied`" in shown) is there
        assert not there or space["verdicts"]["lev-vs-tied"].evidence in shown
