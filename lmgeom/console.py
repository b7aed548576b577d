"""What the commands share: tables of words, and kinds of arguments."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any


def columns(rows: Sequence[Sequence[Any]]) -> str:
    """Lay rows of words out in columns, as wide as their widest word; None is a dash."""
    text = [[("-" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in text)
    return "\n".join(line.rstrip() for line in lines)


def number(kind: type[int] | type[float], least: float) -> Callable[[str], Any]:
    """Make an argument type that accepts numbers of at least `least`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            word = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {word} of at least {least:g}")
        return value

    return parse
