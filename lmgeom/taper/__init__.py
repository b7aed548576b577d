"""Depth: MLP widths that taper at an exact budget, and where each layer pushes the stream."""

from lmgeom.taper.alignment import (
    Alignment,
    alignment,
    depth_correlation,
    widths_by_alignment,
)
from lmgeom.taper.schedule import SCHEDULES, group_widths, widths

__all__ = [
    "SCHEDULES",
    "Alignment",
    "alignment",
    "depth_correlation",
    "group_widths",
    "widths",
    "widths_by_alignment",
]
