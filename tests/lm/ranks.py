"""Trainings that `test_distributed` compares: torchrun makes them use its ranks, else one."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from lmgeom.data import synthetic
from lmgeom.errors import LmgeomError
from lmgeom.lm.config import Config
from lmgeom.lm.distributed import SHARDS, process_group, rank, whole
from lmgeom.lm.evaluate import evaluate
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.train import TrainConfig, train

# 63 rows do not divide among 2 ranks, and with one head of LEV a rank holds none of its splines.
TIED = Config(63, 16, 2, 2, 16, 30)
UNTIED = Config(63, 16, 2, 2, 16, 30, head="untied")
LEV = {"n_digits": 2, "seed_dim": 4, "n_knots": 4, "rank": 2, "heads": 1}
COMPUTED = Config(63, 16, 2, 2, 16, 30, input="lev", input_options=LEV, head="untied")
CHAIN = Config(63, 16, 2, 2, 16, 32, mixer="hope-attention", mixer_options={"levels": 2})
DATA = synthetic(63, seed=0, n_tokens=2000)
RUN = {"steps": 4, "batch_size": 4, "context": 16, "warmup": 1, "lr": 1e-2, "clip": 0.5}
RULES = {
    "adamw": (TIED, {}),
    "muon": (UNTIED, {"body_optimizer": "muon", "head_optimizer": "muon", "head_lr": 3e-3}),
    "rownorm": (TIED, {"head_optimizer": "rownorm", "head_lr": 0.3}),
    "sign": (UNTIED, {"head_optimizer": "sign", "head_lr": 0.3}),
    "equispread": (UNTIED, {"head_optimizer": "equispread", "head_lr": 0.3}),
    "equispread-tied": (
        TIED,
        {
            "head_optimizer": "equispread",
            "head_lr": 0.3,
            "head_options": {"whiten": 0.5, "sweeps": 2, "cap": True, "vocab_size": 60},
        },
    ),
    "levels": (CHAIN, {"level_periods": [1, 3]}),
    "pieces": (COMPUTED, {"accumulation": 2, "loss_chunk": 5, "head_lr": 3e-3}),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def run(rule: str, dtype: str, shard: str = "ddp", **options):
    """Train one case; gives the losses and the final weights."""
    config, settings = RULES[rule]
    torch.manual_seed(0)
    model = LanguageModel(config).to(DTYPES[dtype])
    settings = RUN | settings | {"shard": shard}
    result = train(model, DATA, TrainConfig(**settings), quiet=True, **options)
    weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return [[e["loss"], e["grad_norm"], e["tokens"]] for e in result.history], weights


def failure(shard: str, *, spoil: int | None = None, **options) -> str:
    """One line of a run that must fail: the output of one block overflows on rank `spoil`."""
    torch.manual_seed(0)
    model = LanguageModel(TIED)
    if spoil == rank():
        model.blocks[1].mlp.register_forward_hook(lambda module, inputs, output: output * torch.inf)
    changes = {"shard": shard, "batch_size": options.pop("batch_size", 4)}
    try:
        train(model, DATA, TrainConfig(**RUN | changes), quiet=True, **options)
    except LmgeomError as error:
        return str(error)
    return "nothing failed"


def plain_muon(model, config):
    """The optimizer of a user who does not know about shards."""
    return torch.optim.Muon(model.blocks[0].mlp.parameters())


def failures() -> dict[str, str]:
    """What is said about errors, by name."""
    return {
        "ddp": failure("ddp", spoil=1),
        "fsdp": failure("fsdp", spoil=1),
        "optimizer": failure("fsdp", optimizer=plain_muon),
        "batch": failure("ddp", batch_size=3),
        "once": failure("ddp", out="/proc/nowhere"),
    }


def compiled() -> dict[str, list[float]]:
    """Losses of two compiled steps in two pieces; the code generator is left out."""
    settings, losses = RUN | {"steps": 2, "accumulation": 2, "compile": True}, {}
    compile, torch.compile = torch.compile, partial(torch.compile, backend="aot_eager")
    try:
        for shard in SHARDS:
            torch.manual_seed(0)
            model = LanguageModel(replace(TIED, layers=1))
            config = TrainConfig(**settings | {"shard": shard})
            result = train(model, DATA, config, quiet=True)
            losses[shard] = [entry["loss"] for entry in result.history]
    finally:
        torch.compile = compile
    return losses


def evaluations() -> dict[str, float]:
    """Nats of held-out text under a sharded model, the windows shared among the ranks."""
    torch.manual_seed(0)
    model = LanguageModel(TIED)
    found = {}

    def look(model, step):
        found.update(evaluate(model, DATA.splits, batch_size=3, together=True))
        return {}

    train(model, DATA, TrainConfig(**RUN | {"shard": "fsdp"}), evaluate=look, quiet=True)
    return {name: score.nats for name, score in found.items()}


def main(out: Path) -> None:
    """Run every case on all ranks and leave its losses and weights in a folder."""
    torch.set_num_threads(1)
    with process_group("cpu"):
        for rule in RULES:
            for dtype in DTYPES:
                for shard in SHARDS:
                    losses, weights = run(rule, dtype, shard)
                    if rank() == 0:
                        save_file(weights, out / f"{rule}-{dtype}-{shard}.safetensors")
                        text = json.dumps(losses)
                        (out / f"{rule}-{dtype}-{shard}.json").write_text(text)
        facts = {"failures": failures(), "compiled": compiled(), "nats": evaluations()}
        (out / f"facts-{rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
