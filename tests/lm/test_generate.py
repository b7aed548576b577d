"""Generation: exact draws, one text with and without a state, streaming, and refusals."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgeom.data import byte_tokenizer
from lmgeom.errors import ConfigError, DataError
from lmgeom.lm import Config, LanguageModel, complete, generate
from lmgeom.lm.generate import (
    keep_top_k,
    keep_top_p,
    next_chances,
    probabilities,
    stream_text,
)
from lmgeom.mixers import MIXERS

TINY = Config(vocab_size=30, dim=16, layers=2, heads=2, context=24, mlp_width=32, init_std=0.3)
PROMPT = torch.tensor([[3, 1, 4], [1, 5, 9]])
weights = st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any)


def make(config=TINY, seed=0):
    torch.manual_seed(seed)
    return LanguageModel(config).requires_grad_(False)


def kept(chances):
    assert chances.sum().item() == pytest.approx(1, abs=1e-15)
    return chances.nonzero().flatten().tolist()


def dyadic(counts):
    """Probabilities whose partial sums are exact, and the same as fractions."""
    total = 1 << (sum(counts) - 1).bit_length()
    counts = [counts[0] + total - sum(counts), *counts[1:]]
    exact = [Fraction(count, total) for count in counts]
    return torch.tensor([float(p) for p in exact], dtype=torch.float64), exact


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.floats(0.05, 20))
def test_temperature_is_a_power_of_the_chances(logits, temperature):
    logits = torch.tensor(logits, dtype=torch.float64)
    chances = probabilities(logits, temperature)
    assert chances.sum().item() == pytest.approx(1)
    ratio = (chances[0].log() - chances.log()) * temperature
    real = chances > 1e-290
    assert torch.allclose(ratio[real], (logits[0] - logits)[real], atol=1e-6) or not real[0]


def test_the_coldest_temperatures_are_the_largest_logit():
    logits = torch.tensor([[1.0, 3e38, 3e38, -3e38], [2.0, 0.0, 1.0, 2.0]])
    for temperature in (1e-300, 1e-30):
        assert probabilities(logits, temperature).tolist() == [[0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5]]
    assert probabilities(logits, 0).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert probabilities(logits.bfloat16(), 0).dtype == torch.float64


@given(weights, st.integers(1, 8))
def test_top_k_keeps_the_first_of_the_ranking(counts, count):
    chances, exact = dyadic(counts)
    ranking = sorted(range(len(exact)), key=lambda i: (-exact[i], i))
    right = [i for i in ranking[:count] if exact[i] > 0]
    assert kept(keep_top_k(chances, count)) == sorted(right)


@given(weights, st.integers(1, 32))
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(counts, share):
    chances, exact = dyadic(counts)
    mass = Fraction(share, 32)
    found = kept(keep_top_p(chances, float(mass)))
    sets = itertools.chain.from_iterable(
        itertools.combinations(range(len(exact)), n) for n in range(1, len(exact) + 1)
    )
    reach = [s for s in sets if sum(exact[i] for i in s) >= mass]
    assert sum(exact[i] for i in found) >= mass
    assert len(found) == min(map(len, reach))
    ranking = sorted(range(len(exact)), key=lambda i: (-exact[i], i))
    assert found == sorted(ranking[: len(found)])


def test_a_token_always_remains_and_a_whole_mass_keeps_them_all():
    generator = torch.Generator().manual_seed(0)
    chances = probabilities(8 * torch.randn(3, 50_000, generator=generator))
    assert keep_top_p(chances, 1).count_nonzero() == chances.numel()
    for mass in (5e-324, 1e-12):
        one = keep_top_p(chances, mass)
        assert torch.equal(one, keep_top_k(chances, 1))
        assert one.sum(-1).tolist() == [1, 1, 1]
    assert torch.equal(keep_top_p(chances, 0.5)[1], keep_top_p(chances[1], 0.5))


def test_top_p_reads_what_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(next_chances(logits, 1.0, 2, 0.55)) == [0]
    assert kept(next_chances(logits, 1.0, None, 0.55)) == [0, 1]
    assert kept(next_chances(logits, 0, 3, 0.9)) == [0]


def uncached(model, ids, count, seed, **settings):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        chances = next_chances(model(ids)[:, -1], **settings)
        ids = torch.cat((ids, torch.multinomial(chances, 1, generator=generator)), dim=1)
    return ids


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_state_does_not_change_the_text(mixer, temperature):
    model = make(replace(TINY, mixer=mixer)).double()
    settings = {"temperature": temperature, "top_k": 20, "top_p": 0.95}
    text = complete(model, PROMPT, 21, seed=7, **settings)
    assert text.shape == (2, 24)
    assert torch.equal(text, uncached(model, PROMPT, 21, 7, **settings))


def test_lev_writes_the_same_text_with_and_without_a_state():
    lev = {"seed_dim": 8, "rank": 4, "heads": 2}
    model = make(replace(TINY, input="lev", head="untied", input_options=lev)).double()
    settings = {"temperature": 1.0, "top_k": None, "top_p": None}
    assert torch.equal(
        complete(model, PROMPT, 9, seed=1), uncached(model, PROMPT, 9, 1, **settings)
    )


def test_a_seed_fixes_the_text_and_none_follows_pytorch():
    model = make()
    first, again, other = (complete(model, PROMPT, 20, seed=n) for n in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        texts.append(complete(model, PROMPT, 20))
    assert torch.equal(*texts)
    assert not torch.equal(complete(model, PROMPT, 20), texts[0])


def test_a_seed_leaves_pytorchs_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    complete(make(seed=3), PROMPT, 5, seed=1)
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_come_one_by_one_and_gradients_stay_on_for_the_reader():
    model = LanguageModel(TINY)
    stream = generate(model, PROMPT, 3, temperature=0)
    token = next(stream)
    assert token.shape == (2,)
    assert torch.is_grad_enabled()
    assert not token.requires_grad
    whole = complete(model, PROMPT.int(), 3, temperature=0)
    assert torch.equal(torch.stack([token, *stream], dim=1), whole[:, 3:])


def test_each_text_of_a_batch_ends_at_its_own_stop():
    model, ids = make(), torch.arange(8)[:, None] + PROMPT[0]
    free = complete(model, ids, 20, seed=0)[:, 3:].tolist()
    stop = {free[0][2], free[1][5]}
    ends = [next((n for n, i in enumerate(row) if i in stop), 19) for row in free]
    stopped = complete(model, ids, 20, seed=0, stop=stop)[:, 3:].tolist()
    assert len(stopped[0]) == max(ends) + 1
    for row, full, end in zip(stopped, free, ends, strict=True):
        assert row == (full[: end + 1] + [full[end]] * 20)[: len(row)]


def test_greedy_is_greedy():
    model = make()
    text = complete(model, PROMPT, 10, temperature=0)
    assert torch.equal(model(text)[:, 2:-1].argmax(-1), text[:, 3:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": True}, "temperature=True"),
        ({"top_k": 0}, "top_k=0: must be a positive integer, or None"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"top_p": 0}, "top_p=0: must be a number from above 0 to 1, or None"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_p": "0.5"}, "top_p='0.5'"),
        ({"seed": -1}, "seed=-1: must be an integer from 0"),
        ({"seed": 2**63}, "seed="),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be a positive integer"),
        ({"stop": [30]}, r"stop=\[30\]: must be ids from 0 to 29"),
        ({"stop": ["."]}, r"stop=\['.'\]"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_call(options, message):
    with pytest.raises(ConfigError, match=message):
        generate(make(), PROMPT, **{"max_new_tokens": 2} | options)


def test_prompts_that_cannot_work_are_refused_at_the_call():
    with pytest.raises(DataError, match="token id 34 is outside"):
        generate(make(), PROMPT + 25, 2)
    with pytest.raises(DataError, match="shape"):
        generate(make(), PROMPT[0], 2)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_text_beyond_the_context_is_refused_at_the_call(mixer):
    model = make(replace(TINY, mixer=mixer))
    assert complete(model, PROMPT, 22, temperature=0).shape == (2, 25)
    if model.limit is None:
        assert complete(model, PROMPT, 60).shape == (2, 63)
    else:
        message = "prompt of 3 tokens and 23 new ones: all but the last must fit the context of 24"
        with pytest.raises(DataError, match=message):
            generate(model, PROMPT, 23)


def test_logits_that_are_not_finite_are_named():
    model = make()
    model.norm.weight[0] = float("nan")
    with pytest.raises(DataError, match="logits are not finite"):
        complete(model, PROMPT, 2)


@given(st.text(), st.binary(max_size=12), st.integers(1, 3))
def test_streamed_text_is_the_decoded_text(words, rubbish, size):
    """Tokens of any bytes, cut anywhere."""
    data = words.encode() + rubbish
    tokens = {i: data[i : i + size] for i in range(0, len(data), size)}
    pieces = list(stream_text(tokens, tokens))
    assert all(pieces)
    assert "".join(pieces) == data.decode("utf-8", "replace")


@settings(max_examples=30)
@given(st.text(min_size=1))
def test_a_piece_is_given_out_with_its_last_byte(words):
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode(words), tokenizer.eot]
    assert list(stream_text(ids, tokenizer.tokens)) == list(words)
