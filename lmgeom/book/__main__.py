"""`python -m lmgeom.book`: the commands that the Makefile calls."""

import os
import signal
import sys
from types import FrameType

from lmgeom.book.command import INTERRUPTED, main


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Treat a request to end like Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    code = main()
    if code == INTERRUPTED:
        os._exit(code)  # without waiting for notebooks that still run; their workers follow
    sys.exit(code)
