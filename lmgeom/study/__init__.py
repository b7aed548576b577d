"""Runs and their records, paired statistics, and verdicts on claims."""

from lmgeom.study.claims import claims_box, judge, load_claims
from lmgeom.study.records import load_records, record
from lmgeom.study.statistics import (
    matched_shares,
    paired,
    paired_arms,
    paired_curve,
    paired_slope,
    paired_strata,
    ratios,
    tokens_to_match,
)

__all__ = [
    "claims_box",
    "judge",
    "load_claims",
    "load_records",
    "matched_shares",
    "paired",
    "paired_arms",
    "paired_curve",
    "paired_slope",
    "paired_strata",
    "ratios",
    "record",
    "tokens_to_match",
]
