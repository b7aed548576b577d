"""Other people's tools: importing this registers our models with `transformers`.

`lmgeom.hub.harness` is for the evaluation harness. Both need `pip install "lmgeom[hub]"`.
"""

from lmgeom.hub.pretrained import (
    LmgeomConfig,
    LmgeomForCausalLM,
    Past,
    export,
    fast_tokenizer,
    model_card,
)

__all__ = [
    "LmgeomConfig",
    "LmgeomForCausalLM",
    "Past",
    "export",
    "fast_tokenizer",
    "model_card",
]
