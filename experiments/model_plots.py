"""The part of a page that shows the speed-up model: surfaces, best K, and how wrong it is."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from experiments.figures import (
    MARKERS,
    STYLE,
    add_legend,
    legend_in,
    new_figure,
    series_color,
    write_plot,
)
from experiments.overview_data import Overview, num_values
from experiments.overview_plots import Section
from experiments.speedup_model import (
    asked_sizes,
    batch_sizes,
    best_k,
    compare,
    fit,
    typical_context,
)
from experiments.tables import HtmlTable, arm_label

_MAX_SURFACES = 6
_MAX_CELLS = 8  # beside each other that have room for a number
HEADING = "Predicted speed-up"
_KEYS = ["setting", "target", "series"]


def predict(overview: Overview) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the surfaces of every setting and drafter, and the comparison with what was measured.

    Both have the columns `setting`, `target` and `random_tokens` first.
    """
    surfaces: list[pd.DataFrame] = []
    compared: list[pd.DataFrame] = []
    for setting in overview.drafting["setting"].unique():
        arms = overview.summary.loc[overview.summary["setting"] == setting]
        target = str(arms["target"].iloc[0] or "-").rpartition("/")[2]
        model = fit(overview, setting)
        if model.points.empty:
            continue
        sizes = batch_sizes(model.points, asked_sizes(arms, model.points))
        context = typical_context(model.points)
        tables = [
            model.surface(series, sizes, context)
            for series in model.acceptance
            if model.can_predict(series)
        ]
        for frames, found in (
            (surfaces, tables),
            (compared, [compare(model, overview, setting)]),
        ):
            for frame in found:
                frame.insert(0, "setting", setting)
                frame.insert(1, "target", target)
                frame.insert(2, "random_tokens", bool(arms["random_tokens"].any()))
                frames.append(frame)
    return _stack(surfaces), _stack(compared)


def _stack(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate; frames without rows would only spoil the column types."""
    known = [frame for frame in frames if len(frame)]
    if not known:
        return pd.DataFrame(columns=[*_KEYS, "k", "num_reqs"])
    return pd.concat(known, ignore_index=True)


def model_section(folder: Path, overview: Overview) -> Section:
    """Draw the surfaces as `<folder>/speedup_model*.png` and return the section.

    The numbers are written as `<folder>/speedup_model.csv`.
    """
    section = Section(HEADING)
    surfaces, compared = predict(overview)
    keys = Counter(zip(*(compared[name] for name in _KEYS), strict=True))
    shown = dict.fromkeys(setting for (setting, *_), count in keys.items() if count > 1)
    if surfaces.empty or not shown:
        section.notes.append(
            "Left out: it takes a drafter whose decode steps were measured, beside the "
            "autoregressive arm, at two K or two batch sizes."
        )
        return section
    folder.mkdir(parents=True, exist_ok=True)
    surfaces.to_csv(folder / "speedup_model.csv", index=False)
    section.notes += [*_explained(surfaces), _error_sentence(compared)]
    with matplotlib.rc_context(STYLE):
        _draw(folder, section, overview, surfaces, compared, shown)
    section.tables += [_best_table(surfaces), _compared_table(compared)]
    return section


def _draw(
    folder: Path,
    section: Section,
    overview: Overview,
    surfaces: pd.DataFrame,
    compared: pd.DataFrame,
    settings: Iterable[str],
) -> None:
    """Add the figures: a map over K and batch size for each drafter of a setting.

    Where a setting has one batch size, lines over K for all its drafters instead.
    """
    figures: list[tuple[str, Figure, str]] = []
    for setting in settings:
        rows, points = (f.loc[f["setting"] == setting] for f in (surfaces, compared))
        if num_values(rows, "num_reqs") == 1:
            figures.append((str(setting), *_curves(rows, points, overview.series)))
            continue
        for series in rows["series"].unique():
            title = f"{series}, {setting}" if setting else series
            own = (frame.loc[frame["series"] == series] for frame in (rows, points))
            figures.append((title, *_surface(*own)))
    for number, (title, figure, alt) in enumerate(figures[:_MAX_SURFACES], start=1):
        path = folder / ("speedup_model.png" if number == 1 else f"speedup_model_{number}.png")
        section.plots.append(write_plot(path, title or HEADING, alt, figure))
    if len(figures) > _MAX_SURFACES:
        section.notes.append(f"The first {_MAX_SURFACES} of {len(figures)} are drawn.")


def _explained(surfaces: pd.DataFrame) -> list[str]:
    texts = [
        "Expected tokens of a step over its measured time, over the same of autoregressive "
        "decoding; decode steps alone, without the prompts'. Between measured points, times are "
        "linear. Points were measured where a ring is; a star is the best K."
    ]
    if any(surfaces["is_extrapolated"]):
        texts.append("Hatched, dashed, or marked with ~: outside of what was measured, so a guess.")
    return texts


def _error_sentence(compared: pd.DataFrame) -> str:
    """Return how far predictions are from what was measured."""
    errors = compared["error"].abs()
    text = (
        f"Relative error at the {len(errors)} measured points: mean {errors.mean():.1%}, worst "
        f"{errors.max():.1%}."
    )
    held_out = compared["held_out_error"].abs().dropna()
    if len(held_out):
        text += (
            f" Predicted without the point itself, where others surround it ({len(held_out)} "
            f"points): mean {held_out.mean():.1%}, worst {held_out.max():.1%}."
        )
    return text


def _surface(rows: pd.DataFrame, points: pd.DataFrame) -> tuple[Figure, str]:
    """Draw the map of a drafter over K and batch size."""
    sizes, ks = sorted(rows["num_reqs"].unique()), sorted(rows["k"].unique())
    grid = rows.pivot(index="num_reqs", columns="k", values="speedup").to_numpy(np.float64)
    figure, (axes,) = new_figure(1.7 + 0.42 * len(sizes))
    spread = max(float(np.nanmax(np.abs(grid - 1))), 0.05)
    norm = TwoSlopeNorm(1.0, 1 / (1 + spread), 1 + spread)
    image = axes.imshow(grid, cmap="RdBu", norm=norm, aspect="auto", origin="lower")
    measured = set(zip(points["k"], points["num_reqs"], strict=True))
    best = {row["num_reqs"]: row["k"] for row in best_k(rows).to_dict("records")}
    for row in rows.to_dict("records"):
        place = ks.index(row["k"]), sizes.index(row["num_reqs"])
        is_best = best.get(row["num_reqs"]) == row["k"]
        _mark(axes, place, row, (row["k"], row["num_reqs"]) in measured, is_best, len(ks))
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    axes.set_yticks(range(len(sizes)), [str(size) for size in sizes])
    axes.xaxis.set_major_locator(MaxNLocator(_MAX_CELLS, integer=True)) if len(ks) > 16 else None
    axes.grid(visible=False)
    axes.set_xlabel("K, drafts a step")
    axes.set_ylabel("requests")
    figure.colorbar(image, ax=axes, label="speed-up", pad=0.02)
    figure.legend(handles=_keys(rows), loc="outside lower center", ncols=3, frameon=False)
    return figure, f"Map of predicted speed-up over K and batch size. {_spoken_best(rows)}"


def _mark(
    axes: Axes,
    place: tuple[int, int],
    row: dict[str, float],
    is_measured: bool,
    is_best: bool,
    num_columns: int,
) -> None:
    """Write a cell's number, and mark what it is."""
    x, y = place
    if row["is_extrapolated"]:
        corner = (x - 0.5, y - 0.5)
        axes.add_patch(
            Rectangle(corner, 1, 1, fill=False, hatch="////", edgecolor="#777777", linewidth=0)
        )
    if is_measured:
        axes.plot(x - 0.36, y + 0.26, "o", mfc="white", mec="#111111", markersize=5)
    if is_best:
        axes.plot(x + 0.36, y + 0.26, "*", mfc="#F0E442", mec="#111111", markersize=10)
    if num_columns <= _MAX_CELLS and math.isfinite(row["speedup"]):
        axes.annotate(
            f"{row['speedup']:.2f}",
            (x, y),
            xytext=(0, -3),
            textcoords="offset points",
            ha="center",
            va="center",
            bbox={"facecolor": "white", "alpha": 0.65, "edgecolor": "none", "pad": 0.8},
        )


def _keys(rows: pd.DataFrame) -> list[Artist]:
    """Return the legend's entries."""
    plain: dict[str, Any] = {"linestyle": "none", "markeredgecolor": "#111111"}
    keys: list[Artist] = [
        Line2D([], [], marker="o", markerfacecolor="white", label="measured", **plain),
        Line2D(
            [], [], marker="*", markersize=10, markerfacecolor="#F0E442", label="best K", **plain
        ),
    ]
    if any(rows["is_extrapolated"]):
        keys.append(
            Rectangle((0, 0), 1, 1, fill=False, hatch="////", edgecolor="#777777", label="a guess")
        )
    return keys


def _curves(rows: pd.DataFrame, points: pd.DataFrame, series: Sequence[str]) -> tuple[Figure, str]:
    """Draw predicted lines over K, with the measured points."""
    present = [name for name in series if name in set(rows["series"])]
    figure, (axes,) = new_figure(3.0 + legend_in([*present, "x"]))
    best = {row["series"]: row for row in best_k(rows).to_dict("records")}
    for name in present:
        index = series.index(name)
        own = rows.loc[rows["series"] == name].sort_values("k")
        x, y = own["k"].to_numpy(), own["speedup"].to_numpy(np.float64)
        guess = own["is_extrapolated"].to_numpy(bool)
        color = series_color(index)
        axes.plot(x, y, linestyle=":", color=color, linewidth=1.5)
        axes.plot(x, np.where(guess, np.nan, y), color=color, linewidth=1.8, label=name)
        found = points.loc[points["series"] == name]
        axes.plot(
            found["k"],
            found["measured"],
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            markerfacecolor="white",
            color=color,
        )
        if best[name]["k"]:
            axes.plot(
                best[name]["k"], best[name]["speedup"], "*", mfc="#F0E442", mec=color, markersize=11
            )
    axes.axhline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("K, drafts a step (open marks: measured, star: best)")
    axes.set_ylabel("speed-up of decode steps")
    add_legend(figure, axes)
    return figure, f"Lines of predicted speed-up over K. {_spoken_best(rows)}"


def _spoken_best(rows: pd.DataFrame) -> str:
    parts = [
        f"{row['series']} at batch size {row['num_reqs']}: best K={row['k']} with "
        f"{row['speedup']:.2f}x"
        for row in best_k(rows).to_dict("records")
    ]
    return "; ".join(parts) + "."


def _best_table(surfaces: pd.DataFrame) -> HtmlTable:
    lines: list[list[str]] = []
    for _, rows in surfaces.groupby(_KEYS, sort=False):
        for row in best_k(rows).to_dict("records"):
            guess = "~" if row["is_extrapolated"] else ""
            lines.append(
                [
                    arm_label(row, "series"),
                    str(row["target"]),
                    *([str(row["setting"])] if any(surfaces["setting"]) else []),
                    str(row["num_reqs"]),
                    f"{row['context']:.0f}",
                    str(row["k"]) if row["k"] else "0: no drafts",
                    f"{row['speedup']:.2f}x{guess}",
                    f"{row['expected_tokens']:.2f}",
                    *(_ms(row[name]) for name in ("target_ms", "draft_ms", "rest_ms", "step_ms")),
                ]
            )
    headers = ["Drafter", "Target"]
    if any(surfaces["setting"]):
        headers.append("Setting")
    text_columns = tuple(range(len(headers)))
    headers += ["Batch size", "Context", "Best K", "Speed-up", "Tokens a step", "Target, ms"]
    headers += ["Draft, ms", "Rest, ms", "Step, ms"]
    caption = "The best K of each batch size, as predicted. ~: outside of what was measured."
    return HtmlTable(caption, headers, lines, text_columns)


def _compared_table(compared: pd.DataFrame) -> HtmlTable:
    with_setting = any(compared["setting"])
    lines = [
        [
            arm_label(row, "series"),
            *([str(row["setting"])] if with_setting else []),
            str(row["k"]),
            str(row["num_reqs"]),
            str(row["num_steps"]),
            f"{row['measured']:.2f}x",
            f"{row['predicted']:.2f}x",
            _percent(row["error"]),
            f"{row['held_out']:.2f}x" if math.isfinite(row["held_out"]) else "-",
            _percent(row["held_out_error"]),
        ]
        for row in compared.to_dict("records")
    ]
    headers = ["Drafter", *(["Setting"] if with_setting else []), "K", "Batch size", "Decode steps"]
    headers += ["Measured", "Predicted", "Error", "Predicted without the point", "Its error"]
    caption = "Speed-up of decode steps, measured and predicted. A dash: nothing on both sides."
    return HtmlTable(caption, headers, lines, (0, 1) if with_setting else (0,))


def _ms(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _percent(value: float) -> str:
    return f"{value:+.1%}" if math.isfinite(value) else "-"
