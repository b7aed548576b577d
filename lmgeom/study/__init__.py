"""Runs and their records, paired statistics, and verdicts on claims."""

from lmgeom.study.claims import claims_box, claims_list, judge, load_claims
from lmgeom.study.records import load_records, record
from lmgeom.study.statistics import (
    comparison_table,
    factorial_effect,
    factorial_weights,
    matched_shares,
    paired,
    paired_arms,
    paired_curve,
    paired_slope,
    paired_strata,
    paired_trend,
    ratios,
    strata_table,
    tokens_to_match,
    trials,
    weighted_arms,
)
from lmgeom.study.transfer import Carried, carried, size_trials

__all__ = [
    "Carried",
    "carried",
    "claims_box",
    "claims_list",
    "comparison_table",
    "factorial_effect",
    "factorial_weights",
    "judge",
    "load_claims",
    "load_records",
    "matched_shares",
    "paired",
    "paired_arms",
    "paired_curve",
    "paired_slope",
    "paired_strata",
    "paired_trend",
    "ratios",
    "record",
    "size_trials",
    "strata_table",
    "tokens_to_match",
    "trials",
    "weighted_arms",
]
