"""Equispread on the heads of other people's models: tiny random ones of transformers."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from lmgeom.errors import TrainingError
from lmgeom.head import Equispread, Together, hilbert_shifts, norm_radius

BUDGET, TOKENS = 0.5, 160
SHAPE = {
    "vocab_size": TOKENS + 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}


def llama(tied=False):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))


def batch():
    """Sequences with a rule: each id is its predecessor plus three."""
    return torch.arange(0, 120, 10)[:, None] + 3 * torch.arange(12)


def head_of(model):
    return model.get_output_embeddings().weight


def parts(model, rho=None, **options):
    """The five lines."""
    head = head_of(model)
    body = [parameter for parameter in model.parameters() if parameter is not head]
    rho = rho or norm_radius(model.model.norm.weight)
    rule = Equispread([head], budget=BUDGET, rho=rho, vocab_size=TOKENS, **options)
    return rule, Together(rule, torch.optim.AdamW(body, lr=1e-2))


def step(model, optimizer, clip=None):
    """Train on the batch once; give its loss and the largest change of a log-odds."""
    output = model(batch(), labels=batch(), output_hidden_states=True)
    hidden = output.hidden_states[-1].detach().flatten(0, 1)
    output.loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    before = head_of(model).detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    shifts = hilbert_shifts(head_of(model).detach() - before, hidden)
    return output.loss.item(), shifts.max().item()


def train(model, optimizer, steps, clip=None):
    """Losses of some steps, none of which moves a log-odds by more than the budget."""
    losses = []
    for _ in range(steps):
        loss, shift = step(model, optimizer, clip)
        assert shift <= BUDGET * (1 + 1e-3)
        losses.append(loss)
    return losses


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_falls_and_no_log_odds_moves_by_more_than_the_budget(tied):
    model = llama(tied)
    rule, optimizer = parts(model, center=not tied)
    losses = train(model, optimizer, 40)
    assert losses[0] > 4.5
    assert losses[-1] < losses[0] / 4
    rule.check()


def test_every_parameter_has_exactly_one_rule():
    for model in (llama(), llama(tied=True)):
        _, optimizer = parts(model)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert sorted(map(id, held)) == sorted(map(id, model.parameters()))


def test_the_promise_follows_the_schedule():
    model = llama()
    _, optimizer = parts(model)
    scheduler = LambdaLR(optimizer, lambda n: 0.5**n)
    for n in range(6):
        assert [group["lr"] for group in optimizer.param_groups] == [0.5**n, 1e-2 * 0.5**n]
        _, shift = step(model, optimizer)
        assert 0.05 * BUDGET * 0.5**n < shift <= BUDGET * 0.5**n * (1 + 1e-3)
        scheduler.step()


def test_padding_rows_stay_and_all_others_move():
    model = llama()
    before = head_of(model).detach().clone()
    train(model, parts(model)[1], 2)
    moved = (head_of(model).detach() - before).norm(dim=1)
    assert not moved[TOKENS:].any()
    assert (moved[:TOKENS] > 0).all()


def test_clipping_the_whole_gradient_keeps_the_promise():
    model = llama()
    losses = train(model, parts(model)[1], 40, clip=0.1)
    assert losses[-1] < losses[0] / 3


def test_muon_can_train_the_layers():
    model = llama()
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    taken = {id(p) for p in [head_of(model), *matrices]}
    others = [p for p in model.parameters() if id(p) not in taken]
    optimizer = Together(
        Equispread([head_of(model)], budget=BUDGET, rho=norm_radius(model.model.norm.weight)),
        torch.optim.Muon(matrices, lr=1e-2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1e-2),
    )
    losses = train(model, optimizer, 40)
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("tied", [False, True])
def test_a_resumed_run_goes_on_to_the_last_bit(tied):
    model = llama(tied)
    _, optimizer = parts(model, center=not tied)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = llama(tied)
    _, resumed = parts(again, center=not tied)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert train(model, optimizer, 3) == train(again, resumed, 3)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_trainer_of_transformers_saves_and_resumes_it(tmp_path):
    plan = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 6, "report_to": []}
    plan |= {"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    data, ends = [{"input_ids": row, "labels": row} for row in batch()], []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = llama()
        rule, optimizer = parts(model)
        both = optimizer, LambdaLR(optimizer, lambda n: 0.5**n)
        arguments = TrainingArguments(str(tmp_path), **plan)
        Trainer(model, arguments, train_dataset=data, optimizers=both).train(resume)
        rule.check()
        assert rule.param_groups[0]["lr"] == 0.5**4
        ends.append(list(model.parameters()))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_a_bad_batch_leaves_the_head_alone_and_is_reported():
    model = llama()
    rule, optimizer = parts(model)
    train(model, optimizer, 2)
    momentum = optimizer.state[head_of(model)]["momentum"]
    before = head_of(model).detach().clone(), momentum.clone()
    (model(batch(), labels=batch()).loss * torch.nan).backward()
    rule.step()
    assert torch.equal(head_of(model), before[0])
    assert torch.equal(momentum, before[1])
    with pytest.raises(TrainingError, match="1 steps"):
        rule.check()


def test_a_model_in_half_precision_keeps_a_float32_head():
    model = llama().bfloat16()
    _, optimizer = parts(model)
    losses = []
    for _ in range(40):
        loss = model(batch(), labels=batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    wide = optimizer.state[head_of(model)]["weight"]
    assert losses[-1] < losses[0] / 2
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), head_of(model))


def test_autocast_trains_float32_weights_in_the_same_way():
    model = llama()
    _, optimizer = parts(model)
    losses = []
    for _ in range(40):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch(), labels=batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert head_of(model).dtype == torch.float32
    assert losses[-1] < losses[0] / 3


def test_a_gradient_scaler_changes_nothing_but_skips_an_overflow():
    ends = []
    for scaled in (False, True):
        model = llama()
        _, optimizer = parts(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        for factor in (1.0, 1.0, float("inf") if scaled else None):
            if factor is not None:
                scaler.scale(factor * model(batch(), labels=batch()).loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        ends.append(list(model.parameters()))
    for plain, other in zip(*ends, strict=True):
        assert torch.allclose(plain, other, atol=1e-5)


def gemma():
    torch.manual_seed(0)
    model = GemmaForCausalLM(GemmaConfig(**SHAPE, tie_word_embeddings=False))
    gain = model.model.norm.weight
    return model, lambda: norm_radius(1 + gain)()


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=TOKENS + 32, n_positions=32)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    norm = model.transformer.ln_f
    torch.nn.init.normal_(norm.bias)
    return model, norm_radius(norm.weight, norm.bias)


@pytest.mark.parametrize("family", [gemma, gpt2])
def test_the_radius_of_other_families_holds_and_is_no_larger_than_needed(family):
    model, radius = family()
    tied = head_of(model) is model.get_input_embeddings().weight
    rule, optimizer = parts(model, rho=radius, center=not tied)
    losses = train(model, optimizer, 20)
    assert losses[-1] < losses[0]
    hidden = model(batch(), output_hidden_states=True).hidden_states[-1]
    longest = hidden.norm(dim=-1).max().item()
    assert 0.5 * radius().item() < longest <= radius().item() * (1 + 1e-5)
    rule.check()
