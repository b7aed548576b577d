"""What the commands share: tables of words, and kinds of arguments."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any


def columns(rows: Sequence[Sequence[Any]]) -> str:
    """Lay rows of words out in columns, as wide as their widest word; None is a dash."""
    text = [[("-" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in text)
    return "\n".join(line.rstrip() for line in lines)


def filled(text: str) -> str:
    """Refuse the empty text, which an unset variable of a shell gives."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def number(
    kind: type[int] | type[float], least: float, most: float = math.inf
) -> Callable[[str], Any]:
    """Make an argument type that accepts numbers from `least` to `most`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            word = "an integer" if kind is int else "a number"
            range_ = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {word} {range_}")
        return value

    return parse
