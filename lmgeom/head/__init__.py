"""Output: the geometry of the head, and updates measured by how far they move probabilities."""

from lmgeom.head.bounds import (
    Bound,
    CertifiedStep,
    InputSet,
    ball,
    certified_step,
    hilbert_bound,
    hilbert_shifts,
    layernorm,
    rmsnorm,
)
from lmgeom.head.diameter import Diameter, diameter, diameter_bounds, diameter_brackets
from lmgeom.head.equidistance import (
    Equidistance,
    distance_ratio_bound,
    equidistance,
    kerdock,
    simplex_pair,
    spread,
)
from lmgeom.head.hilbert import (
    birkhoff_contraction,
    hilbert_distance,
    projective_diameter,
    range_seminorm,
)
from lmgeom.head.optimizer import (
    HEAD_RULES,
    Equispread,
    HeadRule,
    SignRows,
    Together,
    norm_radius,
)
from lmgeom.head.steepest import Steepest, polar, steepest, steepness, tension_bounds, unit_rows

__all__ = [
    "HEAD_RULES",
    "Bound",
    "CertifiedStep",
    "Diameter",
    "Equidistance",
    "Equispread",
    "HeadRule",
    "InputSet",
    "SignRows",
    "Steepest",
    "Together",
    "ball",
    "birkhoff_contraction",
    "certified_step",
    "diameter",
    "diameter_bounds",
    "diameter_brackets",
    "distance_ratio_bound",
    "equidistance",
    "hilbert_bound",
    "hilbert_distance",
    "hilbert_shifts",
    "kerdock",
    "layernorm",
    "norm_radius",
    "polar",
    "projective_diameter",
    "range_seminorm",
    "rmsnorm",
    "simplex_pair",
    "spread",
    "steepest",
    "steepness",
    "tension_bounds",
    "unit_rows",
]
