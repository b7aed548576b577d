"""Three ideas about the geometry of language models, derived, implemented and tested."""

__version__ = "0.1.0"
