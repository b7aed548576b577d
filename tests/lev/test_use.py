"""LEV inside somebody else's model: a tiny Llama of transformers with its input replaced."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lmgeom.lev import LEV
from lmgeom.lm.optim import adamw, role

OPTIONS = {"seed_dim": 16, "rank": 8, "heads": 2, "learned_spacing": True}
SHAPE = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
}


class LevLlama(LlamaForCausalLM):
    """A Llama whose input is LEV; its config says which."""

    _tied_weights_keys = None

    def __init__(self, config):
        super().__init__(config)
        self.set_input_embeddings(LEV(config.vocab_size, config.hidden_size, **config.lev))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LevLlama(LlamaConfig(**SHAPE, tie_word_embeddings=False, lev=OPTIONS))


@pytest.fixture
def batch():
    """Sequences with a rule: each id is its predecessor plus three."""
    start = torch.arange(0, 160, 10)[:, None]
    return start + 3 * torch.arange(12)


def train(model, batch, steps):
    """Losses of a few steps on one batch."""
    optimizer, losses = adamw(model, lr=1e-2), []
    for _ in range(steps):
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_input_is_replaced_and_the_head_stays(model):
    assert isinstance(model.get_input_embeddings(), LEV)
    assert model.lm_head.weight.shape == (200, 32)
    names = {name for name, _ in model.named_parameters()}
    assert "model.embed_tokens.weight" not in names
    assert {name.rpartition(".")[2] for name in names if "embed_tokens" in name} == {
        "codebooks",
        "projection",
        "norm_gain",
        "norm_bias",
        "spline_scale",
        "spline_delta",
        "output",
    }


def test_the_gradient_reaches_every_parameter_of_lev(model, batch):
    model(batch, labels=batch).loss.backward()
    for name, parameter in model.get_input_embeddings().named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_the_loss_falls_and_the_rule_is_learned(model, batch):
    losses = train(model, batch, 60)
    assert losses[0] > 4
    assert losses[-1] < losses[0] / 10
    start = batch[3:4, :4]
    continued = model.generate(start, max_new_tokens=5, do_sample=False)
    assert continued.tolist() == [batch[3, :9].tolist()]


def test_training_moves_the_table(model, batch):
    before = model.get_input_embeddings().table().detach()
    train(model, batch, 3)
    after = model.get_input_embeddings().table().detach()
    assert ((after - before).abs().amax(1) > 0).all(), "ids outside the batch move too"


def test_our_optimizer_knows_the_splines_of_a_foreign_model(model):
    kinds = {name: role(name, tuple(p.shape)) for name, p in model.named_parameters()}
    assert kinds["model.embed_tokens.spline_delta"] == "spline"
    assert kinds["model.embed_tokens.spline_scale"] == "spline"
    assert kinds["model.embed_tokens.norm_gain"] == "gain"


def test_save_and_load_keep_every_parameter(model, batch, tmp_path):
    train(model, batch, 3)
    model.save_pretrained(tmp_path)
    loaded, report = LevLlama.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.lev == OPTIONS
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert torch.equal(loaded(batch).logits, model.eval()(batch).logits)


def test_a_frozen_model_is_a_stock_llama(model, batch, tmp_path):
    train(model, batch, 3)
    expected = model.eval()(batch).logits
    model.set_input_embeddings(model.get_input_embeddings().freeze())
    assert torch.allclose(model(batch).logits, expected, atol=1e-5)
    model.save_pretrained(tmp_path)
    stock, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(stock) is LlamaForCausalLM
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.allclose(stock(batch).logits, expected, atol=1e-5)


def test_a_tied_model_must_be_untied_first():
    """The head keeps the old table, and tying again finds none to tie to."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    table = model.get_input_embeddings().weight
    assert model.lm_head.weight is table
    model.set_input_embeddings(LEV(200, 32, **OPTIONS))
    assert model.lm_head.weight is table
    with pytest.raises(AttributeError, match="weight"):
        model.tie_weights()
