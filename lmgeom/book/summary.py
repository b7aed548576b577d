"""What each paper claims, what we found and how to rerun it, in the words of the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from lmgeom import study
from lmgeom.study.claims import UNANSWERED
from lmgeom.study.run import load_study, studies

__all__ = ["LEAD", "PAPERS", "command", "found", "front_table", "rerun"]

PAPERS = {
    "input": "Leviathan {cite}`batley2026leviathan`",
    "depth": "Tapered models {cite}`bayat2026tapered`",
    "output": "Update geometry of the head {cite}`somasundaram2026head`",
    "together": "All three, which is ours",
}
# The claims that say most about a part, for pages that cannot show all.
LEAD = {
    "input": (
        "lev-parameter-count",
        "lev-vs-tied",
        "lev-vs-untied",
        "lev-rare",
        "lev-gain-grows",
        "lev-vocabulary",
    ),
    "depth": (
        "taper-exact-budget",
        "taper-cosine-gain",
        "taper-mirror",
        "taper-architectures",
        "taper-alignment",
    ),
    "output": (
        "head-diameter",
        "head-rownorm-guarantee",
        "head-convex-adamw",
        "head-equidistant-step",
        "head-step-transfers",
        "head-rownorm-loss",
    ),
    "together": ("together-all", "together-lev-head"),
}
PHRASES = {
    "holds exactly": "hold exactly",
    "holds": "hold",
    "direction only": "have the right direction and no more",
    "no effect found": "show no effect",
    "fails": "fail",
    "not at our scale": "need a larger scale",
    "not attempted": "wait for their runs",
    "not checked here": "rest on tests that did not run here",
}


def _of(part: str) -> dict[str, dict[str, Any]]:
    """Claims of one part of the ledger."""
    return {name: row for name, row in study.load_claims().items() if row["part"] == part}


def _verdict(claim: Mapping[str, Any]) -> str:
    """Verdict of a claim and, where it has been measured, the evidence."""
    verdict = study.judge(claim)
    measured = verdict.verdict not in UNANSWERED and "test" not in claim
    return f"**{verdict.verdict}**" + (f": {verdict.evidence.rstrip('.')}" if measured else "")


def _study_command(name: str) -> str:
    """What makes the records of a study."""
    return f"lmgeom study run {name}" if name in studies() else "python -m lmgeom.study.convex"


def benchmark(claim: Mapping[str, Any]) -> tuple[str, str]:
    """Name the script that measures a claim, and what it fills: a record, or a folder of them."""
    record = PurePosixPath(claim["benchmark"]["record"])
    out = record if record.parent.name == "benchmarks" else record.parent
    return out.stem.replace("-", "_"), str(out)


def command(claim: Mapping[str, Any]) -> str:
    """Say what answers a claim again: a study, a test or a benchmark.

    Args:
        claim: An entry of the ledger that has a rule, a test or a benchmark.
    """
    if "rule" in claim:
        return _study_command(claim["rule"]["study"])
    if "test" in claim:
        return "lmgeom study claims --check"
    return f"python -m tests.benchmarks.{benchmark(claim)[0]}"


def found(part: str) -> str:
    """Write how the claims of a part came out, and the leading ones one by one.

    Args:
        part: A key of `PAPERS`.

    Returns:
        Markdown.
    """
    claims = _of(part)
    counts = Counter(study.judge(claim).verdict for claim in claims.values())
    words = "; ".join(f"{text}: {counts[word]}" for word, text in PHRASES.items() if counts[word])
    lines = [f"**What it claims, and what we found.** {len(claims)} claims ({words}), among them:"]
    lines.append("")
    for claim in (claims[name] for name in LEAD[part]):
        paper = f"*The paper:* {claim['reported']}. "
        lines.append(f"- {claim['claim']} {paper}*Here:* {_verdict(claim)}.")
    return "\n".join(lines)


def rerun(part: str) -> str:
    """Write the commands behind a part's studies, what is on record and what it took.

    Args:
        part: A key of `PAPERS`.

    Returns:
        Markdown.
    """
    named = [claim["rule"]["study"] for claim in _of(part).values() if "rule" in claim]
    text = (
        "**How to rerun it.** With `--results FOLDER` a study is run anew, into a folder of yours."
    )
    lines = [text, "", "| command | on record | core-minutes |", "|---|---|---|"]
    for name in dict.fromkeys(named):
        records = study.load_records(name)
        planned = len(load_study(name).runs) if name in studies() else len(records)
        minutes = f"{sum(r['seconds'] for r in records) / 60:.0f}" if records else "not yet run"
        lines.append(f"| `{_study_command(name)}` | {len(records)} of {planned} runs | {minutes} |")
    return "\n".join(lines)


def front_table() -> str:
    """Write the front page's table: claim and the paper's figure, our finding, the command.

    Returns:
        MyST Markdown.
    """
    lines = ["| claim, and the paper's figure | we found | to rerun |", "|---|---|---|"]
    for part, paper in PAPERS.items():
        claims = _of(part)
        lines.append(f"| **{paper}** | | |")
        for claim in (claims[name] for name in LEAD[part]):
            words = f"{claim['claim']} *The paper:* {claim['reported']}."
            lines.append(f"| {words} | {_verdict(claim)} | `{command(claim)}` |")
    return "\n".join(lines) + "\n"
