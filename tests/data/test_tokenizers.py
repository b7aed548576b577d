"""Tokenizers: round trips, agreement with the library that trained them, files."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Trained
from tokenizers import models, pre_tokenizers, trainers

from lmgeom.data import Tokenizer, byte_tokenizer, packaged, read_tokenizer, train_bpe
from lmgeom.data.tokenizers import byte_alphabet, check_name
from lmgeom.errors import DataError

TEXTS = [
    "The hare had not won: the tortoise won, though the hare ran faster than the tortoise.\n",
    "Naïve café, 2026 — x**2 + y**2\tdef f(x):\n    return x  # 它 also works\n\n\n",
    "I'll say what they've said; don't ask <|endoftext|> again and again and again.",
] * 3


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(TEXTS, 300, "small")


def test_byte_alphabet_is_a_bijection():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert not any(c.isspace() for c in alphabet)


def test_ids_are_those_of_the_library_that_trained_it(bpe):
    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=299, initial_alphabet=sorted(byte_alphabet()), show_progress=False
    )
    trained.train_from_iterator(TEXTS, trainer)
    for text in TEXTS:
        assert bpe.encode(text) == trained.encode(text).ids


@given(st.text())
def test_decoding_gives_the_text_back(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_shorten_the_text_and_lose_nothing(bpe):
    for text in TEXTS:
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert len(ids) < len(text.encode())
    assert bpe.bytes_per_token(TEXTS) > 1.2


def test_special_text_in_a_document_is_ordinary_text(bpe):
    ids = bpe.encode("<|endoftext|>")
    assert bpe.eot not in ids
    assert bpe.decode([bpe.eot]) == "<|endoftext|>"
    assert bpe.eot == bpe.vocab_size - 1 == 299


def test_batch_does_not_depend_on_threads(bpe):
    assert bpe.encode_batch(TEXTS, 1) == bpe.encode_batch(TEXTS, 2) == [*map(bpe.encode, TEXTS)]


def test_training_is_deterministic(bpe):
    assert train_bpe(TEXTS, 300, "small").sha256 == bpe.sha256


def test_too_many_merges_are_refused():
    with pytest.raises(DataError, match="fewer than 16384"):
        train_bpe(TEXTS, 16384)


def test_truncated_is_a_smaller_training(bpe):
    smaller = train_bpe(TEXTS, 280, "small")
    assert bpe.truncated(280).ranks == smaller.ranks
    assert bpe.truncated(280).encode(TEXTS[0]) == smaller.encode(TEXTS[0])


def test_file_round_trip(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.to_json(), "utf-8")
    again = read_tokenizer(tmp_path)
    assert (again.ranks, again.eot, again.sha256) == (bpe.ranks, bpe.eot, bpe.sha256)
    path.write_text('{"tokens": []}', "utf-8")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        read_tokenizer(path)
    with pytest.raises(DataError, match="no such tokenizer"):
        read_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 7}, "name=7: must be a string"),
        ({"pattern": None}, "pattern=None: must be a string"),
        ({"pattern": ""}, "pattern='': must be a string that is not empty"),
        ({"vocab_size": "9"}, "vocab_size='9': must be an integer from 257 to 4294967296"),
        ({"vocab_size": 256}, "vocab_size=256: must be an integer from 257"),
        ({"vocab_size": 2**40}, f"vocab_size={2**40}: must be an integer from 257"),
        ({"first": -5}, "first=-5: must be an integer from 0 to 44"),
        ({"first": 2**40}, f"first={2**40}: must be an integer from 0 to 44"),
        ({"first": True}, "first=True: must be an integer"),
        ({"eot": "x"}, "eot='x': must be an integer from 0 to 299"),
        ({"eot": -1}, "eot=-1: must be an integer from 0 to 299"),
        ({"eot": 300}, "eot=300: must be an integer from 0 to 299"),
        ({"eot": 255}, "eot=255: is the id of a token"),
        ({"tokens": []}, r"tokens: the byte b'\x00' is missing"),
        ({"tokens": "AAAA"}, "not a tokenizer that lmgeom wrote"),
        ({"tokens": [1]}, "not a tokenizer that lmgeom wrote"),
    ],
)
def test_damaged_values_are_named(change, message, tmp_path):
    stored = json.loads(byte_tokenizer().to_json()) | {"vocab_size": 300, "eot": 299}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(stored))
    assert read_tokenizer(path).vocab_size == 300
    path.write_text(json.dumps(stored | change))
    with pytest.raises(DataError, match=re.escape(f"{path}: {message}")):
        read_tokenizer(path)


def test_damaged_tokens_and_files_are_refused():
    stored = json.loads(byte_tokenizer().to_json())
    stored["tokens"].append(stored["tokens"][7])
    with pytest.raises(DataError, match="a token stands there twice"):
        Tokenizer.from_json(json.dumps(stored))
    for content in ("[" * 100_000, "[]", b"\xff\xfe{", '{"name": '):
        with pytest.raises(DataError, match="not a tokenizer that lmgeom wrote"):
            Tokenizer.from_json(content)


def test_a_damaged_pattern_is_named():
    stored = json.loads(byte_tokenizer().to_json()) | {"pattern": "(a"}
    with pytest.raises(DataError, match=r"bytes: pattern '\(a': must be a regular expression"):
        Tokenizer.from_json(json.dumps(stored)).encode("a")


@pytest.mark.parametrize("pattern", ["a*", "(?=b)"])
def test_a_pattern_that_matches_nothing_at_all_is_refused(pattern):
    stored = json.loads(byte_tokenizer().to_json()) | {"pattern": pattern}
    tokenizer = Tokenizer.from_json(json.dumps(stored))
    for encode, text in ((tokenizer.encode, "bb"), (tokenizer.encode_batch, ["bb"])):
        with pytest.raises(DataError, match=r"bytes: pattern .*: must not match an empty string"):
            encode(text)


def test_unknown_names_and_ids(bpe):
    with pytest.raises(DataError, match="gpt2, cl100k"):
        packaged("gpt5")
    with pytest.raises(DataError, match="unknown tokenizer 'gpt5': choose from bpe-8k"):
        check_name("gpt5")
    with pytest.raises(DataError, match="id 300"):
        bpe.decode([0, 300])
