"""Run the command as ``python -m lmgeom``."""

from lmgeom.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
