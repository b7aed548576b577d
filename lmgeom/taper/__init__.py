"""Depth: MLP widths that taper at an exact budget, and what they answer to."""

from lmgeom.taper.schedule import SCHEDULES, group_widths, widths

__all__ = ["SCHEDULES", "group_widths", "widths"]
