"""The check of a machine at its tiny size: whole, honest, and caught where it goes wrong."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from lmgeom.lm import speed
from lmgeom.lm.config import Config
from lmgeom.lm.device import peak_flops
from lmgeom.lm.speed import TINY, Cut, gap, gpu_check, head_bytes, levers, write_whole
from lmgeom.study.paths import results

CPU = torch.device("cpu")
SMALL = Config(64, 16, 1, 2, 16, 32)


@pytest.fixture(scope="module")
def record():
    return gpu_check("cpu", TINY, say=lambda line: None)


def test_a_cpu_is_called_one(record):
    assert record["machine"]["device"] == "cpu"
    assert "no GPU" in record["machine"]["note"]
    assert record["left_out"] == ["compile", "tf32", "measured bytes"]
    assert "measured" not in record["step_bytes"]
    assert record["failed"] == {}


def test_every_check_is_there(record):
    names = {"resumption", "bfloat16", "ladder", "step_bytes", "heads", "update_seconds"}
    assert names < set(record)
    assert record["resumption"] == {"repeatable": True, "exact": True}
    assert record["bfloat16"]["holds"]
    assert len(record["bfloat16"]["curves"][1]) == 20
    assert all(row["tokens_a_second"] > 0 for row in record["ladder"])
    assert set(record["update_seconds"]) == {"AdamW", "Muon", "RowNorm", "Equispread"}
    whole, chunked = (head["counted"] for head in record["heads"][-2:])
    assert chunked < whole
    assert json.loads(json.dumps(record))["ladder"] == record["ladder"]


def test_each_rung_adds_one_lever(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    rungs = levers(torch.device("cuda"))
    assert [rung.name for rung in rungs] == [
        "eager float32",
        "tf32",
        "bfloat16",
        "fused attention",
        "fused AdamW",
        "compile",
        "chunked loss",
    ]
    for before, after in itertools.pairwise(rungs):
        one, two = (vars(rung) for rung in (before, after))
        assert sum(one[key] != two[key] for key in one if key != "name") == 1


def test_a_compiled_step_is_compared(monkeypatch):
    """The graph is captured whole; the code generator behind it is torch's own business."""
    calls, compile = [], torch.compile

    def eager(function):
        calls.append(function)
        return compile(function, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", eager)
    found = gap(SMALL, CPU, 2, compile=True)
    assert len(calls) == 1
    assert found["holds"]
    assert found["bar"] == 1e-3


def test_a_check_that_fails_leaves_the_others(monkeypatch):
    def fail():
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(speed, "checks", lambda *where: {"bad": fail, "good": lambda: 1})
    found = gpu_check("cpu", TINY, say=lambda line: None)
    assert found["failed"] == {"bad": "RuntimeError: no kernel"}
    assert found["good"] == 1


def test_no_check_starts_late():
    late = replace(TINY, limit=-1.0)
    found = gpu_check("cpu", late, say=lambda line: None)
    assert found["left_out"][3:] == list(speed.checks(TINY, CPU))


def test_a_head_in_chunks_needs_the_chunk():
    rows, dim, tokens = 4000, 16, 512
    whole, chunked = (head_bytes(rows, dim, tokens, chunk, CPU)["counted"] for chunk in (None, 32))
    assert whole >= 3 * 4 * rows * tokens
    assert chunked < 4 * (2 * 32 * rows + 3 * rows * dim) + 10**5


def test_data_that_is_cut():
    data = speed.synthetic(64, n_tokens=2000)
    cut = Cut(data, 2)
    assert torch.equal(cut.batch(0, 1, 2, 8)[0], data.batch(0, 1, 2, 8)[0])
    with pytest.raises(InterruptedError, match="from step 2 on"):
        cut.batch(0, 2, 2, 8)


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "check.json"
    write_whole(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_whole(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["check.json"]


def test_no_rung_on_record_is_faster_than_the_machine():
    record = json.loads((results() / "benchmarks" / "speed-ladder.json").read_text("utf-8"))
    assert all(0 < row["share_of_peak"] < 1 for row in record["ladder"])
    best, source = speed.fastest_peak(CPU)
    assert best >= max(peak_flops(CPU, p)[0] for p in ("float32", "bfloat16"))
    assert "measured" in source
