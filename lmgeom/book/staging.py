"""Turn a clean notebook into one that papermill runs and Jupyter Book shows.

nbdev's directives (`#| hide`) mean nothing to papermill, which would run an `eval: false` cell, nor
to Jupyter Book, which would print them. Staging turns each into the tag that both understand,
strips the line, checks the parameters of the profile and puts them where the notebook's own are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from papermill.translators import PythonTranslator

from lmgeom.errors import ConfigError

__all__ = ["check_parameters", "parameters_of", "stage"]

DIRECTIVE = re.compile(r"^#\|\s*(?P<name>\w+)\s*:?\s*(?P<value>.*?)\s*$")
TAGS = {
    "default_exp": "remove-cell",
    "hide": "remove-cell",
    "hide_input": "remove-input",
    "hide_output": "remove-output",
}
KNOWN = (*TAGS, "eval", "export", "exporti", "exports")


def _tag(name: str, value: str, where: str) -> str | None:
    """Tag that a directive stands for, None for those that only concern the export."""
    if name not in KNOWN:
        raise ConfigError(f"{where}: unknown directive {name!r}, known: {', '.join(KNOWN)}")
    if name == "eval":
        if value not in ("true", "false"):
            raise ConfigError(f"{where}: eval is {value!r}, it must be true or false")
        return "skip-execution" if value == "false" else None
    return TAGS.get(name)


def _stage_cell(cell: NotebookNode, where: str) -> None:
    """Replace the directive lines of one code cell by tags."""
    kept = []
    tags = list(cell.metadata.get("tags", []))
    for line in cell.source.splitlines():
        if match := DIRECTIVE.match(line):
            tag = _tag(match["name"], match["value"], where)
            if tag and tag not in tags:
                tags.append(tag)
        else:
            kept.append(line)
    cell.source = "\n".join(kept).strip("\n")
    if tags:
        cell.metadata["tags"] = tags


def parameters_of(path: Path) -> dict[str, Any]:
    """Parameters of a notebook and their defaults.

    Args:
        path: A clean notebook.

    Returns:
        Name to default, as papermill finds them; a default that is no literal is left as its text.
    """
    found = {}
    for name, entry in papermill.inspect_notebook(str(path)).items():
        try:
            found[name] = ast.literal_eval(entry["default"])
        except (ValueError, SyntaxError):
            found[name] = entry["default"]
    return found


def _same_kind(value: Any, default: Any) -> bool:
    """Tell whether a value can stand for a default: same type, or a whole number for a float."""
    if default is None or type(value) is type(default):
        return True
    if isinstance(default, float):
        return type(value) is int
    return isinstance(default, (list, tuple)) and isinstance(value, (list, tuple))


def check_parameters(name: str, path: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Check a profile's parameters against the notebook that will receive them.

    papermill only warns about a name the notebook does not have, and then runs its defaults.

    Args:
        name: Name of the notebook, for messages.
        path: The clean notebook.
        parameters: Name to value.

    Returns:
        The parameters that differ from the notebook's defaults.

    Raises:
        ConfigError: An unknown name (the message lists the known ones) or a value of another type.
    """
    defaults = parameters_of(path)
    for key, value in parameters.items():
        if key not in defaults:
            known = ", ".join(defaults) or "none"
            raise ConfigError(f"{name}: unknown parameter {key!r}, known: {known}")
        if not _same_kind(value, default := defaults[key]):
            raise ConfigError(
                f"{name}: {key} = {value!r} is a {type(value).__name__}, the notebook's default "
                f"{default!r} is a {type(default).__name__}"
            )
    return {key: value for key, value in parameters.items() if value != defaults[key]}


def stage(name: str, path: Path, parameters: Mapping[str, Any], profile: str) -> NotebookNode:
    """Stage one notebook.

    Args:
        name: Name of the notebook, for messages.
        path: The clean notebook.
        parameters: Parameters of the profile; checked here.
        profile: Name of the profile, shown above the parameters it sets.

    Returns:
        A notebook without directive lines, with tags in their place, and with one cell of the
        profile's parameters after the notebook's own wherever a value differs.

    Raises:
        ConfigError: Unknown directive, parameter, or a parameter of another type.
    """
    changed = check_parameters(name, path, parameters)
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            _stage_cell(cell, f"{name}, cell {cell.get('id', '?')}")
            cell.outputs, cell.execution_count = [], None
    if changed:
        source = PythonTranslator.codify(changed, f"Set by profile {profile}")
        cell = new_code_cell(source.strip(), id="injected-parameters")
        cell.metadata["tags"] = ["injected-parameters"]
        tagged = ("parameters" in other.metadata.get("tags", []) for other in notebook.cells)
        notebook.cells.insert(list(tagged).index(True) + 1, cell)
    return notebook
