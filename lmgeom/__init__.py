"""Three uniform defaults of a language model, derived, implemented and tested on real text.

Modules:

- `lmgeom.book.dependencies`: What a notebook's outputs depend on, as one hash.
- `lmgeom.book.staging`: Turn a clean notebook into one that papermill runs and Jupyter Book shows.
- `lmgeom.cli`: The `lmgeom` command: data, training, evaluation, generation, budgets, studies and the book.
- `lmgeom.data.build`: Turn a source into a prepared folder: token files, offsets, tokenizer, manifest.
- `lmgeom.data.packages`: The packages whose files make up our corpora: pinned versions, sha256, and their parsers.
- `lmgeom.data.sources`: Sources of text by name: what there is, how it is fetched, and its documents.
- `lmgeom.study.convex`: Softmax regression on frozen hidden states: the one problem of a head that is convex."""

__version__ = "0.1.0"
