"""Files of plans and claims: how they are read, and what is wrong with a mapping in one."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

NUMBER = (int, float)
WORDS = {str: "a string", int: "an integer, 0 or more", NUMBER: "a number, 0 or more"}
WORDS |= {bool: "true or false", list: "a list", dict: "a mapping"}


def fault(
    given: Any, needed: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> str | None:
    """Name a key of a mapping that is missing, unknown or of another kind; None if all is well.

    Args:
        given: What was read.
        needed: Kind of each key that must be there: a key of `WORDS`.
        optional: Kind of each key that may be there.
    """
    known = dict(needed) | dict(optional or {})
    if not isinstance(given, Mapping):
        return f"must be a mapping of {', '.join(known)}, got {given!r}"
    if unknown := [key for key in given if key not in known]:
        return f"unknown {unknown[0]!r}; known: {', '.join(known)}"
    if missing := [key for key in needed if key not in given]:
        return f"lacks {', '.join(missing)}"
    for key, value in given.items():
        kind = known[key]
        good = type(value) in (kind if kind is NUMBER else (kind,))
        if not good or (kind in (int, NUMBER) and not 0 <= value < math.inf):
            return f"{key}={value!r} must be {WORDS[kind]}"
    return None


class _UniqueKeys(yaml.SafeLoader):
    """Reads YAML as `yaml.safe_load` does, and refuses a mapping that has a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a mapping of a node."""
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        first = {key.value: key for key in reversed(keys)}
        for key in keys:
            if key is not first[key.value]:
                wrong = f"key {key.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, wrong, key.start_mark)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        yaml.YAMLError: If it is no YAML, or a mapping in it has a key twice.
    """
    return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
