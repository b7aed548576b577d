import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields

import numpy as np
import pytest
import torch
import yaml

from lmgeom import data
from lmgeom.errors import ConfigError, RecordError
from lmgeom.lm.config import Config
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.optim import schedule
from lmgeom.study.records import load_records, only_writer
from lmgeom.study.run import (
    depth_profile,
    execute,
    geometry,
    head_update,
    load_study,
    run_study,
    status,
    studies,
)
from lmgeom.study.statistics import stratum
from lmgeom.taper import Alignment, alignment

PLAN = {
    "name": "tiny",
    "question": "does it run?",
    "data": {"source": "synthetic", "tokenizer": "none"},
    "seeds": [0, 1],
    "model": {"vocab_size": 64, "dim": 16, "layers": 1, "heads": 2, "context": 16, "mlp_width": 32},
    "train": {"steps": 6, "batch_size": 2, "context": 16, "lr": 0.01, "warmup": 1},
    "evaluation": {"every": 3, "tokens": 200, "final_tokens": 400},
    "arms": {"tied": {}, "untied": {"model": {"head": "untied"}}},
}


@pytest.fixture
def book(tmp_path, monkeypatch):
    (tmp_path / "settings.ini").touch()
    (tmp_path / "book" / "studies").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    corpus = data.synthetic(64, 0, 4000)
    monkeypatch.setattr(data, "corpus", lambda source, tokenizer: corpus)
    return tmp_path


def write(book, **changes):
    path = book / "book" / "studies" / "tiny.yaml"
    path.write_text(yaml.safe_dump(PLAN | changes))
    return path


def test_a_study_resolves_every_run(book):
    write(book)
    study = load_study("tiny")
    assert studies() == ["tiny"]
    assert [run.name for run in study.runs] == [
        "tied-seed0",
        "tied-seed1",
        "untied-seed0",
        "untied-seed1",
    ]
    assert len({run.id for run in study.runs}) == 4
    assert study.run("untied-seed1").model.head == "untied"


def test_changes_make_another_study_of_it(book):
    write(book)
    study = load_study(
        "tiny", seeds=[7], train={"steps": 4}, data={"source": "mine", "tokenizer": "x"}
    )
    assert [run.name for run in study.runs] == ["tied-seed7", "untied-seed7"]
    assert {run.train.steps for run in study.runs} == {4}
    assert {run.data["source"] for run in study.runs} == {"mine"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [1]}, "unknown 'sedes'"),
        ({"arms": {"a": {"modle": {}}}}, "unknown 'modle'"),
        ({"train": {"stpes": 3}}, "stpes"),
        ({"evaluation": {"every": 1, "token": 2}}, "unknown 'token'"),
        ({"model": {"preset": "tied-huge"}}, "tied-huge"),
        ({"name": "../x"}, r"name '\.\./x' needs"),
        ({"arms": {"a/b": {}}}, "name 'a/b' needs"),
        ({"arms": []}, r"arms=\[\] must be a dict"),
        ({"seeds": 3}, "seeds=3 must be a list"),
        ({"seeds": [0, 0]}, "must be different integers"),
        ({"evaluation": None}, "evaluation=None must be a dict"),
        ({"evaluation": {"every": 1, "tokens": 2}}, "lacks final_tokens"),
        ({"evaluation": PLAN["evaluation"] | {"document_tokens": 1}}, "document_tokens 2"),
        ({"evaluation": PLAN["evaluation"] | {"strata": 1}}, "strata=1 must be a bool"),
        ({"evaluation": PLAN["evaluation"] | {"alignment": "yes"}}, "alignment='yes' must be a"),
        ({"evaluation": PLAN["evaluation"] | {"head_update": 1}}, "head_update=1 must be a bool"),
        ({"train": PLAN["train"] | {"head_optimizer": "lion"}}, "head_optimizer='lion': known"),
        ({"arms": {"a": {"data": {"source": "x"}}}}, "data lacks tokenizer"),
        ({"data": {"source": "x"}}, "data lacks tokenizer"),
        ({"data": PLAN["data"] | {"fingerprint": 12}}, "fingerprint=12 must be a str"),
    ],
)
def test_a_misspelled_key_is_named(book, changes, message):
    write(book, **changes)
    with pytest.raises(ConfigError, match=message):
        load_study("tiny")


@pytest.mark.parametrize("text", [b"", b"a: [", b"\xff\xfe", b"name: x"])
def test_a_file_that_is_no_study_is_refused(book, text):
    path = book / "own.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"own\.yaml"):
        load_study(path)


def test_an_unknown_study_lists_the_known(book):
    write(book)
    with pytest.raises(ConfigError, match="unknown study 'tny'; known: tiny"):
        load_study("tny")


def test_a_run_is_recorded_once(book):
    write(book)
    run = load_study("tiny").runs[0]
    first = execute(run, quiet=True)
    before = run.path().stat().st_mtime_ns
    assert execute(run, quiet=True) == first
    assert run.path().stat().st_mtime_ns == before
    assert load_records("tiny") == [first]
    assert [point["tokens"] for point in first["curve"]] == [96, 192]
    assert {"val", "lambada"} <= set(first["losses"])
    assert not list((book / "_build" / "runs").iterdir())
    assert [row["state"] for row in status(load_study("tiny"))].count("done") == 1


def test_the_validation_loss_is_the_weighted_mean(book):
    write(book)
    losses = execute(load_study("tiny").runs[0], quiet=True)["losses"]
    weights = data.corpus("", "").weights
    mean = sum(weights[d] * losses[f"val/{d}"] for d in weights)
    assert losses["val"] == pytest.approx(mean, abs=2e-6)


def test_an_arm_may_read_its_own_data(book):
    own = {"source": "synthetic", "tokenizer": "own"}
    write(book, arms={"a": {}, "b": {"data": own}}, seeds=[0])
    a, b = load_study("tiny").runs
    assert (a.data, b.data) == (PLAN["data"], own)
    other = {"source": "mine", "tokenizer": "x"}
    assert {run.data["source"] for run in load_study("tiny", data=other).runs} == {"mine"}


def test_a_cut_reads_the_beginning_of_every_document(book):
    write(book, evaluation=PLAN["evaluation"] | {"document_tokens": 9, "strata": True})
    splits = execute(load_study("tiny").runs[0], quiet=True)["strata"]["splits"]
    corpus = data.corpus("", "")
    assert set(splits) == {"val/a", "val/b"}
    for name, sums in splits.items():
        assert np.sum(sums["counts"]) == 8 * min(len(corpus.splits[name]), 400 // 9)


def test_strata_add_up_to_the_losses(book):
    write(book, evaluation=PLAN["evaluation"] | {"strata": True})
    run = load_study("tiny").runs[0]
    entry = execute(run, quiet=True)
    found, corpus = entry["strata"], data.corpus("", "")
    assert load_records("tiny") == [entry]
    assert sum(found["entries"]) == corpus.vocab_size
    assert found["weights"] == {"val/a": 0.5, "val/b": 0.5}
    for name, sums in found["splits"].items():
        counts, nats = np.array(sums["counts"]), np.array(sums["nats"])
        assert counts.shape == nats.shape == (min(32, len(counts)), 7)
        assert nats.sum() / counts.sum() == pytest.approx(entry["losses"][name], abs=1e-4)
        rarest = np.flatnonzero(counts.sum(0))[0]
        assert stratum(corpus.shares()).min() <= rarest
    assert run.path().stat().st_size < 40_000


def test_the_geometry_of_the_table_is_recorded_before_and_after(book):
    options = {"seed_dim": 4, "n_knots": 4, "rank": 4, "heads": 2}
    lev = {"model": {"input": "lev", "head": "untied", "input_options": options}}
    write(book, arms={"tied": {}, "lev": lev}, seeds=[0])
    for run in load_study("tiny").runs:
        found = execute(run, quiet=True)["geometry"]
        torch.manual_seed(0)
        assert found["initial"] == geometry(LanguageModel(run.model))
        assert found["initial"]["rows"] == found["final"]["rows"] == 64
        assert found["initial"] != found["final"]


DEEP = {
    "model": PLAN["model"] | {"layers": 3},
    "evaluation": PLAN["evaluation"] | {"alignment": True},
}


def updates(book, **train):
    """Entries of the curve of the untied arm, with the measures of its head's updates."""
    watched = PLAN["evaluation"] | {"head_update": True}
    write(book, evaluation=watched, train=PLAN["train"] | train)
    run = load_study("tiny").run("untied-seed0")
    return execute(run, quiet=True)["curve"]


def test_updates_of_the_head_keep_their_budget(book):
    """Budget times schedule bounds radius times diameter, which bounds what predictions do."""
    curve = updates(book, head_optimizer="rownorm", head_lr=0.3, body_optimizer="muon")
    assert [point["tokens"] for point in curve] == [96, 192]
    for point, factor in zip(curve, (schedule(2, 6, 1), 0.1), strict=True):
        worst = point["head/radius"] * point["head/diameter"]
        assert 0.5 * 0.3 * factor < worst <= 0.3 * factor * (1 + 0.02)  # the gain moved by a step
        assert 0 < point["head/hilbert"] < worst
        assert point["head/distance"] < point["head/diameter"]
        assert point["head/excess"] >= 1
        assert point["head/radius"] == pytest.approx(4, rel=0.1)


def test_to_watch_the_head_changes_no_result(book):
    watched = updates(book)
    write(book)
    plain = execute(load_study("tiny").run("untied-seed0"), quiet=True)["curve"]
    kept = [{key: point[key] for key in point if "head/" not in key} for point in watched]
    assert kept == plain
    assert all(point["head/diameter"] > 0 for point in watched)


def test_an_update_of_the_head_is_measured_as_by_hand(book):
    write(book)
    run = load_study("tiny").run("untied-seed0")
    torch.manual_seed(0)
    model, corpus = LanguageModel(run.model), data.corpus("synthetic", "none")
    before = model.head.weight.detach() + 0.01 * torch.randn(64, 16)
    found = head_update(model, corpus, before)
    S = (model.head.weight.detach() - before).double()
    distances = torch.pdist(S)
    assert found["head/radius"] == 4
    assert found["head/diameter"] == pytest.approx(distances.max().item())
    assert found["head/distance"] == pytest.approx(distances.square().mean().sqrt().item())
    squares = distances.square()
    spread = squares.var(unbiased=False).sqrt() / squares.mean()
    floor = ((64 - 1 - 16) / (64 * 16)) ** 0.5
    assert found["head/excess"] == pytest.approx((spread / floor).item())
    total = 0.0
    for name, weight in corpus.weights.items():
        text = corpus.splits[f"val/{name}"].tokens
        for start in (0, len(text) - 16):
            ids = torch.from_numpy(text[start : start + 16].astype(np.int64))
            change = model.hidden(ids[None])[0].detach() @ S.float().T
            total += weight / 2 * (change.amax(1) - change.amin(1)).square().mean().item()
    assert found["head/hilbert"] == pytest.approx(total**0.5, rel=1e-4)
    nothing = head_update(model, corpus, model.head.weight.detach())
    assert nothing["head/excess"] is None
    assert nothing["head/hilbert"] == nothing["head/diameter"] == 0


def test_the_alignment_of_the_trained_model_is_recorded(book):
    write(book, **DEEP, arms={"a": {}}, seeds=[0])
    run = load_study("tiny").runs[0]
    found = execute(run, quiet=True)["alignment"]
    assert load_records("tiny")[0]["alignment"] == found
    names = {field.name for field in fields(Alignment)}
    cosines = ("mlp", "mlp_here", "block")
    assert found.keys() == names | {f"{name}_correlation" for name in cosines}
    assert all(len(values) == 3 for values in found.values())
    for name in cosines:
        r = np.corrcoef(range(3), found[name])[0, 1]
        assert found[f"{name}_correlation"][0] == pytest.approx(r, abs=1e-2)


def test_the_profile_is_the_weighted_mean_over_windows_of_the_domains(book):
    corpus = data.corpus("", "")
    object.__setattr__(corpus, "weights", {"a": 0.8, "b": 0.2})
    torch.manual_seed(0)
    model = LanguageModel(Config(64, 16, 3, 2, 16, 32))
    expected = 0.0
    for name, weight in corpus.weights.items():
        text = torch.from_numpy(corpus.splits[f"val/{name}"].tokens.astype(np.int64))
        starts = [i * (len(text) - 16) // 7 for i in range(8)]
        rows = torch.stack([text[start : start + 16] for start in starts])
        expected = expected + weight * alignment(model, rows).mlp.mean(0)
    assert depth_profile(model, corpus)["mlp"] == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_context_longer_than_a_text_is_cut(book):
    model = LanguageModel(Config(64, 16, 2, 2, 10**5, 32))
    assert set(map(len, depth_profile(model, data.corpus("", "")).values())) == {2}


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.2, float("nan")]])
def test_a_record_with_another_profile_than_its_layers_is_refused(book, values):
    write(book, **DEEP, arms={"a": {}}, seeds=[0])
    run = load_study("tiny").runs[0]
    entry = execute(run, quiet=True)
    entry["alignment"]["mlp"] = values
    run.path().write_text(json.dumps(entry))
    with pytest.raises(RecordError, match="alignment mlp must be 3 finite numbers"):
        load_records("tiny")


def test_the_seed_changes_the_result_and_nothing_else_does(book):
    write(book)
    runs = load_study("tiny").runs
    losses = [
        execute(run, book / f"r{i}", quiet=True)["losses"]["val"] for i, run in enumerate(runs[:2])
    ]
    again = execute(runs[0], book / "again", quiet=True)["losses"]["val"]
    assert losses[0] != losses[1]
    assert again == losses[0]


def test_other_data_than_pinned_stop_the_run(book):
    write(book, data=PLAN["data"] | {"fingerprint": "0123"})
    run = load_study("tiny").runs[0]
    with pytest.raises(ConfigError, match="pins data 0123"):
        execute(run, quiet=True)
    assert not run.path().exists()


def test_two_processes_never_write_one_record(book):
    write(book)
    run = load_study("tiny").runs[0]
    with only_writer(run.path()), pytest.raises(RecordError, match="is being written"):
        execute(run, quiet=True)


COMMAND = """
import sys
from lmgeom import data
corpus = data.synthetic(64, 0, 4000)
data.corpus = lambda source, tokenizer: corpus
from lmgeom.study.run import execute, load_study
execute(load_study("tiny").runs[0])
"""


def test_a_killed_run_resumes_to_the_same_record(book):
    train = PLAN["train"] | {"steps": 200, "checkpoint_every": 20}
    write(book, train=train, evaluation=PLAN["evaluation"] | {"every": 100, "strata": True})
    run = load_study("tiny").runs[0]
    whole = execute(run, book / "whole", quiet=True)
    process = subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.DEVNULL)
    work = book / "_build" / "runs"
    deadline = time.monotonic() + 60
    while not list(work.glob("*/step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not run.path().exists()
    resumed = execute(run, quiet=True)
    for key in ("losses", "strata", "geometry", "curve", "tokens", "id"):
        assert json.dumps(resumed[key]) == json.dumps(whole[key])


def test_a_failed_worker_is_reported_and_the_others_go_on(book, monkeypatch):
    write(book, seeds=[0])
    lines = []
    failed = run_study(load_study("tiny"), workers=2, report=lines.append)
    assert sorted(failed) == [run.name for run in load_study("tiny").runs]
    assert all("synthetic" in line for line in lines[1:])
