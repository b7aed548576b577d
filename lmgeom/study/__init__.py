"""Runs and their records, paired statistics, and verdicts on claims."""

from lmgeom.study.claims import claims_box, judge, load_claims
from lmgeom.study.records import load_records, record
from lmgeom.study.statistics import paired, paired_arms, paired_curve, ratios, tokens_to_match

__all__ = [
    "claims_box",
    "judge",
    "load_claims",
    "load_records",
    "paired",
    "paired_arms",
    "paired_curve",
    "ratios",
    "record",
    "tokens_to_match",
]
