"""How tokens see each other: mixers of one interface, (B, T, D) -> (B, T, D), causal.

A mixer is built as `Mixer(dim, heads, *, context, rope_base, **options)`. Two static methods count
its cost: `parameter_count(dim, heads, **options)`, and, for the forward FLOPs that multiply no
parameter, `flops_per_token(dim, heads, tokens, **options)`.
"""

from lmgeom.mixers.attention import Attention, Rotary, rotary_angles, rotate

MIXERS = {"attention": Attention}

__all__ = ["MIXERS", "Attention", "Rotary", "rotary_angles", "rotate"]
