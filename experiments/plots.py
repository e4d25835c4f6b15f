"""The figures of a report: one function each, from the tables of `specdec.metrics`."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.figures import (
    COLORS,
    MARKERS,
    STYLE,
    Plot,
    add_legend,
    error_lengths,
    legend_in,
    name_places,
    new_figure,
    say,
    series_color,
    series_hatch,
    write_plot,
)
from experiments.tables import category_label, shown_phases
from specdec.metrics import PHASES

# How acceptance is shown over the position -> what it is a share of.
_POSITION_KINDS = {
    "unconditional": "of the drafts judged at the position",
    "conditional": "of those behind accepted drafts only",
}


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
    with matplotlib.rc_context(STYLE):
        return [
            write_plot(
                folder / "accepted_length.png",
                "Mean accepted length by arm (bonus included)",
                f"Bars of mean accepted length: {_spoken(summary, 'accepted_length', '{:.2f}')}.",
                _accepted_length(summary),
            ),
            write_plot(
                folder / "acceptance_by_position.png",
                "Share of valid drafts accepted, by position",
                "Lines of unconditional and conditional acceptance over the draft position, by "
                "arm; the numbers are in the table below.",
                draw_positions(positions, arms),
            ),
            write_plot(
                folder / "speed.png",
                "Tokens per second and speed-up",
                f"Bars of tokens per second: {_spoken(summary, 'tokens_per_s', '{:.1f}')}. "
                f"Bars of speed-up: {_spoken(summary, 'speedup', '{:.2f}x')}.",
                _speed(summary),
            ),
            write_plot(
                folder / "time_split.png",
                "Milliseconds per decode step, by phase",
                "Stacked bars of milliseconds per decode step by phase "
                f"({', '.join(shown_phases(times))}); the numbers are in the table below.",
                draw_time_split(times),
            ),
            write_plot(
                folder / "categories.png",
                "Mean accepted length by category (bonus included)",
                "Grouped bars of mean accepted length by category and arm; the numbers are in the "
                "table of categories.",
                draw_categories(categories, arms),
            ),
        ]


def _accepted_length(summary: pd.DataFrame) -> Figure:
    figure, (axes,) = new_figure(1.2 + 0.42 * len(summary))
    _bars(axes, summary, "accepted_length", "{:.2f}", one="no drafts")
    axes.set_xlabel("committed tokens per verification step")
    return figure


def _speed(summary: pd.DataFrame) -> Figure:
    figure, (upper, lower) = new_figure(2.0 + 0.8 * len(summary), rows=2)
    _bars(upper, summary, "speedup", "{:.2f}x", one="autoregressive")
    upper.set_xlabel("speed-up vs autoregressive")
    _bars(lower, summary, "tokens_per_s", "{:.1f}")
    lower.set_xlabel("tokens/s")
    return figure


def draw_positions(positions: pd.DataFrame, arms: Sequence[str]) -> Figure:
    """Draw acceptance over the draft position, unconditional and conditional.

    Args:
        positions: from `specdec.metrics.position_table`.
        arms: all names in the order of their colours, the first the baseline's.
    """
    drafted = positions.loc[positions["num_drafted"] > 0]
    drafting = [(index, arm) for index, arm in enumerate(arms) if arm in set(drafted["arm"])]
    figure, both = new_figure(5.4 + legend_in([arm for _, arm in drafting]), rows=2)
    for axes, (kind, of) in zip(both, _POSITION_KINDS.items(), strict=True):
        for index, arm in drafting:
            own = drafted.loc[drafted["arm"] == arm]
            axes.errorbar(
                own["position"],
                own[kind],
                yerr=error_lengths(own, kind),
                color=series_color(index),
                marker=MARKERS[index % len(MARKERS)],
                markersize=5,
                linewidth=1.5,
                elinewidth=1,
                capsize=2,
                label=arm,
            )
        axes.set_title(f"{kind}: {of}")
        axes.set_ylabel("share accepted")
        axes.set_ylim(-0.02, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    both[1].set_xlabel("draft position")
    if drafting:
        add_legend(figure, both[0])
    else:
        for axes in both:
            axes.set_xticks([])
            say(axes, "no drafts were proposed")
    return figure


def draw_time_split(times: pd.DataFrame) -> Figure:
    """Draw where a decode step's time goes, from `specdec.metrics.time_split`."""
    figure, (axes,) = new_figure(1.7 + 0.42 * len(times))
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
    axes.set_xlim(0, 1.3 * left.max(initial=0.0) or 1.0)
    name_places(axes, list(times["arm"]))
    axes.set_xlabel("milliseconds per decode step")
    add_legend(figure, axes)
    return figure


def draw_categories(categories: pd.DataFrame, arms: Sequence[str]) -> Figure:
    """Draw the mean accepted length by category, a bar an arm.

    Args:
        categories: from `specdec.metrics.summarise_categories`.
        arms: all names in the order of their colours, the first the baseline's: it has no bars
            unless it is the only one.
    """
    names = list(categories["category"].unique())
    shown = [(index, arm) for index, arm in enumerate(arms) if index or len(arms) == 1]
    height = 1.2 + len(names) * (0.17 * len(shown) + 0.2)
    figure, (axes,) = new_figure(height + legend_in([arm for _, arm in shown]))
    bar = 0.8 / len(shown)
    top = 1.0
    for order, (index, arm) in enumerate(shown):
        own = categories.loc[categories["arm"] == arm].set_index("category").reindex(names)
        axes.barh(
            np.arange(len(names)) - 0.4 + bar * (order + 0.5),
            own["accepted_length"],
            xerr=error_lengths(own, "accepted_length"),
            height=bar * 0.92,
            color=series_color(index),
            hatch=series_hatch(index),
            edgecolor="white",
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
            label=arm,
        )
        top = max(top, _highest(own, "accepted_length"))
    axes.set_xlim(0, 1.05 * top)
    axes.axvline(1.0, color="#333333", linewidth=1, linestyle="--")
    name_places(axes, [category_label(name) for name in names])
    axes.set_xlabel("committed tokens per step (dashed: no drafts)")
    add_legend(figure, axes)
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
            xerr=error_lengths(own, name),
            height=0.62,
            color=series_color(place),
            hatch=series_hatch(place),
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
        axes.set_title(f"dashed: {one}", loc="left", color="#555555")
    if not np.isfinite(summary[name].to_numpy(np.float64)).any():
        say(axes, "not measured")
    name_places(axes, list(summary["arm"]))


def _phase_color(phase: str) -> str:
    return COLORS[PHASES.index(phase)]


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
