"""Prepared folders: what is in them, and that nothing half-written ever is."""

import errno
import json
import os
import threading

import numpy as np
import pytest

from lmgeom.data import build, load, ngrams, prepare, sources
from lmgeom.data.packages import Document, Package
from lmgeom.data.tokenizers import Tokenizer, byte_tokenizer
from lmgeom.errors import DataError

N = 60
SHARED = 7
CACHE = os.environ.get("LMGEOM_CACHE")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LMGEOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def letters(tmp_path):
    """A tokenizer file: the bytes and the end of text."""
    path = tmp_path / "bytes.json"
    path.write_text(byte_tokenizer().to_json())
    return path


def toy_documents(archive):
    for i in range(N):
        yield Document("wiki", f"Article {i} of the toy. " + f"word{i} " * 30)
        yield Document("code", f"def f_{i}(x):\n    return x + {i}\n" * 8)
    yield Document("wiki", "Article 0 of the toy. " + "word0 " * 30)  # a duplicate
    yield Document("wiki_ood", "unseen " * 5 + " ".join(f"alien{i}" for i in range(40)), "held_out")
    yield Document("wiki_ood", "Quoting: " + f"word{SHARED} " * 20, "held_out")
    yield Document("lambada", "The last word is", "held_out", " naïve")


@pytest.fixture
def toy(cache, monkeypatch):
    path = cache / "downloads" / "toy.tgz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"toy")
    sha256 = sources.file_sha256(path)
    package = Package("toy", "1.0", "npm", "toy.tgz", sha256, "none", toy_documents)
    made = sources.Packages("a toy", (package,), {"wiki": 0.3, "code": 0.1, "math": 0.6})
    monkeypatch.setitem(sources.SOURCES, "toy", made)
    return "toy"


def leftovers(folder):
    return [p.name for p in folder.iterdir() if not p.name.endswith(".lock")]


def test_folder_holds_what_the_source_holds(toy, letters, capsys):
    folder = prepare(toy, tokenizer=letters, context=32)
    assert folder.name == "toy-bytes"
    prepared = load(folder)
    assert list(prepared.train) == ["code", "wiki"]
    assert prepared.weights == {"code": pytest.approx(0.25), "wiki": pytest.approx(0.75)}
    names = {f"{split}/{d}" for split in ("val", "test") for d in ("code", "wiki")}
    assert set(prepared.splits) == {*names, "wiki_ood", "lambada"}
    rows = prepared.manifest["splits"]
    assert sum(rows[f"{s}/wiki"]["documents"] for s in ("train", "val", "test")) == N
    assert prepared.manifest["packages"][0]["documents"] == 2 * N + 4
    decode = prepared.tokenizer.decode
    text = "".join(map(decode, prepared.train.values()))
    for split in ("val", "test"):
        text += "".join(decode(prepared.splits[f"{split}/{d}"].tokens) for d in ("code", "wiki"))
    expected = {d.text for d in toy_documents(None) if d.split is None}
    assert set(text.split("<|endoftext|>")[1:]) == expected
    assert "train/wiki" in capsys.readouterr().err


def test_scored_part_of_lambada(toy, letters):
    last = load(prepare(toy, tokenizer=letters, context=32, quiet=True)).splits["lambada"]
    document, decode = last.document(0), byte_tokenizer().decode
    assert decode(document[1 : last.score_from[0]]) == "The last word is"
    assert decode(document[last.score_from[0] :]) == " naïve"
    assert last.bytes.tolist() == [len(" naïve".encode())]


def test_contamination_is_counted(toy, letters):
    folder = prepare(toy, tokenizer=letters, context=32, quiet=True)
    prepared = load(folder)
    row = prepared.manifest["contamination"]["wiki_ood"]
    runs = len(ngrams("Quoting: " + f"word{SHARED} " * 20))
    assert row["documents"] == 2
    assert row["documents_sharing"] == 1
    assert row["grams_shared"] == runs - 1  # all but the run with "Quoting"
    assert row["train_documents_sharing"] == 1
    report = json.loads((folder / "contamination.json").read_text())
    assert report["wiki_ood"]["shared_with_train"] == [1]
    assert prepared.manifest["contamination"]["lambada"]["documents_sharing"] == 0


def test_same_source_gives_the_same_bytes(toy, letters, tmp_path):
    first = prepare(toy, tmp_path / "a", tokenizer=letters, context=32, quiet=True)
    second = prepare(toy, tmp_path / "b", tokenizer=letters, context=32, quiet=True)
    assert load(first).fingerprint == load(second).fingerprint
    files = [p.relative_to(first) for p in first.rglob("*") if p.is_file()]
    assert len(files) > 20
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_other_data_has_another_fingerprint(toy, letters, tmp_path):
    fingerprints = {
        load(
            prepare(toy, tmp_path / str(i), tokenizer=letters, context=32, quiet=True, **options)
        ).fingerprint
        for i, options in enumerate(
            [{}, {"weights": {"wiki": 1.0, "code": 1.0}}, {"max_bytes": 9000}, {"held_out": False}]
        )
    }
    assert len(fingerprints) == 4


def test_prepared_once_then_found_again(toy, letters, monkeypatch):
    folder = prepare(toy, tokenizer=letters, context=32, quiet=True)
    monkeypatch.setattr(build.sources, "documents", None)  # not called again
    assert prepare(toy, tokenizer=letters, context=32, quiet=True) == folder
    with pytest.raises(DataError, match="prepared with max_bytes = None, not 5"):
        prepare(toy, tokenizer=letters, max_bytes=5)


def test_a_prepared_folder_opens_as_a_corpus(toy, letters, tmp_path, monkeypatch):
    folder = prepare(toy, tmp_path / "mine", tokenizer=letters, context=32, quiet=True)
    monkeypatch.setattr(build, "prepare", None)  # not called
    assert build.corpus(folder).fingerprint == load(folder).fingerprint


def test_missing_package_is_told_again(cache, letters, monkeypatch, toy, capsys):
    absent = Package("absent", "1.0", "npm", "absent.tgz", "0" * 64, "none", toy_documents)
    monkeypatch.setenv("PATH", "")
    made = sources.Packages("a toy", (*sources.SOURCES["toy"].packages, absent), {"wiki": 1.0})
    monkeypatch.setitem(sources.SOURCES, "toy", made)
    folder = prepare(toy, tokenizer=letters, context=32)
    assert load(folder).manifest["missing"] == ["absent"]
    assert "missing: absent" in capsys.readouterr().err
    prepare(toy, tokenizer=letters, context=32)
    assert "prepared without absent; delete it to try again" in capsys.readouterr().err


def test_foreign_folder_is_left_alone(toy, letters, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match=r"not a prepared folder: .*, then prepare it again"):
        prepare(toy, tmp_path / "mine", tokenizer=letters)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("share", [0.0, 0.5, 0.85, 0.95, 1.0])
def test_full_disk_leaves_nothing(toy, letters, tmp_path, monkeypatch, share):
    append, written, capacity = build._append, 0, 10**9

    def until_full(file, content):
        nonlocal written
        written += 1
        if written > capacity:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(file, content)

    monkeypatch.setattr(build, "_append", until_full)
    prepare(toy, tmp_path / "whole", tokenizer=letters, context=32, quiet=True)
    capacity, written = int(share * (written - 1)), 0
    out = tmp_path / "out" / "x"
    with pytest.raises(DataError, match="No space left on device; nothing was written") as caught:
        prepare(toy, out, tokenizer=letters, context=32, quiet=True)
    assert "\n" not in str(caught.value)
    assert leftovers(out.parent) == []
    capacity = 10**9
    load(prepare(toy, out, tokenizer=letters, context=32, quiet=True))


def test_leftover_of_a_killed_process_is_replaced(toy, letters, tmp_path):
    (tmp_path / "out" / ".x.partial").mkdir(parents=True)
    (tmp_path / "out" / ".x.partial" / "stage").write_text("half")
    load(prepare(toy, tmp_path / "out" / "x", tokenizer=letters, context=32, quiet=True))
    assert leftovers(tmp_path / "out") == ["x"]


def test_second_waits_for_the_first(tmp_path):
    inside = threading.Event()

    def second():
        with sources.locked(tmp_path / "x"):
            inside.set()

    with sources.locked(tmp_path / "x"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not inside.wait(0.2)
    assert inside.wait(30)
    thread.join()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b"a\xffb", "not UTF-8, byte 0xff at offset 1"),
        (b"short", "shorter than one context of 256"),
    ],
)
def test_text_that_cannot_be_used_leaves_nothing(tmp_path, letters, content, message):
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(path, tmp_path / "out" / "x", tokenizer=letters, quiet=True)
    assert leftovers(tmp_path / "out") == []


def test_own_file_from_end_to_end(tmp_path, letters):
    path = tmp_path / "mine.txt"
    lines = (f"Paragraph {i}. " + "word " * 100 for i in range(200))
    path.write_text("\n\n".join(lines))
    prepared = load(prepare(path, tokenizer=letters, quiet=True))
    assert list(prepared.train) == ["text"]
    assert set(prepared.splits) == {"val/text", "test/text"}
    x, _ = prepared.batch(0, 0, 2, 64)
    assert x.shape == (2, 64)
    path.write_text("changed " * 5000)
    with pytest.raises(DataError, match="was prepared with other files"):
        prepare(path, tokenizer=letters, quiet=True)


def test_own_path_is_one_request_however_it_is_spelled(tmp_path, letters, monkeypatch):
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "my-texts" / "a.txt").write_text("many words " * 500)
    monkeypatch.chdir(tmp_path)
    folder = prepare("my-texts", tokenizer=letters, quiet=True)
    assert folder.name == "my-texts-bytes"
    for source in ("my-texts/", "./my-texts", tmp_path / "my-texts"):
        assert prepare(source, tokenizer=letters, quiet=True) == folder
    monkeypatch.chdir("my-texts")
    assert prepare(".", tokenizer=letters, quiet=True) == folder


def test_one_document_is_all_training(tmp_path, letters):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"text": "only one document " * 50}))
    prepared = load(prepare(path, tokenizer=letters, quiet=True))
    assert prepared.splits == {}
    assert len(prepared.train["text"]) == 901


def test_bad_requests(toy, letters, cache):
    with pytest.raises(DataError, match="unknown source 'tokenizers'"):
        prepare("tokenizers", tokenizer=letters)
    with pytest.raises(DataError, match="unknown tokenizer 'gpt5'"):
        prepare(toy, tokenizer="gpt5", quiet=True)
    assert not (cache / "prepared").exists()
    with pytest.raises(DataError, match="weights: latin; the domains are code, wiki"):
        prepare(toy, tokenizer=letters, weights={"latin": 1.0}, quiet=True)
    with pytest.raises(DataError, match="fewer than 16384"):
        prepare(toy, quiet=True)


@pytest.mark.parametrize("name", ["train/wiki.tokens", "val/code.documents", "lambada.scored"])
def test_truncated_file_is_refused_by_name(toy, letters, name):
    folder = prepare(toy, tokenizer=letters, context=32, quiet=True)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{name} has \d+ bytes, the manifest says \d+"):
        load(folder)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        load(folder)


def test_not_a_prepared_folder(tmp_path):
    with pytest.raises(DataError, match=r"no readable manifest\.json"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(DataError, match=r"no readable manifest\.json"):
        load(tmp_path)


def test_wide_vocabulary_is_stored_in_32_bits(toy, tmp_path):
    letters = byte_tokenizer()
    wide = Tokenizer("wide", letters.ranks, letters.pattern, 99_999, 100_000)
    (tmp_path / "wide.json").write_text(wide.to_json())
    prepared = load(prepare(toy, tokenizer=tmp_path / "wide.json", context=32, quiet=True))
    assert prepared.train["wiki"].dtype == np.uint32
    assert prepared.frequencies()[99_999] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": None}, "no readable manifest"),
        ({"splits": {"train/wiki": 3}}, "no readable manifest"),
        ({"splits": {"val/wiki": {"tokens": None}}}, "no readable manifest"),
        ({"weights": 1}, "no readable manifest"),
        ({"weights": {"code": 0.5, "wiki": "half"}}, "no readable manifest"),
        ({"weights": {"wiki": 1.0}}, "do not fit the domains code, wiki"),
        ({"weights": {"code": -0.5, "wiki": 1.5}}, "do not fit the domains code, wiki"),
        ({"vocab_size": "257"}, "no readable manifest"),
        ({"vocab_size": 257.0}, r"vocab_size 257\.0, dtype 'uint16'"),
        ({"vocab_size": 256}, "vocab_size 256, but the tokenizer has 257 ids"),
        ({"dtype": "float64"}, "dtype 'float64'"),
    ],
)
def test_wrong_manifest_is_refused(toy, letters, change, message):
    folder = prepare(toy, tokenizer=letters, context=32, quiet=True)
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("place", "value"), [(0, 1), (1, 0), (1, -1), (-1, 10**6)])
def test_offsets_that_do_not_rise_are_refused(toy, letters, place, value):
    folder = prepare(toy, tokenizer=letters, context=32, quiet=True)
    path = folder / "val" / "wiki.documents"
    offsets = np.fromfile(path, dtype=np.int64)
    offsets[place] = value
    offsets.tofile(path)
    with pytest.raises(DataError, match=rf"wiki\.documents: .*; delete {folder}, then prepare it"):
        load(folder)


@pytest.mark.skipif("LMGEOM_TEST_CORE" not in os.environ, reason="needs the fetched core")
class TestCore:
    """The real core, which `make test` prepares; it sets LMGEOM_TEST_CORE=1."""

    @pytest.fixture(autouse=True)
    def real_cache(self, monkeypatch):
        if CACHE:
            monkeypatch.setenv("LMGEOM_CACHE", CACHE)
        else:
            monkeypatch.delenv("LMGEOM_CACHE")

    @pytest.fixture
    def core(self):
        from lmgeom.data import corpus

        return corpus(quiet=True)

    def test_domains_and_sizes(self, core):
        assert core.domains == ["books", "code", "dialogue", "essays", "law", "wiki"]
        assert core.vocab_size == 16384
        assert sum(map(len, core.train.values())) > 15_000_000
        assert sum(core.weights.values()) == pytest.approx(1)
        assert len(core.splits["lambada"]) == 5153
        assert core.manifest["missing"] == []
        assert core.manifest["request"]["source"] == "minipile-core"

    def test_held_out_sets_share_nothing_with_training(self, core):
        report = core.manifest["contamination"]
        assert report["wiki_ood"]["documents_sharing"] == 0
        assert report["lambada"]["documents_sharing"] == 0
        assert report["c4_ood"]["documents_sharing"] <= 4

    def test_random_reads_do_not_starve_a_model(self, core):
        import time

        core.batch(0, 0, 16, 256)
        start = time.process_time()
        for step in range(100):
            core.batch(0, step, 16, 256)
        tokens_per_second = 100 * 16 * 256 / (time.process_time() - start)
        assert tokens_per_second > 1e6  # about 50 million; a training step takes 4,096 in 10 ms

    @pytest.mark.parametrize(
        ("name", "ids"),  # of "Hello, world!", as the vocabularies' own libraries give them
        [
            ("gpt2", [15496, 11, 995, 0]),
            ("cl100k", [9906, 11, 1917, 0]),
            ("o200k", [13225, 11, 2375, 0]),
            ("llama3", [9906, 11, 1917, 0]),
            ("tekken", [22177, 1044, 4304, 1033]),
        ],
    )
    def test_packaged_vocabularies(self, core, name, ids):
        from lmgeom.data import packaged

        tokenizer = packaged(name)
        wiki = core.tokenizer.decode(core.splits["wiki_ood"].tokens[1:20_000])
        assert tokenizer.encode("Hello, world!") == ids
        ids = tokenizer.encode(wiki)
        assert tokenizer.decode(ids) == wiki
        assert max(ids) < tokenizer.vocab_size
        assert 3.5 < len(wiki.encode()) / len(ids) < 4.6
        assert len(set(tokenizer.ranks.values())) == len(tokenizer.ranks)
        assert tokenizer.eot not in tokenizer.tokens
