"""Evaluation: each token once, with the context we say, and an error that means what it says."""

import math

import numpy as np
import pytest
import torch

from lmgeom.data import Split, synthetic
from lmgeom.errors import ConfigError, DataError
from lmgeom.lm.config import Config
from lmgeom.lm.evaluate import Losses, choose, evaluate, losses, ratio, summarize, windows
from lmgeom.lm.model import LanguageModel

CONTEXT = 16
DATA = synthetic(64, seed=0, n_tokens=2000)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = LanguageModel(Config(64, 16, 2, 2, CONTEXT, 32, head="untied"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.mark.parametrize("first", [1, 2, 30])
@pytest.mark.parametrize("overlap", [1, 5, 8, 16])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 25, 31, 64])
def test_windows_score_each_token_once_with_its_context(length, overlap, first):
    cuts = windows(length, CONTEXT, overlap, first)
    scored = [position for _, stop, score in cuts for position in range(score, stop)]
    assert scored == list(range(first, length))
    for start, stop, score in cuts:
        assert start >= 0
        assert stop - 1 - start <= CONTEXT
        assert score - start >= min(overlap, score)


def test_the_whole_document_is_the_context_where_it_fits():
    assert windows(17, 16, 1) == [(0, 17, 1)]
    assert windows(100, 16, 8, first=99) == [(83, 100, 99)]


def brute(model, document, cuts):
    """Losses of a document, one window and one token at a time."""
    found = []
    for start, stop, score in cuts:
        for position in range(score, stop):
            ids = torch.tensor(document[start:position].astype(np.int64))[None]
            logits = model(ids)[0, -1]
            found.append(torch.log_softmax(logits, 0)[int(document[position])].neg().item())
    return found


@torch.no_grad()
@pytest.mark.parametrize(("name", "batch_size"), [("val/a", 1), ("val/b", 7), ("lambada", 32)])
def test_losses_equal_one_token_at_a_time(model, name, batch_size):
    split = DATA.splits[name]
    found = losses(model, split, batch_size=batch_size, chunk=5)
    expected, targets, documents = [], [], []
    for i in range(len(split)):
        document = split.document(i)
        first = 1 if split.score_from is None else int(split.score_from[i])
        expected += brute(model, document, windows(len(document), CONTEXT, CONTEXT // 2, first))
        targets += document[first:].tolist()
        documents += [i] * (len(document) - first)
    assert found.targets.tolist() == targets
    assert found.documents.tolist() == documents
    np.testing.assert_allclose(found.nats, expected, rtol=1e-5, atol=1e-5)


def test_every_byte_of_the_text_is_paid_for(model):
    split = DATA.splits["val/a"]
    found = evaluate(model, {"val/a": split})["val/a"]
    nats = losses(model, split).nats.astype(np.float64)
    assert found.tokens == len(split.tokens) - len(split)
    assert found.nats == pytest.approx(nats.mean())
    assert found.bits_per_byte == pytest.approx(nats.sum() / math.log(2) / split.bytes.sum())
    assert found.documents == len(split)
    assert found.perplexity == pytest.approx(math.exp(nats.mean()))


def test_last_words(model):
    split = DATA.splits["lambada"]
    found = evaluate(model, split)["split"]
    nats = losses(model, split).nats.astype(np.float64)
    assert found.tokens == found.documents == len(split)
    assert found.document_nats == pytest.approx(nats.mean())
    assert found.document_perplexity == pytest.approx(math.exp(nats.mean()))
    assert found.document_stderr == pytest.approx(nats.std(ddof=1) / math.sqrt(len(nats)))
    assert found.bits_per_byte == pytest.approx(nats.sum() / math.log(2) / (4 * len(split)))


def test_a_document_is_scored_on_its_own(model):
    split = DATA.splits["val/a"]
    alone = Split(split.document(1), np.array([0, len(split.document(1))]), split.bytes[1:2])
    found = losses(model, split)
    np.testing.assert_allclose(
        losses(model, alone).nats, found.nats[found.documents == 1], rtol=1e-5, atol=1e-6
    )


def test_results_do_not_depend_on_the_batch(model):
    one, many = (evaluate(model, DATA.splits, batch_size=n) for n in (1, 64))
    assert one.keys() == many.keys() == DATA.splits.keys()
    for name in one:
        assert one[name].nats == pytest.approx(many[name].nats, rel=1e-6)


def test_more_context_is_read_with_more_overlap(model):
    split = DATA.splits["val/a"]
    fresh, most = (losses(model, split, overlap=n).nats for n in (1, CONTEXT))
    assert len(fresh) == len(most)
    assert not np.allclose(fresh, most)


@pytest.mark.parametrize("overlap", [0, 17])
def test_an_impossible_overlap_is_named(model, overlap):
    with pytest.raises(ConfigError, match=f"overlap={overlap}: must be from 1 to 16"):
        losses(model, DATA.splits["val/a"], overlap=overlap)


def test_choose():
    lengths = np.array([5, 3, 8, 2, 7, 4])
    assert choose(lengths, None).tolist() == [0, 1, 2, 3, 4, 5]
    assert choose(lengths, 10**6).tolist() == [0, 1, 2, 3, 4, 5]
    few = choose(lengths, 12)
    assert few.tolist() == choose(lengths, 12).tolist() == sorted(few)
    assert 0 < lengths[few].sum() <= 12
    assert set(few) <= set(choose(lengths, 20).tolist())
    assert len(choose(lengths, 1)) == 1


def test_chosen_documents_are_spread_evenly():
    few = choose(np.ones(10_000, np.int64), 100)
    counts = np.bincount(few // 1000, minlength=10)
    assert counts.min() >= 8
    assert counts.max() <= 12


def test_max_tokens_reads_whole_documents(model):
    split = DATA.splits["val/a"]
    whole, part = losses(model, split), losses(model, split, max_tokens=150)
    kept = np.isin(whole.documents, part.documents)
    assert 0 < kept.sum() < len(kept)
    np.testing.assert_array_equal(whole.targets[kept], part.targets)
    np.testing.assert_allclose(whole.nats[kept], part.nats, rtol=1e-5, atol=1e-6)


def test_a_long_document_is_cut_and_last_words_are_not(model):
    split, last = DATA.splits["val/a"], DATA.splits["lambada"]
    whole, part = losses(model, split), losses(model, split, document_tokens=12)
    place = np.concatenate([np.arange(1, n) for n in np.diff(split.documents)])
    np.testing.assert_array_equal(part.targets, whole.targets[place < 12])
    np.testing.assert_array_equal(part.documents, whole.documents[place < 12])
    np.testing.assert_allclose(part.nats, whole.nats[place < 12], rtol=1e-5, atol=1e-6)
    assert losses(model, last, document_tokens=2).nats.tolist() == losses(model, last).nats.tolist()


def test_a_cut_makes_a_budget_cover_more_documents(model):
    split = DATA.splits["val/a"]
    few, many = (losses(model, split, max_tokens=100, document_tokens=n) for n in (None, 10))
    assert len(np.unique(many.documents)) == len(split) == 4
    assert len(np.unique(few.documents)) < 4
    assert len(many.nats) == 4 * 9


def test_bits_a_byte_are_for_documents_read_whole(model):
    splits = {name: DATA.splits[name] for name in ("val/a", "lambada")}
    longest = int(np.diff(splits["val/a"].documents).max())
    whole = evaluate(model, splits)
    assert evaluate(model, splits, document_tokens=longest) == whole
    cut = evaluate(model, splits, document_tokens=longest - 1)
    assert cut["val/a"].bits_per_byte is None
    assert cut["lambada"] == whole["lambada"]


@pytest.mark.parametrize("tokens", [1, 0, -3])
def test_a_cut_leaves_a_token_to_score(model, tokens):
    with pytest.raises(ConfigError, match=f"document_tokens={tokens}: must be 2 or more"):
        losses(model, DATA.splits["val/a"], document_tokens=tokens)


def test_ratio_equals_the_bootstrap():
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 400, 300)
    totals = sizes * rng.normal(3, 0.4, 300) + rng.normal(0, 5, 300)
    value, error = ratio(totals, sizes)
    picks = rng.integers(0, 300, (4000, 300))
    resampled = totals[picks].sum(1) / sizes[picks].sum(1)
    assert value == pytest.approx(totals.sum() / sizes.sum())
    assert error == pytest.approx(resampled.std(), rel=0.05)


def test_ratio_of_equal_sizes_is_the_error_of_a_mean():
    totals = np.array([1.0, 2.0, 4.0, 9.0])
    assert ratio(totals, np.ones(4)) == (4.0, pytest.approx(totals.std(ddof=1) / 2))
    assert ratio(totals[:1], np.ones(1)) == (1.0, None)


def test_copies_of_a_token_are_not_new_evidence():
    """A document twice as long tells no more of other documents: only their number counts."""
    totals, sizes = np.array([2.0, 3.0, 7.0]), np.array([1, 1, 2])
    assert ratio(2 * totals, 2 * sizes)[1] == pytest.approx(ratio(totals, sizes)[1])


def test_nothing_to_score(model):
    empty = Split(np.array([63, 63], np.uint16), np.array([0, 1, 2]), np.array([0, 0]))
    with pytest.raises(DataError, match="no token"):
        losses(model, empty)


@pytest.mark.parametrize("position", [1, 2, 3])
def test_an_id_outside_the_vocabulary_is_named_wherever_it_stands(model, position):
    tokens = np.array([63, 1, 2, 3], np.uint16)
    tokens[position] = 60_000
    with pytest.raises(DataError, match=r"token id 60000 is outside \[0, 64\)"):
        losses(model, Split(tokens, np.array([0, 4]), np.array([3])))


def test_an_empty_document_is_passed_over(model):
    split = Split(np.array([63, 63, 1, 2], np.uint16), np.array([0, 1, 4]), np.array([0, 5]))
    found = evaluate(model, split)["split"]
    assert (found.documents, found.tokens, found.stderr) == (1, 2, None)


def test_the_model_stays_in_its_mode(model):
    model.train()
    losses(model, DATA.splits["val/a"])
    assert model.training
    model.eval()
    losses(model, DATA.splits["val/a"])
    assert not model.training


def test_the_sum_is_taken_in_float64():
    """In float32, 2**24 + 1 is 2**24: adding ones to it would be lost."""
    nats = np.array([2**24, 1, 1, 1, 1], np.float32)
    found = Losses(np.zeros(5, np.int64), nats, np.zeros(5, np.int64))
    assert summarize(found, np.array([9])).document_nats == 2**24 + 4
