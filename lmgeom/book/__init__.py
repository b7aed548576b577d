"""From clean notebooks to a checked book: settings, staging, execution, Sphinx build, gates.

Everything here works on a checkout of the repository (the folder that holds settings.ini) and needs
the ``book`` extra. ``lmgeom book --help`` lists the commands that the Makefile calls.
"""
