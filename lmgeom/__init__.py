"""Three uniform defaults of a language model, derived, implemented and tested on real text.

Modules:

- `lmgeom.book.dark`: Draw heat maps a second time, for pages in dark mode.
- `lmgeom.book.dependencies`: What a notebook's outputs depend on, as one hash.
- `lmgeom.book.library`: Read the library without importing it: what is public, its docstrings, cells, tests and claims.
- `lmgeom.book.reference`: The reference of the library: one page a package, and links between it and the chapters.
- `lmgeom.book.rerun`: Rerun one chapter with a reader's own parameters or records, and set the numbers beside ours.
- `lmgeom.book.staging`: Turn a clean notebook into one that papermill runs and Jupyter Book shows.
- `lmgeom.cli`: The `lmgeom` command: data, training, evaluation, generation, budgets, studies and the book.
- `lmgeom.data.build`: Turn a source into a prepared folder: token files, offsets, tokenizer, manifest.
- `lmgeom.data.packages`: The packages whose files make up our corpora: pinned versions, sha256, and their parsers.
- `lmgeom.data.sources`: Sources of text by name: what there is, how it is fetched, and its documents.
- `lmgeom.study.convex`: Softmax regression on frozen hidden states: the one problem of a head that is convex."""

__version__ = "0.1.0"
