"""Output: the geometry of the head, and updates measured by how far they move probabilities."""

from lmgeom.head.diameter import Diameter, diameter, diameter_bounds
from lmgeom.head.hilbert import hilbert_distance, range_seminorm

__all__ = ["Diameter", "diameter", "diameter_bounds", "hilbert_distance", "range_seminorm"]
