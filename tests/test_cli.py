import io
import json
import signal
from dataclasses import replace

import pytest
import torch

from lmgeom import cli, data
from lmgeom.cli import READY, TOKENIZERS, main, parser
from lmgeom.data.tokenizers import BPE_SIZES, PACKAGED
from lmgeom.lm import Config, LanguageModel, complete, load_model
from lmgeom.lm.checkpoint import save

TINY = Config(vocab_size=64, dim=16, layers=1, heads=2, context=16, mlp_width=32)


@pytest.fixture
def corpus(monkeypatch):
    found = data.synthetic(64, 0, 4000)
    monkeypatch.setattr(data, "corpus", lambda *names, **options: found)
    return found


def refuse(capsys, *words):
    """Run a command that must fail and return its one line."""
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("lmgeom: ")
    assert err.count("\n") == 1
    return err


def test_params_prints_the_published_size(capsys):
    assert main(["params", "leviathan-1.2b", "--json"]) == 0
    budget = json.loads(capsys.readouterr().out)
    assert budget["input"] == 2_252_928
    assert main(["params", "leviathan-1.2b"]) == 0
    assert "2,252,928" in capsys.readouterr().out
    assert main(["params"]) == 0
    assert "untied-400m" in capsys.readouterr().out
    assert main(["params", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["leviathan-1.2b"]["total"] == 1_217_980_544


def test_params_takes_words_of_names(capsys):
    assert main(["params", "400m", "albert-wide-small", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "albert-wide-small" in found
    arms = {name for name in found if name.endswith("-400m")}
    assert {"tied-400m", "untied-400m", "albert-400m", "factored-400m", "leviathan-400m"} <= arms
    assert len(arms) == len(found) - 1
    assert main(["params", "leviathan-small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == 3_316_224
    assert main(["params", "tied-small", "untied-small", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["tied-small", "untied-small"]
    assert main(["params", "permuted", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["leviathan-small-permuted"]
    assert main(["params", "Permuted"]) == 0
    assert "leviathan-small-permuted  169,344" in capsys.readouterr().out
    assert "preset='400': unknown; `lmgeom params` lists all" in refuse(capsys, "params", "400")
    assert "preset='': unknown; " in refuse(capsys, "params", "400m", "")
    assert main(["params", "440m", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 8


def test_params_takes_the_spelling_of_the_papers(capsys):
    outs = []
    for name in ("leviathan-1.2b", "Leviathan-1.2B"):
        assert main(["params", name]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1]


def test_unknown_names_come_with_known_ones(capsys):
    assert "leviathan-1.2b" in refuse(capsys, "params", "leviathan-2b")
    assert "minipile-core" in refuse(capsys, "data", "fetch", "minipil")
    assert "minipile-core" in refuse(capsys, "data", "prepare", "minipil")
    assert "leviathan-tied" in refuse(capsys, "study", "show", "leviathan")
    assert "leviathan-tied" in refuse(capsys, "study", "run", "leviathan")


def test_the_book_has_its_verbs_here_too(capsys):
    assert "known: smoke, book, gpu" in refuse(capsys, "book", "build", "--profile", "smok")
    assert "unknown gate 'rufff'" in refuse(capsys, "book", "test", "rufff")


def test_study_run_needs_one_name(capsys):
    assert "--all" in refuse(capsys, "study", "run")


@pytest.mark.parametrize(
    "words", [["--steps", "0"], ["--steps", "x"], ["--lr", "-1"], ["--lr", "nan"]]
)
def test_numbers_are_checked_by_the_parser(words, capsys):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(["train", "--preset", "tied-small", "--out", "x", *words])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--preset", "tied-small", "--out", "x", "--data", ""],
        ["data", "prepare", ""],
        ["eval", "x", "--tasks", ""],
        ["study", "show", "head-lr", "--results", ""],
        ["study", "gpu-check", "--device", "cpu", "--out", ""],
        ["book", "rerun", "x", "--results", ""],
        ["book", "serve", "--port", "70000"],
        ["params", "tied-small", "--memory", "--sequences", "9" * 13],
    ],
)
def test_empty_and_impossible_words_are_refused_by_the_parser(words, capsys):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(words)
    assert stop.value.code == 2
    assert "error: argument " in capsys.readouterr().err


def test_the_help_names_every_tokenizer():
    assert f"{', '.join([*BPE_SIZES, *PACKAGED])}, or a path" == TOKENIZERS
    assert f"{', '.join(PACKAGED)}, or a path" == READY


@pytest.mark.parametrize("word", ["--list", "--all"])
def test_one_run_is_neither_listed_nor_all(word, capsys):
    assert "--run takes one study" in refuse(
        capsys, "study", "run", "head-lr", "--run", "adamw-0.001-seed0", word
    )


def train(tmp_path, *words, steps="4"):
    (tmp_path / "model.json").write_text(TINY.to_json())
    setting = ["--steps", steps, "--batch-size", "2", "--lr", "0.01", "--warmup", "1"]
    where = ["--config", str(tmp_path / "model.json"), "--out", str(tmp_path / "run")]
    return main(["train", *where, *setting, *words])


def test_train_then_evaluate(tmp_path, corpus, capsys):
    assert train(tmp_path) == 0
    assert train(tmp_path, "--resume") == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--splits", "val/a", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["val/a"]["nats"] > 0
    assert main(["eval", str(tmp_path / "run"), "--splits", "val/a", "--max-tokens", "5"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[0] == "val/a"
    assert row[2:] == ["-", "-", "4", "1"]  # a document of five tokens at most, four to predict
    assert "unknown split 'val/z'" in refuse(
        capsys, "eval", str(tmp_path / "run"), "--splits", "val/z"
    )


@pytest.fixture
def written(tmp_path, monkeypatch, capsys):
    """A run on text of four-byte characters, one token a byte."""
    made = data.from_text(["\U0001f600 \u20ac one \u00e9 " * 40 + str(i) for i in range(8)])
    monkeypatch.setattr(data, "corpus", lambda *names, **options: made)
    monkeypatch.setitem(globals(), "TINY", replace(TINY, vocab_size=260))
    assert train(tmp_path) == 0
    capsys.readouterr()
    return tmp_path / "run"


def test_generate_finds_the_tokenizer_of_its_run(written, capsys):
    words = ["--prompt", "one \u00e9", "--max-new-tokens", "9", "--seed", "3"]
    assert main(["generate", str(written), *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith("one \u00e9")
    assert text.endswith("\n")
    [step] = written.glob("step-*")
    assert main(["generate", str(step), *words, "--top-p", "1"]) == 0
    assert capsys.readouterr().out == text
    model, tokenizer = load_model(step), data.byte_tokenizer()
    ids = [tokenizer.eot, *tokenizer.encode("one \u00e9")]
    new = complete(model, torch.tensor([ids]), 9, seed=3, stop=[tokenizer.eot])[0, len(ids) :]
    shown = b"".join(tokenizer.tokens.get(int(i), b"") for i in new).decode("utf-8", "replace")
    assert text == f"one \u00e9{shown}\n"
    for extra in (["--temperature", "0"], ["--top-k", "1"]):
        assert main(["generate", str(written), *words, *extra]) == 0
    assert main(["generate", str(written), "--max-new-tokens", "3"]) == 0


def test_generate_refuses_in_one_line(written, tmp_path, capsys):
    run = ["generate", str(written)]
    long = "a prompt of 1 tokens and 100 new ones: all but the last must fit the context of 16"
    assert long in refuse(capsys, *run)
    assert "top_p=1.5" in refuse(capsys, *run, "--top-p", "1.5")
    assert "no package holds the tokenizer 'gpt5'" in refuse(capsys, *run, "--tokenizer", "gpt5")
    assert "nowhere" in refuse(capsys, "generate", str(tmp_path / "nowhere"))
    wide = data.byte_tokenizer()
    wide.vocab_size = 300
    (tmp_path / "wide.json").write_text(wide.to_json())
    words = [*run, "--tokenizer", str(tmp_path / "wide.json"), "--max-new-tokens", "3"]
    assert "tokenizer bytes has 300 ids, the model only 260" in refuse(capsys, *words)
    assert main([*words[:3], str(written), *words[4:]]) == 0
    (written / "tokenizer.json").unlink()
    capsys.readouterr()
    assert "has no tokenizer.json beside it: use --tokenizer" in refuse(capsys, *run)


def test_a_character_that_the_terminal_lacks_is_shown_as_a_question_mark(written, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", terminal)
    words = ["--prompt", "\u20ac\u00e9 \udcff", "--max-new-tokens", "2", "--seed", "0"]
    assert main(["generate", str(written), *words]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue().startswith("?\u00e9 ?".encode("latin-1"))


def test_train_takes_rules_for_head_body_and_levels(tmp_path, corpus, capsys):
    words = ["--head-optimizer", "equispread", "--head-lr", "0.3", "--body-optimizer", "muon"]
    assert train(tmp_path, *words, "--head-option", "whiten=0.5", "--head-option", "cap=true") == 0
    out = capsys.readouterr().out
    assert "Equispread (embedding), Muon (matrix), AdamW (gain)" in out
    assert "0.3 nats a step for the head" in out
    assert train(tmp_path, "--resume") == 2
    assert "train.head_optimizer: equispread -> None" in capsys.readouterr().err
    chain = replace(TINY, mixer="hope-attention", mixer_options={"levels": 2})
    setting = ["--steps", "4", "--lr", "0.01", "--level-periods", "1", "2"]
    (tmp_path / "chain.json").write_text(chain.to_json())
    where = ["--config", str(tmp_path / "chain.json"), "--out", str(tmp_path / "chain")]
    assert main(["train", *where, *setting]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head-optimizer", "lion"], "head_optimizer='lion': known: adamw, muon"),
        (["--head-optimizer", "sign"], "head_lr=None: 'sign' needs the largest change"),
        (["--head-option", "whiten=1"], "option 'whiten': unknown; known: betas, weight_decay"),
        (["--body-optimizer", "sgd"], "body_optimizer='sgd': known: adamw, muon"),
        (["--level-periods", "1", "2"], "no MLP of the model is a chain of levels"),
    ],
)
def test_rules_that_cannot_work_are_named(tmp_path, corpus, capsys, words, message):
    assert train(tmp_path, *words) == 2
    assert message in capsys.readouterr().err


def test_an_option_of_the_head_needs_a_value(capsys):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(["train", "--preset", "tied-small", "--head-option", "whiten"])
    assert stop.value.code == 2
    assert "'whiten' is not NAME=VALUE" in capsys.readouterr().err


def test_a_run_is_not_overwritten_or_changed_unasked(tmp_path, corpus, capsys):
    assert train(tmp_path) == 0
    capsys.readouterr()
    assert train(tmp_path) == 2
    assert train(tmp_path, "--resume", steps="6") == 2
    assert "steps" in capsys.readouterr().err


def test_data_with_more_ids_than_the_model_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "corpus", lambda *names: data.synthetic(128, 0, 4000))
    assert train(tmp_path) == 2
    assert "vocab_size=64" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_missing_config_or_checkpoint_is_named(tmp_path, corpus, capsys):
    words = ["train", "--config", "no.json", "--steps", "1", "--lr", "1", "--out", str(tmp_path)]
    assert "no.json" in refuse(capsys, *words)
    assert "nowhere" in refuse(capsys, "eval", str(tmp_path / "nowhere"))
    (tmp_path / "no.json").write_bytes(b"\xff")
    words[2] = str(tmp_path / "no.json")
    assert "not UTF-8" in refuse(capsys, *words)


def test_settings_are_refused_before_text_is_prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "corpus", lambda *names: pytest.fail("the text was prepared"))
    assert train(tmp_path, "--clip", "0") == 2
    assert "clip=0.0" in capsys.readouterr().err


def test_a_short_run_needs_no_warmup(tmp_path, corpus, capsys):
    (tmp_path / "model.json").write_text(TINY.to_json())
    words = ["--config", str(tmp_path / "model.json"), "--out", str(tmp_path / "run")]
    assert main(["train", *words, "--steps", "5", "--batch-size", "2", "--lr", "0.01"]) == 0
    assert "after 1 steps" in capsys.readouterr().out


def test_the_empty_path_is_refused(tmp_path):
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, "--out", "")
    assert stop.value.code == 2


def test_a_prepared_folder_is_a_source(tmp_path, capsys):
    with open(tmp_path / "mine.jsonl", "w") as file:
        for i in range(30):
            file.write(json.dumps({"text": f"Document {i} has some words. " * 20}) + "\n")
    tokenizer = tmp_path / "bytes.json"
    tokenizer.write_text(data.byte_tokenizer().to_json())
    out = tmp_path / "prepared"
    words = ["--tokenizer", str(tokenizer), "--out", str(out)]
    assert main(["data", "prepare", str(tmp_path / "mine.jsonl"), *words]) == 0
    assert train(tmp_path, "--data", str(out)) == 2
    assert "needs 257" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_named(tmp_path, corpus, capsys):
    model = LanguageModel(TINY)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    folder = save(tmp_path, 1, model)
    assert "norm.weight is not finite" in refuse(capsys, "eval", str(folder))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "run/log.jsonl"), "run/log.jsonl: No space left"),
        (FileNotFoundError("no book here"), "no book here"),
        (MemoryError("146 TiB"), "out of memory: 146 TiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
    ],
)
def test_trouble_of_the_machine_is_one_line(error, words, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_params", lambda args: (_ for _ in ()).throw(error))
    assert words in refuse(capsys, "params")


def test_a_programming_error_is_not_hidden(monkeypatch):
    monkeypatch.setattr(cli, "_params", lambda args: (_ for _ in ()).throw(RuntimeError("bug")))
    with pytest.raises(RuntimeError, match="bug"):
        main(["params"])


def test_an_interrupted_run_ends_well_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    found = data.synthetic(64, 0, 4000)

    class Interrupting:
        vocab_size, fingerprint = found.vocab_size, found.fingerprint

        def batch(self, seed, step, *size):
            if step == 1:
                signal.raise_signal(signal.SIGTERM)
            return found.batch(seed, step, *size)

    monkeypatch.setattr(data, "corpus", lambda *names: Interrupting())
    assert train(tmp_path) == 0
    assert "SIGTERM came at step 2; with --resume the run goes on" in capsys.readouterr().out


def test_a_terminated_preparation_leaves_nothing(tmp_path, monkeypatch, capsys):
    from lmgeom.data import sources

    def documents(*args, **kwargs):
        assert list(tmp_path.glob(".out.partial"))
        signal.raise_signal(signal.SIGTERM)
        yield

    monkeypatch.setattr(sources, "documents", documents)
    (tmp_path / "mine.jsonl").write_text('{"text": "a"}\n')
    before = signal.getsignal(signal.SIGTERM)
    words = ["data", "prepare", str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / "out")]
    assert main(words) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.splitlines()[-1] == "lmgeom: terminated"
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.jsonl", "out.lock"}
    assert signal.getsignal(signal.SIGTERM) is before


def test_fetch_fails_where_a_package_is_missing(monkeypatch):
    for status, code in (("present", 0), ("fetched", 0), ("missing", 1)):
        monkeypatch.setattr(data, "fetch", lambda name, s=status: [{"status": s}])
        assert main(["data", "fetch", "minipile-core"]) == code
