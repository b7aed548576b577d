"""What the command offers on memory, dashboards and the check of a GPU."""

import json

import pytest
import torch

from lmgeom import data
from lmgeom.cli import main
from lmgeom.lm import progress, speed
from lmgeom.lm.config import Config


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Words that train the smallest model on synthetic tokens."""
    monkeypatch.setattr(data, "corpus", lambda *names, **options: data.synthetic(64, 0, 4000))
    (tmp_path / "model.json").write_text(Config(64, 16, 1, 2, 16, 32).to_json())
    how = ["--steps", "4", "--batch-size", "2", "--lr", "0.01", "--warmup", "1"]
    return ["train", "--config", str(tmp_path / "model.json"), "--out", str(tmp_path / "run"), *how]


def test_memory_of_a_preset(capsys):
    small = ["tied-small", "--memory", "--sequences", "1", "--context", "16"]
    assert main(["params", *small, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["blocks"] for row in rows] == ["kept", "recomputed"] * 2
    assert main(["params", "albert-small", "--memory", "--context", "16", "--sequences", "1"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    assert main(["params", "400m", "--memory"]) == 2
    assert "needs one preset, and " in capsys.readouterr().err
    assert main(["params", "tied-small", "untied-small", "--memory"]) == 2
    assert "and 2 are meant: tied-small, untied-small" in capsys.readouterr().err
    assert main(["params", "tied-small", "--loss-chunk", "8"]) == 2
    assert "--loss-chunk goes with --memory" in capsys.readouterr().err


def test_a_missing_dashboard_is_one_line_before_the_start(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    assert main([*words, "--log", "tensorboard,trackio"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_changes_are_named_and_then_allowed(words, capsys):
    assert main(words) == 0
    assert main([*words, "--resume", "--clip", "0.5"]) == 2
    assert "train.clip: 1.0 -> 0.5" in capsys.readouterr().err
    assert main([*words, "--resume", "--clip", "0.5", "--allow-changes"]) == 0


def test_the_banner_says_the_memory(words, capsys):
    assert main([*words, "--recompute", "--dtype", "float32", "--no-compile"]) == 0
    assert "MiB at the peak of a step" in capsys.readouterr().out


def test_the_check_writes_one_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "checks", lambda *where: {"good": lambda: 1})
    out = tmp_path / "check.json"
    assert main(["study", "gpu-check", "--device", "cpu", "--tiny", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["good"] == 1
    assert record["machine"]["device"] == "cpu"
    assert main(["study", "gpu-check", "--device", "cpu", "--tiny"]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_says_so(capsys):
    assert main(["study", "gpu-check"]) == 2
    assert "device='cuda'" in capsys.readouterr().err
