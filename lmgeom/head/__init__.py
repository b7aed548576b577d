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
from lmgeom.head.hilbert import (
    birkhoff_contraction,
    hilbert_distance,
    projective_diameter,
    range_seminorm,
)

__all__ = [
    "Bound",
    "CertifiedStep",
    "Diameter",
    "InputSet",
    "ball",
    "birkhoff_contraction",
    "certified_step",
    "diameter",
    "diameter_bounds",
    "diameter_brackets",
    "hilbert_bound",
    "hilbert_distance",
    "hilbert_shifts",
    "layernorm",
    "projective_diameter",
    "range_seminorm",
    "rmsnorm",
]
