"""Input: quadratic B-splines, base-b digits, and the LEV layer built from them."""

from lmgeom.lev.digits import base, digits
from lmgeom.lev.embedding import LEV, lev_parameters
from lmgeom.lev.geometry import table_statistics
from lmgeom.lev.spline import basis

__all__ = ["LEV", "base", "basis", "digits", "lev_parameters", "table_statistics"]
