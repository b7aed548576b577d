"""The estimate of a step's memory against autograd, a real ledger and the process's own peak."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from lmgeom.lm.config import Config, parameters, presets
from lmgeom.lm.device import loss_function, make_plan
from lmgeom.lm.memory import Ledger, gibibytes, memory_rows, step_memory
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.optim import make_optimizer

SMALL = Config(2048, 32, 2, 2, 64, 96)
LEVERS = [{}, {"chunk": 50}, {"recompute": True}, {"precision": "bfloat16"}, {"accumulate": True}]
HOPE = {"mixer": "hope-attention", "mixer_options": {"levels": 2}, "mlp_width": 48}
MODELS = {
    "attention": SMALL,
    "untied": replace(SMALL, head="untied"),
    "gated": replace(SMALL, mixer="gated-attention"),
    "titans": replace(SMALL, mixer="titans-lmm", mixer_options={"depth": 1}),
    "hope": replace(SMALL, **HOPE),
}


def real_peak(config, sequences, *, precision=None, chunk=None, recompute=False, accumulate=False):
    """The peak of a step that is computed, by the same ledger."""
    torch.manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (sequences, config.context))
    with Ledger() as ledger:
        model = LanguageModel(config)
        rule = make_optimizer(model)
        loss_of = loss_function(model, make_plan("cpu", precision), chunk, recompute)
        for _ in range(2):
            for piece in range(1 + accumulate):
                if piece == accumulate:
                    ledger.peak = ledger.live
                loss_of(ids, ids).backward()
            rule.step()
            rule.zero_grad(set_to_none=True)
    return ledger.peak


@pytest.mark.parametrize("levers", LEVERS, ids=str)
def test_a_step_without_contents_needs_what_a_real_one_does(levers):
    assert step_memory(SMALL, 3, **levers).peak == pytest.approx(
        real_peak(SMALL, 3, **levers), 0.01
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_mixer_and_head(name):
    config = replace(MODELS[name], context=32)
    found = step_memory(config, 2)
    assert found.peak == pytest.approx(real_peak(config, 2), 0.02)
    assert found.gradients == 4 * parameters(config).total
    assert step_memory(config, 2, recompute=True).activations < found.activations


@pytest.mark.parametrize("rule", ["muon", "rownorm", "sign", "equispread"])
def test_every_rule_of_the_head(rule):
    make = partial(make_optimizer, head_optimizer=rule, head_lr=0.1, body_optimizer="muon")
    found = step_memory(MODELS["untied"], 1, optimizer=make)
    assert 0 < found.optimizer < step_memory(MODELS["untied"], 1).optimizer


def test_lev_is_counted_as_if_all_ids_were_distinct():
    """An upper bound: the real batch repeats some of its ids."""
    config = replace(presets["leviathan-small"], layers=1, context=64)
    assert 1 <= step_memory(config, 4).peak / real_peak(config, 4) < 1.3


CHILD = """
import json, sys
import torch
from lmgeom.lm.config import Config
from lmgeom.lm.device import loss_function, make_plan
from lmgeom.lm.memory import step_memory
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.optim import make_optimizer
from tests.benchmarks.measuring import peak_bytes

torch.set_num_threads(1)
config = Config(16384, 64, 2, 2, 128, 128)
found = step_memory(config, 16)
model = LanguageModel(config)
rule, loss_of = make_optimizer(model), loss_function(model, make_plan("cpu", "float32"))
ids = torch.randint(0, 16384, (16, 128))

def step(ids=ids):
    loss_of(ids, ids).backward()
    rule.step()
    rule.zero_grad(set_to_none=True)

step(ids[:1])
print(json.dumps([found.peak - found.weights - found.optimizer, peak_bytes(step)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_process_itself_needs_as_much(root):
    """About 300 MB; the process's peak has what its allocator keeps, so a tenth either way."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=root, check=True, capture_output=True, text=True
    )
    estimate, measured = json.loads(done.stdout)
    assert measured == pytest.approx(estimate, rel=0.1)


def test_nothing_of_the_size_is_allocated_and_no_random_number_is_drawn():
    before = torch.get_rng_state()
    found = step_memory(replace(presets["untied-1.2b"], layers=1), 64, precision="bfloat16")
    assert found.peak > 50 * 2**30
    assert torch.equal(torch.get_rng_state(), before)


def test_the_table_has_a_row_for_each_pair_of_levers():
    rows = memory_rows(SMALL, (1, 2), 64, 32)
    assert [row[:4] for row in rows[1:4:2]] == [
        ("1", "64", "whole", "kept"),
        ("1", "64", "chunked", "kept"),
    ]
    assert len(rows) == 9


def test_sizes_in_words():
    assert gibibytes(3 * 2**29) == "1.50 GiB"
    assert gibibytes(2**20) == "1.0 MiB"
