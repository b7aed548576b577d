import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import yaml

from lmgeom import data
from lmgeom.errors import ConfigError, RecordError
from lmgeom.lm.config import Config, parameters, presets
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.optim import schedule
from lmgeom.study import run as run_module
from lmgeom.study.records import load_records, only_writer, record
from lmgeom.study.run import (
    depth_profile,
    execute,
    geometry,
    head_update,
    load_study,
    run_study,
    status,
    studies,
    time_left,
    work_folder,
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
        ({"name": "../x"}, r"name '\.\./x' must be a string of letters"),
        ({"arms": {"a/b": {}}}, "name 'a/b' must be"),
        ({"arms": []}, r"arms=\[\] must be a mapping"),
        ({"arms": {}}, "arms={} must name at least one"),
        ({"arms": {True: {}}}, "name True must be a string of letters"),
        ({"arms": {"a": ["model"]}}, r"arm a: must be a mapping of model, .*, got \['model'\]"),
        ({"arms": {"a": 5}}, "arm a: must be a mapping of model, train, data, got 5"),
        ({"arms": {"a": 0}}, "arm a: must be a mapping of model, train, data, got 0"),
        ({"arms": {"a": {"model": 3}}}, "arm a: model=3 must be a mapping"),
        ({"arms": {"a": {"train": None}}}, "arm a: train=None must be a mapping"),
        ({"model": {"preset": ["a"]}}, r"preset=\['a'\]: unknown"),
        ({"model": {1: 2, "zz": 3}}, r"config=\[1, 'zz'\]: unknown"),
        ({"train": {1: 2, "zz": 3}}, r"train config=\[1, 'zz'\]: unknown"),
        ({"seeds": 3}, "seeds=3 must be a list"),
        ({"seeds": []}, r"seeds=\[\]: must be .*, at least one"),
        ({"seeds": [[0]]}, r"seeds=\[\[0\]\]: must be different integers"),
        ({"seeds": [0, 0]}, "must be different integers"),
        ({"evaluation": None}, "evaluation=None must be a mapping"),
        ({"evaluation": {"every": 1, "tokens": 2}}, "lacks final_tokens"),
        ({"evaluation": PLAN["evaluation"] | {"document_tokens": 1}}, "document_tokens 2"),
        ({"evaluation": PLAN["evaluation"] | {"strata": 1}}, "strata=1 must be true or"),
        (
            {"evaluation": PLAN["evaluation"] | {"alignment": "yes"}},
            "alignment='yes' must be true or",
        ),
        ({"evaluation": PLAN["evaluation"] | {"head_update": 1}}, "head_update=1 must be true or"),
        ({"train": PLAN["train"] | {"head_optimizer": "lion"}}, "head_optimizer='lion': known"),
        ({"train": PLAN["train"] | {"seed": 7}}, "train: seed=7 belongs into seeds"),
        (
            {"arms": {"a": {"train": {"eval_every": 9}}}},
            "eval_every=9 belongs into evaluation.every",
        ),
        (
            {"train": PLAN["train"] | {"context": 17}},
            "train: context=17 is more than the model's 16",
        ),
        ({"arms": {"a": {"data": {"source": "x"}}}}, "data: lacks tokenizer"),
        ({"data": {"source": "x"}}, "data: lacks tokenizer"),
        ({"data": PLAN["data"] | {"fingerprint": 12}}, "fingerprint=12 must be a string"),
    ],
)
def test_a_misspelled_key_is_named(book, changes, message):
    write(book, **changes)
    with pytest.raises(ConfigError, match=message) as error:
        load_study("tiny")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", [b"", b"a: [", b"[" * 20_000, b"!!bool x", b"\xff\xfe", b"name: x"]
)
def test_a_file_that_is_no_study_is_refused(book, text):
    path = book / "own.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"own\.yaml"):
        load_study(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 5}, "seeds=5: must be different integers"),
        ({"seeds": "01"}, "seeds='01': must be different integers"),
        ({"model": None}, "changes: model=None must be a mapping"),
        ({"lr": 1.0}, "changes: unknown 'lr'; known: model, train, data, evaluation"),
    ],
)
def test_impossible_changes_are_named(book, changes, message):
    write(book)
    with pytest.raises(ConfigError, match=message):
        load_study("tiny", **changes)


def test_a_key_that_stands_twice_is_refused(book):
    path = write(book)
    text = path.read_text().replace("  tied: {}\n", "  tied: {}\n  untied: {}\n")
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tiny\.yaml cannot be read: key 'untied' stands twice"):
        load_study("tiny")


def test_the_preset_of_an_arm_counts_before_the_plan_s_own_settings(book):
    tapered = {"model": {"preset": "transformer-small-tapered"}}
    write(book, model={"preset": "transformer-small", "mlp_width": 512}, arms={"a": tapered})
    assert load_study("tiny").runs[0].model == presets["transformer-small-tapered"]
    again = load_study("tiny", model={"layers": 9, "context": 128}).runs[0].model
    assert again == replace(presets["transformer-small-tapered"], context=128)


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
import pathlib, time
from lmgeom.study import run


def measure(*args, measure=run.measure):
    pathlib.Path("reached").touch()
    while pathlib.Path("hold").exists():
        time.sleep(0.02)
    return measure(*args)


run.measure = measure
run.execute(run.load_study("tiny").run(sys.argv[1]))
"""


def start(study, run, folder):
    """A worker that reads the synthetic text, and stops to evaluate while there is a hold."""
    log = run_module._log(run, folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        command = [sys.executable, "-c", COMMAND, run.name]
        return subprocess.Popen(command, stdout=file, stderr=file)


def wait_for(path):
    deadline = time.monotonic() + 300
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_killed_run_resumes_to_the_same_record(book):
    train = PLAN["train"] | {"steps": 200, "checkpoint_every": 20}
    write(book, train=train, evaluation=PLAN["evaluation"] | {"every": 100, "strata": True})
    run = load_study("tiny").runs[0]
    whole = execute(run, book / "whole", quiet=True)
    (book / "hold").touch()
    process = start(None, run, None)
    wait_for(book / "reached")
    assert status(load_study("tiny"))[0]["state"] == "running"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (book / "hold").unlink()
    assert not run.path().exists()
    row = status(load_study("tiny"))[0]
    assert (row["state"], row["val"]) == ("failed", None)
    assert row["note"].startswith(f"process {process.pid} on ")
    assert 0 < row["trained"] < 1
    resumed = execute(run, quiet=True)
    for key in ("losses", "strata", "geometry", "curve", "tokens", "id"):
        assert json.dumps(resumed[key]) == json.dumps(whole[key])


def test_a_failed_worker_is_reported_and_the_others_go_on(book, monkeypatch):
    write(book, seeds=[0])
    lines = []
    failed = run_study(load_study("tiny"), workers=2, report=lines.append)
    assert sorted(failed) == [run.name for run in load_study("tiny").runs]
    assert all("synthetic" in line for line in lines[1:])
    rows = status(load_study("tiny"))
    assert {row["state"] for row in rows} == {"failed"}
    assert all("synthetic" in row["note"] and "exit code 2" in row["note"] for row in rows)


LONG = {"train": PLAN["train"] | {"checkpoint_every": 1}, "seeds": [0]}


def losses():
    return {r["arm"]: r["losses"] for r in load_records("tiny")}


def test_a_killed_worker_is_started_again_and_the_others_go_on(book, monkeypatch):
    write(book, **LONG)
    study, started, lines = load_study("tiny"), [], []
    (book / "hold").touch()

    def kill_the_first(*args):
        started.append(start(*args))
        if len(started) == 2:
            wait_for(book / "reached")
            started[0].kill()
            (book / "hold").unlink()
        return started[-1]

    monkeypatch.setattr(run_module, "_start", kill_the_first)
    assert run_study(study, workers=2, report=lines.append) == []
    assert len(started) == 3
    assert "tiny tied-seed0: again: its process was killed by signal 9" in lines
    found = losses()
    for run in study.runs:
        whole = execute(run, book / "whole", quiet=True)
        assert found[run.arm] == whole["losses"]


def test_a_worker_that_is_killed_each_time_is_given_up(book, monkeypatch):
    write(book, seeds=[0], arms={"a": {}})
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    log = run_module._log(load_study("tiny").runs[0], None)
    log.parent.mkdir(parents=True)
    log.write_text("its last words\n")
    monkeypatch.setattr(run_module, "_start", lambda *args: subprocess.Popen(command))
    lines = []
    assert run_study(load_study("tiny"), report=lines.append) == ["a-seed0"]
    assert [line.split(": ")[1] for line in lines[1:]] == ["again", "again", "failed"]
    assert lines[-1].endswith("its last words (exit code -9)")


def test_two_commands_share_the_runs_of_a_study(book, monkeypatch):
    write(book, **LONG)
    study, started = load_study("tiny"), []
    (book / "hold").touch()
    monkeypatch.setattr(run_module, "PAUSE", 0.1)
    monkeypatch.setattr(run_module, "_start", lambda *a: started.append(a[1].name) or start(*a))
    found = []
    command = lambda: found.append(run_study(study, workers=1, report=str))  # noqa: E731
    threads = [threading.Thread(target=command) for _ in range(2)]
    for thread in threads:
        thread.start()
        wait_for(study.runs[0].path().with_suffix(".lock"))
    wait_for(study.runs[1].path().with_suffix(".lock"))
    (book / "hold").unlink()
    for thread in threads:
        thread.join()
    assert found == [[], []]
    assert sorted(started) == ["tied-seed0", "untied-seed0"]
    assert set(losses()) == {"tied", "untied"}


def test_a_command_that_is_stopped_takes_its_workers_with_it(book, monkeypatch):
    write(book, **LONG)
    started = []
    (book / "hold").touch()

    def start_one(*args):
        if started:
            wait_for(book / "reached")
            (book / "hold").unlink()
            raise KeyboardInterrupt
        started.append(start(*args))
        return started[0]

    monkeypatch.setattr(run_module, "_start", start_one)
    with pytest.raises(KeyboardInterrupt):
        run_study(load_study("tiny"), workers=2, report=str)
    assert started[0].poll() is not None
    assert not list((book / "book" / "results").rglob("*.lock"))


def test_copies_of_a_notebook_do_not_meet(book):
    """Each executes a run with a results folder of its own, and so a working folder of its own."""
    write(book)
    run = load_study("tiny").runs[0]
    with only_writer(book / "_build" / "runs" / "x"), only_writer(run.path()):
        one, two = (execute(run, book / name, quiet=True) for name in ("one", "two"))
    assert one["losses"] == two["losses"]
    assert not list((book / "_build" / "runs").glob("tiny*"))


def test_work_stands_with_the_records(book, monkeypatch):
    ours = book / "book" / "results"
    assert work_folder() == work_folder(ours) == book / "_build" / "runs"
    assert work_folder(book / "mine") == book / "mine" / "_runs"
    monkeypatch.setattr("lmgeom.study.paths.results", lambda: book / "theirs")
    assert work_folder() == book / "theirs" / "_runs"


def test_the_time_left_is_judged_by_the_runs_that_are_done(book):
    write(book)
    study = load_study("tiny")
    assert time_left(study) is None
    entry = execute(study.runs[0], quiet=True)
    record(entry | {"seconds": 10.0}, book / "other")
    left = time_left(study, book / "other")
    per_token = 10 / (3 * 6 * 2 * 16)
    each = per_token * (3 * 6 * 2 * 16 + 2 * (2 * 2 * 200 + (len(entry["losses"]) - 1) * 400))
    same = parameters(study.runs[2].model).flops / parameters(study.runs[0].model).flops
    assert left == pytest.approx(each * (1 + 2 * same))
    assert time_left(study, book / "other", workers=2) == pytest.approx(left / 2)
    assert time_left(study, book / "other", workers=99) == pytest.approx(each * max(1, same))
    for run in study.runs:
        execute(run, quiet=True)
    assert time_left(study) == 0
