"""Read the library without importing it: what is public, its docstrings, cells, tests and claims.

Everything comes from the sources: `__all__`, the syntax trees, the comments that nbdev leaves above
each exported cell, the notebooks and the tests. So the reference of the book cannot be stale, and
reading it takes no PyTorch.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lmgeom.study import claims

__all__ = ["PACKAGES", "Docstring", "Entry", "Library", "Place", "parse_docstring"]

PACKAGES = ("lev", "taper", "mixers", "head", "data", "lm", "study", "hub")
LISTS = ("Args", "Attributes", "Raises")
TEXTS = ("Returns", "Yields")
EXPORTED_CELL = re.compile(r"# %% \S*nbs/(?P<notebook>\S+)\.ipynb #(?P<cell>\S+)$")
EQUATION = re.compile(r"^\$\$ \((?P<label>eq-[\w-]+)\)", re.MULTILINE)
Definition = ast.FunctionDef | ast.ClassDef
Node = Definition | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Docstring:
    """A docstring in Google's style, taken apart.

    Attributes:
        text: Summary line and explanation.
        items: Entries of the sections Args, Attributes and Raises, by section and name.
        texts: Texts of the sections Returns and Yields.
    """

    text: str
    items: dict[str, dict[str, str]]
    texts: dict[str, str]

    @property
    def summary(self) -> str:
        """The first paragraph, on one line."""
        return " ".join(self.text.partition("\n\n")[0].split())


def _items(lines: Iterable[str]) -> dict[str, str]:
    """Read the entries of a section: a name, a colon, a text that may go on below."""
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        match = re.match(r" {4}(\*{0,2}[\w.]+): (.*)", line)
        if match and not line.startswith(" " * 5):
            name = match[1]
            found[name] = match[2].strip()
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found


def parse_docstring(source: str) -> Docstring:
    """Take a docstring apart.

    Args:
        source: The docstring, indented as it stands in the code.

    Returns:
        Its text and sections; a section that it lacks is absent.
    """
    blocks: dict[str, list[str]] = {"": []}
    section = ""
    for line in inspect.cleandoc(source).splitlines():
        if line.removesuffix(":") in (*LISTS, *TEXTS) and line.endswith(":"):
            section = line[:-1]
            blocks[section] = []
        elif section and line and not line.startswith(" "):
            section = ""  # a paragraph after the sections belongs to the text
            blocks[section] += ["", line]
        else:
            blocks[section].append(line)
    items = {name: _items(blocks[name]) for name in LISTS if name in blocks}
    texts = {name: " ".join(" ".join(blocks[name]).split()) for name in TEXTS if name in blocks}
    return Docstring("\n".join(blocks[""]).strip(), items, texts)


@dataclass(frozen=True)
class Place:
    """A code cell of a chapter.

    Attributes:
        notebook: Name of the chapter, as `lev/02_digits`.
        cell: Id of the cell.
    """

    notebook: str
    cell: str

    @property
    def label(self) -> str:
        """Target of links to it."""
        return f"at-{self.notebook}-{self.cell}".replace("/", "-").replace("_", "-").lower()


@dataclass(frozen=True)
class Entry:
    """One public name.

    Attributes:
        name: The name itself.
        module: Module that defines it.
        path: The shortest name to import it by, from its package where that exports it.
        node: Its definition.
        place: Cell that exports it, None in a module without a notebook.
    """

    name: str
    module: str
    path: str
    node: Node
    place: Place | None

    @property
    def promoted(self) -> bool:
        """Whether its package exports it, too."""
        return self.path.count(".") == 2

    @property
    def docstring(self) -> Docstring:
        """Its docstring, empty for a constant."""
        node = self.node
        text = ast.get_docstring(node, clean=False) if isinstance(node, Definition) else None
        return parse_docstring(text or "")

    @property
    def constant(self) -> bool:
        """Whether it is neither a function nor a class."""
        return not isinstance(self.node, Definition)


def public_names(tree: ast.Module) -> list[str]:
    """Names in a module's `__all__`, none without one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _definitions(tree: ast.Module) -> dict[str, Node]:
    """What a module defines at its top level, by name."""
    found: dict[str, Node] = {}
    for node in tree.body:
        if isinstance(node, Definition):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target): node for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = node
    return found


def _places(text: str) -> dict[int, Place]:
    """Cells of a generated module by the line where each begins."""
    matches = ((i, EXPORTED_CELL.match(line)) for i, line in enumerate(text.splitlines(), 1))
    return {i: Place(match["notebook"], match["cell"]) for i, match in matches if match}


def _identifiers(node: ast.AST) -> Iterator[str]:
    """Names and attributes in some code; annotations in quotes count."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Full names of what some code takes from lmgeom, by import or as an attribute of a module."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lmgeom":
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "lmgeom":
                    name = alias.asname or "lmgeom"
                    known[name] = alias.name if alias.asname else "lmgeom"
    yield from known.values()
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *parts])


class Library:
    """The public names of a checkout, and where each is derived, checked and claimed.

    Args:
        root: Checkout of the repository.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._notebooks: dict[str, list[dict[str, Any]]] = {}

    @cached_property
    def entries(self) -> list[Entry]:
        """All public names of the packages, module by module in the order of their definition."""
        return [entry for package in PACKAGES for entry in self._package(package)]

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """Syntax trees of the packages' modules by name."""
        found = {}
        for package in PACKAGES:
            for path in sorted((self.root / "lmgeom" / package).glob("*.py")):
                name = f"lmgeom.{package}.{path.stem}".removesuffix(".__init__")
                found[name] = ast.parse(path.read_text(encoding="utf-8"))
        return found

    def _package(self, package: str) -> Iterator[Entry]:
        """Public names of one package."""
        top = f"lmgeom.{package}"
        promoted = public_names(self.modules[top])
        sources = {
            alias.name: node.module
            for node in ast.walk(self.modules[top])
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for module in (name for name in self.modules if f"{name}.".startswith(f"{top}.")):
            tree = self.modules[module]
            here = {name for name in promoted if sources.get(name, top) == module}
            path = self.root.joinpath(*module.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            places = _places(path.read_text(encoding="utf-8"))
            for name, node in _definitions(tree).items():
                if name in here or name in public_names(tree):
                    full = f"{top if name in here else module}.{name}"
                    starts = [line for line in places if line < node.lineno]
                    place = places[max(starts)] if starts else None
                    yield Entry(name, module, full, node, place)

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        """Entries by each full name that imports them."""
        found = {entry.path: entry for entry in self.entries}
        return found | {f"{entry.module}.{entry.name}": entry for entry in self.entries}

    def named_in(self, tree: ast.AST) -> set[str]:
        """Paths of the entries that some code takes from lmgeom."""
        return {self._by_name[n].path for n in imported_names(tree) if n in self._by_name}

    # ------------------------------------------------------------------ chapters
    def cells(self, notebook: str) -> list[dict[str, Any]]:
        """Cells of a clean notebook, each with its id, cell_type and source as one text."""
        if notebook not in self._notebooks:
            path = self.root / "nbs" / f"{notebook}.ipynb"
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            self._notebooks[notebook] = [c | {"source": "".join(c["source"])} for c in cells]
        return self._notebooks[notebook]

    @cached_property
    def notebooks(self) -> list[str]:
        """Names of all notebooks."""
        folder = self.root / "nbs"
        found = (path.relative_to(folder).with_suffix("") for path in folder.glob("*/*.ipynb"))
        return sorted(path.as_posix() for path in found)

    def chapter(self, entry: Entry) -> str | None:
        """Chapter that exports an entry, or the first that uses or names one without a notebook."""
        if entry.place:
            return entry.place.notebook
        used = (name for name in self.notebooks if entry.path in self._used_by[name])
        return next(used, next((n for n in self.notebooks if self._names(n, entry)), None))

    def _names(self, notebook: str, entry: Entry) -> bool:
        """Whether the text of a chapter of the same package names an entry."""
        mine = notebook.split("/")[0] == entry.module.split(".")[1]
        texts = (cell["source"] for cell in self.cells(notebook) if cell["cell_type"] == "markdown")
        return mine and any(f"`{entry.name}`" in text for text in texts)

    @cached_property
    def _used_by(self) -> dict[str, set[str]]:
        """Paths of the entries that each notebook imports."""
        return {name: self.named_in(self._code(name)) for name in self.notebooks}

    def _code(self, notebook: str) -> ast.Module:
        """All code of a notebook as one tree, without lines that are no Python."""
        sources = (c["source"] for c in self.cells(notebook) if c["cell_type"] == "code")
        lines = [line for source in sources for line in source.splitlines()]
        return ast.parse("\n".join("" if line[:1] in ("%", "!") else line for line in lines))

    def _index(self, place: Place) -> int:
        """Position of a cell in its notebook."""
        return next(i for i, c in enumerate(self.cells(place.notebook)) if c["id"] == place.cell)

    def equation(self, entry: Entry) -> str | None:
        """Label of the last numbered equation before an entry's cell, in the same section."""
        if entry.place is None:
            return None
        for cell in reversed(self.cells(entry.place.notebook)[: self._index(entry.place)]):
            if cell["cell_type"] == "markdown":
                section = re.split(r"^#+ ", cell["source"], flags=re.MULTILINE)
                if labels := EQUATION.findall(section[-1]):
                    return str(labels[-1])
                if len(section) > 1:
                    return None
        return None

    def lesson(self, entry: Entry) -> Place | None:
        """First cell after an entry's own that uses it and asserts something."""
        if entry.place is None:
            return None
        for cell in self.cells(entry.place.notebook)[self._index(entry.place) + 1 :]:
            if cell["cell_type"] == "code" and not cell["source"].startswith("#| export"):
                lines = cell["source"].splitlines()
                code = "\n".join("" if line[:1] in ("%", "!") else line for line in lines)
                tree = ast.parse(code)
                checks = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
                if checks and entry.name in set(_identifiers(tree)):
                    return Place(entry.place.notebook, cell["id"])
        return None

    # ------------------------------------------------------------------ tests and claims
    @cached_property
    def tests(self) -> dict[str, ast.Module]:
        """Syntax trees of the tests by path below the folder of tests."""
        folder = self.root / "tests"
        paths = sorted(folder.rglob("test_*.py"))
        return {
            path.relative_to(folder).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
            for path in paths
        }

    @cached_property
    def _direct(self) -> dict[str, list[str]]:
        """Tests that take each entry from lmgeom by its name."""
        found: dict[str, list[str]] = {}
        for test, tree in self.tests.items():
            for path in self.named_in(tree):
                found.setdefault(path, []).append(test)
        return found

    @cached_property
    def _users(self) -> dict[str, list[Entry]]:
        """Entries whose definition mentions each entry, of its own module or package."""
        mentioned = {entry.path: set(_identifiers(entry.node)) for entry in self.entries}
        return {
            entry.path: [
                user
                for user in self.entries
                if user is not entry and entry.name in mentioned[user.path]
            ]
            for entry in self.entries
        }

    def tested_by(self, entry: Entry) -> tuple[list[str], list[str]]:
        """Test files of an entry, and the names through which they reach it.

        Args:
            entry: A public name.

        Returns:
            Files below the folder of tests, and the entries on the way, none where the tests name
            the entry itself. Without such a test, those of the nearest entries that use it count.
        """
        seen = {entry.path}
        waiting: deque[tuple[Entry, tuple[str, ...]]] = deque([(entry, ())])
        while waiting:
            current, way = waiting.popleft()
            if files := self._direct.get(current.path):
                return files, list(way)
            for user in self._users[current.path]:
                if user.path not in seen:
                    seen.add(user.path)
                    waiting.append((user, (*way, user.path)))
        return [], []

    @cached_property
    def boxed(self) -> dict[str, list[str]]:
        """Chapters that show each claim in their box, by its id."""
        found: dict[str, list[str]] = {}
        for name in self.notebooks:
            for node in ast.walk(self._code(name)):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("claims_box"):
                    for value in node.args:
                        if isinstance(value, ast.Constant):
                            found.setdefault(str(value.value), []).append(name)
        return found

    @cached_property
    def claims(self) -> dict[str, dict[str, Any]]:
        """The ledger by id."""
        return claims.load_claims(self.root / "book" / "claims.yaml")

    @cached_property
    def _claimed(self) -> dict[str, list[str]]:
        """Ids of the claims whose test names an entry, by the entry's path."""
        found: dict[str, list[str]] = {}
        for name, row in self.claims.items():
            file, _, node = str(row.get("test", "")).partition("::")
            tree = self.tests.get(file.removeprefix("tests/"))
            parts = {n.name: n for n in ast.walk(tree) if isinstance(n, Definition)} if tree else {}
            function = parts.get(node.partition("[")[0].rpartition("::")[2])
            if tree is None or function is None:
                continue
            used: set[str] = set()
            waiting: list[Definition] = [function]
            while waiting:  # the test, and the helpers beside it that it calls
                new = set(_identifiers(waiting.pop())) - used
                used |= new
                waiting += [parts[name] for name in sorted(new & parts.keys())]
            for path in sorted(self.named_in(tree)):
                if path.rpartition(".")[2] in used:
                    found.setdefault(path, []).append(name)
        return found

    def claims_of(self, entry: Entry) -> list[str]:
        """Ids of the claims whose test uses an entry."""
        return self._claimed.get(entry.path, [])
