"""What is wrong with a mapping that was read from a file of plans or claims."""

import math
from collections.abc import Mapping
from typing import Any

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
