"""Splits, windows, batches, 13-grams, corpora in memory."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgeom.data import from_text, ngrams, synthetic
from lmgeom.data.tokens import assign_splits, document_hash, pack, token_dtype, uniforms
from lmgeom.errors import DataError

seeds = st.integers(0, 2**63 - 1)


def test_hash_is_the_head_of_sha256():
    assert f"{document_hash('a'):016x}" == hashlib.sha256(b"a").hexdigest()[:16]


@given(st.integers(0, 400), seeds)
def test_splits_partition_and_hold_out_the_smallest_hashes(n, seed):
    hashes = np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64)
    codes = assign_splits(hashes)
    counts = np.bincount(codes, minlength=3)
    assert counts.sum() == n
    if n < 3:
        assert counts[0] == n
    else:
        assert counts.min() >= 1
        assert hashes[codes == 1].max() <= hashes[codes == 2].min()
        assert hashes[codes == 2].max() <= hashes[codes == 0].min()


def test_a_large_domain_holds_out_one_percent_each():
    hashes = np.random.default_rng(0).integers(0, 2**64, 100_000, dtype=np.uint64)
    shares = np.bincount(assign_splits(hashes)) / 100_000
    assert shares == pytest.approx([0.98, 0.01, 0.01], abs=1e-3)


def test_split_of_a_document_does_not_depend_on_its_place():
    hashes = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    order = np.random.default_rng(1).permutation(1000)
    assert np.array_equal(assign_splits(hashes)[order], assign_splits(hashes[order]))


@given(seeds, seeds)
def test_uniforms_depend_on_seed_and_step_alone(seed, step):
    first = uniforms(seed, step, 8)
    assert np.array_equal(first, uniforms(seed, step, 8))
    assert np.array_equal(first[:4], uniforms(seed, step, 4))
    assert not np.array_equal(first, uniforms(seed, step + 1, 8))
    assert not np.array_equal(first, uniforms(seed + 1, step, 8))
    assert ((first >= 0) & (first < 1)).all()


def test_uniforms_are_pinned():
    """A change here changes the data order of every recorded run."""
    assert (uniforms(1, 2, 2) * 2**53).astype(np.int64).tolist() == PINNED


PINNED = [6769902246321800, 8594745862910234]


def test_uniforms_are_uniform():
    values = np.concatenate([uniforms(0, step, 100) for step in range(1000)])
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 150  # chi-squared, 99 degrees of freedom


def test_batch_is_a_window_of_its_domain():
    corpus = synthetic(domains=2)
    x, y = corpus.batch(3, 5, 16, 32)
    assert x.shape == y.shape == (16, 32)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    for row, last, (name, start) in zip(x, y[:, -1], corpus.windows(3, 5, 16, 32), strict=True):
        window = corpus.train[name][start : start + 33]
        assert row.tolist() == window[:-1].tolist()
        assert last == window[-1]


def test_domains_come_by_weight_and_every_window_can_come():
    corpus = synthetic(n_tokens=200, domains=2)
    object.__setattr__(corpus, "weights", {"a": 0.8, "b": 0.2})
    chosen = [window for step in range(500) for window in corpus.windows(0, step, 8, 150)]
    share = np.mean([name == "a" for name, _ in chosen])
    assert share == pytest.approx(0.8, abs=0.03)
    starts = {start for name, start in chosen if name == "a"}
    assert starts == set(range(len(corpus.train["a"]) - 150))


def test_domain_shorter_than_a_window():
    corpus = synthetic(n_tokens=200, domains=1)
    n = len(corpus.train["a"])
    assert corpus.batch(0, 0, 1, n - 1)[0].shape == (1, n - 1)
    with pytest.raises(DataError, match=f"'a' has {n} tokens, a window needs {n + 1}"):
        corpus.batch(0, 0, 1, n)


def test_frequencies_count_the_training_tokens_once():
    corpus = synthetic(vocab_size=50)
    counts = corpus.frequencies()
    assert counts.shape == (50,)
    assert counts.dtype == np.int64
    assert counts.sum() == sum(map(len, corpus.train.values()))
    assert corpus._counts is corpus._counts


def test_shares_are_those_of_what_training_reads():
    """Domain by weight, not by size: the batches themselves are the other route."""
    corpus = dataclasses.replace(synthetic(vocab_size=50), weights={"a": 0.9, "b": 0.1})
    corpus.train["a"][:] = np.where(corpus.train["a"] == 7, 8, corpus.train["a"])
    shares = corpus.shares()
    assert shares.sum() == pytest.approx(1)
    assert shares[7] == pytest.approx(0.1 * np.mean(corpus.train["b"] == 7))
    read = np.zeros(50)
    for step in range(200):
        read += np.bincount(corpus.batch(0, step, 64, 16)[0].ravel(), minlength=50)
    assert np.abs(read / read.sum() - shares).max() < 0.004
    assert np.abs(corpus.frequencies() / corpus.frequencies().sum() - shares).max() > 0.004


def test_synthetic_is_determined_by_its_arguments():
    first, again, other = synthetic(seed=1), synthetic(seed=1), synthetic(seed=2)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert np.array_equal(first.train["a"], again.train["a"])
    assert first.train["a"].max() == first.vocab_size - 1


def test_documents_begin_with_the_end_of_text():
    corpus = synthetic()
    for split in corpus.splits.values():
        assert split.documents[-1] == len(split.tokens)
        for i in range(len(split)):
            document = split.document(i)
            assert document[0] == corpus.vocab_size - 1
            assert (document[1:] < corpus.vocab_size - 1).all()
    last = corpus.splits["lambada"]
    assert (last.score_from == np.diff(last.documents) - 1).all()


def test_type_is_the_smallest_that_fits():
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32
    tokens, offsets = pack([[1, 2], [], [70_000]], 99_999, 100_000)
    assert tokens.tolist() == [99_999, 1, 2, 99_999, 99_999, 70_000]
    assert offsets.tolist() == [0, 3, 4, 6]


def test_from_text_keeps_every_byte():
    texts = [f"document {i}: naïve café\n" * 5 for i in range(50)]
    corpus = from_text(texts)
    splits = corpus.splits.values()
    assert sum(s.bytes.sum() for s in splits) + len(corpus.train["text"]) == (
        sum(len(t.encode()) for t in texts) + sum(corpus.train["text"] == 256)
    )
    held = corpus.splits["val/text"]
    assert corpus.tokenizer.decode(held.document(0)[1:]) in texts
    with pytest.raises(DataError, match="at least 3"):
        from_text(["one", "two"])


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(1, 6))
def test_ngrams_agree_with_comparing_the_words(words, n):
    found = ngrams(" ".join(words), n)
    runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    assert len(found) == len(runs)
    assert len(set(found.tolist())) == len(set(runs))


def test_ngrams_ignore_case_and_punctuation():
    assert np.array_equal(ngrams("To be, or NOT to be!", 3), ngrams("to be or not to be", 3))
