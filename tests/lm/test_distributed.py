"""Two processes train the model that one trains, with every optimizer, whole or sharded."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import rank_faults
import ranks
import torch
from safetensors.torch import load_file

from lmgeom import cli
from lmgeom.head.optimizer import HEAD_RULES
from lmgeom.lm import LanguageModel, TrainConfig, checkpoint, presets, train
from lmgeom.lm.optim import BODY_RULES

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """Losses and weights that two processes left for every case."""
    out = tmp_path_factory.mktemp("ranks")
    command = [*TORCHRUN, str(Path(ranks.__file__)), str(out)]
    subprocess.run(command, check=True, env=ENVIRONMENT)
    return out


@pytest.mark.parametrize("dtype", ranks.DTYPES)
@pytest.mark.parametrize("rule", ranks.RULES)
def test_two_processes_equal_one(two, rule, dtype):
    losses, weights = ranks.run(rule, dtype)
    for shard in ("ddp", "fsdp"):
        name = f"{rule}-{dtype}-{shard}"
        found = json.loads((two / f"{name}.json").read_text())
        assert torch.tensor(found) == pytest.approx(torch.tensor(losses), abs=1e-5)
        loaded = load_file(two / f"{name}.safetensors")
        assert loaded.keys() == weights.keys()
        if dtype == "float64":
            for key, weight in weights.items():
                torch.testing.assert_close(loaded[key], weight, rtol=0, atol=1e-8)


def test_every_rule_offered_is_among_the_cases():
    chosen = [TrainConfig(**ranks.RUN | settings) for _, settings in ranks.RULES.values()]
    assert {config.head_optimizer for config in chosen} == set(HEAD_RULES)
    assert {config.body_optimizer for config in chosen} == set(BODY_RULES)


def facts(two):
    return [json.loads((two / f"facts-{rank}.json").read_text()) for rank in (0, 1)]


def test_every_rank_says_what_failed_and_where(two):
    said = [fact["failures"] for fact in facts(two)]
    assert said[0] == said[1]
    bad = "step 1: loss nan, .* is output of blocks.1.mlp on rank 1"
    for shard in ("ddp", "fsdp"):
        assert re.search(bad, said[0][shard])
    assert said[0]["optimizer"] == "shard='fsdp': Muon needs whole weights; use 'ddp'"
    assert said[0]["batch"] == "batch_size=3: must be a multiple of 2 ranks x 1 pieces"
    assert said[0]["once"].startswith("out='/proc/nowhere': cannot be written")


def test_two_compiled_processes_equal_one(two):
    eager = TrainConfig(**ranks.RUN | {"steps": 2})
    torch.manual_seed(0)
    model = LanguageModel(replace(ranks.TIED, layers=1))
    losses = [entry["loss"] for entry in train(model, ranks.DATA, eager, quiet=True).history]
    for fact in facts(two):
        for shard in ("ddp", "fsdp"):
            assert fact["compiled"][shard] == pytest.approx(losses, abs=1e-5)


def test_a_shared_evaluation_gives_every_rank_the_whole(two):
    whole = ranks.evaluations()
    assert facts(two)[0]["nats"] == facts(two)[1]["nats"] == pytest.approx(whole, abs=1e-5)


# The command under torchrun ----------------------------------------------------------------------


def command(out, fault, *words, ranks=2):
    """Run `lmgeom train` on some ranks while something happens to the last one."""
    start = TORCHRUN if ranks == 2 else [sys.executable]
    script = [*start, rank_faults.__file__, fault, "train", *rank_faults.WORDS]
    done = subprocess.run(
        [*script, "--out", str(out), *words], env=ENVIRONMENT, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def logged(out):
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, 9))
    return [entry["loss"] for entry in entries]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    """One process to step 2, two with shards to step 5 or so, one to the end: as one throughout."""
    code, _, errors = command(tmp_path / "whole", "none", ranks=1)
    assert code == 0, errors
    out = tmp_path / "parts"
    code, said, errors = command(out, "signal:1", ranks=1)
    assert code == 0, errors
    assert "SIGTERM came at step 2; with --resume the run goes on" in said
    _, said, _ = command(out, "signal:4", "--resume", "--shard", "fsdp")
    assert said.count("with --resume the run goes on") == 1
    assert 5 <= checkpoint.latest(out).step < 8
    assert command(out, "none", "--resume", ranks=1)[0] == 0
    assert logged(out) == pytest.approx(logged(tmp_path / "whole"), abs=1e-5)


def test_a_dead_rank_ends_the_others_and_is_named(tmp_path):
    code, _, said = command(tmp_path, "die:4", "--checkpoint-every", "2")
    died = (tmp_path / "log.jsonl").stat().st_mtime  # the last step before
    assert time.time() - died < 60
    assert code != 0
    assert re.search(r"rank +: 1 ", said)
    assert f"Signal {signal.SIGKILL.value} (SIGKILL)" in said
    assert "rank 0 has lost another rank" in said
    assert checkpoint.latest(tmp_path).step == 4


# The example for SLURM -------------------------------------------------------------------------

STUBS = {
    "scontrol": 'if [ "$1" = show ]; then echo first; echo second; else echo "$@"; fi',
    "srun": 'shift; for id in 0 1; do SLURM_PROCID=$id SLURM_LOCALID=$id SLURM_NTASKS=2 "$@"; done',
    "python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT" "${@:3}"',
}


def test_the_slurm_script_starts_ranks_of_a_command_that_parses(tmp_path, root):
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "DATA": "text", "OUT": "run 1"}
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(root / "examples" / "train.slurm")]
    done = subprocess.run(
        script, env=os.environ | variables, check=True, capture_output=True, text=True
    )
    *ranks_said, queued = done.stdout.splitlines()
    assert [line.split()[:5] for line in ranks_said] == [
        [rank, rank, "2", "first", "20007"] for rank in "01"
    ]
    assert queued == "requeue 7"
    words = ranks_said[0].replace("run 1", "run-1").split()[5:]
    args = cli.parser().parse_args(words)
    assert (args.out, args.resume, args.shard) == ("run-1", True, "ddp")
    assert args.preset in presets
