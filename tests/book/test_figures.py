"""The figure style, direct labels, folded tables and the provenance footer."""

from __future__ import annotations

import io
import itertools

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lmgeom import figures


@pytest.fixture(autouse=True)
def _style():
    with mpl.rc_context():
        figures.use()
        yield


@pytest.fixture
def shown(monkeypatch):
    """HTML that was displayed."""
    found = []
    monkeypatch.setattr(figures, "display", lambda item: found.append(item.data))
    return found


def draw() -> bytes:
    """Bytes of a small figure."""
    figure = Figure()
    ax = figure.subplots()
    ax.plot([0, 1], [0, 1])
    figures.label(ax, 1, 1, "curve", "lev")
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def test_same_numbers_give_the_same_bytes():
    first = draw()
    assert first == draw()
    assert b"dc:date" not in first


def test_label_takes_a_name_of_the_palette():
    ax = Figure().subplots()
    assert figures.label(ax, 0, 0, "x", "tied").get_color() == figures.COLORS["tied"]
    assert figures.label(ax, 0, 0, "x", "#123456").get_color() == "#123456"


def boxes(ax):
    """Boxes of the labels as drawn, and after a second drawing."""
    figure = ax.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    for _ in range(2):
        figure.draw(renderer)
        yield [text.get_window_extent(renderer) for text in ax.texts]


def test_labels_that_would_overlap_are_parted_and_others_stay():
    names, heights = ("untied", "lev", "tied", "far"), (0.50, 0.49, 0.51, 0.9)
    ax = Figure().subplots()
    ax.set(ylim=(0, 1))
    for name, y in zip(names, heights, strict=True):
        figures.label(ax, 1, y, name)
    alone = Figure().subplots()
    alone.set(ylim=(0, 1))
    figures.label(alone, 1, 0.9, "far")
    first, second = boxes(ax)
    for one, other in itertools.combinations(first, 2):
        assert min(one.y1, other.y1) - max(one.y0, other.y0) <= 2 + 1e-6  # of 13 pixels
    untied, lev, tied, far = ([box.y0, box.y1] for box in first)
    assert lev < untied < tied < far
    assert np.mean([untied, lev, tied]) == pytest.approx(np.mean([first[0].y0, first[0].y1]))
    assert far == pytest.approx([value for box in next(boxes(alone)) for value in (box.y0, box.y1)])
    assert [box.y0 for box in first] == pytest.approx([box.y0 for box in second])


def test_a_label_beyond_the_axes_is_drawn_whole():
    figure = Figure()
    ax = figure.subplots()
    figures.label(ax, 1, 0.5, "a long label at the right edge")
    renderer = FigureCanvasAgg(figure).get_renderer()
    label = ax.texts[0].get_window_extent(renderer)
    assert label.x1 > ax.get_window_extent(renderer).x1
    assert ax.get_tightbbox(renderer).x1 >= label.x1


def test_labels_side_by_side_or_with_an_arrow_stay():
    ax = Figure().subplots()
    arrow = {"arrowstyle": "-"}
    labels = [
        figures.label(ax, 0.1, 0.5, "left"),
        figures.label(ax, 0.8, 0.5, "right"),
        figures.label(ax, 0.1, 0.5, "arrow", arrowprops=arrow),
    ]
    list(boxes(ax))
    assert [text.shift for text in labels] == [0, 0, 0]


def luminance(color: str) -> float:
    """Relative luminance of a color, as contrast is defined for the web."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("name", figures.COLORS)
def test_colors_stand_out_on_a_white_page(name):
    assert 1.05 / (luminance(figures.COLORS[name]) + 0.05) > 2


def test_table_shows_values_and_escapes_words(shown):
    figures.table({"x": np.array([1.0, 2.5]), "name": ["a<b", "c"]}, caption="Numbers & names")
    (text,) = shown
    assert "<summary>Numbers &amp; names</summary>" in text
    assert "a&lt;b" in text
    assert "2.5" in text
    assert text.count("<tr>") == 3


def test_long_table_keeps_first_and_last_and_says_so(shown):
    figures.table({"x": range(1000)}, limit=5)
    (text,) = shown
    assert "(5 of 1000 rows)" in text
    assert ">0</td>" in text
    assert ">999</td>" in text


@pytest.mark.parametrize("columns", [{"x": [1], "y": [1, 2]}, {"x": []}])
def test_columns_of_other_lengths_are_refused(columns):
    with pytest.raises(ValueError, match="one common length"):
        figures.table(columns)


def test_footer_says_where_numbers_come_from(shown):
    figures.footer(seed=3, name="a<b")
    (text,) = shown
    for part in ("versions", "torch", "device", "commit", "run time", "seed = 3", "&lt;"):
        assert part in text


def test_commit_marks_uncommitted_changes(monkeypatch):
    answers = {"rev-parse": "abcd1234", "status": " M file"}
    monkeypatch.setattr(figures, "_git", lambda *arguments: answers[arguments[0]])
    assert figures.commit() == "abcd1234 with uncommitted changes"
    answers["status"] = ""
    assert figures.commit() == "abcd1234"


def test_commit_outside_a_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert figures.commit() == "not in a git repository"


def test_row_cloud_joins_the_pair_in_every_dimension():
    rows = np.random.default_rng(0).normal(size=(6, 5))
    rows[:, 2:] *= 1e-9  # so that the two principal axes carry every distance
    for cloud in (rows, rows[:, :2]):
        ax = Figure().subplots()
        figures.row_cloud(ax, cloud, (3, 1))
        line = next(line for line in ax.lines if line.get_linestyle() == "-")
        length = np.hypot(*np.diff(line.get_xydata(), axis=0)[0])
        assert abs(length - np.linalg.norm(rows[3] - rows[1])) < 1e-6


def test_shift_finds_the_greatest_rise_and_fall_among_many():
    rng = np.random.default_rng(1)
    before = rng.normal(size=200)
    after = before + 0.1 * rng.normal(size=200)
    after[17], after[5] = before[17] + 2, before[5] - 3
    ax = Figure().subplots()
    assert figures.shift(ax, before, after) == (17, 5)
    moves = [np.ptp(line.get_ydata()) for line in ax.lines if len(line.get_ydata()) == 2]
    assert sorted(moves)[-2:] == pytest.approx([2, 3])
    assert len(moves) <= 42


class Found:
    """A mean with an interval."""

    low, mean, high = 1.0, 2.0, 4.0


def test_intervals_stand_upright_or_lie_and_leave_out_what_is_missing():
    upright, across = Figure().subplots(1, 2)
    figures.intervals(upright, [5, 6], [Found, None], "lev")
    figures.intervals(across, [5], [Found], "lev", across=True)
    assert [line.get_xydata().tolist() for line in upright.lines] == [[[5, 1], [5, 4]], [[5, 2]]]
    assert [line.get_xydata().tolist() for line in across.lines] == [[[1, 5], [4, 5]], [[2, 5]]]


def test_a_band_goes_from_low_to_high_around_the_mean():
    ax = Figure().subplots()
    figures.band(ax, [0, 1], [Found, Found], "tied")
    assert ax.lines[0].get_ydata().tolist() == [2, 2]
    assert ax.collections[0].get_paths()[0].get_extents().intervaly.tolist() == [1, 4]


def test_strata_are_ticked_by_name_around_zero():
    ax = Figure().subplots()
    figures.strata(ax, [(2, 500, Found)], ["a", "b", "c"], "lev")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["a", "b", "c"]
    zero, line, point = (line.get_ydata() for line in ax.lines)
    assert (list(zero), list(line), list(point)) == ([0, 0], [1, 4], [2])
    assert ax.lines[2].get_xdata() == [2]


def test_the_best_trial_is_circled():
    ax = Figure().subplots()
    trials = [(0.001, 5.0), (0.002, 4.0), (0.004, 4.5)]
    assert figures.screening(ax, trials, "lev", "lev") == (0.002, 4.0)
    curve, circle = ax.lines
    assert curve.get_xydata().tolist() == [list(trial) for trial in trials]
    assert (circle.get_xydata().tolist(), circle.get_fillstyle()) == ([[0.002, 4.0]], "none")
    assert ax.texts[0].get_text() == "lev"


def test_an_empty_panel_says_why():
    ax = Figure().subplots()
    figures.pending(ax, "no record yet")
    assert ax.texts[0].get_text() == "no record yet"
