"""Errors that a person can act on: one line that names the wrong value and the right kind."""


class LmgeomError(Exception):
    """Base of every error raised on purpose; the command prints it on one line and exits with 2."""


class ConfigError(LmgeomError, ValueError):
    """A setting that cannot work; the message names field, value and what would be right."""


class DataError(LmgeomError, ValueError):
    """Text, tokens or a source that cannot be used."""


class CheckpointError(LmgeomError):
    """A checkpoint that is missing, damaged, foreign or of another shape."""


class RecordError(LmgeomError):
    """A run record that is missing, damaged or being written by another run."""


class TrainingError(LmgeomError):
    """Training stopped: a loss or gradient is not finite, or the data ran out."""


class BookError(LmgeomError):
    """The book cannot be built: a notebook, a tool or a pinned download failed."""
