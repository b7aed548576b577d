"""Tokens a second of our training loop against a plain loop around a Llama of transformers.

``python -m tests.benchmarks.train_speed`` writes ``book/results/benchmarks/train-speed.json``. Both
train the same function from the same weights on the same batches, at about 10 and about 50 million
parameters: a tied table, float32, fused AdamW, clipped gradients. Ours takes the loss in chunks.
Times are processor seconds of one thread, which a busy machine does not stretch; reading the batch
is part of a step. The peak is that of the loop's own report, by the clock. It takes a few minutes.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from lmgeom.data import corpus
from lmgeom.lm import Config, LanguageModel
from lmgeom.lm.device import batches, loss_function, make_plan, peak_flops, train_flops
from lmgeom.lm.optim import adamw
from lmgeom.lm.train import update
from tests.benchmarks.measuring import medians, record_file, write_record

CONTEXT = 256
SHAPES = {
    "10m": {"dim": 256, "layers": 8, "heads": 4, "mlp_width": 704},
    "50m": {"dim": 512, "layers": 13, "heads": 8, "mlp_width": 1408},
}
BATCH = {"10m": 8, "50m": 4}
LOSS_CHUNK = 512
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
KINDS = {  # parts of the names of operations, and of those that call them
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("scaled_dot_product",),
    "loss": ("LinearLoss", "nll_loss", "log_softmax"),
    "optimizer": ("Optimizer.step", "adamw"),
}


def llama(model):
    """The Llama of transformers that computes what a model of ours does, with its weights."""
    config = model.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
    )
    weights = {"model.embed_tokens": model.input, "model.norm": model.norm}
    weights = {f"{name}.weight": part.weight for name, part in weights.items()}
    for i, block in enumerate(model.blocks):
        split = {
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj": block.mixer.qkv,
            "self_attn.o_proj": block.mixer.output,
            "mlp.gate_proj mlp.up_proj": block.mlp.gate_up,
            "mlp.down_proj": block.mlp.down,
            "input_layernorm": block.mixer_norm,
            "post_attention_layernorm": block.mlp_norm,
        }
        for names, part in split.items():
            rows = part.weight.chunk(len(names.split()))
            pairs = zip(names.split(), rows, strict=True)
            weights |= {f"model.layers.{i}.{name}.weight": row for name, row in pairs}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    if missing not in ([], ["lm_head.weight"]) or unexpected:
        raise ValueError(f"not the same model: {missing} missing, {unexpected} left over")
    return theirs


def plain_step(model, optimizer, batch):
    """One step of a plain loop."""
    x, y = batch
    loss = F.cross_entropy(model(input_ids=x, use_cache=False).logits.flatten(0, 1), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def loops(config, data, sequences):
    """A function for each loop that makes its next step and gives the loss; their parameters."""
    torch.manual_seed(0)
    ours = LanguageModel(config)
    theirs = llama(ours)
    optimizers = (
        adamw(ours, **SETTINGS),
        torch.optim.AdamW(theirs.parameters(), **SETTINGS, fused=True),
    )
    loss_of = loss_function(ours, make_plan("cpu", "float32", False), LOSS_CHUNK)
    steps = {
        "ours": lambda batch: update(ours, optimizers[0], loss_of, batch)[0],
        "transformers": partial(plain_step, theirs, optimizers[1]),
    }

    def loop(step):
        shape = {"batch_size": sequences, "context": CONTEXT}
        reader = batches(data, torch.device("cpu"), range(1000), seed=0, **shape)
        return lambda: step(next(reader))

    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    if counts[0] != counts[1]:
        raise ValueError(f"not the same model: {counts[0]} and {counts[1]} parameters")
    return {name: loop(step) for name, step in steps.items()}, counts[0]


def kind_of(event):
    """What an operation is for, by its name or by that of an operation that called it."""
    for kind, parts in KINDS.items():
        caller = event
        while caller is not None:
            if any(part in caller.name for part in parts):
                return kind
            caller = caller.cpu_parent
    return "everything else"


def shares(step):
    """Share of one step's time in each kind of operation."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    times = dict.fromkeys([*KINDS, "everything else"], 0.0)
    for event in found.events():
        times[kind_of(event)] += event.self_cpu_time_total
    return {kind: time / sum(times.values()) for kind, time in times.items()}


def measure(size, rounds, batch):
    """All figures of one size."""
    data = corpus("minipile-core", "bpe-16k", quiet=True)
    config = Config(data.vocab_size, context=CONTEXT, **SHAPES[size])
    jobs, parameters = loops(config, data, batch)
    first = {name: job() for name, job in jobs.items()}
    if abs(first["ours"] - first["transformers"]) > 1e-4:
        raise ValueError(f"not the same model: losses {first}")
    seconds = medians(jobs, rounds)
    profiles = {name: shares(job) for name, job in jobs.items()}
    speeds = {name: batch * CONTEXT / value for name, value in seconds.items()}
    peak, _ = peak_flops(torch.device("cpu"), "float32")
    kind, share = max(profiles["ours"].items(), key=lambda item: item[1])
    return {
        "vocab_size": config.vocab_size,
        **SHAPES[size],
        "parameters": parameters,
        "tokens": batch * CONTEXT,
        "loss_chunk": LOSS_CHUNK,
        "rounds": rounds,
        "first_loss": first,
        "seconds": seconds,
        "tokens_a_second": speeds,
        "ratio": seconds["transformers"] / seconds["ours"],
        "profile": profiles,
        "share_of_peak_flops": train_flops(config, CONTEXT) * speeds["ours"] / peak,
        "bound_by": f"{kind}, {share:.0%} of our step",
    }


def main():
    """Measure both sizes and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each loop")
    parser.add_argument("--batch", type=int, help="sequences a step; by default 8 and 4")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--out", type=Path, help="the record; by default the book's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = record_file("train-speed", args.out)
    sizes = {size: measure(size, args.rounds, args.batch or BATCH[size]) for size in args.sizes}
    ratios = {f"ratio_{size}": figures["ratio"] for size, figures in sizes.items()}
    write_record(out, "train-speed", {**ratios, "least_ratio": min(ratios.values()), **sizes})


if __name__ == "__main__":
    main()
