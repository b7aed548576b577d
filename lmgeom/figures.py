"""One look for every figure, table and provenance footer of the book.

This module needs the ``book`` extra (matplotlib, IPython); nothing else in the library imports it.
"""

from __future__ import annotations

import html
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.style
import numpy as np
from IPython import get_ipython
from IPython.display import HTML, display
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Affine2D, IdentityTransform

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLORS",
    "CYCLE",
    "band",
    "footer",
    "intervals",
    "label",
    "pending",
    "row_cloud",
    "screening",
    "shift",
    "strata",
    "table",
    "use",
]

STYLE = Path(__file__).with_name("lmgeom.mplstyle")

# Okabe and Ito's palette: told apart by readers with any common color vision, and legible on white
# and, after the page's lightness inversion, on dark grey.
COLORS: dict[str, str] = {
    "lev": "#0072B2",
    "tied": "#D55E00",
    "lev_default": "#56B4E9",
    "untied": "#CC79A7",
    "accent": "#E69F00",
    "contrast": "#009E73",
    "reference": "#333333",
    "muted": "#767676",
}
PAPER = "#ffffff"
CYCLE: list[str] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333"]

_started = time.perf_counter()


def use() -> None:
    """Set the book's figure style and start the clock that `footer` reads.

    In a notebook figures become SVG with a transparent background and no date in the file, so that
    the same numbers give the same bytes. Outside IPython only the style is set.
    """
    global _started
    _started = time.perf_counter()
    mpl.style.use(STYLE)
    if get_ipython() is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        metadata = {"Date": None, "Creator": None}
        set_matplotlib_formats("svg", metadata=metadata)


class _Label(Annotation):
    """An annotation with a halo that makes room for its neighbors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shift = 0.0  # pixels upward
        self.set_path_effects([withStroke(linewidth=2.4, foreground=PAPER)])

    def update_positions(self, renderer: Any) -> None:
        """Find the place that was asked for, and move from there."""
        super().update_positions(renderer)
        self.set_transform(self.get_transform() + Affine2D().translate(0, self.shift))

    def draw(self, renderer: Any) -> None:
        """Draw the label; the first of its axes parts them all."""
        axes: Any = self.axes
        others = [text for text in axes.texts if isinstance(text, _Label)]
        if self is others[0]:
            _part([text for text in others if text.arrow_patch is None], renderer)
        super().draw(renderer)


def _part(labels: Sequence[_Label], renderer: Any) -> None:
    """Stack labels that overlap, each stack centered on where its labels want to be."""
    boxes = {}
    for text in labels:
        text.shift = 0.0
        box = text.get_window_extent(renderer)
        boxes[text] = (box.x0 + 1, box.x1 - 1, (box.y0 + box.y1) / 2, box.height - 2)

    def overlap(one: _Label, other: _Label) -> bool:
        (left, right, y, height), (start, end, at, tall) = boxes[one], boxes[other]
        apart = abs(y + one.shift - at - other.shift)
        return bool(left < end and start < right and apart < (height + tall) / 2 - 1e-6)

    stacks = [[text] for text in labels]
    while pair := next(
        (
            (a, b)
            for a, b in combinations(stacks, 2)
            if any(overlap(one, other) for one in a for other in b)
        ),
        None,
    ):
        stacks = [stack for stack in stacks if stack not in pair]
        stacks.append(sorted(pair[0] + pair[1], key=lambda text: boxes[text][2]))
        total = sum(boxes[text][3] for text in stacks[-1])
        y = sum(boxes[text][2] for text in stacks[-1]) / len(stacks[-1]) - total / 2
        for text in stacks[-1]:
            _, _, wanted, height = boxes[text]
            text.shift = y + height / 2 - wanted
            y += height


def label(
    ax: Axes, x: float, y: float, text: str, color: str = COLORS["reference"], **kwargs: Any
) -> Annotation:
    """Write a label beside a curve, in the curve's color, instead of a legend.

    A halo keeps lines behind the label from striking it out. Labels of one axes that overlap when
    they are drawn move apart, up or down, by no more than they must.

    Args:
        ax: Axes to write on.
        x: Position of the labeled point, data units.
        y: Position of the labeled point, data units.
        text: The label.
        color: A color, or a name out of `COLORS`.
        **kwargs: Passed to `Axes.annotate`; `xytext` is an offset in points, (4, 0) by default.

    Returns:
        The annotation.
    """
    defaults = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "clip_on": False}
    settings = {**defaults, **kwargs}
    annotation = _Label(text, (x, y), color=COLORS.get(color, color), **settings)
    annotation.set_transform(IdentityTransform())
    ax.add_artist(annotation)
    return annotation


def intervals(
    ax: Axes, at: Sequence[float], found: Sequence[Any], color: str, *, across: bool = False
) -> None:
    """Draw means as points and their intervals as lines.

    Args:
        ax: Axes to draw on.
        at: Where each stands, data units.
        found: Objects with `mean`, `low` and `high`; None draws nothing.
        color: A color, or a name out of `COLORS`.
        across: Draw along x, as for rows of a list, and not along y.
    """
    color = COLORS.get(color, color)
    for place, one in zip(at, found, strict=True):
        if one is not None:
            line, point = ([place, place], [one.low, one.high]), (place, one.mean)
            ax.plot(*(line[::-1] if across else line), "-", color=color)
            ax.plot(*(point[::-1] if across else point), "o", ms=4, color=color)


def band(ax: Axes, x: Sequence[float], found: Sequence[Any], color: str) -> None:
    """Draw means as a curve and their intervals as a band.

    Args:
        ax: Axes to draw on.
        x: Positions, data units.
        found: Objects with `mean`, `low` and `high`, one a position.
        color: A color, or a name out of `COLORS`.
    """
    color = COLORS.get(color, color)
    low, high = [one.low for one in found], [one.high for one in found]
    ax.fill_between(x, low, high, color=color, alpha=0.2, lw=0)
    ax.plot(x, [one.mean for one in found], color=color)


def strata(
    ax: Axes, rows: Sequence[tuple[int, int, Any]], names: Sequence[str], color: str
) -> None:
    """Draw differences by stratum around a zero line, rare tokens left.

    Args:
        ax: Axes to draw on.
        rows: (stratum, targets, difference) of the strata to draw.
        names: Name of every stratum, for the ticks.
        color: A color, or a name out of `COLORS`.
    """
    ax.axhline(0, color=COLORS["muted"], lw=1)
    intervals(ax, [k for k, *_ in rows], [found for *_, found in rows], color)
    ax.set_xticks(range(len(names)), names, rotation=90, fontsize=7)


def screening(
    ax: Axes, trials: Sequence[tuple[float, float]], text: str, color: str
) -> tuple[float, float]:
    """Draw the trials of one arm and circle the best one.

    Args:
        ax: Axes to draw on.
        trials: (learning rate, loss), one or more, in order of the rate.
        text: Name of the arm.
        color: A color, or a name out of `COLORS`.

    Returns:
        The trial with the lowest loss.
    """
    color, best = COLORS.get(color, color), min(trials, key=lambda trial: trial[1])
    ax.plot(*zip(*trials, strict=True), "o-", color=color)
    ax.plot(*best, "o", markersize=11, fillstyle="none", color=color)
    label(ax, *trials[-1], text, color, xytext=(8, 0))  # right of a circle, if that is the best
    return best


def pending(ax: Axes, text: str) -> None:
    """Say in an empty panel why nothing is drawn in it, and hide the scale it has for nothing."""
    ax.grid(False)
    ax.tick_params(left=False, labelleft=False)
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=COLORS["muted"])


def row_cloud(ax: Axes, rows: Any, pair: tuple[int, int] | None = None) -> None:
    """Draw the rows of an update of the head as points, and the two farthest apart.

    Args:
        ax: Axes to draw on; both axes get one scale.
        rows: The update, shape (V, D) with D at least 2: an array or a tensor. Beyond two
            dimensions the picture is the cloud's shadow on its two principal axes.
        pair: Two rows to join, of which the first gets the color of a rise.
    """
    points = np.asarray(rows, dtype=float)
    if points.shape[1] > 2:
        points = points - points.mean(0)
        points = points @ np.linalg.svd(points, full_matrices=False)[2][:2].T
    ax.plot(*points.T, "o", color=COLORS["muted"], ms=4, alpha=0.7)
    if pair is not None:
        ax.plot(*points[list(pair)].T, "-", color=COLORS["reference"], lw=1)
        for i, color in zip(pair, (COLORS["accent"], COLORS["lev"]), strict=True):
            ax.plot(*points[i], "o", color=color, ms=6)
    ax.set_aspect("equal", adjustable="datalim")


def shift(ax: Axes, log_p: Any, log_q: Any, limit: int = 40) -> tuple[int, int]:
    """Draw what a step does to the probabilities of one prediction.

    Each token moves from a hollow mark to a full one. The length of the greatest rise plus that
    of the greatest fall is Hilbert's distance.

    Args:
        ax: Axes to draw on.
        log_p: Log-probabilities before, shape (V,).
        log_q: Log-probabilities after, shape (V,).
        limit: At most so many tokens are drawn, evenly picked, the two below among them.

    Returns:
        The token that rises most and the one that falls most.
    """
    before, after = (np.asarray(values, dtype=float) for values in (log_p, log_q))
    up, down = int(np.argmax(after - before)), int(np.argmin(after - before))
    ranked = np.argsort(-before)
    keep = np.linspace(0, len(ranked) - 1, min(limit, len(ranked))).round().astype(int)
    order = [i for place, i in enumerate(ranked) if place in keep or i in (up, down)]
    for x, i in enumerate(order):
        color = {up: COLORS["accent"], down: COLORS["lev"]}.get(i, COLORS["muted"])
        ax.plot([x, x], [before[i], after[i]], color=color, lw=1.6)
        ax.plot(x, before[i], "o", color=color, mfc="none", ms=4)
        ax.plot(x, after[i], "o", color=color, ms=4)
    ax.set(xlabel="tokens, likeliest first", ylabel="log-probability, nats", xticks=[])
    return up, down


def _cell(value: Any) -> str:
    """Format one number or word of a table."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return html.escape(text)


def _is_number(value: Any) -> bool:
    """Tell whether a cell is set right-aligned."""
    return isinstance(value, (int, float)) or hasattr(value, "__float__")


def _rows_html(columns: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> str:
    """Lay out the chosen rows of a table."""
    head = "".join(f'<th scope="col">{html.escape(str(name))}</th>' for name in columns)
    lines = []
    for i in rows:
        cells = (
            f"<td{' class=number' if _is_number(values[i]) else ''}>{_cell(values[i])}</td>"
            for values in columns.values()
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def table(
    columns: Mapping[str, Sequence[Any]], *, caption: str = "The plotted numbers", limit: int = 40
) -> None:
    """Display the numbers of a figure as a folded table, below the figure.

    Args:
        columns: Column title to values; all columns have the same length. Values are numbers,
            words, NumPy arrays or tensors of one dimension.
        caption: What the numbers are; the folded line a reader clicks.
        limit: At most so many rows are shown, evenly picked, first and last among them.

    Raises:
        ValueError: The columns have different lengths, or there is nothing to show.
    """
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise ValueError(f"columns need one common length of at least 1, got {lengths}")
    n = next(iter(lengths.values()))
    rows = list(range(n))
    if n > limit:
        rows = sorted({round(i * (n - 1) / (limit - 1)) for i in range(limit)})
        caption = f"{caption} ({len(rows)} of {n} rows)"
    body = _rows_html(columns, rows)
    if "inline" in mpl.get_backend():
        from matplotlib_inline.backend_inline import flush_figures

        flush_figures()
    display(
        HTML(
            f'<details class="figure-table"><summary>{html.escape(caption)}</summary>'
            f'<div class="table-scroll">{body}</div></details>'
        )
    )


def _git(*arguments: str) -> str | None:
    """Answer of a git command in the working directory, or None outside a repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str:
    """Short hash of the checked-out commit, with a mark when tracked files differ from it."""
    short = _git("rev-parse", "--short=8", "HEAD")
    if not short:
        return "not in a git repository"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{short} with uncommitted changes" if changed else short


def device() -> str:
    """The processor, or the GPU where torch is loaded and sees one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    if torch is None:
        return name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'' if threads == 1 else 's'}"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages the numbers depend on."""
    found = {"Python": platform.python_version()}
    for name in ("lmgeom", "torch", "numpy", "scipy", "matplotlib"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def footer(**parameters: Any) -> None:
    """Display where the numbers of a page come from: versions, device, commit, time, parameters.

    Args:
        **parameters: The notebook's parameters, as `footer(seed=seed, steps=steps)`.
    """
    rows = {
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "device": device(),
        "commit": commit(),
        "run time": f"{time.perf_counter() - _started:.1f} s",
    }
    if parameters:
        rows["parameters"] = ", ".join(f"{name} = {value!r}" for name, value in parameters.items())
    lines = "".join(
        f'<tr><th scope="row">{name}</th><td>{html.escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    display(HTML(f'<table class="provenance"><tbody>{lines}</tbody></table>'))
