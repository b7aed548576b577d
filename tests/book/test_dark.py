"""Heat maps in dark mode: the twin keeps the field of colors and turns the rest."""

from __future__ import annotations

import io
import re

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from lmgeom import figures
from lmgeom.book.dark import dark_twin, draw_for_dark, turned


def drawing(kind: str) -> str:
    """A small figure with a color bar and a line on its field of colors."""
    with mpl.rc_context():
        figures.use()
        figure = Figure()
        ax = figure.subplots()
        values = np.arange(12.0).reshape(3, 4)
        if kind != "plot":
            figure.colorbar(getattr(ax, kind)(values))
        ax.plot([0, 1], [0, 1], color="#123456")
        ax.set(xlabel="words")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        return out.getvalue()


def colors(svg: str) -> set[str]:
    return set(re.findall(r"(?:fill|stroke): ?(#[0-9a-f]{6})", svg))


@pytest.mark.parametrize("kind", ["imshow", "pcolormesh", "contourf"])
def test_twin_keeps_the_colors_of_numbers_and_turns_those_of_words(kind):
    svg = drawing(kind)
    twin = dark_twin(svg)
    assert twin is not None
    assert "#262626" in colors(svg)  # the words
    assert "#262626" not in colors(twin)
    assert turned("#262626") in colors(twin)
    assert "#123456" in colors(twin)  # drawn on the field
    images = re.compile(r"data:image/png;base64,\s*([\w+/=\s]+)")
    assert images.findall(svg) == images.findall(twin)
    if kind != "imshow":
        field = {mpl.colors.to_hex(color) for color in mpl.colormaps["cividis"](range(256))}
        assert field & colors(svg) == field & colors(twin) != set()


def test_drawing_without_a_field_needs_no_twin():
    assert dark_twin(drawing("plot")) is None


def test_turning_makes_black_light_and_keeps_gray_gray():
    assert turned("#000000") == "#ffffff"
    assert turned("#ffffff") == "#131313"
    assert len(set(re.findall("..", turned("#777777")[1:]))) == 1


def test_pages_show_the_twin_in_dark_mode_once(tmp_path):
    (tmp_path / "_images").mkdir()
    (tmp_path / "lev").mkdir()
    for name, kind in (("heat", "imshow"), ("line", "plot")):
        (tmp_path / "_images" / f"{name}.svg").write_text(drawing(kind), encoding="utf-8")
    page = tmp_path / "lev" / "01.html"
    tag = '<img alt="{0}" src="../_images/{0}.svg" />'
    page.write_text(tag.format("heat") + tag.format("line"), encoding="utf-8")
    assert [path.name for path in draw_for_dark(tmp_path)] == ["heat-dark.svg"]
    assert page.read_text(encoding="utf-8") == (
        '<img class="only-light" alt="heat" src="../_images/heat.svg" />'
        '<img class="only-dark" alt="heat" src="../_images/heat-dark.svg" />' + tag.format("line")
    )
    assert draw_for_dark(tmp_path) == []
