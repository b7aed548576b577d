"""Checkpoints: what is saved comes back to the last bit, and whatever else is refused by name."""

import contextlib
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys

import pytest
import torch

from lmgeom.errors import CheckpointError
from lmgeom.lm import checkpoint
from lmgeom.lm.config import Config
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.optim import adamw

TIED = Config(64, 16, 2, 2, 16, 32)
UNTIED = Config(64, 16, 2, 2, 16, 32, head="untied")


def make(config=TIED, seed=0):
    torch.manual_seed(seed)
    model = LanguageModel(config)
    return model, adamw(model)


def advance(model, optimizer, n=2):
    for _ in range(n):
        optimizer.zero_grad()
        ids = torch.randint(0, 64, (2, 9))
        torch.nn.functional.cross_entropy(
            model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
        optimizer.step()


def same_state(a, b):
    for one, two in zip(a.param_groups, b.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {
            k: v for k, v in two.items() if k != "params"
        }
        for p, q in zip(one["params"], two["params"], strict=True):
            assert a.state[p].keys() == b.state[q].keys()
            for key, value in a.state[p].items():
                other = b.state[q][key]
                if isinstance(value, torch.Tensor):
                    assert value.dtype == other.dtype
                    assert torch.equal(value, other)
                else:
                    assert value == other
    return True


@pytest.fixture
def run(tmp_path):
    """A run's folder with checkpoints of steps 1 and 2, and the model and optimizer of step 2."""
    model, optimizer = make()
    for step in (1, 2):
        advance(model, optimizer)
        checkpoint.save(tmp_path, step, model, optimizer, {"note": "ä"})
    return tmp_path, model, optimizer


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_round_trip_is_bit_exact(config, tmp_path):
    model, optimizer = make(config)
    advance(model, optimizer)
    path = checkpoint.save(tmp_path, 10, model, optimizer, {"note": [1, 0.1, None]})
    assert path == tmp_path / "step-00000010"
    other, fresh = make(config, seed=1)
    found = checkpoint.latest(tmp_path)
    checkpoint.load(found, other, fresh)
    assert found.step == 10
    assert found.extra == {"note": [1, 0.1, None]}
    assert Config.from_dict(found.config) == config
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert same_state(optimizer, fresh)


def test_a_tied_weight_is_stored_once_and_tied_again(run):
    folder, model, _ = run
    loaded = checkpoint.load_model(folder)
    assert loaded.head.weight is loaded.input.weight
    assert torch.equal(loaded.head.weight, model.head.weight)
    size = (folder / "step-00000002" / "model.safetensors").stat().st_size
    assert size < 4 * sum(p.numel() for p in model.parameters()) + 4096


def test_a_weight_with_two_names_is_stored_once(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model, other = Tied(), Tied()
    path = checkpoint.save(tmp_path, 1, model)
    assert checkpoint.read(path).tied == {"b.weight": "a.weight"}
    checkpoint.load(path, other)
    assert other.b.weight is other.a.weight
    assert torch.equal(other.b.weight, model.b.weight)
    loose = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    with pytest.raises(CheckpointError, match=r"lacks 'b\.weight'"):
        checkpoint.load(path, loose)


class Odd(torch.optim.Optimizer):
    """Keeps numbers, an integer tensor and a wide one."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5, "pair": (1, 2)})

    def step(self):
        for p in self.param_groups[0]["params"]:
            count = 2**24 + 1 + self.state[p].get("n", 0)
            self.state[p] |= {"n": self.state[p].get("n", 0) + 1, "x": 0.1, "none": None}
            self.state[p] |= {
                "big": torch.tensor(count),
                "wide": torch.ones(2, dtype=torch.float64),
            }


def test_any_optimizer_of_tensors_and_numbers(tmp_path):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer, fresh = Odd(model.parameters()), Odd(other.parameters())
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    checkpoint.load(checkpoint.save(tmp_path, 1, model, optimizer), other, fresh)
    assert same_state(optimizer, fresh)


def test_a_state_that_is_neither_is_refused_before_anything_is_written(tmp_path):
    model, _ = make()
    optimizer = Odd(model.parameters())
    optimizer.step()
    optimizer.state[next(model.parameters())]["list"] = [1]
    with pytest.raises(CheckpointError, match=r"blocks\.0.*\.list is a list"):
        checkpoint.save(tmp_path, 1, model, optimizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep_last(tmp_path, keep):
    model, _ = make()
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, model, keep=keep)
    assert [step for step, _ in checkpoint.steps(tmp_path)] == list(range(5 - keep, 5))


def test_saving_a_step_again_replaces_it(run):
    folder, model, optimizer = run
    advance(model, optimizer)
    checkpoint.load(checkpoint.save(folder, 2, model, optimizer), other := make(seed=3)[0])
    assert torch.equal(other.norm.weight, model.norm.weight)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]


def test_nothing_there(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.load_model(tmp_path)


def cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def as_pickle(path):
    path.write_bytes(pickle.dumps({"weights": list(range(100))}))


def as_torch(path):
    torch.save({"weights": torch.zeros(3)}, path)


def giant_header(path):
    path.write_bytes(struct.pack("<Q", 2**40) + path.read_bytes()[8:])


def as_folder(path):
    path.unlink()
    path.mkdir()


def as_file(path):
    shutil.rmtree(path)
    path.write_text("")


DAMAGES = [
    ("model.safetensors", cut, "is damaged"),
    ("model.safetensors", flip, "is damaged"),
    ("model.safetensors", lambda path: path.write_bytes(b""), "is damaged: 0 bytes"),
    ("model.safetensors", os.remove, "is missing"),
    ("model.safetensors", as_pickle, "is a pickle"),
    ("model.safetensors", as_torch, "is a pickle"),
    ("model.safetensors", giant_header, "declares a header of 1099511627776 bytes"),
    ("optimizer.safetensors", cut, "is damaged"),
    ("state.json", cut, "is not JSON"),
    ("state.json", as_folder, "cannot be read: Is a directory"),
    ("", as_file, "no state.json"),
    ("state.json", os.remove, "no state.json"),
    ("state.json", lambda path: path.write_text("{}"), "is foreign"),
    ("state.json", lambda path: path.write_text("[" * 10**5), "is not JSON"),
    ("state.json", lambda path: path.write_bytes(b"\xff\xfe\x00"), "is not JSON"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used(
    run, name, damage, message, caplog
):
    folder, _, _ = run
    damage(folder / "step-00000002" / name)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.read(folder / "step-00000002")
    assert "step-00000002" in str(error.value)
    assert "\n" not in str(error.value)
    assert checkpoint.latest(folder).step == 1
    assert "step-00000002" in caplog.text
    assert len(caplog.records) == 1


def test_all_damaged(run):
    folder, _, _ = run
    for step in (1, 2):
        cut(folder / f"step-{step:08d}" / "model.safetensors")
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints can be read"):
        checkpoint.latest(folder)


def edit(path, **changes):
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "is foreign"),
        ({"step": 3}, "it was renamed"),
        ({"step": "2"}, "no usable 'step'"),
        ({"tied": []}, "no usable 'tied'"),
        ({"sha256": {"../../secret": "0"}}, r"lists '\.\./\.\./secret'"),
        ({"sha256": {"model.safetensors": "0", "optimizer.safetensors": "0"}}, "is damaged"),
    ],
)
def test_a_hostile_state_is_refused(run, changes, message):
    path = run[0] / "step-00000002"
    edit(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read(path)


def test_a_pickle_with_a_matching_hash_is_never_loaded(run, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    folder, model, optimizer = run
    path = folder / "step-00000002"
    (path / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    digests = {name: checkpoint._sha256(path / name) for name in checkpoint.FILES}
    edit(path, sha256=digests)
    with pytest.raises(CheckpointError, match="pickle"):
        checkpoint.load(path, model, optimizer)
    assert not (tmp_path / "exploded").exists()


def test_bytes_that_are_no_safetensors_but_have_the_right_hash(run):
    folder, model, _ = run
    path = folder / "step-00000002"
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]" + bytes(8))
    edit(path, sha256={name: checkpoint._sha256(path / name) for name in checkpoint.FILES})
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        checkpoint.load(path, model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(64, 32, 2, 2, 16, 32), r"of shape \(.*\), must be torch.float32 of shape"),
        (Config(64, 16, 3, 2, 16, 32), "lacks 'blocks.2"),
        (Config(64, 16, 1, 2, 16, 32), "adds 'blocks.1"),
        (UNTIED, "lacks 'head.weight'"),
    ],
)
def test_another_shape_is_refused_and_the_model_stays(run, config, message):
    other = make(config, seed=5)[0]
    before = {n: p.clone() for n, p in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(run[0] / "step-00000002", other)
    assert all(torch.equal(p, before[n]) for n, p in other.state_dict().items())


def test_another_dtype_is_refused(run):
    with pytest.raises(CheckpointError, match=r"float32 of .*, must be torch.float64"):
        checkpoint.load(run[0] / "step-00000002", make()[0].double())


def test_an_optimizer_over_other_parameters_is_refused_and_the_model_stays(run):
    model, _ = make(seed=5)
    other = torch.optim.AdamW(model.parameters())
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="parameter groups"):
        checkpoint.load(run[0] / "step-00000002", model, other)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert not other.state


@pytest.mark.parametrize("groups", [None, 3, [3], [{}], [{"params": []}]])
def test_an_optimizer_of_another_form_is_refused(run, groups):
    folder, model, optimizer = run
    edit(folder / "step-00000002", optimizer={"values": {}, "groups": groups})
    with pytest.raises(CheckpointError, match="step-00000002 holds no state for these parameter"):
        checkpoint.load(folder / "step-00000002", model, optimizer)


@contextlib.contextmanager
def small_disk():
    """Writes beyond 4 kB fail halfway through, as on a full disk; pytest's own come afterwards."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_disk_full_while_saving(run):
    folder, model, optimizer = run
    advance(model, optimizer)
    with (
        small_disk(),
        pytest.raises(CheckpointError, match=r"cannot save step 3.*earlier checkpoints") as error,
    ):
        checkpoint.save(folder, 3, model, optimizer)
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoint.latest(folder).step == 2


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_any_failing_call_leaves_no_half_checkpoint(run, monkeypatch, call, step):
    folder, model, optimizer = run

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoint.save(folder, step, model, optimizer)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_save_that_fails_while_it_replaces_a_step_loses_none(run, monkeypatch, renames):
    folder, model, optimizer = run
    shutil.rmtree(folder / "step-00000001")
    calls = []

    def fail(*paths, real=os.replace):
        calls.append(paths)
        if len(calls) > renames:
            raise OSError(5, "Input/output error")
        real(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            checkpoint.save(folder, 2, model, optimizer, {"note": "new"})
    assert checkpoint.latest(folder).extra == {"note": "ä"}
    checkpoint.save(folder, 2, model, optimizer, {"note": "new"})
    assert checkpoint.latest(folder).extra == {"note": "new"}
    assert [p.name for p in folder.iterdir()] == ["step-00000002"]


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(CheckpointError, match="cannot save step 1"):
        checkpoint.save(tmp_path / "taken", 1, make()[0])


KILLED = """
import os, signal, sys
from pathlib import Path
from lmgeom.lm import checkpoint
from lmgeom.lm.config import Config
from lmgeom.lm.model import LanguageModel
model = LanguageModel(Config(64, 16, 2, 2, 16, 32))
for call in ("fsync", "replace"):
    folder = Path(sys.argv[1], call)
    checkpoint.save(folder, 1, model)
    child = os.fork()
    if child == 0:
        setattr(os, call, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        checkpoint.save(folder, 2, model)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def test_a_kill_in_the_middle_of_saving(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True)
    for call in ("fsync", "replace"):
        folder = tmp_path / call
        assert any(p.name.startswith(".tmp-") for p in folder.iterdir())
        assert checkpoint.latest(folder).step == 1
        checkpoint.save(folder, 2, make()[0])
        assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_copied_checkpoint_still_loads(run, tmp_path_factory):
    folder, model, _ = run
    there = tmp_path_factory.mktemp("there") / "step-00000002"
    shutil.copytree(folder / "step-00000002", there)
    assert torch.equal(checkpoint.load_model(there).norm.weight, model.norm.weight)


def test_others_may_read_what_umask_lets_them(run):
    modes = {path.stat().st_mode for path in (run[0] / "step-00000002").iterdir()}
    assert len(modes) == 1
