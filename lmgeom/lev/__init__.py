"""Input: quadratic B-splines, base-b digits, the LEV layer built from them, and its rivals."""

from lmgeom.lev.baselines import FactoredMLP, FactorizedEmbedding, FlatMLP, PermutedLEV
from lmgeom.lev.digits import base, digits
from lmgeom.lev.embedding import LEV, lev_parameters
from lmgeom.lev.geometry import table_statistics
from lmgeom.lev.spline import basis

__all__ = [
    "LEV",
    "FactoredMLP",
    "FactorizedEmbedding",
    "FlatMLP",
    "PermutedLEV",
    "base",
    "basis",
    "digits",
    "lev_parameters",
    "table_statistics",
]
