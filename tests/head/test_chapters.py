"""The experiment notebooks of the head with whatever records there are: none, some, all."""

import importlib.util

import numpy as np
import pytest

from lmgeom.study import convex, judge, load_claims, paths
from lmgeom.study.records import FIELDS, record

SLOW = {"convex-problem", "convex-convex", "convex-optimum", "convex-yours"}
SLOW |= {"convex-solution-certificate", "convex-solution-common"}
ABOUT_COMMITTED = {"convex-reading-check"}


def run_convex(results, monkeypatch):
    path = paths.root() / "tests" / "study" / "test_experiments.py"
    spec = importlib.util.spec_from_file_location("experiments", path)
    experiments = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(experiments)
    return experiments.run_cells("05_head_convex", results, monkeypatch, SLOW | ABOUT_COMMITTED)


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
