"""Ask SmolLM2-135M by our connection to the evaluation harness and by the harness's own.

``python -m tests.benchmarks.harness`` takes the model from a pinned package, asks it the first
questions of some tasks and a part of an article, and writes every pair of log-probabilities to
``book/results/benchmarks/harness.json``. It needs the packages lm-eval, transformers and gguf.
"""

import argparse
from types import SimpleNamespace

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lmgeom.hub.harness import Harness, load_tasks, task_rows
from tests.benchmarks.alignment import packaged_smollm2
from tests.benchmarks.measuring import record_file, write_record

TASKS = ("lambada_openai", "arc_easy", "winogrande", "piqa", "boolq")
CONTEXT = 256  # short enough that the article and long passages are cut


class Foreign(torch.nn.Module):
    """A model of transformers with the two parts that our models have."""

    def __init__(self, model):
        super().__init__()
        self.body, self.head = model.model, model.lm_head
        self.config = SimpleNamespace(context=CONTEXT)

    def hidden(self, ids):
        """Hidden states (B, T, D) of ids (B, T)."""
        return self.body(ids, use_cache=False).last_hidden_state


def compare(ours, theirs, kind, requests):
    """Both answers to each request, and the largest difference."""
    pair = [getattr(lm, kind)(requests) for lm in (ours, theirs)]
    if kind == "loglikelihood":
        assert [greedy for _, greedy in pair[0]] == [greedy for _, greedy in pair[1]]
        pair = [[value for value, _ in answers] for answers in pair]
    gap = max(abs(a - b) for a, b in zip(*pair, strict=True))
    return {"ours": pair[0], "theirs": pair[1], "largest_gap": gap}


def main():
    """Ask, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--questions", type=int, default=2, help="questions a task (default: 2)")
    args = parser.parse_args()
    path = record_file("harness")
    torch.set_num_threads(1)
    model, tokenizer = packaged_smollm2()
    options = {"max_length": CONTEXT, "device": "cpu", "batch_size": 4}
    theirs = HFLM(model, tokenizer=tokenizer, add_bos_token=False, **options)
    words = SimpleNamespace(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode=tokenizer.decode,
        eot=theirs.prefix_token_id,
    )
    ours = Harness(Foreign(model), words, batch_size=3, start=False, quiet=True)
    rows = []
    for name, task in load_tasks(list(TASKS))["tasks"].items():
        task.build_all_requests(limit=args.questions, rank=0, world_size=1)
        rows.append({"task": name} | compare(ours, theirs, "loglikelihood", task.instances))
    article = next(task_rows("wiki_ood"))["text"][:1600]
    request = Instance("loglikelihood_rolling", {}, (article,), 0)
    rows.append({"task": "wiki_ood"} | compare(ours, theirs, "loglikelihood_rolling", [request]))
    figures = {"model": "SmolLM2-135M-Instruct", "weights": "4-bit, made float32"}
    figures |= {"context": CONTEXT, "rows": rows}
    write_record(path, "harness", figures)


if __name__ == "__main__":
    main()
