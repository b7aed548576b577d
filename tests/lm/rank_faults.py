"""The train command on synthetic data, in which something happens to the last rank at a step."""

import os
import signal
import sys

import torch

from lmgeom import cli, data
from lmgeom.lm import Config
from lmgeom.lm.distributed import rank, size

SETTINGS = {"steps": 8, "batch-size": 4, "lr": 0.01, "warmup": 1, "device": "cpu"}
WORDS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
WORDS += ["--preset", "tiny"]
TINY = Config(64, 16, 2, 2, 16, 32)


class Faulty:
    """Synthetic tokens; reading the batch of one step on the last rank has a consequence.

    Args:
        fault: "none", "die:STEP" or "signal:STEP", a SIGTERM to torchrun where it is the parent.
    """

    def __init__(self, fault: str):
        self.tokens = data.synthetic(64, seed=0, n_tokens=2000)
        self.vocab_size, self.fingerprint = 64, self.tokens.fingerprint
        self.kind, _, step = fault.partition(":")
        self.step = int(step or -1)

    def batch(self, seed: int, step: int, *shape: int):
        """The batch, after what happens."""
        if step == self.step and rank() == size() - 1:
            if self.kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(os.getppid() if size() > 1 else os.getpid(), signal.SIGTERM)
        return self.tokens.batch(seed, step, *shape)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cli._config = lambda args: TINY
    data.corpus = lambda *names: Faulty(sys.argv[1])
    sys.exit(cli.main(sys.argv[2:]))
