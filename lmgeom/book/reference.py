"""The reference of the library: one page a package, and links between it and the chapters.

Each entry says what a name takes, gives and raises, and closes with a line that leads to the cell
that builds it, its equation, the cell that checks it, its tests and its claims. Each chapter ends
with the way back. Pages are MyST Markdown with Sphinx's own Python directives, so that search and
index know every name.
"""

from __future__ import annotations

import ast
import html
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from lmgeom.book.library import PACKAGES, Definition, Entry, Library, Place, parse_docstring

__all__ = ["annotate", "docstring_faults", "reference_pages"]

FOLDER = "reference"
TITLES = {
    "lev": "Input",
    "taper": "Depth",
    "mixers": "Mixers",
    "head": "Output",
    "data": "Data",
    "lm": "Language model",
    "study": "Studies",
    "hub": "Other people's tools",
}
LONGEST_VALUE = 60  # characters of a constant's value
MOST_TESTS = 3  # test files named in an entry
SHAPE = re.compile(r"\(.*\)|[Ss]hape|scalar|\b[Ss]ame\b|\bas\b")  # words that say a shape
RECORDS = ("dataclass", "NamedTuple")


# ------------------------------------------------------------------ signatures
def _is_record(node: ast.ClassDef) -> bool:
    """Tell whether a class takes its annotated fields as arguments."""
    words = [ast.unparse(part) for part in (*node.bases, *node.decorator_list)]
    return any(word.startswith(RECORDS) for word in words)


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """Annotated fields of a class, without private ones."""
    found = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    return [field for field in found if not ast.unparse(field.target).startswith("_")]


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """A method that a class defines itself."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == name:
            return part
    return None


def _inherits(node: Definition) -> bool:
    """Tell whether a class is made as its base is."""
    own = isinstance(node, ast.ClassDef) and (_method(node, "__init__") or _is_record(node))
    return isinstance(node, ast.ClassDef) and not own


def _drop_first(arguments: ast.arguments) -> ast.arguments:
    """The arguments of a method without self or cls."""
    rest = ast.arguments(**{name: getattr(arguments, name) for name in ast.arguments._fields})
    rest.posonlyargs, rest.args = arguments.posonlyargs[1:], arguments.args
    if not arguments.posonlyargs:
        rest.args = arguments.args[1:]
    return rest


def _of_class(node: ast.ClassDef, library: Library) -> str:
    """Arguments of a class as in its signature."""
    if _is_record(node):
        return ", ".join(ast.unparse(field) for field in _fields(node))
    if init := _method(node, "__init__") or _method(node, "__new__"):
        return ast.unparse(_drop_first(init.args))
    names = {ast.unparse(base) for base in node.bases}
    for other in library.entries:
        if other.name in names and isinstance(other.node, ast.ClassDef):
            return _of_class(other.node, library)
    return ""


def _of_function(node: ast.FunctionDef, method: bool = False) -> str:
    """Arguments and result of a function as in its signature."""
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    arguments = _drop_first(node.args) if method and not static else node.args
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){result}"


def _argument_names(node: Definition, library: Library) -> list[str]:
    """Names of the arguments of a function or class, with their stars."""
    if isinstance(node, ast.ClassDef):
        text = _of_class(node, library)
    else:
        method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
        text = ast.unparse(_drop_first(node.args) if method else node.args)
    arguments = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    given = arguments.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [a.arg for a in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Documented methods of a class without leading underscore, as its author orders them."""
    for part in node.body:
        documented = isinstance(part, ast.FunctionDef) and bool(ast.get_docstring(part))
        if isinstance(part, ast.FunctionDef) and documented and part.name[0] != "_":
            yield part


# ------------------------------------------------------------------ entries
def _definition_list(items: Mapping[str, str]) -> list[str]:
    """A list of names and what they mean."""
    return [line for name, text in items.items() for line in (f"`{name}`", f": {text}", "")]


def _body(source: str) -> list[str]:
    """A docstring as Markdown: text, arguments, result, errors."""
    doc = parse_docstring(source)
    lines = [doc.text, ""]
    for section in ("Args", "Attributes"):
        if section in doc.items:
            lines += _definition_list(doc.items[section])
    for section, text in doc.texts.items():
        lines += [f"**{section}** {text}", ""]
    if errors := doc.items.get("Raises"):
        lines += ["**Raises**", "", *_definition_list(errors)]
    return lines


def _link(label: str, text: str) -> str:
    """A link to a place in the book."""
    return f"[{text}](#{label})"


def _claim(name: str, library: Library, page: str) -> str:
    """A link to a claim's row, in its chapter or on the front page."""
    chapters = library.boxed.get(name, [])
    target = f"{chapters[0]}.html" if chapters else "index.html"
    path = posixpath.relpath(target, posixpath.dirname(page) or ".")
    return f'<a href="{path}#claim-{name}">{html.escape(name)}</a>'


def _trace(entry: Entry, library: Library) -> list[str]:
    """The line that leads from an entry to where it is built, checked and claimed."""
    parts = []
    if entry.place:
        parts.append(_link(entry.place.label, "built here"))
    elif chapter := library.chapter(entry):
        parts.append(f"[used here](/{chapter}.ipynb)")
    if not entry.constant and (label := library.equation(entry)):
        parts.append(f"equation {{eq}}`{label}`")
    if not entry.constant and (lesson := library.lesson(entry)):
        parts.append(_link(lesson.label, "checked here"))
    files, way = library.tested_by(entry)
    if files:
        shown = ", ".join(f"`{name}`" for name in files[:MOST_TESTS])
        more = f" and {len(files) - MOST_TESTS} more" if len(files) > MOST_TESTS else ""
        through = f" through `{way[0].rpartition('.')[2]}`" if way else ""
        parts.append(f"tests {shown}{more}{through}")
    if names := library.claims_of(entry):
        page = f"{FOLDER}/page.html"
        parts.append("claims " + ", ".join(_claim(name, library, page) for name in names))
    return ["::::{container} trace", " · ".join(parts), "::::", ""] if parts else []


def _directive(kind: str, head: str, body: Iterable[str], *options: str) -> list[str]:
    """A directive of Sphinx's Python domain; colons rather than backticks, which bodies contain."""
    fence = ":" * (7 if kind == "class" else 5)
    return [f"{fence}{{py:{kind}}} {head}", *options, "", *body, fence, ""]


def _value(node: ast.Assign | ast.AnnAssign) -> str:
    """The value of a constant, cut where it is long."""
    text = ast.unparse(node.value) if node.value else ""
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} ..."


def _entry(entry: Entry, library: Library) -> list[str]:
    """One entry of a page."""
    node, trace = entry.node, _trace(entry, library)
    head = entry.path.removeprefix(f"lmgeom.{entry.module.split('.')[1]}.")
    if isinstance(node, ast.FunctionDef):
        body = [*_body(ast.get_docstring(node, clean=False) or ""), *trace]
        return _directive("function", head + _of_function(node), body)
    if isinstance(node, ast.ClassDef):
        body = _body(ast.get_docstring(node, clean=False) or "")
        for method in _methods(node):
            inner = _body(ast.get_docstring(method, clean=False) or "")
            if any(ast.unparse(d).endswith("property") for d in method.decorator_list):
                kind = ast.unparse(method.returns) if method.returns else "object"
                body += _directive("property", method.name, inner, f":type: {json.dumps(kind)}")
            else:
                body += _directive("method", method.name + _of_function(method, True), inner)
        return _directive("class", f"{head}({_of_class(node, library)})", [*body, *trace])
    options = [f":value: {json.dumps(_value(node))}"]
    if isinstance(node, ast.AnnAssign):
        options.insert(0, f":type: {json.dumps(ast.unparse(node.annotation))}")
    return _directive("data", head, trace, *options)


# ------------------------------------------------------------------ pages
def _module(module: str, library: Library) -> list[str]:
    """One module's section: what its package exports, then its parts, folded."""
    entries = [entry for entry in library.entries if entry.module == module]
    places = {entry.place.notebook for entry in entries if entry.place}
    lines = [f"## {module}", ""]
    if places:
        name = min(places)
        boxed = [claim for claim, chapters in library.boxed.items() if name in chapters]
        page = f"{FOLDER}/page.html"
        rows = ", ".join(_claim(claim, library, page) for claim in boxed)
        text = f"From the chapter [](/{name}.ipynb)" + (f" · claims {rows}" if boxed else "")
        lines += ["::::{container} trace", text, "::::", ""]
    first = [entry for entry in entries if entry.promoted]
    rest = [entry for entry in entries if not entry.promoted]
    lines += [line for entry in first for line in _entry(entry, library)]
    if rest:
        parts = [line for entry in rest for line in _entry(entry, library)]
        title = f"Parts of {module}" if first else f"All of {module}"
        lines += [f":::::::::{{dropdown}} {title}", *parts, ":::::::::", ""]
    return lines


def _page(package: str, library: Library) -> str:
    """The page of one package."""
    top = f"lmgeom.{package}"
    intro = ast.get_docstring(library.modules[top]) or ""
    lines = [f"# {TITLES[package]}: {top}", "", intro, "", f":::{{py:currentmodule}} {top}", ":::"]
    for module in dict.fromkeys(entry.module for entry in library.entries):
        if f"{module}.".startswith(f"{top}."):
            lines += ["", *_module(module, library)]
    return "\n".join(lines) + "\n"


def _index(library: Library) -> str:
    """The page that lists every package and what it exports."""
    lines = [
        "# The library",
        "",
        "What each package exports. An entry says what a name takes, gives and raises, and leads "
        "to the cell that builds it, its equation, the cell that checks it, its tests and its "
        "claims; every chapter ends with the way back. All of it is generated from the sources.",
        "",
    ]
    for package in PACKAGES:
        names = [entry for entry in library.entries if entry.path.split(".")[1] == package]
        links = [_link(e.path, f"`{e.name}`") for e in names if e.promoted]
        title = f"{TITLES[package]}: lmgeom.{package}"  # in words, for the contents of the page
        lines += [f"## [{title}](/{FOLDER}/{package}.md)", "", " · ".join(sorted(links)), ""]
    return "\n".join(lines)


def reference_pages(library: Library) -> dict[PurePosixPath, bytes]:
    """Write the reference.

    Args:
        library: The public names of a checkout.

    Returns:
        Pages of MyST Markdown by their path in the book: an index and one page a package.
    """
    pages = {package: _page(package, library) for package in PACKAGES}
    pages["index"] = _index(library)
    return {PurePosixPath(FOLDER, f"{name}.md"): text.encode() for name, text in pages.items()}


# ------------------------------------------------------------------ chapters
def _places(name: str, library: Library) -> set[Place]:
    """Cells of a chapter that the reference links to."""
    found = set()
    for entry in library.entries:
        if entry.place and entry.place.notebook == name:
            found |= {place for place in (entry.place, library.lesson(entry)) if place}
    return found


def _mark(cell: NotebookNode, label: str) -> None:
    """Put a target before the first paragraph or heading of a text cell, outside directives."""
    blocks, fenced = cell.source.split("\n\n"), False
    for index, block in enumerate(blocks):
        if not fenced and re.match(r"[^\s`:$|>]|`[^`]", block):
            blocks[index] = f"({label})=\n{block}"
            break
        fenced ^= sum(line.startswith(("```", ":::")) for line in block.splitlines()) % 2 == 1
    cell.source = "\n\n".join(blocks)


def annotate(notebook: NotebookNode, name: str, library: Library) -> NotebookNode:
    """Give a chapter the targets that the reference links to, and the way back to it.

    Args:
        notebook: An executed chapter.
        name: Name of the chapter.
        library: The public names of the checkout.

    Returns:
        A copy with targets before the cells that build and check a name, and with a last line of
        links to the entries of what the chapter exports.
    """
    notebook = nbformat.from_dict(notebook)
    cells = {place.cell: place.label for place in _places(name, library)}
    text: NotebookNode | None = None
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = cell
        elif cell.get("id") in cells and text is not None:
            _mark(text, cells[cell.id])
    entries = [e for e in library.entries if e.place and e.place.notebook == name]
    if entries:
        shown = [entry for entry in entries if entry.promoted] or entries
        links = " · ".join(_link(entry.path, f"`{entry.name}`") for entry in shown)
        source = f":::{{container}} trace\nIn the reference: {links}\n:::"
        notebook.cells.append(new_markdown_cell(source, id="reference-links"))
    return notebook


# ------------------------------------------------------------------ completeness
def _raised(node: Definition) -> set[str]:
    """Errors that a function raises itself."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call):
            found.add(ast.unparse(part.exc.func).rpartition(".")[2])
    return found


def docstring_faults(entry: Entry, library: Library) -> list[str]:
    """Say what the docstring of a public function or class lacks.

    Args:
        entry: A public name.
        library: The public names of the checkout.

    Returns:
        One line a fault: no summary, an argument that is not described or not there, a tensor
        without a shape, a result or an error that is not described.
    """
    if entry.constant:
        return []
    doc, node = entry.docstring, entry.node
    assert isinstance(node, Definition)
    if not doc.summary:
        return [f"{entry.path}: no docstring"]
    record = isinstance(node, ast.ClassDef) and _is_record(node)
    given = doc.items.get("Args", {}) | (doc.items.get("Attributes", {}) if record else {})
    names = [] if _inherits(node) else _argument_names(node, library)
    faults = [f"does not describe {name}" for name in names if name not in given]
    faults += [f"describes {name}, which is not there" for name in given if name not in names]
    if isinstance(node, ast.FunctionDef):
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            if kind.startswith("Tensor") and not SHAPE.search(given.get(argument.arg, "")):
                faults.append(f"gives no shape for {argument.arg}")
        result = ast.unparse(node.returns) if node.returns else ""
        if result not in ("None", "") and not doc.texts:
            faults.append("does not describe its result")
        elif result == "Tensor" and not SHAPE.search(" ".join((doc.summary, *doc.texts.values()))):
            faults.append("gives no shape for its result")
        faults += [
            f"does not describe {error}"
            for error in sorted(_raised(node) - doc.items.get("Raises", {}).keys())
        ]
    return [f"{entry.path} {fault}" for fault in faults]
