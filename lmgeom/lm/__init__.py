"""The language model that the three papers are settings of: configuration, model, loss."""

from lmgeom.lm.config import HEADS, INPUTS, Budget, Config, TiedHead, parameters, presets
from lmgeom.lm.loss import bits_per_byte, token_loss
from lmgeom.lm.model import Block, LanguageModel, RMSNorm, SwiGLU, init_weights

__all__ = [
    "HEADS",
    "INPUTS",
    "Block",
    "Budget",
    "Config",
    "LanguageModel",
    "RMSNorm",
    "SwiGLU",
    "TiedHead",
    "bits_per_byte",
    "init_weights",
    "parameters",
    "presets",
    "token_loss",
]
