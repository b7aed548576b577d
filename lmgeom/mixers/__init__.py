"""How tokens see each other: mixers of one interface, (B, T, D) -> (B, T, D), causal.

A mixer is a module built as `Mixer(dim, heads, *, context, rope_base, **options)`.

- `mixer(x)` maps x, shape (B, T, D), to an output of the same shape. Training uses it.
- `mixer.initial_state(batch)` is the state before the first token, and `mixer.step(x, state)`
  continues by the n >= 1 tokens of x, shape (B, n, D): it returns the outputs and the new state and
  leaves the given one as it was. Generation uses it. Any cut of a text into pieces, with the state
  carried over, gives the output of the whole text. States are named tuples. One that differs from
  the mixer's own in kind, shapes, dtype, device, window or chunk is refused.

`mixer.levels` is the number of MLPs in the chain that follows it in a layer, nearly always 1.
`mixer.limit` is the longest text in tokens; None, or no such attribute, if there is no limit.
Two static methods count the cost. `parameter_count(dim, heads, **options)` is the number of
parameters, and `flops_per_token(dim, heads, tokens, **options)` the forward FLOPs a token of the
matrix products on a text of `tokens` tokens, beyond two for each parameter.
"""

from typing import Any

from lmgeom.mixers.attention import (
    Attention,
    HeadNorm,
    KeyValues,
    Rotary,
    rotary_angles,
    rotate,
    visible,
)
from lmgeom.mixers.gated import GatedAttention
from lmgeom.mixers.hope import (
    Cadence,
    ContinuumMemory,
    Hope,
    HopeAttention,
    chain,
    level_periods,
    level_widths,
)
from lmgeom.mixers.memory import (
    DeepState,
    Gates,
    LinearState,
    deep_memory,
    linear_memory,
    step_ceiling,
)
from lmgeom.mixers.titans import NeuralMemory, TitansLMM, TitansMAC, TitansMAG, TitansMAL

MIXERS: dict[str, Any] = {
    "attention": Attention,
    "gated-attention": GatedAttention,
    "titans-lmm": TitansLMM,
    "titans-mag": TitansMAG,
    "titans-mal": TitansMAL,
    "titans-mac": TitansMAC,
    "hope-attention": HopeAttention,
    "hope": Hope,
}

__all__ = [
    "MIXERS",
    "Attention",
    "Cadence",
    "ContinuumMemory",
    "DeepState",
    "GatedAttention",
    "Gates",
    "HeadNorm",
    "Hope",
    "HopeAttention",
    "KeyValues",
    "LinearState",
    "NeuralMemory",
    "Rotary",
    "TitansLMM",
    "TitansMAC",
    "TitansMAG",
    "TitansMAL",
    "chain",
    "deep_memory",
    "level_periods",
    "level_widths",
    "linear_memory",
    "rotary_angles",
    "rotate",
    "step_ceiling",
    "visible",
]
