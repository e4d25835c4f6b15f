"""The figures of a report: one function each, from the tables of `specdec.metrics`."""

import base64
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.tables import category_label, shown_phases
from specdec.metrics import PHASES

# Okabe and Ito's colours, which colour-blind readers can tell apart; grey is the baseline's.
_BASELINE_COLOR = "#8c8c8c"
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
_MARKERS = "osD^vPX*"
_HATCHES = ("", "///", "...", "xxx")  # where there are more arms than colours
_RC: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "hatch.linewidth": 0.6,
}
_WIDTH_IN = 5.8  # narrow, so that a phone still shows the letters
_DPI = 200


@dataclass
class Plot:
    """A written figure with the words that stand for it."""

    name: str
    heading: str
    alt: str
    width: int  # pixels
    height: int
    base64_png: str


def write_plots(
    folder: Path,
    summary: pd.DataFrame,
    categories: pd.DataFrame,
    positions: pd.DataFrame,
    times: pd.DataFrame,
) -> list[Plot]:
    """Draw every figure of a report and write it as `<folder>/<name>.png`.

    Args:
        folder: where the images go.
        summary: from `specdec.metrics.summarise_arms`.
        categories: from `specdec.metrics.summarise_categories`.
        positions: from `specdec.metrics.position_table`.
        times: from `specdec.metrics.time_split`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arms = list(summary["arm"])
    with matplotlib.rc_context(_RC):
        return [
            _write(
                folder / "accepted_length.png",
                "Mean accepted length by arm (bonus included)",
                f"Bars of mean accepted length: {_spoken(summary, 'accepted_length', '{:.2f}')}.",
                _accepted_length(summary),
            ),
            _write(
                folder / "acceptance_by_position.png",
                "Share of valid drafts accepted, by position",
                "Lines of unconditional and conditional acceptance over the draft position, by "
                "arm; the numbers are in the table below.",
                _positions(positions, arms),
            ),
            _write(
                folder / "speed.png",
                "Tokens per second and speed-up",
                f"Bars of tokens per second: {_spoken(summary, 'tokens_per_s', '{:.1f}')}. "
                f"Bars of speed-up: {_spoken(summary, 'speedup', '{:.2f}x')}.",
                _speed(summary),
            ),
            _write(
                folder / "time_split.png",
                "Milliseconds per decode step, by phase",
                "Stacked bars of milliseconds per decode step by phase "
                f"({', '.join(shown_phases(times))}); the numbers are in the table below.",
                _time_split(times),
            ),
            _write(
                folder / "categories.png",
                "Mean accepted length by category (bonus included)",
                "Grouped bars of mean accepted length by category and arm; the numbers are in the "
                "table of categories.",
                _categories(categories, arms),
            ),
        ]


def _accepted_length(summary: pd.DataFrame) -> Figure:
    figure, (axes,) = _figure(1.2 + 0.42 * len(summary))
    _bars(axes, summary, "accepted_length", "{:.2f}", one="no drafts")
    axes.set_xlabel("committed tokens per verification step")
    return figure


def _speed(summary: pd.DataFrame) -> Figure:
    figure, (left, right) = _figure(1.2 + 0.42 * len(summary), columns=2)
    _bars(left, summary, "tokens_per_s", "{:.1f}")
    left.set_xlabel("tokens/s")
    _bars(right, summary, "speedup", "{:.2f}x", one="autoregressive")
    right.set_xlabel("speed-up vs autoregressive")
    right.tick_params(labelleft=False)
    return figure


def _positions(positions: pd.DataFrame, arms: Sequence[str]) -> Figure:
    drafted = positions.loc[positions["num_drafted"] > 0]
    drafting = [(index, arm) for index, arm in enumerate(arms) if arm in set(drafted["arm"])]
    figure, both = _figure(3.2 + _legend_in([arm for _, arm in drafting]), columns=2)
    for axes, kind in zip(both, ("unconditional", "conditional"), strict=True):
        for index, arm in drafting:
            own = drafted.loc[drafted["arm"] == arm]
            axes.errorbar(
                own["position"],
                own[kind],
                yerr=_errors(own, kind),
                color=_color(index),
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5,
                linewidth=1.5,
                elinewidth=1,
                capsize=2,
                label=arm,
            )
        axes.set_title(kind, fontsize=10)
        axes.set_xlabel("draft position")
        axes.set_ylim(-0.02, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    both[0].set_ylabel("share of valid drafts accepted")
    both[1].tick_params(labelleft=False)
    if drafting:
        _legend(figure, both[0])
    else:
        for axes in both:
            axes.set_xticks([])
            _say(axes, "no drafts were proposed")
    return figure


def _time_split(times: pd.DataFrame) -> Figure:
    figure, (axes,) = _figure(1.6 + 0.42 * len(times))
    places = np.arange(len(times))
    left = np.zeros(len(times))
    phases = shown_phases(times)
    for phase in phases:
        mean_ms = times[f"{phase}_ms"].fillna(0.0).to_numpy(np.float64)
        axes.barh(places, mean_ms, left=left, height=0.62, color=_phase_color(phase), label=phase)
        left += mean_ms
    for place, total in zip(places, left, strict=True):
        axes.annotate(
            f"{total:.1f} ms" if total else "no decode step",
            (total, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_xlim(0, 1.2 * left.max(initial=0.0) or 1.0)
    _name_places(axes, list(times["arm"]))
    axes.set_xlabel("milliseconds per decode step")
    _legend(figure, axes, columns=len(phases))
    return figure


def _categories(categories: pd.DataFrame, arms: Sequence[str]) -> Figure:
    names = list(categories["category"].unique())
    shown = [(index, arm) for index, arm in enumerate(arms) if index or len(arms) == 1]
    height = 1.2 + len(names) * (0.17 * len(shown) + 0.2)
    figure, (axes,) = _figure(height + _legend_in([arm for _, arm in shown]))
    bar = 0.8 / len(shown)
    top = 1.0
    for order, (index, arm) in enumerate(shown):
        own = categories.loc[categories["arm"] == arm].set_index("category").reindex(names)
        axes.barh(
            np.arange(len(names)) - 0.4 + bar * (order + 0.5),
            own["accepted_length"],
            xerr=_errors(own, "accepted_length"),
            height=bar * 0.92,
            color=_color(index),
            hatch=_hatch(index),
            edgecolor="white",
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
            label=arm,
        )
        top = max(top, _highest(own, "accepted_length"))
    axes.set_xlim(0, 1.05 * top)
    axes.axvline(1.0, color="#333333", linewidth=1, linestyle="--")
    _name_places(axes, [category_label(name) for name in names])
    axes.set_xlabel("committed tokens per verification step (dashed: no drafts)")
    _legend(figure, axes)
    return figure


def _bars(axes: Axes, summary: pd.DataFrame, name: str, form: str, one: str = "") -> None:
    """Draw one bar an arm with its interval and number, and a dashed line at 1 called `one`."""
    for place, value in enumerate(summary[name]):
        own = summary.iloc[[place]]
        if not np.isfinite(value):
            continue
        axes.barh(
            place,
            value,
            xerr=_errors(own, name),
            height=0.62,
            color=_color(place),
            hatch=_hatch(place),
            edgecolor="white",
            error_kw={"elinewidth": 1.2, "capsize": 3, "ecolor": "#333333"},
        )
        axes.annotate(
            form.format(value),
            (_highest(own, name), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.set_xlim(0, 1.35 * _highest(summary, name) or 1.0)
    if one:
        axes.axvline(1.0, color="#333333", linewidth=1, linestyle="--")
        axes.set_title(f"dashed: {one}", fontsize=9, loc="left", color="#555555")
    if not np.isfinite(summary[name].to_numpy(np.float64)).any():
        _say(axes, "not measured")
    _name_places(axes, list(summary["arm"]))


def _figure(height_in: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure that no global state keeps, with axes side by side."""
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    return figure, [figure.add_subplot(1, columns, column + 1) for column in range(columns)]


def _name_places(axes: Axes, names: Sequence[str]) -> None:
    """Label horizontal bars, the first one on top; a long name takes two lines."""
    wrapped = [textwrap.fill(name, 18) for name in names]
    axes.set_yticks(range(len(names)), wrapped)
    if wrapped != list(names):
        axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def _legend_columns(names: Sequence[str]) -> int:
    """Return how many entries fit beside each other: the width is about 75 letters."""
    return max(1, min(3, 75 // (max(map(len, names), default=0) + 8)))


def _legend_in(names: Sequence[str]) -> float:
    """Return the height that a legend takes, in inches."""
    return 0.22 * -(-len(names) // _legend_columns(names))


def _legend(figure: Figure, axes: Axes, columns: int | None = None) -> None:
    """Put the axes' legend below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    columns = columns or _legend_columns(labels)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#555555")


def _color(index: int) -> str:
    return _COLORS[(index - 1) % len(_COLORS)] if index else _BASELINE_COLOR


def _phase_color(phase: str) -> str:
    return _COLORS[PHASES.index(phase)]


def _hatch(index: int) -> str:
    return _HATCHES[(index - 1) // len(_COLORS) % len(_HATCHES)] if index else ""


def _errors(frame: pd.DataFrame, name: str) -> np.ndarray:
    """Return [2, num_rows] lengths of error bars; a missing interval has none."""
    value = frame[name].to_numpy(np.float64)
    low, high = (frame[f"{name}_{end}"].to_numpy(np.float64) for end in ("low", "high"))
    # A percentile interval of few units may miss its own estimate.
    return np.nan_to_num(np.clip(np.stack([value - low, high - value]), 0.0, None))


def _highest(frame: pd.DataFrame, name: str) -> float:
    """Return where the longest bar with its interval ends; 0 where there is no value."""
    ends = frame[[name, f"{name}_high"]].to_numpy(np.float64)
    return float(np.nan_to_num(ends).max(initial=0.0))


def _spoken(summary: pd.DataFrame, name: str, form: str) -> str:
    pairs = zip(summary["arm"], summary[name], strict=True)
    return ", ".join(
        f"{arm} {form.format(value) if np.isfinite(value) else 'not measured'}"
        for arm, value in pairs
    )


def _write(path: Path, heading: str, alt: str, figure: Figure) -> Plot:
    # No software tag: the same data give the same bytes, and the page names no web address.
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    width, height = (round(inches * _DPI) for inches in figure.get_size_inches())
    figure.clear()
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return Plot(path.stem, heading, alt, width, height, encoded)
