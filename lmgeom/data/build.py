"""Turn a source into a prepared folder: token files, offsets, tokenizer, manifest.

The text passes through one staging file, so that memory holds hashes and offsets only. Everything
is written to a temporary folder beside the target and renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lmgeom import __version__
from lmgeom.data import sources
from lmgeom.data.packages import Document
from lmgeom.data.tokenizers import (
    BPE_SIZES,
    check_name,
    packaged,
    read_tokenizer,
    train_bpe,
)
from lmgeom.data.tokens import SPLITS, Corpus, assign_splits, load, ngrams, pack, token_dtype
from lmgeom.errors import DataError

FORMAT = 1
SAMPLE_BYTES = 48_000_000
BATCH_BYTES = 8_000_000


class Staged(NamedTuple):
    """Where a document lies in the staging file.

    Attributes:
        hash: First 64 bits of the sha256 of its text.
        start: First byte.
        size: UTF-8 bytes of its text.
        scored: UTF-8 bytes of the scored text that follows; 0 where the whole text is scored.
    """

    hash: int
    start: int
    size: int
    scored: int


def prepare(
    source: str | Path,
    out: str | Path | None = None,
    *,
    tokenizer: str | Path = "bpe-16k",
    dataset: str | None = None,
    streaming: bool = True,
    max_bytes: int | None = None,
    held_out: bool | None = None,
    weights: dict[str, float] | None = None,
    context: int = 256,
    contamination: bool = True,
    quiet: bool = False,
) -> Path:
    """Tokenize a source and write it as a folder that `load` opens; done once, then found again.

    Args:
        source: Name of a source, `hub:ID[:CONFIGURATION]`, or the path of text files.
        out: Target folder; `cache_dir()/prepared/<source>-<tokenizer>` if None.
        tokenizer: bpe-8k, bpe-16k or bpe-50k (trained on the source's own training text), gpt2,
            cl100k, o200k, llama3, tekken, or the path of a tokenizer.json or a prepared folder.
        dataset: Another id, or a local folder of the same layout, for a source of the Hub.
        streaming: Read a data set of the Hub while it arrives.
        max_bytes: Stop after so many bytes of training text.
        held_out: Add wiki_ood, c4_ood and lambada; None adds them to named sources only.
        weights: Domain -> chance in a batch; None takes the source's.
        context: The longest window that every domain must be able to serve.
        contamination: Report the 13-grams that held-out text shares with the training text.
        quiet: Print no progress.

    Returns:
        The folder.

    Raises:
        DataError: For an unknown source or tokenizer, text that cannot be used, a folder that
            holds something else, or a full disk; nothing half-written remains.
    """
    is_own = sources.resolve(source) is None  # unknown names fail before anything is touched
    source = Path(source).resolve() if is_own else source  # one request, however it is spelled
    check_name(tokenizer)
    name = Path(tokenizer).stem if Path(tokenizer).exists() else str(tokenizer)
    label = str(source).removeprefix("hub:").strip("/").replace("/", "-").replace(":", "-")
    label = Path(source).stem if is_own else label
    out = Path(out) if out else sources.cache_dir() / "prepared" / f"{label}-{name}"
    request = {
        "format": FORMAT,
        "source": str(source),
        "tokenizer": str(tokenizer),
        "dataset": dataset,
        "max_bytes": max_bytes,
        "held_out": held_out,
        "weights": weights,
        "files": sources.own_files(source),
    }
    try:
        with sources.locked(out, quiet):
            if _is_done(out, request, quiet):
                return out
            partial = out.with_name(f".{out.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process: we hold the lock
            try:
                partial.mkdir()
                found = sources.Origin()
                read = sources.documents(
                    source,
                    found,
                    dataset=dataset,
                    streaming=streaming,
                    max_bytes=max_bytes,
                    held_out=held_out,
                    quiet=quiet,
                )
                work = _Work(partial, found, quiet)
                work.stage(read)
                work.choose_tokenizer(tokenizer, weights)
                work.write(context, contamination)
                work.finish(request, str(source))
                os.replace(partial, out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{out}: {error.strerror or error}; nothing was written") from error
    return out


def corpus(
    name: str = "minipile-core", tokenizer: str | Path = "bpe-16k", *, quiet: bool = False
) -> Corpus:
    """Open a corpus by name, fetched and prepared where it is missing.

    Args:
        name: A source, as `prepare` takes it, or a folder that `prepare` wrote.
        tokenizer: A tokenizer, as `prepare` takes it; a prepared folder has its own.
        quiet: Print no progress.

    Returns:
        The corpus; its tokens stay on the disk until they are used.
    """
    if name not in sources.SOURCES and (Path(name) / "manifest.json").is_file():
        return load(name)
    return load(prepare(name, tokenizer=tokenizer, quiet=quiet))


def _is_done(out: Path, request: dict[str, Any], quiet: bool) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        manifest = json.loads((out / "manifest.json").read_text("utf-8"))
        stored, missing = manifest["request"], manifest["missing"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{out} exists and is not a prepared folder: choose another"
        raise DataError(f"{message}, or delete {out}, then prepare it again") from error
    for key, wanted in request.items():
        if stored.get(key) != wanted:
            change = "other files"
            if key != "files":
                change = f"{key} = {stored.get(key)!r}, not {wanted!r}"
            message = f"{out} was prepared with {change}"
            raise DataError(f"{message}: choose another folder, or delete it")
    if missing and not quiet:
        line = f"{out} was prepared without {', '.join(missing)}; delete it to try again"
        print(line, file=sys.stderr, flush=True)
    return True


@dataclass
class _Work:
    """One preparation: stage the text, choose the tokenizer, write the tokens, describe them."""

    folder: Path
    origin: sources.Origin
    quiet: bool
    staged: dict[str, list[Staged]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    report: dict[str, dict[str, Any]] = field(default_factory=dict)

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)

    # ------------------------------------------------------------ 1. stage and split
    def stage(self, documents: Iterator[Document]) -> None:
        """Write the text of every document to one file, drop exact duplicates, assign splits."""
        by_domain: dict[tuple[str, str | None], list[Staged]] = {}
        start, seen, duplicates = time.perf_counter(), set(), 0
        with open(self.folder / "stage", "wb") as file:
            for document in documents:
                text, scored = document.text.encode(), document.scored.encode()
                digest = hashlib.sha256(text + scored).digest()
                if not text.strip():
                    continue
                if document.split != "held_out":  # those stay as they were published
                    if digest in seen:
                        duplicates += 1
                        continue
                    seen.add(digest)
                hash64 = int.from_bytes(digest[:8], "big")
                row = Staged(hash64, file.tell(), len(text), len(scored))
                by_domain.setdefault((document.domain, document.split), []).append(row)
                _append(file, text + scored)
            size = file.tell()
        for (domain, split), rows in by_domain.items():
            if split == "held_out":
                self.staged[domain] = rows
            elif split:
                self.staged.setdefault(f"{split}/{domain}", []).extend(sorted(rows))
            else:
                hashes = np.array([row.hash for row in rows], dtype=np.uint64)
                codes = assign_splits(hashes)
                for code, name in enumerate(SPLITS):
                    chosen = (row for row, c in zip(rows, codes, strict=True) if c == code)
                    self.staged[f"{name}/{domain}"] = sorted(chosen)
        if not any(name.startswith("train/") for name in self.staged):
            raise DataError("the source holds no text")
        n, seconds = sum(map(len, by_domain.values())), time.perf_counter() - start
        self.say(f"read {n:,} documents, {size / 1e6:.1f} MB, {seconds:.1f} s")
        self.say(f"dropped {duplicates} exact duplicates")

    def texts(self, rows: list[Staged]) -> Iterator[list[tuple[str, str]]]:
        """Yield batches of (text, scored text), each about BATCH_BYTES long."""
        with open(self.folder / "stage", "rb") as file:
            batch, size = [], 0
            for row in rows:
                file.seek(row.start)
                content = file.read(row.size + row.scored)
                batch.append((content[: row.size].decode(), content[row.size :].decode()))
                size += len(content)
                if size >= BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
            if batch:
                yield batch

    # ------------------------------------------------------------ 2. weights and tokenizer
    def choose_tokenizer(self, name: str | Path, weights: dict[str, float] | None) -> None:
        """Fix the domains' weights, and train or read the tokenizer."""
        start = time.perf_counter()
        sizes = {
            domain.removeprefix("train/"): sum(row.size for row in rows)
            for domain, rows in sorted(self.staged.items())
            if domain.startswith("train/") and rows
        }
        given = weights or self.origin.weights or sizes
        unknown = set(weights or ()) - set(sizes)
        if unknown or not sum(given.get(domain, 0) for domain in sizes) > 0:
            bad = ", ".join(sorted(unknown)) or "none of them positive"
            raise DataError(f"weights: {bad}; the domains are {', '.join(sizes)}")
        total = sum(given.get(domain, 0) for domain in sizes)
        self.weights = {d: given[d] / total for d in sizes if given.get(d, 0) > 0}
        if str(name) in BPE_SIZES:
            self.tokenizer = train_bpe(self.sample(), BPE_SIZES[str(name)], str(name))
        elif Path(name).exists():
            self.tokenizer = read_tokenizer(name)
        else:
            self.tokenizer = packaged(str(name), quiet=self.quiet)
        _save(self.folder / "tokenizer.json", self.tokenizer.to_json())
        self.say(f"tokenizer {self.tokenizer.name}: {time.perf_counter() - start:.1f} s")

    def sample(self) -> Iterator[str]:
        """Yield training documents in the order of their hashes, of each domain as it weighs."""
        for domain, weight in self.weights.items():
            left, chosen = weight * SAMPLE_BYTES, []
            for row in self.staged[f"train/{domain}"]:
                if left > 0:
                    chosen.append(row)
                    left -= row.size
            for batch in self.texts(chosen):
                yield from (text for text, _ in batch)

    # ------------------------------------------------------------ 3. tokens
    def write(self, context: int, contamination: bool) -> None:
        """Encode every split; held-out splits first: training text is checked against them."""
        names = [name for name, rows in self.staged.items() if rows]
        names.sort(key=lambda name: (name.startswith("train/"), name))
        overlap = _Overlap() if contamination else None
        for name in names:
            start = time.perf_counter()
            is_train = name.startswith("train/")
            if is_train and name.removeprefix("train/") not in self.weights:
                continue
            row = self.rows[name] = self.write_split(name, overlap, is_train)
            if is_train and row["tokens"] < context + 1:
                message = f"{name.removeprefix('train/')!r} has {row['tokens']} training tokens"
                raise DataError(f"{message}, shorter than one context of {context}: use more text")
            seconds = time.perf_counter() - start
            self.say(
                f"{name:16s} {row['documents']:7,} documents {row['bytes'] / 1e6:8.2f} MB "
                f"{row['tokens']:11,} tokens {seconds:6.1f} s"
            )
        self.report = overlap.report() if overlap else {}

    def write_split(self, name: str, overlap: _Overlap | None, is_train: bool) -> dict[str, Any]:
        """Write the files of one split and return its row of the manifest."""
        rows, (eot, vocab_size) = self.staged[name], (self.tokenizer.eot, self.tokenizer.vocab_size)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lengths, scored_from = [], []
        with open(f"{path}.tokens", "wb") as file:
            for batch in self.texts(rows):
                encoded = self.tokenizer.encode_batch([text for text, _ in batch])
                for ids, (_, scored) in zip(encoded, batch, strict=True):
                    scored_from.append(len(ids) + 1)
                    if scored:
                        ids.extend(self.tokenizer.encode(scored))
                    lengths.append(len(ids) + 1)
                _append(file, pack(encoded, eot, vocab_size)[0])
                if overlap:
                    overlap.add([text + scored for text, scored in batch], name, is_train)
        files = [f"{name}.tokens"]
        scored_bytes = [row.scored or row.size for row in rows]
        has_scored = any(row.scored for row in rows)
        if not is_train:
            arrays = {"documents": np.cumsum([0, *lengths]), "bytes": scored_bytes}
            arrays |= {"scored": scored_from} if has_scored else {}
            for kind, values in arrays.items():
                files.append(f"{name}.{kind}")
                with open(self.folder / files[-1], "wb") as file:
                    _append(file, np.asarray(values, dtype=np.int64))
        return {
            "documents": len(rows),
            "tokens": sum(lengths),
            "bytes": sum(scored_bytes),
            "scored": has_scored,
            "sha256": {file: sources.file_sha256(self.folder / file) for file in files},
        }

    # ------------------------------------------------------------ 4. manifest
    def finish(self, request: dict[str, Any], source: str) -> None:
        """Write contamination.json and, last, manifest.json; remove the staging file."""
        (self.folder / "stage").unlink()
        tokenizer = self.tokenizer
        content = {
            "dtype": token_dtype(tokenizer.vocab_size).name,
            "vocab_size": tokenizer.vocab_size,
            "weights": self.weights,
            "tokenizer": {
                "name": tokenizer.name,
                "eot": tokenizer.eot,
                "sha256": tokenizer.sha256,
            },
            "splits": self.rows,
        }
        canonical = json.dumps(content, sort_keys=True).encode()
        manifest = {
            "source": source,
            "fingerprint": hashlib.sha256(canonical).hexdigest(),
            **content,
            "packages": self.origin.packages,
            "missing": self.origin.missing,
            "contamination": {
                name: {key: value for key, value in row.items() if key != "shared_with_train"}
                for name, row in self.report.items()
            },
            "lmgeom": __version__,
            "request": request,
        }
        _save(self.folder / "contamination.json", json.dumps(self.report, indent=1))
        _save(self.folder / "manifest.json", json.dumps(manifest, indent=1))
        if self.origin.missing:
            self.say(f"missing: {', '.join(self.origin.missing)}")


class _Overlap:
    """13-grams that held-out splits share with the training text."""

    def __init__(self) -> None:
        self.held_out: dict[str, list[np.ndarray]] = {}
        self.train_documents: dict[str, int] = {}
        self.grams: np.ndarray | None = None

    def add(self, texts: list[str], name: str, is_train: bool) -> None:
        """Take in the next documents of a split; all held-out splits come before training text."""
        found = [ngrams(text) for text in texts]
        if not is_train:
            self.held_out.setdefault(name, []).extend(found)
            return
        every = self._index() if self.grams is None else self.grams
        document = np.repeat(np.arange(len(found)), [len(grams) for grams in found])
        grams = np.concatenate(found)
        known = self.filter[grams & np.uint64(len(self.filter) - 1)]  # most runs stop here
        grams, document = grams[known], document[known]
        place = np.minimum(np.searchsorted(every, grams), len(every) - 1)
        hit = every[place] == grams
        self.shared[place[hit]] = True
        for bit, split in enumerate(self.held_out):
            of_split = self.member[place[hit]] >> np.uint64(bit) & np.uint64(1) > 0
            n = len(np.unique(document[hit][of_split]))
            self.train_documents[split] = self.train_documents.get(split, 0) + n

    def _index(self) -> np.ndarray:
        sets = {name: np.concatenate([*rows, _NO_GRAMS]) for name, rows in self.held_out.items()}
        self.grams = every = np.unique(np.concatenate([*sets.values(), np.zeros(1, np.uint64)]))
        self.member = np.zeros(len(every), dtype=np.uint64)
        for bit, grams in enumerate(sets.values()):
            self.member[np.searchsorted(every, grams)] |= np.uint64(1 << bit)
        self.shared = np.zeros(len(every), dtype=bool)
        self.filter = np.zeros(1 << 24, dtype=bool)
        self.filter[every & np.uint64(len(self.filter) - 1)] = True
        return every

    def report(self) -> dict[str, dict[str, Any]]:
        """Count, for each held-out split, what it shares with the training text."""
        every = self._index() if self.grams is None else self.grams
        rows = {}
        for name, documents in self.held_out.items():
            shared = [self.shared[np.searchsorted(every, grams)] for grams in documents]
            indices = [i for i, flags in enumerate(shared) if flags.any()]
            rows[name] = {
                "documents": len(documents),
                "documents_sharing": len(indices),
                "grams": sum(map(len, documents)),
                "grams_shared": int(sum(flags.sum() for flags in shared)),
                "train_documents_sharing": self.train_documents.get(name, 0),
                "shared_with_train": indices,
            }
        return rows


_NO_GRAMS = np.empty(0, dtype=np.uint64)


def _append(file: BinaryIO, content: bytes | np.ndarray) -> None:
    file.write(content if isinstance(content, bytes) else memoryview(content.data).cast("B"))


def _save(path: Path, text: str) -> None:
    with open(path, "wb") as file:
        _append(file, text.encode())
