"""Read settings.ini: profiles, and the notebook parameters they set."""

from __future__ import annotations

import ast
import configparser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmgeom.errors import ConfigError

__all__ = ["Profile", "load_profile", "notebook_names", "notebook_path", "repository"]

PROJECT = "project"


def _count(value: Any) -> bool:
    """Tell whether a value is a whole number of at least 1."""
    return type(value) is int and value >= 1


def _names(value: Any) -> bool:
    """Tell whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


# Settings of a whole profile: what a value must satisfy, and that in words.
GENERAL = {
    "workers": (_count, "a whole number of at least 1"),
    "timeout": (_count, "a whole number of at least 1"),
    "tokenizers": (_names, "a list of names, such as ['bpe-16k']"),
}


@dataclass(frozen=True)
class Profile:
    """How one profile runs the notebooks.

    Attributes:
        name: Section of settings.ini.
        workers: Notebooks executed at a time.
        timeout: Seconds one cell may take.
        tokenizers: Tokenizers for which the core text is prepared.
        parameters: Notebook name to the parameters that differ from the notebook's defaults.
    """

    name: str
    workers: int
    timeout: int
    tokenizers: list[str]
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)


def repository(start: Path | None = None) -> Path:
    """Find the checkout that holds `start` (the working directory by default).

    Args:
        start: Folder to walk up from.

    Returns:
        The nearest folder at or above `start` with a settings.ini.

    Raises:
        ConfigError: No folder above `start` has one.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "settings.ini").is_file():
            return folder
    raise ConfigError(f"no settings.ini at or above {start}: run this inside a checkout of lmgeom")


def notebook_names(root: Path) -> list[str]:
    """Names of all notebooks, as `lev/01_spline`, in reading order of the folders."""
    folder = root / "nbs"
    paths = (p.relative_to(folder) for p in folder.rglob("*.ipynb"))
    return sorted(
        p.with_suffix("").as_posix()
        for p in paths
        if not any(part.startswith((".", "_")) for part in p.parts)
    )


def notebook_path(root: Path, name: str) -> Path:
    """Path of a notebook by name.

    Raises:
        ConfigError: There is no such notebook; the message lists those there are.
    """
    if name not in (known := notebook_names(root)):
        raise ConfigError(f"unknown notebook {name!r}, known: {', '.join(known) or 'none'}")
    return root / "nbs" / f"{name}.ipynb"


def _literal(key: str, text: str) -> Any:
    """Read one value of settings.ini."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ConfigError(
            f"settings.ini: {key} = {text} is no Python literal, such as 3, 0.1, [1, 2] or 'text'"
        ) from None


def load_profile(root: Path, name: str) -> Profile:
    """Read one profile.

    Args:
        root: Checkout of the repository.
        name: smoke, book or gpu.

    Returns:
        The profile; parameter names and types are checked later, against each notebook.

    Raises:
        ConfigError: Unknown profile, setting or notebook name, or a value that is no literal.
    """
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        parser.read(root / "settings.ini", encoding="utf-8")
    except configparser.Error as error:
        raise ConfigError(f"settings.ini: {' '.join(str(error).split())}") from None
    profiles = [section for section in parser.sections() if section != PROJECT]
    if name not in profiles:
        raise ConfigError(f"unknown profile {name!r}, known: {', '.join(profiles)}")
    general: dict[str, Any] = {}
    parameters: dict[str, dict[str, Any]] = {}
    for key, text in parser.items(name):
        value = _literal(key, text)
        notebook, dot, parameter = key.rpartition(".")
        if dot:
            notebook_path(root, notebook)
            parameters.setdefault(notebook, {})[parameter] = value
        elif key not in GENERAL:
            known = ", ".join((*GENERAL, "NOTEBOOK.PARAMETER"))
            raise ConfigError(f"settings.ini: unknown key {key!r} in [{name}], known: {known}")
        elif not GENERAL[key][0](value):
            raise ConfigError(f"settings.ini: {key} = {text} must be {GENERAL[key][1]}")
        else:
            general[key] = value
    if missing := GENERAL.keys() - general.keys():
        raise ConfigError(f"settings.ini: [{name}] lacks {', '.join(sorted(missing))}")
    return Profile(name, **general, parameters=parameters)
