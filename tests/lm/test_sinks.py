"""Dashboards: they get the numbers, on this machine only, and never end a run."""

import json
import socket
import sys
from types import SimpleNamespace

import pytest
import torch

from lmgeom.data import synthetic
from lmgeom.errors import ConfigError
from lmgeom.lm import progress
from lmgeom.lm.config import Config
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.progress import History, check_sinks, numbers_of, open_sinks
from lmgeom.lm.train import TrainConfig, train

DATA = synthetic(64, seed=0, n_tokens=2000)
RUN = TrainConfig(steps=4, batch_size=2, context=16, warmup=1, checkpoint_every=2)


def run(out, data=DATA, **options):
    torch.manual_seed(0)
    model = LanguageModel(Config(64, 16, 1, 2, 16, 32))
    evaluate = {"evaluate": lambda model, step: {"val/a": {"nats": 1.5}}}
    return train(model, data, RUN, out=out, quiet=True, **evaluate | options)


@pytest.fixture
def offline(monkeypatch):
    """No connection, and variables that name servers."""

    def refuse(*args):
        raise AssertionError("a dashboard wants to connect")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/somewhere")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://example.org")


@pytest.fixture
def trackio(monkeypatch):
    """A module that stands for trackio and keeps what it gets."""
    seen = SimpleNamespace(began=[], logged=[], ended=0, environment=[])

    class Run:
        def log(self, numbers, step):
            seen.logged.append((step, numbers))

        def finish(self):
            seen.ended += 1

    def init(**options):
        import os

        seen.began.append(options)
        seen.environment.append([name for name in os.environ if name.startswith("TRACKIO_S")])
        return Run()

    module = SimpleNamespace(init=init, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "trackio", module)
    return seen


def test_tensorboard_files_can_be_read(tmp_path, offline):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = run(tmp_path, log=["tensorboard"])
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    points = [(event.step, event.value) for event in found.Scalars("loss")]
    assert points == [(e["step"], pytest.approx(e["loss"])) for e in result.history]
    assert [event.step for event in found.Scalars("evaluation/val/a/nats")] == [4]


def test_tensorboard_forgets_the_steps_that_are_made_again(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    class Cut:
        vocab_size, fingerprint = DATA.vocab_size, DATA.fingerprint

        def batch(self, seed, step, *shape):
            if step == 3:
                raise RuntimeError("power cut")
            return DATA.batch(seed, step, *shape)

    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path, Cut(), log=["tensorboard"])
    run(tmp_path, log=["tensorboard"], resume=True)
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4]


def test_trackio_gets_the_numbers_and_no_server(tmp_path, trackio, offline):
    run(tmp_path / "a b", log=["trackio"])
    [options] = trackio.began
    assert (options["name"], options["resume"]) == ("a-b", "never")
    assert options["config"]["train"]["steps"] == 4
    assert not {"space_id", "server_url"} & set(options)
    assert trackio.environment == [[]]
    assert [step for step, _ in trackio.logged] == [1, 2, 3, 4, 4]
    assert set(trackio.logged[0][1]) == {"loss", "lr", "grad_norm", "tokens", "seconds"}
    assert trackio.ended == 1
    run(tmp_path / "a b", log=["trackio"], resume=True)
    assert trackio.began[1]["resume"] == "allow"


def test_trackio_itself_writes_here(tmp_path, offline, monkeypatch, capsys):
    pytest.importorskip("trackio")
    run(tmp_path / "run", log=["trackio"])
    assert "run" in capsys.readouterr().out


def test_the_file_is_the_same_with_and_without(tmp_path, trackio):
    for name, log in (("with", ["trackio"]), ("without", [])):
        run(tmp_path / name, log=log)
    texts = [(tmp_path / name / "log.jsonl").read_text() for name in ("with", "without")]
    entries = [[json.loads(line) | {"seconds": 0} for line in text.splitlines()] for text in texts]
    assert entries[0] == entries[1]


def test_a_missing_package_is_said_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    message = r"log='trackio': the package is missing: pip install 'lmgeom\[trackio\]'"
    with pytest.raises(ConfigError, match=message) as error:
        run(tmp_path / "run", log=["trackio"])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_an_unknown_name_is_said_with_the_known_ones():
    with pytest.raises(ConfigError, match="log='wandb': unknown; known: tensorboard, trackio"):
        check_sinks(["wandb"])
    check_sinks([])


def test_a_sink_that_cannot_be_opened_is_one_line(tmp_path, trackio, monkeypatch):
    def fail(**options):
        raise ValueError("no database\nhere")

    monkeypatch.setattr(sys.modules["trackio"], "init", fail)
    with pytest.raises(ConfigError, match=r"log='trackio': cannot be opened: no database$"):
        open_sinks(["trackio"], tmp_path)
    assert open_sinks(["trackio"], None) == []


def test_a_sink_that_fails_is_left_out_and_the_run_goes_on(tmp_path, caplog):
    class Full:
        calls = 0

        def log(self, step, numbers):
            self.calls += 1
            raise OSError(28, "No space left on device")

        def close(self):
            raise AssertionError("closed after it failed")

    sink = Full()
    history = History(tmp_path, sinks=[sink])
    for step in (1, 2):
        history.add({"step": step, "loss": 1.0})
    history.close()
    assert sink.calls == 1
    assert caplog.text.count("Full failed and gets no more numbers") == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


def test_numbers_of_an_entry():
    entry = {"step": 1, "loss": float("inf"), "on": True, "a": {"b": {"c": 2}}, "t": "x"}
    assert numbers_of(entry) == {"a/b/c": 2.0}
