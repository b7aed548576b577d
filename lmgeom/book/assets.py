"""Bring what pages need from npm: MathJax and the text font, and axe-core, which checks them.

Each comes once, as a pinned archive whose sha256 is checked; pages then need no network.
"""

from __future__ import annotations

import tarfile
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from lmgeom.data.packages import Package
from lmgeom.data.sources import archive
from lmgeom.errors import BookError

__all__ = ["AXE", "MATHJAX", "SERIF", "axe_script", "web_assets"]

MATHJAX = Package(
    name="mathjax",
    version="3.2.2",
    client="npm",
    filename="mathjax-3.2.2.tgz",
    sha256="1b9c0a1c44df864e915690558e72adb9cc5203360daefd385084ced3b6c64c09",
    license="Apache-2.0",
)
SERIF = Package(
    name="@fontsource-variable/source-serif-4",
    version="5.3.1",
    client="npm",
    filename="fontsource-variable-source-serif-4-5.3.1.tgz",
    sha256="8c452853c74be1e43e9fbfe76321c26f4678a2d431e93209ff1d9faec03fd96f",
    license="OFL-1.1",
)
# For the tests of the pages only: no page holds it.
AXE = Package(
    name="axe-core",
    version="4.14.1",
    client="npm",
    filename="axe-core-4.14.1.tgz",
    sha256="e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745",
    license="MPL-2.0",
)
# Archive, prefix cut from its names, folder of static files, and the files wanted.
FILES = (
    (
        MATHJAX,
        "package/es5",
        "mathjax",
        ("tex-mml-chtml.js", "input/tex/extensions/*.js", "output/chtml/fonts/woff-v2/*.woff"),
    ),
    (
        SERIF,
        "package",
        "fonts",
        (
            "LICENSE",
            "files/source-serif-4-latin-wght-*.woff2",
            "files/source-serif-4-latin-ext-wght-*.woff2",
            "files/source-serif-4-greek-wght-*.woff2",
        ),
    ),
)


def web_assets() -> dict[PurePosixPath, bytes]:
    """Read the bundled files, downloading their archives where the cache lacks them.

    Returns:
        Content by path below the folder of static files.

    Raises:
        BookError: An archive cannot be had.
    """
    found: dict[PurePosixPath, bytes] = {}
    for package, prefix, folder, patterns in FILES:
        found.update(_members(_archive(package), prefix, PurePosixPath(folder), patterns))
    return found


def axe_script() -> str:
    """Read axe-core, the script that looks for barriers in a page.

    Raises:
        BookError: Its archive cannot be had.
    """
    (content,) = _members(_archive(AXE), "package", PurePosixPath(), ("axe.min.js",)).values()
    return content.decode()


def _archive(package: Package) -> Path:
    """Path of a package's archive, downloaded where the cache lacks it."""
    path = archive(package, quiet=True)
    if path is None:
        raise BookError(
            f"{package.name} {package.version} is needed for the pages and could not be "
            "downloaded: is npm installed, and its registry within reach?"
        )
    return path


def _members(
    path: Path, prefix: str, folder: PurePosixPath, patterns: tuple[str, ...]
) -> dict[PurePosixPath, bytes]:
    """Read the members of a gzipped tar that match, under their new names."""
    found = {}
    with tarfile.open(path, mode="r:gz") as file:
        for member in file:
            name = member.name.removeprefix(f"{prefix}/")
            if member.isfile() and any(fnmatchcase(name, pattern) for pattern in patterns):
                stream = file.extractfile(member)
                assert stream is not None
                found[folder / name] = stream.read()
    return found
