"""Real gradients of a small head, trained on the book's own prose."""

import pytest
import torch

from lmgeom.data import from_text
from lmgeom.lm import Config, LanguageModel, token_loss
from lmgeom.lm.optim import adamw

STEPS = (1, 20, 60)


@pytest.fixture(scope="session")
def real_gradients(root):
    """Gradients (257, 8) of an untied head over bytes, float64, at three moments of training."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((root / "book").glob("*.md"))]
    data = from_text(texts)
    torch.manual_seed(0)
    model = LanguageModel(Config(data.vocab_size, 8, 1, 2, 32, 16, head="untied"))
    optimizer, kept = adamw(model, lr=1e-2), []
    for step in range(1, max(STEPS) + 1):
        x, y = data.batch(0, step, 8, 32)
        optimizer.zero_grad()
        token_loss(model.head, model.hidden(x), y).backward()
        if step in STEPS:
            kept.append(model.head.weight.grad.double())
        optimizer.step()
    return kept
