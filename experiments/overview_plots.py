"""The figures of an overview: one function a section, from `experiments.overview_data.Overview`.

A section whose axis has one value is left out, and says why.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

from experiments.figures import (
    MARKERS,
    STYLE,
    Plot,
    add_legend,
    error_lengths,
    legend_in,
    new_figure,
    say,
    series_color,
    write_plot,
)
from experiments.overview_data import AUTOREGRESSIVE, Overview, best_arms, num_values, panels
from experiments.phase_event_costs import phase_event_lines
from experiments.plots import draw_categories, draw_positions, draw_time_split
from experiments.tables import HtmlTable

_MAX_PANELS = 4  # of a section; the table has all
_MAX_LINES = 8  # that a reader can tell apart


@dataclass
class Section:
    """A part of the page: figures, or the reason why there is none."""

    heading: str
    notes: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[HtmlTable] = field(default_factory=list)


def write_sections(folder: Path, overview: Overview) -> list[Section]:
    """Draw every section's figures as `<folder>/*.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        return [
            _accepted_length_by_k(folder, overview),
            _speedup_by_k(folder, overview),
            _speedup_by_batch_size(folder, overview),
            _pareto(folder, overview),
            _acceptance_by_position(folder, overview),
            _categories(folder, overview),
            _time_split(folder, overview),
        ]


def write_panels(
    folder: Path,
    section: Section,
    name: str,
    frame: pd.DataFrame,
    draw: Callable[[pd.DataFrame], tuple[Figure, str]],
    max_lines: int | None = None,
) -> Section:
    """Add a figure for each setting of a frame to a section.

    Args:
        folder: where the images go.
        section: gets the plots, and a note where some settings are left out.
        name: of the files; those after the first are numbered.
        frame: has the column `setting`.
        draw: returns a panel's figure and what it shows in words.
        max_lines: drafters that a figure holds; None where it holds all.
    """
    shown, count = panels(frame, _MAX_PANELS)
    most = max((num_values(rows, "series") for _, rows in shown), default=0)
    if max_lines is not None and most > max_lines:
        section.notes.append(
            f"The first {max_lines} of {most} drafters are drawn; the table of all arms has the "
            "rest."
        )
    for number, (title, rows) in enumerate(shown, start=1):
        figure, alt = draw(rows)
        path = folder / (f"{name}.png" if number == 1 else f"{name}_{number}.png")
        section.plots.append(write_plot(path, title or section.heading, alt, figure))
    if count > len(shown):
        section.notes.append(
            f"The first {len(shown)} of {count} settings are drawn; the table of all arms has "
            "the rest."
        )
    return section


def _accepted_length_by_k(folder: Path, overview: Overview) -> Section:
    section = Section("Mean accepted length by K (bonus included)")
    drafting = overview.drafting
    if num_values(drafting, "k") < 2:
        return _left_out(section, "K", drafting, "k")
    if num_values(drafting, "batch_size") > 1:
        smallest = drafting.groupby("setting")["batch_size"].transform("min")
        drafting = drafting.loc[drafting["batch_size"] == smallest]
        section.notes.append("Of each setting the smallest batch size is drawn.")

    def draw(rows: pd.DataFrame) -> tuple[Figure, str]:
        figure, axes = _lines(rows, overview.series, "k", "accepted_length")
        axes.set_ylim(*_limits(drafting, "accepted_length"))
        axes.set_xlabel("K, drafts a step at most")
        axes.set_ylabel("committed tokens per step")
        axes.axhline(1.0, color="#333333", linewidth=1, linestyle="--")
        return figure, _spoken(rows, "k", "accepted_length", "K={} {:.2f}")

    return write_panels(folder, section, "accepted_length_by_k", drafting, draw, _MAX_LINES)


def _speedup_by_k(folder: Path, overview: Overview) -> Section:
    section = Section("Speed-up by K")
    drafting = overview.drafting
    if num_values(drafting, "k") < 2:
        return _left_out(section, "K", drafting, "k")
    if num_values(drafting, "batch_size") > 1:
        batch = "batch size " + drafting["batch_size"].astype(str)
        joined = np.where(drafting["setting"] == "", batch, drafting["setting"] + ", " + batch)
        drafting = drafting.assign(setting=joined)

    def draw(rows: pd.DataFrame) -> tuple[Figure, str]:
        figure, axes = _lines(rows, overview.series, "k", "speedup")
        axes.set_ylim(*_limits(drafting, "speedup"))
        axes.set_xlabel("K, drafts a step at most")
        _dashed_one(axes)
        return figure, _spoken(rows, "k", "speedup", "K={} {:.2f}x")

    section.notes.append("Dashed: the autoregressive arm of the same run.")
    return write_panels(folder, section, "speedup_by_k", drafting, draw, _MAX_LINES)


def _speedup_by_batch_size(folder: Path, overview: Overview) -> Section:
    section = Section("Speed-up by batch size")
    drafting = overview.drafting
    if num_values(drafting, "batch_size") < 2:
        return _left_out(section, "batch size", drafting, "batch_size")
    ranked = drafting.sort_values("speedup", ascending=False)
    best = ranked.drop_duplicates(["series", "setting", "batch_size"]).sort_index()

    def draw(rows: pd.DataFrame) -> tuple[Figure, str]:
        figure, axes = _lines(rows, overview.series, "batch_size", "speedup")
        axes.set_ylim(*_limits(best, "speedup"))
        if num_values(drafting, "k") > 1:
            for row in rows.dropna(subset=["speedup"]).to_dict("records"):
                place, label = (row["batch_size"], row["speedup"]), f"K={row['k']}"
                axes.annotate(label, place, xytext=(4, 4), textcoords="offset points")
        axes.set_xlabel("requests that run together")
        _log_axis(axes, sorted(rows["batch_size"].unique()))
        _dashed_one(axes)
        return figure, _spoken(rows, "batch_size", "speedup", "batch size {} {:.2f}x")

    if num_values(drafting, "k") > 1:
        section.notes.append("At every batch size each drafter has the K that was fastest there.")
    return write_panels(folder, section, "speedup_by_batch_size", best, draw, _MAX_LINES)


def _pareto(folder: Path, overview: Overview) -> Section:
    section = Section("Latency against throughput")
    names = ["ms_per_token", "tokens_per_s"]
    points = overview.summary.dropna(subset=names)
    if len(points) < 2:
        section.notes.append(f"Left out: {len(points)} arm has both measures; two are needed.")
        return section
    section.notes.append(
        "Every arm is a point; further left, a request gets its next token sooner, further up, "
        "all requests together get more. The line joins the arms that no other beats in both."
    )

    def draw(rows: pd.DataFrame) -> tuple[Figure, str]:
        return _pareto_figure(rows, overview.series)

    return write_panels(folder, section, "pareto", points, draw)


def _pareto_figure(rows: pd.DataFrame, series: Sequence[str]) -> tuple[Figure, str]:
    present = [name for name in series if name in set(rows["series"])]
    figure, (axes,) = new_figure(3.4 + legend_in(present))
    for name in present:
        own, index = rows.loc[rows["series"] == name], series.index(name)
        axes.errorbar(
            own["ms_per_token"],
            own["tokens_per_s"],
            xerr=error_lengths(own, "ms_per_token"),
            yerr=error_lengths(own, "tokens_per_s"),
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            color=series_color(index),
            elinewidth=0.8,
            label=name,
        )
    best = rows.loc[frontier(list(rows["ms_per_token"]), list(rows["tokens_per_s"]))]
    best = best.sort_values("ms_per_token").drop_duplicates(["ms_per_token", "tokens_per_s"])
    axes.plot(best["ms_per_token"], best["tokens_per_s"], color="#333333", linewidth=1, zorder=1)
    several = num_values(rows, "batch_size") > 1
    labels: list[str] = []
    for row in best.to_dict("records"):
        label = f"K={row['k']}" if row["k"] else "no drafts"
        label += f", B={row['batch_size']}" if several else ""
        axes.annotate(
            label,
            (row["ms_per_token"], row["tokens_per_s"]),
            xytext=(6, -11),
            textcoords="offset points",
        )
        labels.append(
            f"{row['series']} {label} at {row['ms_per_token']:.2f} ms and "
            f"{row['tokens_per_s']:.1f} tokens/s"
        )
    axes.set_xlabel("ms per output token of a request")
    axes.set_ylabel("tokens/s of all requests")
    axes.margins(x=0.14, y=0.12)
    add_legend(figure, axes)
    return figure, f"Points of latency and throughput; on the frontier: {'; '.join(labels)}."


def frontier(latency: Sequence[float], throughput: Sequence[float]) -> npt.NDArray[np.bool_]:
    """Return which points no other beats: none has both less latency and more throughput.

    A point that equals another in one measure and loses in the other is beaten, too.
    """
    x, y = np.asarray(latency, np.float64), np.asarray(throughput, np.float64)
    no_worse = (x[None, :] <= x[:, None]) & (y[None, :] >= y[:, None])
    better = (x[None, :] < x[:, None]) | (y[None, :] > y[:, None])
    return np.logical_not(np.any(no_worse & better, axis=1))


def _acceptance_by_position(folder: Path, overview: Overview) -> Section:
    section = Section("Acceptance by position")
    drafted = overview.positions.loc[overview.positions["num_drafted"] > 0]
    if drafted.empty:
        section.notes.append("Left out: no arm proposed a draft.")
        return section
    # The longest curve of a drafter, of the batch size that saw most drafts.
    ranked = drafted.sort_values(["k", "num_drafted"], ascending=False)
    chosen = ranked.drop_duplicates(["series", "setting"])[["run", "arm"]]
    kept = drafted.merge(chosen, on=["run", "arm"])
    section.notes.append("Of each drafter the arm with the largest K is drawn.")

    def draw(rows: pd.DataFrame) -> tuple[Figure, str]:
        figure = draw_positions(rows.assign(arm=rows["series"]), overview.series)
        words = _spoken(rows, "position", "unconditional", "position {} {:.0%}")
        return figure, f"Share of valid drafts accepted, unconditional: {words}"

    return write_panels(folder, section, "acceptance_by_position", kept, draw)


def _categories(folder: Path, overview: Overview) -> Section:
    section = Section("Mean accepted length by category (bonus included)")
    if num_values(overview.categories, "category") < 2:
        return _left_out(section, "category", overview.categories, "category")
    kept = overview.categories.merge(best_arms(overview)[["run", "arm"]], on=["run", "arm"])
    if kept.empty:
        section.notes.append("Left out: no arm drafts.")
        return section
    section.notes.append("Of each drafter the fastest arm is drawn.")

    def draw(rows: pd.DataFrame) -> tuple[Figure, str]:
        labels = rows["series"] + " K=" + rows["k"].astype(str)
        names = [AUTOREGRESSIVE, *labels.unique()[:_MAX_LINES]]
        figure = draw_categories(rows.assign(arm=labels), names)
        return figure, _spoken(rows.assign(series=labels), "category", "accepted_length")

    return write_panels(folder, section, "categories", kept, draw, _MAX_LINES)


def _time_split(folder: Path, overview: Overview) -> Section:
    section = Section("Milliseconds per decode step, by phase")
    best = best_arms(overview)
    baselines = overview.summary.loc[
        (overview.summary["k"] == 0) & overview.summary["run"].isin(best["run"])
    ].drop_duplicates(["setting", "batch_size"])
    chosen = pd.concat([baselines, best])[["run", "arm"]]
    kept = chosen.merge(overview.times, on=["run", "arm"], how="left")
    if not sum(kept["num_steps"].fillna(0)):
        section.notes.append("Left out: no arm has a decode step.")
        return section
    section.notes.append("Of each drafter the fastest arm is drawn, and an autoregressive arm.")
    section.notes += phase_event_lines(overview.runs)

    def draw(rows: pd.DataFrame) -> tuple[Figure, str]:
        labels = rows["series"].where(
            rows["k"] == 0, rows["series"] + " K=" + rows["k"].astype(str)
        )
        if num_values(rows, "batch_size") > 1:
            labels += " B=" + rows["batch_size"].astype(str)
        named = rows.assign(arm=labels)
        pairs = zip(labels, rows["step_ms"], strict=True)
        words = ", ".join(f"{label} {step_ms:.2f} ms" for label, step_ms in pairs)
        return draw_time_split(
            named
        ), f"Stacked bars of a decode step's phases; whole steps: {words}."

    return write_panels(folder, section, "time_split", kept, draw)


def _lines(rows: pd.DataFrame, series: Sequence[str], x: str, y: str) -> tuple[Figure, Axes]:
    """Draw a line with intervals for every series."""
    present = [name for name in series if name in set(rows["series"])][:_MAX_LINES]
    figure, (axes,) = new_figure(3.0 + legend_in(present))
    for name in present:
        index = series.index(name)
        own = rows.loc[rows["series"] == name].sort_values(x)
        axes.errorbar(
            own[x],
            own[y],
            yerr=error_lengths(own, y),
            color=series_color(index),
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            linewidth=1.5,
            elinewidth=1,
            capsize=2,
            label=name,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not any(math.isfinite(value) for value in rows[y]):
        say(axes, "not measured")
    add_legend(figure, axes)
    return figure, axes


def _limits(frame: pd.DataFrame, name: str) -> tuple[float, float]:
    """Return limits that hold all values with their intervals, and 1: the same in all panels."""
    values = frame[[name, f"{name}_low", f"{name}_high"]].to_numpy(np.float64)
    known = [1.0, *values[np.isfinite(values)]]
    room = 0.06 * (max(known) - min(known) or 1.0)
    return min(known) - room, max(known) + room


def _dashed_one(axes: Axes) -> None:
    axes.axhline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.set_ylabel("speed-up vs autoregressive")


def _log_axis(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())


def _spoken(rows: pd.DataFrame, x: str, y: str, form: str = "{} {:.2f}") -> str:
    """Return the numbers of a figure in words, by series."""
    parts: list[str] = []
    for name, own in rows.groupby("series", sort=False):
        known = own.loc[np.isfinite(own[y].to_numpy(np.float64))].sort_values(x)
        pairs = zip(known[x], known[y], strict=True)
        parts.append(f"{name}: " + (", ".join(form.format(*pair) for pair in pairs) or "none"))
    return "; ".join(parts) + "."


def _left_out(section: Section, axis: str, frame: pd.DataFrame, column: str) -> Section:
    names = ", ".join(str(value) for value in dict.fromkeys(frame[column])) or "none"
    section.notes.append(
        f"Left out: the arms that draft have one {axis} only ({names}); sweep more to see a curve."
    )
    return section
