"""Commands about the book: build it, serve it, print it, look at it, run its gates."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lmgeom.console import filled, number
from lmgeom.errors import BookError

__all__ = ["add_commands"]

# What follows imports inside each function: the parser must not need the notebook stack.


def _build(arguments: argparse.Namespace) -> int:
    """Build the book and say where its front page is."""
    from lmgeom.book.pipeline import make_book
    from lmgeom.book.settings import repository

    page = make_book(repository(), arguments.profile)
    print(f"the book is at {page}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    """Say what `build` would do."""
    from lmgeom.book.pipeline import plan
    from lmgeom.book.settings import repository

    print("\n".join(plan(repository(), arguments.profile)))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Serve the built pages to this machine only."""
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    folder = _html(arguments.profile)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", arguments.port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C stops)", flush=True)
        server.serve_forever()
    return 0


def _html(profile: str) -> Path:
    """Folder of the built pages.

    Raises:
        BookError: They have not been built.
    """
    from lmgeom.book.execute import Workspace
    from lmgeom.book.settings import load_profile, repository

    root = repository()
    folder = Workspace(root, load_profile(root, profile).name).html
    if not (folder / "index.html").is_file():
        raise BookError(f"no book in {folder}: run make book PROFILE={profile} first")
    return folder


def _screenshots(arguments: argparse.Namespace) -> int:
    """Write pictures of pages for a person to look at."""
    from lmgeom.book.pages import html_pages, screenshots

    folder = _html(arguments.profile)
    known = {p.relative_to(folder).with_suffix("").as_posix(): p for p in html_pages(folder)}
    if unknown := [name for name in arguments.page if name not in known]:
        raise BookError(f"unknown page {unknown[0]!r}, known: {', '.join(known)}")
    pages = [known[name] for name in arguments.page] or known.values()
    written = screenshots(pages, folder, folder.parents[2] / "screenshots")
    print(f"{len(written)} pictures in {written[0].parent}")
    return 0


def _rerun(arguments: argparse.Namespace) -> int:
    """Execute one chapter with a reader's parameters and compare it with the book's."""
    from lmgeom.book.rerun import rerun
    from lmgeom.book.settings import repository

    results = Path(arguments.results) if arguments.results else None
    options = {"results": results, "profile": arguments.profile}
    page = rerun(repository(), arguments.chapter, arguments.parameters, **options)
    print(f"your numbers beside ours: {page}")
    return 0


def _pdf(arguments: argparse.Namespace) -> int:
    """Print the book to one PDF."""
    from lmgeom.book.printed import print_book
    from lmgeom.book.settings import repository

    folder = _html(arguments.profile)
    out = folder.parents[2] / "lmgeom-book.pdf"
    cut = print_book(folder, repository() / "book", out)
    print(f"the PDF is at {out}")
    for element in cut:
        print(f"does not fit the paper: {element}", file=sys.stderr)
    return 1 if cut else 0


def _zip(arguments: argparse.Namespace) -> int:
    """Pack the built pages."""
    from lmgeom.book.downloads import zip_book

    folder = _html(arguments.profile)
    out = zip_book(folder, folder.parents[2] / "lmgeom-book.zip")
    print(f"the zip is at {out} ({out.stat().st_size / 1e6:.1f} MB)")
    return 0


def _gates(arguments: argparse.Namespace) -> int:
    """Run the gates and print their table."""
    from lmgeom.book.gates import run_gates
    from lmgeom.book.settings import repository

    return run_gates(repository(), arguments.only)


def add_commands(commands: Any) -> None:
    """Add the book's commands to an argparse sub-parser collection.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser("build", help="execute what changed and build the pages")
    parser.add_argument("--profile", default="smoke", help="smoke (default), book or gpu")
    parser.set_defaults(call=_build)
    parser = commands.add_parser("plan", help="say what build would run, and for how long")
    parser.add_argument("--profile", default="smoke", help="smoke (default), book or gpu")
    parser.set_defaults(call=_plan)
    parser = commands.add_parser("serve", help="serve the built pages to this machine")
    parser.add_argument("--profile", default="smoke", help="smoke (default), book or gpu")
    word = "default: %(default)s; 0: any free"
    parser.add_argument("--port", type=number(int, 0, 65535), default=8000, help=word)
    parser.set_defaults(call=_serve)
    parser = commands.add_parser("rerun", help="execute a chapter your way, beside the book's")
    parser.add_argument("chapter", help="such as lev/01_spline")
    word = "a parameter of the chapter, as seed=3; may be given again"
    options = {"action": "append", "default": [], "metavar": "NAME=VALUE", "help": word}
    parser.add_argument("-p", "--parameter", dest="parameters", **options)
    word = "folder of your records, as `lmgeom study run --results` writes them"
    parser.add_argument("--results", type=filled, metavar="FOLDER", help=word)
    parser.add_argument("--profile", default="smoke", help="smoke (default), book or gpu")
    parser.set_defaults(call=_rerun)
    parser = commands.add_parser("pdf", help="print the built pages to one PDF")
    parser.add_argument("--profile", default="smoke", help="smoke (default), book or gpu")
    parser.set_defaults(call=_pdf)
    parser = commands.add_parser("zip", help="pack the built pages for a reader without a network")
    parser.add_argument("--profile", default="smoke", help="smoke (default), book or gpu")
    parser.set_defaults(call=_zip)
    parser = commands.add_parser("screenshots", help="picture pages at four sizes and schemes")
    parser.add_argument("page", nargs="*", help="such as lev/01_spline; all by default")
    parser.add_argument("--profile", default="smoke", help="smoke (default), book or gpu")
    parser.set_defaults(call=_screenshots)
    parser = commands.add_parser("test", help="run every gate that CI runs")
    parser.add_argument("only", nargs="*", metavar="GATE", help="only these gates")
    parser.set_defaults(call=_gates)
