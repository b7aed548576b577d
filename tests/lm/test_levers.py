"""Every lever that makes training fast or small gives the loss and the gradients of the slow loop.

Tolerances: recomputed blocks the same bits; chunks and pieces 1e-5 of the gradient in float32;
compiled graphs 1e-4; bfloat16 0.02 of the loss and 0.05 of the gradient.
"""

import functools

import pytest
import torch

from lmgeom.data import synthetic
from lmgeom.lm.config import Config
from lmgeom.lm.device import loss_function, make_plan
from lmgeom.lm.model import LanguageModel
from lmgeom.lm.train import accumulate

DATA = synthetic(64, seed=0, n_tokens=2000)
BASE = Config(64, 16, 2, 2, 16, 48)
MIXERS = {
    "attention": {},
    "gated-attention": {"mixer": "gated-attention"},
    "titans-lmm": {"mixer": "titans-lmm", "mixer_options": {"depth": 1}},
    "hope-attention": {"mixer": "hope-attention", "mixer_options": {"levels": 3}},
    "lev": {"input": "lev", "head": "untied"},
}


def result(name="attention", *, precision="float32", compile=False, pieces=1, **levers):
    """Loss and whole gradient of one batch."""
    torch.manual_seed(0)
    model = LanguageModel(Config.from_dict(BASE.to_dict() | MIXERS[name]))
    loss_of = loss_function(model, make_plan("cpu", precision, compile), **levers)
    loss = accumulate(loss_of, *DATA.batch(0, 0, 4, 16), pieces)
    gradients = [p.grad.flatten() for p in model.parameters()]
    return loss.item(), torch.cat(gradients)


def gaps(one, two):
    """Relative differences of the losses and of the gradients."""
    return abs(one[0] / two[0] - 1), ((one[1] - two[1]).norm() / two[1].norm()).item()


@pytest.mark.parametrize("name", MIXERS)
def test_recomputed_blocks_change_no_bit(name):
    plain, again = result(name), result(name, recompute=True)
    assert plain[0] == again[0]
    assert torch.equal(plain[1], again[1])


def test_recomputed_blocks_change_no_bit_in_bfloat16():
    plain, again = (result(precision="bfloat16", recompute=wanted) for wanted in (False, True))
    assert plain[0] == again[0]
    assert torch.equal(plain[1], again[1])


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("lever", [{"chunk": 7}, {"pieces": 4}, {"chunk": 5, "pieces": 2}], ids=str)
def test_chunks_and_pieces(name, lever):
    loss, gradient = gaps(result(name, **lever), result(name))
    assert loss < 1e-6
    assert gradient < 1e-5


@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16(name):
    loss, gradient = gaps(result(name, precision="bfloat16"), result(name))
    assert 0 < loss < 0.02
    assert gradient < 0.05


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own, on tracing
@pytest.mark.parametrize("lever", [{}, {"chunk": 7}, {"recompute": True}], ids=str)
def test_compiled(lever, monkeypatch):
    """The graph is captured whole; the code generator behind it is torch's own business."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    loss, gradient = gaps(result(compile=True, **lever), result())
    assert loss < 1e-5
    assert gradient < 1e-4
