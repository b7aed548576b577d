"""`python -m lmgeom.book`: the commands that the Makefile calls."""

import sys

from lmgeom.book.command import main

if __name__ == "__main__":
    sys.exit(main())
