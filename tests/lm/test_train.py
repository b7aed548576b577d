"""The loop: the right gradient, the same bits after any interruption, errors that name things."""

import copy
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lmgeom.data import synthetic
from lmgeom.errors import CheckpointError, ConfigError, DataError, TrainingError
from lmgeom.head.optimizer import HEAD_RULES
from lmgeom.lm import checkpoint
from lmgeom.lm.config import Config
from lmgeom.lm.device import batches, find_device, loss_function, make_plan, train_flops
from lmgeom.lm.loss import IGNORE, token_loss
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.optim import adamw, schedule
from lmgeom.lm.progress import History, Report, exclusive, interrupts, log_line
from lmgeom.lm.train import TrainConfig, accumulate, differences, first_bad, train, update

MODEL = Config(64, 16, 2, 2, 16, 32)
RUN = TrainConfig(steps=6, batch_size=4, context=16, warmup=2, lr=1e-2, checkpoint_every=2)
DATA = synthetic(64, seed=0, n_tokens=2000)


def make(config=MODEL, seed=0):
    torch.manual_seed(seed)
    return LanguageModel(config)


def run(config=RUN, data=DATA, model=None, **options):
    model = model or make()
    return model, train(model, data, config, **{"quiet": True} | options)


def change(config=RUN, **changes):
    return TrainConfig.from_dict(config.to_dict() | changes)


def same(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def losses(result):
    return [entry["loss"] for entry in result.history]


class Hook:
    """Data that calls a function before each batch."""

    vocab_size, fingerprint = DATA.vocab_size, DATA.fingerprint

    def __init__(self, function):
        self.function = function

    def batch(self, seed, step, batch_size, context):
        self.function(step)
        return DATA.batch(seed, step, batch_size, context)


def test_equals_the_plain_loop_to_the_last_bit():
    model, result = run()
    other = make()
    optimizer = adamw(other)
    plain = []
    for step in range(RUN.steps):
        x, y = DATA.batch(0, step, 4, 16)
        loss = token_loss(other.head, other.hidden(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * schedule(step, 6, 2, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    assert losses(result) == plain
    assert same(model, other)


@pytest.mark.parametrize("pieces", [2, 4])
def test_accumulation_gives_the_gradient_of_the_whole_batch(pieces):
    model, (x, y) = make().double(), DATA.batch(0, 0, 4, 16)
    loss_of = loss_function(model, make_plan("cpu"))
    whole = accumulate(loss_of, x, y)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.testing.assert_close(accumulate(loss_of, x, y, pieces), whole)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-15)


def test_accumulation_and_chunks_do_not_change_the_run():
    reference = losses(run()[1])
    for changes in ({"accumulation": 4}, {"loss_chunk": 7}):
        assert losses(run(change(**changes))[1]) == pytest.approx(reference, rel=1e-4)


def test_compiled_loss_equals_eager(monkeypatch):
    """The graph is captured whole; the code generator behind it is torch's own business."""
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiled)
    small = Config(64, 16, 1, 2, 16, 32)
    reference, found = (
        losses(run(change(steps=3, compile=c), model=make(small))[1]) for c in (False, True)
    )
    assert found == pytest.approx(reference, rel=1e-4)


def test_bfloat16_keeps_master_weights_and_float32_losses():
    model, result = run(change(dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses(result) != losses(run()[1])
    assert losses(result) == pytest.approx(losses(run()[1]), rel=0.02)


def test_clipping():
    model, (x, y) = make(), DATA.batch(0, 0, 4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    _, norm = update(model, optimizer, loss_function(model, make_plan("cpu")), (x, y), clip=0.1)
    moved = [(p.detach() - q).norm() for p, q in zip(model.parameters(), before, strict=True)]
    assert norm > 0.1
    assert torch.stack(moved).norm().item() == pytest.approx(0.1, rel=1e-4)


def test_learns():
    _, result = run(change(steps=60))
    assert losses(result)[-1] < losses(result)[0] - 0.3


def test_history_and_evaluations():
    model, result = run(
        change(eval_every=4), evaluate=lambda model, step: {"training": model.training}
    )
    assert [entry["step"] for entry in result.history] == [1, 2, 3, 4, 5, 6]
    assert result.evaluations == [
        {"step": step, "evaluation": {"training": False}} for step in (4, 6)
    ]
    assert (result.steps, result.tokens, result.stopped) == (6, 6 * 64, None)
    assert result.seconds > 0
    assert model.training


def test_global_random_state_is_left_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    model = make()
    torch.manual_seed(7)
    run(model=model)
    assert torch.equal(torch.rand(3), expected)


# Resuming ------------------------------------------------------------------------------------


def test_resume_after_an_error_is_bit_identical(tmp_path):
    whole, expected = run(out=tmp_path / "whole", evaluate=lambda m, step: {"at": step})

    def fail(step):
        if step == 5:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(data=Hook(fail), out=tmp_path / "cut", evaluate=lambda m, step: {"at": step})
    assert len((tmp_path / "cut" / "log.jsonl").read_text().splitlines()) == 5
    other = make(seed=9)
    _, result = run(
        model=other, out=tmp_path / "cut", resume=True, evaluate=lambda m, step: {"at": step}
    )
    assert same(whole, other)
    assert losses(result) == losses(expected)
    assert result.evaluations == expected.evaluations
    lines = [json.loads(t) for t in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == [1, 2, 3, 4, 5, 6]


def test_resume_with_dropout_is_bit_identical(tmp_path):
    def make_dropping(seed):
        model = make(seed=seed)
        model.norm = torch.nn.Sequential(model.norm, torch.nn.Dropout(0.3))
        return model

    whole, _ = run(model=make_dropping(0), out=tmp_path / "whole")
    run(
        change(),
        model=make_dropping(0),
        data=Hook(lambda step: step == 3 and kill()),
        out=tmp_path / "cut",
    )
    resumed, _ = run(model=make_dropping(1), out=tmp_path / "cut", resume=True)
    assert same(whole, resumed)


def kill(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tmp_path, caplog, number):
    before = signal.getsignal(number)
    config = change(checkpoint_every=0)
    data = Hook(lambda step: step == 2 and kill(number))
    _, result = run(config, data, out=tmp_path)
    assert (result.steps, result.stopped) == (3, number.name)
    assert checkpoint.latest(tmp_path).step == 3
    assert "stopped after step 3 of 6" in caplog.text
    assert "resume" in caplog.text
    assert signal.getsignal(number) is before
    resumed, result = run(config, model=make(seed=3), out=tmp_path, resume=True)
    assert (result.steps, result.stopped) == (6, None)
    assert same(resumed, run()[0])


def test_a_signal_in_the_last_step_is_no_early_end(tmp_path):
    _, result = run(data=Hook(lambda step: step == 5 and kill()), out=tmp_path)
    assert (result.steps, result.stopped) == (6, None)


def test_a_second_interrupt_acts_as_usual():
    with interrupts() as caught:
        kill(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            kill(signal.SIGINT)
    assert caught == ["SIGINT"]


DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from lmgeom.data import synthetic
from lmgeom.lm.config import Config
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.train import TrainConfig, train

torch.set_num_threads(1)
data = synthetic(64, seed=0, n_tokens=2000)
settings = dict(steps=12, batch_size=4, context=16, warmup=2, lr=1e-2)

class Deadly:
    vocab_size, fingerprint = data.vocab_size, data.fingerprint

    def batch(self, seed, step, batch_size, context):
        if step == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return data.batch(seed, step, batch_size, context)

def begin(folder, every, data=data):
    pid = os.fork()
    if pid == 0:
        torch.manual_seed(0)
        model = LanguageModel(Config(64, 16, 2, 2, 16, 32))
        config = TrainConfig(checkpoint_every=every, **settings)
        train(model, data, config, out=folder, resume=True, quiet=True)
        os._exit(0)
    return pid

def end(pid, number=0):
    if number:
        os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

root = Path(sys.argv[1])
started = time.perf_counter()
assert end(begin(root / "whole", 1)) == 0
seconds = time.perf_counter() - started

assert end(begin(root / "killed", 6, Deadly())) == -signal.SIGKILL
assert sorted(path.name for path in (root / "killed").glob("step-*")) == ["step-00000006"]
assert len((root / "killed" / "log.jsonl").read_text().splitlines()) == 8
assert end(begin(root / "killed", 6)) == 0

for _ in range(6):
    pid = begin(root / "often", 1)
    time.sleep(random.uniform(0, seconds / 3))
    assert end(pid, signal.SIGKILL) in (0, -signal.SIGKILL)
assert end(begin(root / "often", 1)) == 0
"""


def test_kill_9_and_resume_is_bit_identical(tmp_path):
    """12 steps = 8 + kill, from 6 = 12 with kills at random moments, in weights and optimizer."""
    subprocess.run([sys.executable, "-c", DRIVER, str(tmp_path)], check=True)
    whole = checkpoint.read(tmp_path / "whole" / "step-00000012").path
    for name in ("killed", "often"):
        found = checkpoint.read(tmp_path / name / "step-00000012").path
        for file in checkpoint.FILES:
            expected = load_file(whole / file)
            loaded = load_file(found / file)
            assert expected.keys() == loaded.keys()
            assert all(torch.equal(expected[key], loaded[key]) for key in expected)
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))


def test_resuming_with_other_settings_names_them(tmp_path):
    run(change(steps=4), out=tmp_path)
    with pytest.raises(ConfigError, match=r"train.lr: 0.01 -> 0.02; train.steps: 4 -> 6") as error:
        run(change(lr=0.02), out=tmp_path, resume=True)
    assert "\n" not in str(error.value)
    _, result = run(change(lr=0.02), out=tmp_path, resume=True, allow_changes=True)
    assert result.steps == 6
    assert result.history[-1]["lr"] == pytest.approx(0.002)


def test_changed_settings_of_the_optimizer_are_used(tmp_path):
    run(change(steps=4), out=tmp_path)
    changed = change(weight_decay=0.5)
    kept = []

    def keep(model, config):
        kept.append(adamw(model, config.lr, config.weight_decay, config.betas))
        return kept[0]

    run(changed, out=tmp_path, resume=True, allow_changes=True, optimizer=keep)
    assert {group["weight_decay"] for group in kept[0].param_groups} == {0.5, 0.0}


def test_settings_that_change_no_weight_may_differ(tmp_path):
    run(out=tmp_path)
    run(change(log_every=5, keep=1, eval_every=3, checkpoint_every=1), out=tmp_path, resume=True)


def test_another_model_or_other_data_is_not_resumed(tmp_path):
    run(out=tmp_path)
    bigger = make(Config(64, 16, 2, 2, 16, 48))
    with pytest.raises(ConfigError, match=r"model.mlp_width: 32 -> 48"):
        run(model=bigger, out=tmp_path, resume=True)
    with pytest.raises(ConfigError, match="data: "):
        run(data=synthetic(64, seed=1, n_tokens=2000), out=tmp_path, resume=True)


def test_differences():
    old, new = {"a": 1, "b": {"c": 2, "keep": 1}, "d": 3}, {"a": 1, "b": {"c": 4, "keep": 9}}
    assert differences(old, new) == ["b.c: 2 -> 4", "d: 3 -> None"]


def test_a_finished_run_resumes_to_itself(tmp_path):
    model, result = run(out=tmp_path)
    again, repeated = run(model=make(seed=4), out=tmp_path, resume=True)
    assert same(model, again)
    assert repeated.history == result.history


def test_a_checkpoint_of_no_training_run_is_not_resumed(tmp_path):
    model = make()
    checkpoint.save(tmp_path, 2, model, adamw(model))
    with pytest.raises(CheckpointError, match="step-00000002 has no settings"):
        run(out=tmp_path, resume=True)


def test_resume_without_a_checkpoint_starts(tmp_path):
    assert same(run(out=tmp_path / "new", resume=True)[0], run()[0])


def test_a_damaged_newest_checkpoint_falls_back(tmp_path, caplog):
    model, _ = run(out=tmp_path)
    (tmp_path / "step-00000006" / "model.safetensors").write_bytes(b"")
    resumed, _ = run(model=make(seed=4), out=tmp_path, resume=True)
    assert same(model, resumed)
    assert "step-00000006" in caplog.text
    assert checkpoint.latest(tmp_path).step == 6


# Rules ---------------------------------------------------------------------------------------

LEVELS = {"mixer": "hope-attention", "mixer_options": {"levels": 3}, "mlp_width": 48}
CHAIN = Config.from_dict(MODEL.to_dict() | LEVELS)
CHOICES = [
    *({"head_optimizer": rule, "head_lr": 0.1} for rule in HEAD_RULES),
    {"head_optimizer": "equispread", "head_lr": 0.3, "body_optimizer": "muon"},
    {"level_periods": [1, 2, 4]},
    {"level_periods": [2, 5, 3], "body_optimizer": "muon", "head_optimizer": "sign", "head_lr": 1},
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_every_choice_of_rules_resumes_bit_for_bit(tmp_path, choice, head):
    """Stopped after 3 of 6 steps, in the middle of the periods; weights and optimizer."""
    model = Config.from_dict((CHAIN if "level_periods" in choice else MODEL).to_dict())
    model = Config.from_dict(model.to_dict() | {"head": head})
    config = change(**choice)
    whole, expected = run(config, model=make(model), out=tmp_path / "whole")
    stop = Hook(lambda step: step == 2 and kill())
    run(config, stop, make(model), out=tmp_path / "cut")
    resumed, result = run(config, model=make(model, 1), out=tmp_path / "cut", resume=True)
    assert same(whole, resumed)
    assert losses(result) == losses(expected)
    name = Path("step-00000006", checkpoint.FILES[1])
    states = [load_file(tmp_path / folder / name) for folder in ("whole", "cut")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert losses(result) != losses(run(model=make(model))[1])


def test_the_head_may_have_its_own_rate_and_decay():
    model = Config.from_dict(MODEL.to_dict() | {"head": "untied"})
    plain, _ = run(model=make(model))
    assert same(plain, run(change(head_lr=RUN.lr), model=make(model))[0])
    assert not same(plain, run(change(head_lr=2 * RUN.lr), model=make(model))[0])
    assert not same(plain, run(change(head_options={"weight_decay": 0.0}), model=make(model))[0])


@pytest.mark.parametrize("rule", ["rownorm", "sign", "equispread"])
def test_the_schedule_multiplies_the_budget(rule):
    """Row lengths of the head's steps follow the schedule, whatever clipping makes of gradients."""
    model = make(Config.from_dict(MODEL.to_dict() | {"head": "untied"}))
    seen = []

    def watch(step):
        seen.append((model.head.weight.detach().clone(), model.norm.weight.detach().abs().max()))

    run(change(head_optimizer=rule, head_lr=0.4, clip=1e-3), Hook(watch), model)
    seen.append((model.head.weight.detach(), None))
    for step, ((before, gain), (after, _)) in enumerate(itertools.pairwise(seen)):
        length = 0.4 * schedule(step, 6, 2) / (2 * 4 * gain)
        longest = (after - before).norm(dim=1).max().item()
        assert longest == pytest.approx(length.item(), rel=1e-3)


def test_levels_move_when_they_are_due():
    model, seen = make(CHAIN), []
    levels = model.blocks[0].mlp.levels

    def watch(step):
        seen.append([copy.deepcopy(level.state_dict()) for level in levels])

    run(change(level_periods=[1, 2, 4]), Hook(watch), model)
    moved = [
        [not torch.equal(a["down.weight"], b["down.weight"]) for a, b in zip(*pair, strict=True)]
        for pair in itertools.pairwise(seen)
    ]
    assert moved == [[True, step % 2 == 0, step % 4 == 0] for step in range(1, 6)]


@pytest.mark.parametrize("when", [{"eval_every": 4}, {"checkpoint_every": 4}, {}])
def test_skipped_steps_of_the_head_stop_the_run(tmp_path, when):
    """A last norm of zeros has no radius: the loss is finite, and the head never moves."""
    model = make()

    def silence(step):
        if step >= 2:
            model.norm.weight.data.zero_()

    config = change(checkpoint_every=0, head_optimizer="rownorm", head_lr=0.1)
    config = TrainConfig.from_dict(config.to_dict() | when)
    options = {"out": tmp_path} if "checkpoint_every" in when else {}
    at, count = (4, 2) if when else (6, 4)
    message = f"step {at}: {count} steps of the head were skipped"
    with pytest.raises(TrainingError, match=message):
        run(config, Hook(silence), model, evaluate=lambda m, step: {"at": step}, **options)
    assert checkpoint.steps(tmp_path) == []


def test_the_banner_says_which_rule_moves_what(capsys):
    config = change(head_optimizer="equispread", head_lr=0.3, body_optimizer="muon")
    run(config, quiet=False, model=make(Config.from_dict(MODEL.to_dict() | {"head": "untied"})))
    out = capsys.readouterr().out
    assert "optimizer      Equispread (head), Muon (matrix), AdamW (gain, embedding)\n" in out
    assert "0.001 at the end; 0.3 nats a step for the head\n" in out
    run(quiet=False)
    assert "optimizer      AdamW (gain, matrix, embedding)\n" in capsys.readouterr().out


# Errors --------------------------------------------------------------------------------------


def test_a_bad_weight_is_named(tmp_path):
    model = make()

    def poison(step):
        if step == 3:
            with torch.no_grad():
                model.blocks[1].mlp.down.weight[0, 0] = torch.nan

    message = r"step 4: loss nan.*is weight blocks\.1\.mlp\.down\.weight"
    with pytest.raises(TrainingError, match=message) as error:
        run(model=model, data=Hook(poison), out=tmp_path)
    assert "\n" not in str(error.value)
    assert checkpoint.latest(tmp_path).step == 2
    loaded = checkpoint.load_model(tmp_path)
    assert all(p.isfinite().all() for p in loaded.parameters())


def test_weights_that_an_update_spoils_are_never_saved(tmp_path):
    """The loss of the last step is finite; what its update makes of the weights is not."""

    def spoil(model, config):
        rule = torch.optim.SGD(model.parameters(), lr=0.1)
        rule.register_step_post_hook(lambda *_: model.norm.weight.data.fill_(torch.inf))
        return rule

    message = r"step 1: weight norm\.weight is not finite after the update"
    with pytest.raises(TrainingError, match=message):
        run(change(steps=1, warmup=0), out=tmp_path, optimizer=spoil)
    assert checkpoint.steps(tmp_path) == []


def test_a_finished_run_with_bad_weights_is_not_resumed(tmp_path):
    _, result = run(out=tmp_path)
    found = checkpoint.latest(tmp_path)
    model = make()
    optimizer = adamw(model, RUN.lr, RUN.weight_decay, RUN.betas)
    checkpoint.load(found, model, optimizer)
    with torch.no_grad():
        model.blocks[0].mlp.down.weight[0, 0] = torch.nan
    checkpoint.save(tmp_path, result.steps, model, optimizer, found.extra)
    with pytest.raises(TrainingError, match=r"step-0000\d+: weight blocks\.0\.mlp\.down\.weight"):
        run(out=tmp_path, resume=True)


def test_a_bad_activation_is_named():
    model = make()
    model.blocks[1].mlp.register_forward_hook(lambda module, inputs, output: output * torch.inf)
    with pytest.raises(TrainingError, match=r"step 1: .*is output of blocks\.1\.mlp"):
        run(model=model)


def test_a_bad_gradient_is_named_and_the_weights_stay():
    model = make()
    before = make()
    model.blocks[0].mlp.down.weight.register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(TrainingError, match=r"is gradient of blocks\.0\.mlp\.down\.weight"):
        run(model=model)
    assert same(model, before)


def test_a_norm_that_overflows():
    model = make()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    assert first_bad(model, DATA.batch(0, 0, 4, 16)[0]) == "the norm of the gradient"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"accumulation": 3}, "accumulation=3: must divide 4"),
        ({"lr": 0}, "lr=0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"min_lr": 3e2}, "min_lr=300.0"),
        ({"warmup": 7}, "warmup=7: must be at most steps, 6"),
        ({"warmup": -1}, "warmup=-1"),
        ({"betas": (0.9,)}, "betas="),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"betas": 0.9}, "betas="),
        ({"clip": 0.0}, "clip=0.0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808: must be below"),
        ({"dtype": "float8"}, "dtype='float8': known: float32, tf32, bfloat16"),
        ({"compile": "yes"}, "compile='yes'"),
        ({"loss_chunk": 0}, "loss_chunk=0"),
        ({"keep": 0}, "keep=0"),
        ({"typo": 1}, "typo"),
        (
            {"head_optimizer": "lion"},
            "head_optimizer='lion': known: adamw, muon, rownorm, sign, eq",
        ),
        ({"head_optimizer": ["muon"]}, r"head_optimizer=\['muon'\]: known"),
        ({"head_lr": 0}, "head_lr=0: must be a number from 1e-12 to 1000"),
        ({"head_lr": True}, "head_lr=True: must be a number from 1e-12 to 1000"),
        ({"lr": 2000}, "lr=2000: must be a number from 1e-12 to 1000"),
        ({"seed": 0.0}, r"seed=0\.0: must be a whole number, at least 0"),
        ({"warmup": False}, "warmup=False: must be a whole number"),
        ({"recompute": 1}, "recompute=1: must be True or False"),
        ({"compile": 1.0}, r"compile=1\.0: must be True, False or None"),
        ({"shard": ["ddp"]}, r"shard=\['ddp'\]: known"),
        ({"head_optimizer": "sign"}, "head_lr=None: 'sign' needs the largest change of a log-odds"),
        ({"head_options": 3}, "head_options=3: must be a mapping"),
        ({"head_options": {"whiten": 1}}, "of 'adamw': option 'whiten': unknown; known: betas"),
        (
            {"head_optimizer": "equispread", "head_lr": 0.3, "head_options": {"whiten": 2}},
            "head_options={'whiten': 2} of 'equispread': .*whiten must be a number from 0 to 1",
        ),
        ({"head_options": {1: 2}}, "head_options={1: 2} of 'adamw'"),
        ({"body_optimizer": "sign"}, "body_optimizer='sign': known: adamw, muon"),
        ({"level_periods": [1, 0]}, r"level_periods=\(1, 0\): must be whole numbers, at least 1"),
        ({"level_periods": 4}, "level_periods=4: must be whole numbers"),
    ],
)
def test_impossible_settings_are_named(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        change(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("choice", [{}, *CHOICES, {"head_options": {"weight_decay": 0.0}}], ids=str)
def test_settings_round_trip(choice):
    config = change(**choice)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_settings_nested_too_deep_to_be_shown_are_refused():
    value = []
    for _ in range(3000):
        value = [value]
    with pytest.raises(ConfigError, match="nested too deep"):
        TrainConfig.from_dict({"lr": value})


def test_later_settings_leave_the_names_of_earlier_records_alone():
    folder = Path(__file__).parents[2] / "book" / "results"
    found = [json.loads(path.read_text()) for path in folder.glob("*/*.json")]
    runs = [entry for entry in found if "input" in entry.get("config", {}).get("model", {})]
    settings = [entry["config"]["train"] for entry in runs]
    assert len(settings) >= 80
    assert all(TrainConfig.from_dict(train).to_dict() == train for train in settings)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"context": 17}, {}, "context=17: must be at most the model's 16"),
        ({"device": "cuda:7"}, {}, "device='cuda:7'"),
        ({"device": "abacus"}, {}, "device='abacus'"),
        ({"device": "meta"}, {}, "device='meta': must be of type cpu, cuda, mps"),
        ({"dtype": "tf32", "device": "cpu"}, {}, "dtype='tf32'"),
        ({}, {"resume": True}, "resume=True: needs out"),
        ({}, {"data": synthetic(65, n_tokens=2000)}, "vocab_size=64: the data has ids up to 64"),
        ({"level_periods": [1, 2]}, {}, "no MLP of the model is a chain of levels"),
    ],
)
def test_runs_that_cannot_work(changes, options, message):
    if changes.get("device") == "cuda:7" and torch.cuda.device_count() > 7:
        pytest.skip("there are that many devices")
    with pytest.raises(ConfigError, match=message):
        run(change(**changes), **options)


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path):
    run(out=tmp_path)
    with pytest.raises(ConfigError, match="holds checkpoints"):
        run(out=tmp_path)


def test_two_runs_cannot_share_a_folder(tmp_path):
    with exclusive(tmp_path), pytest.raises(ConfigError, match="another run"):
        run(out=tmp_path)
    run(out=tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(out=tmp_path / "file" / "run")


def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    calls = []

    def save(*args, real=checkpoint.save, **options):
        calls.append(args[1])
        if args[1] == 4:
            raise CheckpointError("cannot save step 4")
        return real(*args, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(CheckpointError, match="step 4"):
        run(out=tmp_path)
    assert calls == [2, 4]
    assert checkpoint.latest(tmp_path).step == 2


# What is printed and logged --------------------------------------------------------------------


def test_banner_and_lines(capsys):
    run(change(log_every=4), quiet=False, evaluate=lambda model, step: {"val": 1.5, "n": 3})
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    for fact in ("device", "precision", "compile", "parameters", "FLOPs a token", "peak", "batch"):
        assert sum(line.startswith(fact) for line in lines) == 1
    assert "1 x 4 sequences x 16 tokens = 64 tokens a step" in out
    assert [line[:8] for line in lines if line.startswith("step ")] == [
        "step 4/6",
        "step 6/6",
    ] * 1 + ["step 6/6"]
    assert lines[-1] == "step 6/6 evaluated | val 1.5000 | n 3"


def test_one_process_says_that_it_shards_nothing(capsys):
    for shard, says in (("fsdp", True), ("ddp", False)):
        run(change(shard=shard), quiet=False)
        assert ("one process, so nothing is sharded" in capsys.readouterr().out) == says


def test_quiet_prints_nothing(capsys):
    run()
    assert capsys.readouterr() == ("", "")


def test_log_line():
    entry = {
        "step": 12,
        "loss": 3.14159,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 8192,
        "seconds": 2,
    }
    assert log_line(entry, 1000, 4.0, flops=10**6, peak=8.192e9) == (
        "step   12/1000 | loss 3.1416 | lr 1.00e-03 | norm 0.500 | 4,096 tokens/s | "
        "50.0% of peak | 1h05m left"
    )


def test_a_bar_only_where_somebody_watches(monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert Report(10).bar is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    report = Report(10)
    assert report.bar is not None
    report.close()
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    assert Report(10).bar is None
    assert Report(10, quiet=True).bar is None


def test_a_log_line_cut_by_a_crash_is_dropped(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    history = History(tmp_path, step=2)
    history.add({"step": 3, "evaluation": {}})
    history.close()
    assert (tmp_path / "log.jsonl").read_text().split("\n") == [
        '{"step": 1}',
        '{"step": 2}',
        '{"step": 3, "evaluation": {}}',
        "",
    ]


def test_flops_by_formula_equal_the_counter():
    model, (x, y) = make(), DATA.batch(0, 0, 4, 16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        token_loss(model.head, model.hidden(x), y).backward()
    assert counter.get_total_flops() == train_flops(MODEL, 16) * x.numel()


@pytest.mark.parametrize("wrong", [64, 60_000, -1])
@pytest.mark.parametrize("which", ["inputs", "targets"])
def test_an_id_outside_the_vocabulary_is_named_before_the_step(which, wrong):
    model, before = make(), make().state_dict()

    class Damaged(Hook):
        def batch(self, *shape):
            batch = DATA.batch(*shape)
            batch[which == "targets"][-1, -1] = wrong
            return batch

    with pytest.raises(DataError, match=rf"token id {wrong} is outside \[0, 64\)"):
        run(data=Damaged(None), model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_targets_that_cost_nothing_are_kept():
    class Masked(Hook):
        def batch(self, *shape):
            x, y = DATA.batch(*shape)
            return x, y.masked_fill(y == 0, IGNORE)

    assert losses(run(data=Masked(None))[1]) != losses(run()[1])


def test_batches_on_the_cpu_are_those_of_the_data():
    device = find_device("cpu")
    found = list(batches(DATA, device, range(3, 6), seed=1, batch_size=2, context=8))
    assert len(found) == 3
    for step, (x, y) in zip(range(3, 6), found, strict=True):
        assert torch.equal(x, DATA.batch(1, step, 2, 8)[0])
        assert torch.equal(y, DATA.batch(1, step, 2, 8)[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_run_agrees_with_the_cpu():
    reference = losses(run()[1])
    exact = change(device="cuda", dtype="float32", compile=False)
    assert losses(run(exact)[1]) == pytest.approx(reference, rel=1e-4)
    assert losses(run(change(device="cuda"))[1]) == pytest.approx(reference, rel=0.02)
