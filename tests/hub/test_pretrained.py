"""The form of a model that `transformers` loads, trains and writes with."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from lmgeom import data
from lmgeom.cli import main
from lmgeom.data.tokenizers import byte_tokenizer, train_bpe
from lmgeom.errors import CheckpointError, ConfigError, DataError
from lmgeom.hub import LmgeomConfig, LmgeomForCausalLM, export, fast_tokenizer, pretrained
from lmgeom.lm import Config, LanguageModel, TrainConfig, load_model, token_loss, train
from lmgeom.lm.checkpoint import model_tensors, read, save
from lmgeom.lm.optim import make_optimizer
from lmgeom.mixers import MIXERS

TINY = Config(vocab_size=64, dim=16, layers=2, heads=2, context=24, mlp_width=32)
INPUTS = {
    "table": {},
    "factorized": {"rank": 4},
    "flat-mlp": {"code_dim": 4, "inner": 8},
    "factored-mlp": {"seed_dim": 4, "inner": 8},
    "lev": {"seed_dim": 8, "rank": 4, "heads": 2},
    "lev-permuted": {"permutation_seed": 3},
}
KINDS = [{"mixer": mixer} for mixer in MIXERS]
KINDS += [{"head": "untied", "input": k, "input_options": o} for k, o in INPUTS.items()]
KINDS += [{"mlp_width": (48, 16)}]


@pytest.fixture(autouse=True)
def quiet():
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture
def ids():
    return torch.randint(0, 64, (3, 10), generator=torch.Generator().manual_seed(1))


def build(**changes) -> LmgeomForCausalLM:
    return LmgeomForCausalLM(LmgeomConfig(**replace(TINY, **changes).to_dict()))


def same(a: LanguageModel, b: LanguageModel) -> bool:
    (one, tied), (two, tied_too) = model_tensors(a), model_tensors(b)
    bits = all(torch.equal(one[n], two[n]) and one[n].dtype == two[n].dtype for n in one)
    return a.config == b.config and list(one) == list(two) and tied == tied_too and bits


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.get("input", k.get("mixer", "taper")))
def test_there_and_back_is_exact(kind, tmp_path, ids):
    own = LanguageModel(replace(TINY, **kind))
    save(tmp_path / "run", 7, own)
    export(tmp_path / "run", tmp_path / "given")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "given")
    assert type(loaded) is LmgeomForCausalLM
    assert same(load_model(save(tmp_path / "back", 7, loaded.model)), own)
    assert torch.equal(loaded(ids).logits, own(ids))


def test_a_tied_table_is_saved_once_and_stays_tied(tmp_path, ids):
    build().save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        ends = [k for k in file.keys() if "input" in k or "head" in k]  # noqa: SIM118
    assert ends == ["model.input.weight"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded(ids, labels=ids).loss.backward()
    torch.optim.SGD(loaded.parameters(), 0.1).step()
    assert loaded.model.head.weight is loaded.model.input.weight
    assert loaded.config.tie_word_embeddings
    with pytest.raises(ConfigError, match="tied"):
        loaded.set_input_embeddings(torch.nn.Embedding(64, 16))
    with pytest.raises(ConfigError, match="vocab_size=64"):
        loaded.resize_token_embeddings(65)


def test_config_is_checked_and_answers_by_other_names(tmp_path):
    config = LmgeomConfig(**TINY.to_dict(), eos_token_id=3)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.settings == TINY
    assert (again.hidden_size, again.num_hidden_layers, again.num_attention_heads) == (16, 2, 2)
    assert (again.max_position_embeddings, again.vocab_size, again.eos_token_id) == (24, 64, 3)
    with pytest.raises(ConfigError, match="heads"):
        LmgeomConfig(**TINY.to_dict() | {"heads": 0})


def test_from_config_draws_what_our_constructor_draws():
    torch.manual_seed(5)
    drawn = AutoModelForCausalLM.from_config(LmgeomConfig(**TINY.to_dict()))
    torch.manual_seed(5)
    assert same(drawn.model, LanguageModel(TINY))


def test_half_precision_keeps_the_angles_wide(tmp_path, ids):
    build().save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    rotary = half.model.blocks[0].mixer.rotary
    assert half.model.input.weight.dtype == torch.bfloat16
    assert rotary.cos.dtype == torch.float32
    assert torch.equal(rotary.cos, LanguageModel(TINY).blocks[0].mixer.rotary.cos)
    assert half(ids, labels=ids).loss.dtype == torch.float32


@pytest.mark.parametrize("broken", ["model.norm.weight", "model.input.weight"])
def test_a_missing_weight_is_refused_by_name(broken, tmp_path):
    build().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[broken]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"weight {broken} is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# ------------------------------------------------------------------ loss and mask
def test_loss_shifts_labels_and_ignores(ids):
    model = build()
    labels = ids.clone()
    labels[0, 4:] = -100
    right = token_loss(model.model.head, model.model.hidden(ids)[:, :-1], labels[:, 1:])
    assert torch.allclose(model(ids, labels=labels).loss, right)
    count = (labels[:, 1:] != -100).sum()
    shared = model(ids, labels=labels, num_items_in_batch=2 * count).loss
    assert torch.allclose(shared, right / 2)
    loss, logits = model(ids, labels=labels, return_dict=False)
    assert torch.equal(loss, model(ids, labels=labels).loss)
    assert torch.allclose(model(ids, logits_to_keep=1).logits, logits[:, -1:])


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_on_the_right_changes_nothing(mixer, ids):
    model = build(mixer=mixer).double()
    real = torch.ones(3, 10, dtype=torch.int64)
    real[1, 6:] = 0
    real[2, 3:] = 0
    labels = ids.masked_fill(real == 0, -100)
    losses = model(ids, attention_mask=real, labels=labels).loss
    alone = [
        model(row[None, :n], labels=row[None, :n]).loss
        for row, n in zip(ids, (10, 6, 3), strict=True)
    ]
    weights = torch.tensor([9, 5, 2]).double()
    assert torch.allclose(losses, (torch.stack(alone) * weights).sum() / 16)


def test_what_a_mask_cannot_say_is_refused(ids):
    model, mask = build(), torch.ones(3, 10)
    mask[0, 0] = 0
    with pytest.raises(DataError, match="pad on the right"):
        model(ids, attention_mask=mask)
    with pytest.raises(DataError, match="equal lengths"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, pad_token_id=64)
    with pytest.raises(DataError, match="equal lengths"):
        model(ids, attention_mask=mask.flip(1), use_cache=True)
    with pytest.raises(DataError, match=r"\(3, 1, 10, 10\)"):
        model(ids, attention_mask=torch.ones(3, 1, 10, 10))


# ------------------------------------------------------------------ writing
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("beams", [1, 3])
def test_cached_writing_is_uncached_writing(mixer, beams, ids):
    model = build(mixer=mixer).eval().double()
    how = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "pad_token_id": 64}
    cached, whole = (model.generate(ids[:, :5], use_cache=use, **how) for use in (True, False))
    assert torch.equal(cached, whole)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_cache_can_be_continued(mixer, ids):
    model = build(mixer=mixer).eval().double()
    past = model(ids[:, :4], use_cache=True).cache
    rest = model(ids[:, 4:], cache=past)
    assert past.get_seq_length() == 10
    assert torch.allclose(rest.logits, model(ids).logits[:, 4:])
    half = model(ids[:, :4], use_cache=True).cache
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 64}
    assert torch.equal(model.generate(ids, cache=half, **how), model.generate(ids, **how))


def test_writing_past_the_context_says_so(ids):
    with pytest.raises(DataError, match="24"):
        build().generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=64)


# ------------------------------------------------------------------ their loop
def trainer(folder, steps, resume=False, **options):
    torch.manual_seed(3)
    model = build(head="untied", input="lev", input_options=INPUTS["lev"])
    rule = make_optimizer(model.model, 1e-2, head_optimizer="equispread", head_lr=0.3)
    schedule = torch.optim.lr_scheduler.LambdaLR(rule, lambda step: 0.8**step)
    rows = (torch.arange(32)[:, None] + torch.arange(12)) % 64
    options = {"per_device_train_batch_size": 4, "save_steps": 2, "logging_steps": 1} | options
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(folder, max_steps=steps, **quiet, **options)
    unscored = [row.masked_fill(torch.arange(12) < i % 9, -100) for i, row in enumerate(rows)]
    examples = [{"input_ids": r, "labels": y} for r, y in zip(rows, unscored, strict=True)]
    loop = Trainer(model, arguments, train_dataset=examples, optimizers=(rule, schedule))
    loop.train(resume_from_checkpoint=resume)
    return model, rule, loop


def test_trainer_moves_all_parts_by_one_schedule(tmp_path):
    before = build(head="untied", input="lev", input_options=INPUTS["lev"])
    model, rule, loop = trainer(tmp_path, 4)
    losses = [entry["loss"] for entry in loop.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    names = {n for n, p in model.named_parameters() if not torch.equal(p, before.get_parameter(n))}
    assert names == {n for n, _ in model.named_parameters()}
    peaks = {group["initial_lr"] for group in rule.param_groups}
    assert all(abs(g["lr"] - g["initial_lr"] * 0.8**4) < 1e-9 for g in rule.param_groups)
    assert len(peaks) == 2


def test_trainer_resumes_exactly(tmp_path):
    whole, *_ = trainer(tmp_path / "whole", 4)
    trainer(tmp_path / "cut", 2)
    resumed, *_ = trainer(tmp_path / "cut", 4, resume=True)
    assert same(whole.model, resumed.model)


def test_trainer_averages_over_accumulated_labels(tmp_path):
    norms = []
    for size, pieces in ((8, 1), (4, 2)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": pieces}
        loop = trainer(tmp_path / str(size), 1, **options)[2]
        norms += [entry["grad_norm"] for entry in loop.state.log_history if "grad_norm" in entry]
    assert abs(norms[0] - norms[1]) < 1e-4 * norms[0]


# ------------------------------------------------------------------ the vocabulary
@pytest.mark.parametrize("text", ["The head's 12 345 rows.\n\n  ok", "naïve — 漢字 🙂\t\x00", ""])
def test_both_tokenizers_give_the_same_ids(text):
    trained = train_bpe(["the head of the model, the tail of the text " * 20], 270)
    for own in (byte_tokenizer(), trained):
        fast = fast_tokenizer(own)
        assert fast.encode(text, add_special_tokens=False) == own.encode(text)
        assert fast.decode(own.encode(text)) == text
        assert fast.eos_token_id == own.eot
        assert fast.encode("<|endoftext|>", add_special_tokens=False) == [own.eot]


# ------------------------------------------------------------------ export
@pytest.fixture
def run(tmp_path):
    corpus = data.synthetic(64, 0, 4000)
    settings = TrainConfig(steps=4, batch_size=2, context=16, warmup=1, device="cpu")

    def evaluate(model, step):
        return {"val": 3.25, "other": {"nats": 2.5, "stderr": None}}

    train(
        LanguageModel(TINY), corpus, settings, out=tmp_path / "run", evaluate=evaluate, quiet=True
    )
    return tmp_path / "run", corpus


def test_card_tells_what_the_log_says(run, tmp_path):
    folder, _ = run
    path = folder / "log.jsonl"
    losses = [json.loads(line)["loss"] for line in path.read_text().splitlines()[:4]]
    later = json.dumps({"step": 9, "evaluation": {"val": 99.0}})
    path.write_text(path.read_text() + later + '\n{"step": 4, "loss"')
    card = (export(folder, tmp_path / "given") / "README.md").read_text()
    assert f"{losses[-1]:.4f} |" in card
    assert "| tokens | 128 |" in card
    assert "| val | 3.2500 |" in card
    assert "| other | 2.5000 |" in card
    assert "99" not in card.split("## Losses")[1].split("## Use")[0]
    assert read(folder / "step-00000004").extra["settings"]["data"] in card


def test_card_of_a_checkpoint_without_a_log(tmp_path):
    save(tmp_path / "run", 3, LanguageModel(TINY))
    card = (export(tmp_path / "run", tmp_path / "given") / "README.md").read_text()
    assert "No log was kept." in card
    assert "| data | unknown |" in card


def test_export_is_whole_or_not_there(run, tmp_path, monkeypatch):
    folder, _ = run
    before = sorted(tmp_path.iterdir())

    def fail(*names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pretrained, "model_card", fail)
    with pytest.raises(OSError, match="No space"):
        export(folder, tmp_path / "given")
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "given").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        export(folder, tmp_path / "given")


def test_export_refuses_data_of_another_model(run, tmp_path):
    folder, corpus = run
    with pytest.raises(ConfigError, match=corpus.fingerprint[:12]):
        export(folder, tmp_path / "given", corpus=data.synthetic(64, 1, 4000))
    with pytest.raises(ConfigError, match="bytes has 257 ids"):
        export(folder, tmp_path / "given", byte_tokenizer())
    with pytest.raises(CheckpointError, match="nowhere"):
        export(tmp_path / "nowhere", tmp_path / "given")


def test_command_exports_with_the_vocabulary(tmp_path, monkeypatch, capsys):
    corpus = data.from_text(["the head of the model " * 400] * 4, byte_tokenizer())
    monkeypatch.setattr(data, "corpus", lambda *names, **options: corpus)
    model = LanguageModel(replace(TINY, vocab_size=257))
    settings = TrainConfig(steps=2, batch_size=2, context=16, warmup=1, device="cpu")
    train(model, corpus, settings, out=tmp_path / "run", quiet=True)
    words = ["export", str(tmp_path / "run"), str(tmp_path / "given")]
    (tmp_path / "run" / "tokenizer.json").unlink(missing_ok=True)
    assert main(words) == 2
    assert "has no tokenizer.json beside it" in capsys.readouterr().err
    (tmp_path / "run" / "tokenizer.json").write_text(corpus.tokenizer.to_json())
    assert main(words) == 0
    assert main([*words[:2], str(tmp_path / "other"), "--data", "own"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "given"), str(tmp_path / "other")]
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "given")
    given = AutoModelForCausalLM.from_pretrained(tmp_path / "given")
    assert fast("the head").input_ids == corpus.tokenizer.encode("the head")
    assert given.generation_config.eos_token_id == 256
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "third")]) == 2
    assert "not a folder that exists" in capsys.readouterr().err


def test_only_the_hub_imports_transformers():
    code = "import sys, lmgeom, lmgeom.cli, lmgeom.study.run; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
