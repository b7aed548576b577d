"""The language model that the three papers are settings of, and its training."""

from lmgeom.lm.checkpoint import load_model
from lmgeom.lm.config import HEADS, INPUTS, Budget, Config, TiedHead, parameters, presets, tapered
from lmgeom.lm.evaluate import Evaluation, evaluate
from lmgeom.lm.generate import complete, generate
from lmgeom.lm.loss import bits_per_byte, token_loss
from lmgeom.lm.model import Block, LanguageModel, RMSNorm, SwiGLU, init_weights
from lmgeom.lm.optim import make_optimizer
from lmgeom.lm.train import TrainConfig, TrainResult, train

__all__ = [
    "HEADS",
    "INPUTS",
    "Block",
    "Budget",
    "Config",
    "Evaluation",
    "LanguageModel",
    "RMSNorm",
    "SwiGLU",
    "TiedHead",
    "TrainConfig",
    "TrainResult",
    "bits_per_byte",
    "complete",
    "evaluate",
    "generate",
    "init_weights",
    "load_model",
    "make_optimizer",
    "parameters",
    "presets",
    "tapered",
    "token_loss",
    "train",
]
