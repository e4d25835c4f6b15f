"""What all figures share: their style, their axes, and how they are written."""

import base64
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; grey is the baseline's.
BASELINE_COLOR = "#8c8c8c"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
MARKERS = "osD^vPX*"
HATCHES = ("", "///", "...", "xxx")  # where there are more arms than colours
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "figure.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.6,
    "text.parse_math": False,  # names are the user's: a "$" in one is no formula
}
# A phone shows a figure 366 pixels wide: letters of 10 points, the smallest, are 11 pixels then.
WIDTH_IN = 4.6
FONT_POINTS = 10
DPI = 180
_LETTERS = 58  # that fit the width
_PLACE = 16  # of them, beside horizontal bars
_JOINT = "\x1f"  # where a word may be parted: in no name


@dataclass
class Plot:
    """A written figure with the words that stand for it."""

    name: str
    heading: str
    alt: str
    width: int  # pixels
    height: int
    base64_png: str


def new_figure(height_in: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure that no global state keeps, with axes below each other."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]


def name_places(axes: Axes, names: Sequence[str]) -> None:
    """Label horizontal bars, the first one on top; a long name takes several lines."""
    axes.set_yticks(range(len(names)), [place_label(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def place_label(name: str) -> str:
    """Return a name in lines that fit beside horizontal bars; a long word ends a line at a `_`."""
    words = name.split()
    parts = [re.sub(r"_(?=[^_])", f"_{_JOINT} ", w) if len(w) > _PLACE else w for w in words]
    return textwrap.fill(" ".join(parts), _PLACE).replace(f"{_JOINT} ", "").replace(_JOINT, "")


def legend_columns(names: Sequence[str]) -> int:
    """Return how many entries fit beside each other."""
    return max(1, min(3, _LETTERS // (max(map(len, names), default=0) + 8)))


def legend_in(names: Sequence[str]) -> float:
    """Return the height that a legend takes, in inches."""
    return 0.22 * -(-len(names) // legend_columns(names))


def add_legend(figure: Figure, axes: Axes) -> None:
    """Put the axes' legend below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=legend_columns(labels), frameon=False
    )


def say(axes: Axes, text: str) -> None:
    """Write a sentence where there is nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#555555")


def series_color(index: int) -> str:
    """Return the colour of a series; the first is the baseline."""
    return COLORS[(index - 1) % len(COLORS)] if index else BASELINE_COLOR


def series_hatch(index: int) -> str:
    """Return what tells bars of the same colour apart."""
    return HATCHES[(index - 1) // len(COLORS) % len(HATCHES)] if index else ""


def error_lengths(frame: pd.DataFrame, name: str) -> np.ndarray:
    """Return [2, num_rows] lengths of error bars; a missing interval has none."""
    value = frame[name].to_numpy(np.float64)
    low, high = (frame[f"{name}_{end}"].to_numpy(np.float64) for end in ("low", "high"))
    # A percentile interval of few units may miss its own estimate.
    return np.nan_to_num(np.clip(np.stack([value - low, high - value]), 0.0, None))


def write_plot(path: Path, heading: str, alt: str, figure: Figure) -> Plot:
    """Write a figure, and return it with its heading and the words that stand for it."""
    # No software tag: the same data give the same bytes, and the page names no web address.
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    width, height = (round(inches * DPI) for inches in figure.get_size_inches())
    figure.clear()
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return Plot(path.stem, heading, alt, width, height, encoded)
