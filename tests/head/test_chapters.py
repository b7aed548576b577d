"""The experiment notebooks of the head with whatever records there are: none, some, all."""

import importlib.util
from importlib.util import spec_from_file_location

import numpy as np
import pytest

from lmgeom.study import convex, judge, load_claims, paths
from lmgeom.study.records import FIELDS, record
from lmgeom.study.run import load_study

SLOW = {"convex-problem", "convex-convex", "convex-optimum", "convex-yours"}
SLOW |= {"convex-solution-certificate", "convex-solution-common"}
ABOUT_COMMITTED = {"convex-reading-check"}


SCRIPT = paths.root() / "tests" / "study" / "test_experiments.py"
experiments = importlib.util.module_from_spec(spec_from_file_location("experiments", SCRIPT))
experiments.__spec__.loader.exec_module(experiments)


def run_convex(results, monkeypatch):
    return experiments.run_cells("05_head_convex", results, monkeypatch, SLOW | ABOUT_COMMITTED)


def run_heads(results, monkeypatch):
    return experiments.run_cells("06_head", results, monkeypatch, frozenset({"heads-yours"}))


def invent(trial, loss, folder):
    """Store a record of a trial with a made-up loss."""
    seen = {"step": 4, "factor": 1.0, "predicted": 0.2, "actual": 0.1}
    seen |= {"diameter": 0.05, "hilbert_rms": 0.2}
    watched = {name: [value] * 40 for name, value in seen.items()}
    entry = dict.fromkeys(FIELDS, "made up") | trial.entry
    entry |= {"curve": [{"tokens": t, "train": loss + 1 - t / 512, "val": 5} for t in (256, 512)]}
    entry |= {"losses": {"train": loss, "val": 5.0}, "watched": watched, "fingerprint": "0"}
    record(entry | {"seconds": 1.0, "tokens": 512}, folder)


def test_the_chapter_stands_without_a_record(tmp_path, monkeypatch):
    space = run_convex(tmp_path, monkeypatch)
    assert not space["records"] + space["screened"] + space["tried"]
    assert {judge(load_claims()[name]).verdict for name in space["JUDGED"]} == {"not attempted"}


def test_the_chapter_shows_a_screening_alone(tmp_path, monkeypatch):
    for trial in convex.screening(convex.Settings()):
        invent(trial, 5.0 + (trial.size - convex.sizes(trial.rule)[2]) ** 2, tmp_path)
    monkeypatch.setattr(convex, "load_reference", lambda folder: REFERENCE)
    space = run_convex(tmp_path, monkeypatch)
    assert len(space["tried"]) == 42
    assert not space["records"]


REFERENCE = {"optimum": 4.0, "lower": 3.9, "at_zero": 7.0, "held_out": 5.0, "rho": 10.0}
REFERENCE |= {"fingerprint": "0"}


@pytest.mark.parametrize(("gap", "verdict"), [(-0.1, "holds"), (0.1, "fails")])
def test_verdicts_are_read_from_the_records(tmp_path, monkeypatch, gap, verdict):
    for trial in convex.screening(convex.Settings()):
        invent(trial, 5.0 + (trial.size - convex.sizes(trial.rule)[2]) ** 2, tmp_path)
    for trial in convex.confirmation(convex.Settings(), tmp_path):
        assert trial.size == convex.sizes(trial.rule)[2]
        own = gap if trial.rule == "equispread" else 0.0
        invent(trial, 5.0 + own + 1e-3 * np.random.default_rng(trial.seed).random(), tmp_path)
    monkeypatch.setattr(convex, "load_reference", lambda folder: REFERENCE)
    space = run_convex(tmp_path, monkeypatch)
    assert {judge(load_claims()[name]).verdict for name in space["JUDGED"]} == {verdict}
    assert space["ends"]["distance"][-1] == pytest.approx(1 + gap, abs=1e-3)
    assert space["moves"]["possible"] == pytest.approx([0.5] * 7)


SCREENINGS = ("head-lr", "head-backbone-lr", "head-tied-lr", "head-transfer-lr")
COMPARISONS = ("head-rules", "head-backbone", "head-tied", "head-50k", "head-large")


def invent_run(run, loss, folder, diameter=0.1, hilbert=0.1):
    """Store a made-up record of a run, the same loss in every split and stratum."""
    entry = dict.fromkeys(FIELDS, "made up") | {"study": run.study, "arm": run.arm, "id": run.id}
    entry |= {"seed": run.seed, "config": run.config, "tokens": 1000, "seconds": 60.0}
    entry["losses"] = dict.fromkeys(("val", "wiki_ood", "c4_ood", "lambada"), loss)
    moved = {"head/diameter": diameter, "head/distance": 0.05, "head/radius": 8.0}
    moved |= {"head/hilbert": hilbert, "head/excess": 2.0}
    entry["curve"] = [{"tokens": t, "val": loss + 1000 / t - 1} | moved for t in (250, 500, 1000)]
    split = {"counts": [[200] * 7] * 3, "nats": [[200 * loss] * 7] * 3}
    entry["strata"] = {"entries": [1] * 7, "weights": {"val/a": 1.0}, "splits": {"val/a": split}}
    record(entry, folder)


def best_sizes(name):
    """The size of each arm in a comparison's plan."""
    return {run.arm: run.train.head_lr for run in load_study(name).runs}


def invent_screenings(folder, shift):
    """Valleys around the planned sizes; over models, AdamW's and Muon's move by `shift` octaves."""
    for name, plan in (("head-lr", "head-rules"), ("head-tied-lr", "head-tied")):
        best = best_sizes(plan)
        for run in load_study(name).runs:
            octaves = np.log2(run.train.head_lr / best[run.arm.rpartition("-")[0]])
            invent_run(run, 6 + 0.01 * octaves**2, folder)
    invent_transfer(folder, shift)
    planned = load_study("head-backbone").runs[0].train.lr
    for run in load_study("head-backbone-lr").runs:
        invent_run(run, 6 + abs(run.train.lr - planned), folder)


def invent_transfer(folder, shift):
    """Trials in three models: steep valleys, which move between models for AdamW and Muon."""
    best = best_sizes("head-50k")
    for run in load_study("head-transfer-lr").runs:
        rule = run.train.head_optimizer
        moved = shift * ("v16k" in run.arm) if rule in ("adamw", "muon") else 0
        octaves = np.log2(run.train.head_lr / best[rule]) - moved
        invent_run(run, 6 + 0.06 * octaves**2, folder)


def test_the_studies_are_planned_before_they_are_run(tmp_path, monkeypatch):
    space = run_heads(tmp_path, monkeypatch)
    assert set(space["plans"]) == {*SCREENINGS, *COMPARISONS}
    assert sorted(set(space["waiting"])) == sorted(COMPARISONS)
    assert set(space["carried"].values()) == {None}
    assert not any(space["compared"] + space["measured"])
    assert len(space["JUDGED"]) >= 10
    assert not space["sentences"]


def test_a_part_of_the_main_study_is_shown(tmp_path, monkeypatch):
    for run in load_study("head-rules").runs:
        if run.arm in ("adamw", "equispread") and run.seed < 2:
            invent_run(run, 6.0 - 0.1 * (run.arm == "equispread") + 1e-3 * run.seed, tmp_path)
    space = run_heads(tmp_path, monkeypatch)
    assert [line for line, p in zip(space["lines"], space["compared"], strict=True) if p] == [
        ("head-rules", "equispread")
    ]
    assert space["measured"] == ["adamw", "equispread"]
    assert space["moves"]["adamw"]["worst, nats"][1] == pytest.approx([0.8] * 3)
    begun = [sentence.partition("**")[2].partition(".")[0] for sentence in space["sentences"]]
    assert begun == ["The order", "Along training", "Other texts, other tokens", *LAST]
    assert space["shares"]["equispread"] < 1


def test_all_studies_give_verdicts(tmp_path, monkeypatch):
    """Equispread ahead everywhere, row normalization behind AdamW with far smaller steps."""
    gaps = {"equispread": -0.1, "rownorm": 0.05}
    invent_screenings(tmp_path, shift=-0.7)
    for name in COMPARISONS:
        for run in load_study(name).runs:
            loss = 6.0 + gaps.get(run.arm, 0.0) + 1e-3 * (run.seed % 2) * (run.arm == "adamw")
            small = 0.05 if run.arm == "rownorm" else 1.0
            invent_run(run, loss, tmp_path, diameter=small, hilbert=small)
    space = run_heads(tmp_path, monkeypatch)
    assert not space["waiting"]
    claims = {name: load_claims()[name] for name in space["JUDGED"]}
    found = {name: judge(claim).verdict for name, claim in claims.items() if "rule" in claim}
    assert set(found.values()) == {"holds"}
    assert space["carried"]["equispread"].spread == pytest.approx(0, abs=1e-6)
    assert space["carried"]["adamw"].spread == pytest.approx(0.7, abs=1e-6)
    text = dict(zip(READINGS, space["sentences"], strict=True))
    assert text["order"].startswith("**The order.** From the lowest mean loss: `equispread` 5.9")
    assert "Equispread is ahead of AdamW in head-rules, head-backbone" in text["settings"]
    assert "does not overlap" in text["paper"]


LAST = ("What predictions feel", "Settings")
READINGS = ("order", "whitening", "decay", "training", "texts", "moves", "settings", "paper")
READINGS += ("transfer",)


@pytest.mark.parametrize(("gap", "word"), [(0.1, "behind"), (0.0, "not told apart from")])
def test_the_reading_follows_the_records(tmp_path, monkeypatch, gap, word):
    """Equispread behind everywhere, or no difference: the sentences say so."""
    for name in COMPARISONS:
        for run in load_study(name).runs:
            noise = 1e-3 * np.random.default_rng([run.seed, len(run.arm)]).standard_normal()
            invent_run(run, 6.0 + gap * ("equispread" in run.arm) + noise, tmp_path)
    space = run_heads(tmp_path, monkeypatch)
    text = dict(zip(READINGS[:-1], space["sentences"], strict=True))
    assert f"Equispread is {word} AdamW in head-rules, head-backbone, head-tied" in text["settings"]
    assert f"Equispread is {word} AdamW at 250 tokens" in text["training"]
    assert f"`equispread` is {word} `adamw`" in text["texts"]
    assert gap == 0.0 or not text["order"].split("`")[1].startswith("equispread")


def test_runs_with_another_size_than_the_best_are_refused(tmp_path, monkeypatch):
    for run in load_study("head-lr").runs:
        invent_run(run, 6.0 - run.train.head_lr, tmp_path)
    space = run_heads(tmp_path, monkeypatch)
    assert "head-rules" in space["waiting"]
    invent_run(load_study("head-rules").runs[0], 5.0, tmp_path)
    with pytest.raises(AssertionError, match="adamw"):
        run_heads(tmp_path, monkeypatch)
