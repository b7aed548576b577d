"""Faults of a machine and of files: each ends in one sentence, and the last checkpoint is whole."""

import json
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from lmgeom.data import synthetic
from lmgeom.data.tokens import intact, read_array
from lmgeom.errors import CheckpointError, DataError, TrainingError
from lmgeom.lm import checkpoint
from lmgeom.lm.config import Config
from lmgeom.lm.loss import IGNORE
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.train import TrainConfig, train

DATA = synthetic(64, seed=0, n_tokens=2000)
RUN = TrainConfig(steps=6, batch_size=4, context=16, warmup=2, lr=1e-2, checkpoint_every=2)


def run(config=RUN, data=DATA, **options):
    torch.manual_seed(0)
    model = LanguageModel(Config(64, 16, 2, 2, 16, 32))
    return train(model, data, config, **{"quiet": True} | options)


def test_a_batch_whose_loss_is_no_number_ends_the_run_before_it_moves_a_weight(tmp_path):
    class Unscored:
        vocab_size, fingerprint = DATA.vocab_size, DATA.fingerprint

        def batch(self, seed, step, *shape):
            x, y = DATA.batch(seed, step, *shape)
            return x, torch.full_like(y, IGNORE) if step == 3 else y

    with pytest.raises(TrainingError, match="step 4: loss nan") as error:
        run(data=Unscored(), out=tmp_path)
    assert "\n" not in str(error.value)
    assert checkpoint.latest(tmp_path).step == 2
    assert run(out=tmp_path, resume=True).steps == 6


def test_a_full_disk_ends_the_run_and_it_goes_on_when_there_is_room(tmp_path):
    """The third checkpoint meets the end of the disk in the middle of a file."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    class Full:
        vocab_size, fingerprint = DATA.vocab_size, DATA.fingerprint

        def batch(self, seed, step, *shape):
            if step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
            return DATA.batch(seed, step, *shape)

    try:
        with pytest.raises(CheckpointError, match=r"cannot save step 6 in .*untouched") as error:
            run(data=Full(), out=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "\n" not in str(error.value)
    assert checkpoint.latest(tmp_path).step == 4
    assert not list(tmp_path.glob(".tmp-*"))
    assert run(out=tmp_path, resume=True).steps == 6
    assert checkpoint.latest(tmp_path).step == 6


CUT = """
import os, sys
import torch
from pathlib import Path
from lmgeom.cli import main
from lmgeom import data
from lmgeom.data.tokens import Corpus

root = Path(sys.argv[1])
real = Corpus.batch

def batch(self, seed, step, *shape):
    if step == 3:
        for path in root.glob("text/train/*.tokens"):
            os.truncate(path, 0)
    return real(self, seed, step, *shape)

Corpus.batch = batch
torch.set_num_threads(1)
model = ["--config", str(root / "model.json"), "--data", str(root / "text")]
how = ["--steps", "6", "--batch-size", "2", "--lr", "0.01", "--checkpoint-every", "2"]
sys.exit(main(["train", *model, *how, "--out", str(root / "run")]))
"""


def test_text_that_is_cut_under_a_run_is_a_sentence_and_no_bus_error(tmp_path):
    """The tokens' file loses its pages between two steps; to read them would be SIGBUS."""
    (tmp_path / "source").mkdir()
    for i in range(40):
        text = f"Text {i}. " + "many words stand here " * 40
        (tmp_path / "source" / f"{i}.txt").write_text(text)
    from lmgeom.data import byte_tokenizer, prepare

    (tmp_path / "bytes.json").write_text(byte_tokenizer().to_json())
    options = {"tokenizer": tmp_path / "bytes.json", "quiet": True}
    prepare(str(tmp_path / "source"), tmp_path / "text", **options)
    config = Config(257, 16, 1, 2, 16, 32)
    (tmp_path / "model.json").write_text(config.to_json())
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "was cut to 0 bytes" in done.stderr
    assert done.stderr.count("\n") == 1
    assert checkpoint.latest(tmp_path / "run").step == 2


def test_an_array_says_when_its_file_was_cut(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens")
    array = read_array(tmp_path, "tokens", np.uint16, 100)
    assert intact(array) is array
    os.truncate(tmp_path / "tokens", 198)
    with pytest.raises(DataError, match="tokens was cut to 198 bytes; it had 200"):
        intact(array)
    (tmp_path / "tokens").unlink()
    assert intact(array) is array  # the pages live as long as the map
    assert intact(np.arange(3)).sum() == 3


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "..", "blocks/../../evil"])
def test_names_that_are_paths_are_names(tmp_path, name):
    """A tensor's name never becomes a path; a foreign one is refused, and nothing is written."""
    from safetensors.torch import load_file, save_file

    run(out=tmp_path / "run")
    path = checkpoint.latest(tmp_path / "run").path
    save_file(load_file(path / "model.safetensors") | {name: torch.ones(2)}, path / "new")
    os.replace(path / "new", path / "model.safetensors")
    state = json.loads((path / "state.json").read_text())
    state["sha256"]["model.safetensors"] = checkpoint._sha256(path / "model.safetensors")
    (path / "state.json").write_text(json.dumps(state))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="adds"):
        checkpoint.load_model(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_recomputed_blocks_give_the_same_run_to_the_last_bit(tmp_path):
    plain = run()
    again = run(TrainConfig.from_dict(RUN.to_dict() | {"recompute": True}))
    losses = [[entry["loss"] for entry in result.history] for result in (plain, again)]
    assert losses[0] == losses[1]
    assert "recompute" not in RUN.to_dict()
