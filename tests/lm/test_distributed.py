"""Two processes train the model that one trains, with every optimizer, whole or sharded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from safetensors.torch import load_file

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
