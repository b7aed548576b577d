"""Text, tokenizers, and tokens: where training data comes from and how it is read."""

from lmgeom.data.build import corpus, prepare
from lmgeom.data.sources import cache_dir, fetch, list_sources
from lmgeom.data.tokenizers import Tokenizer, byte_tokenizer, packaged, read_tokenizer, train_bpe
from lmgeom.data.tokens import Corpus, Split, from_text, load, ngrams, synthetic

__all__ = [
    "Corpus",
    "Split",
    "Tokenizer",
    "byte_tokenizer",
    "cache_dir",
    "corpus",
    "fetch",
    "from_text",
    "list_sources",
    "load",
    "ngrams",
    "packaged",
    "prepare",
    "read_tokenizer",
    "synthetic",
    "train_bpe",
]
