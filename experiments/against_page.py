"""The page of two folders against each other, from `experiments.comparison.Against`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.comparison import DRIFT_NOTE, FORMS, MEASURES, Against
from experiments.figures import (
    BASELINE_COLOR,
    COLORS,
    STYLE,
    Plot,
    error_lengths,
    name_places,
    new_figure,
    place_label,
    say,
    write_plot,
)
from experiments.overview_data import num_values
from experiments.pages import cannot_write, write_page
from experiments.provenance import shown_path
from experiments.tables import (
    RANDOM_NOTE,
    HtmlTable,
    arm_label,
    change_text,
    number_text,
    shown_text,
)

_SMALLEST_REACH = 0.02  # of an axis to either side of no difference: rounding is not blown up
_MAX_ARMS = 40  # in a picture; the table has all
# measure -> its name in the table, and the change's in a heading
_NAMES = {
    "accepted_length": ("Mean accepted length (bonus included)", "Difference of accepted lengths"),
    "tokens_per_s": ("Tokens/s", "Ratio of tokens/s"),
    "speedup": ("Speed-up", "Ratio of speed-ups"),
}


def write_against_page(folder: Path, other: Path, found: Against) -> Path:
    """Write `against.html` and `against/*.png`.

    Args:
        folder: the first of the two; gets the page.
        other: what it is compared with.
        found: from `experiments.comparison.match_runs`.

    Returns:
        The path of the page.

    Raises:
        CapacityError: the folder cannot be written.
    """
    labels = [arm_label(row, "name") for row in _rows(found.lines)]
    lines = found.lines.assign(label=labels)
    try:
        return write_page(
            folder / "against.html",
            "against.html.j2",
            names=[shown_path(str(path)) for path in (folder, other)],
            lead=_lead(lines),
            warnings=found.warnings,
            differences=_table(lines),
            notes=_notes(lines),
            plots=_write_plots(folder / "against", lines),
            unmatched=found.unmatched,
            provenance=found.provenance,
        )
    except OSError as error:
        raise cannot_write(folder, error) from error


def _lead(lines: pd.DataFrame) -> str:
    """Return the result in a few sentences."""
    count = num_values(lines, "label")
    parts: list[str] = []
    for measure in MEASURES:
        shown = _of(lines, measure).loc[lambda own: own["differs"]]
        higher = sum(shown["one"] > shown["other"])
        parts.append(
            f"{_NAMES[measure][0].lower()} higher in {higher}, lower in {len(shown) - higher}"
        )
    return (
        f"{'1 arm is' if count == 1 else f'{count} arms are'} in both folders. As far as intervals "
        f"show it, this folder has: {'; '.join(parts)}."
    )


def _table(lines: pd.DataFrame) -> HtmlTable:
    """Return the changes, three lines an arm."""
    runs = ["run"] if num_values(lines, "run") > 1 else []
    if list(lines["run"]) != list(lines["other_run"]):
        runs = ["run", "other_run"]
    headers = ["Arm", "Measure", "This folder", "Against", "Difference or ratio", "Shown", "Drawn"]
    headers += ["Run", "Run of the other folder"][: len(runs)]
    rows: list[list[str]] = []
    for row in _rows(lines):
        form = FORMS[row["measure"]]
        values = [number_text(row[side], form) for side in ("one", "other")]
        cells = [row["label"], _NAMES[row["measure"]][0], *values, change_text(row)]
        cells += [shown_text(row), str(row["num_units"])]
        rows.append(cells + [str(row[name]) for name in runs])
    caption = (
        "In brackets the 95 % bootstrap interval, which draws the same prompts for both. Shown: it "
        "excludes no difference (0, or a ratio of 1). Drawn: how many prompts, for speeds groups "
        "of them. A dash: nothing to measure."
    )
    if any(lines["random_tokens"]):
        caption += f" {RANDOM_NOTE.capitalize()}"
    return HtmlTable(caption, headers, rows, (0, 1, 5, 7, 8), group_by=0)


def _notes(lines: pd.DataFrame) -> list[str]:
    """Return how to read the table and the pictures, and what these leave out."""
    notes = [
        DRIFT_NOTE,
        "Right of the dashed line this folder has more than the other, left of it less. Filled: "
        "the interval excludes no difference.",
    ]
    count = num_values(lines, "label")
    if count > _MAX_ARMS:
        notes.append(f"The first {_MAX_ARMS} of {count} arms are drawn; the table has the rest.")
    return notes


def _write_plots(folder: Path, lines: pd.DataFrame) -> list[Plot]:
    """Draw the change of each measure as `<folder>/<measure>.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: list[Plot] = []
    with matplotlib.rc_context(STYLE):
        for measure in MEASURES:
            own = _of(lines, measure).iloc[:_MAX_ARMS]
            heading = _NAMES[measure][1]
            words = "; ".join(f"{row['label']} {change_text(row)}" for row in _rows(own))
            alt = f"{heading}, points with intervals: {words}."
            plots.append(write_plot(folder / f"{measure}.png", heading, alt, _changes(own)))
    return plots


def _changes(own: pd.DataFrame) -> Figure:
    """Draw a point with its interval for each arm, and a dashed line at no difference."""
    labels = [place_label(label) for label in own["label"]]
    num_lines = 1 + max(label.count("\n") for label in labels)
    figure, (axes,) = new_figure(1.0 + max(0.42, 0.1 + 0.17 * num_lines) * len(own))
    is_ratio = own["change"].iloc[0] == "ratio"
    none = 1.0 if is_ratio else 0.0
    ends = own.rename(columns={"low": "value_low", "high": "value_high"})
    for place, row in enumerate(_rows(own)):
        if not math.isfinite(row["value"]):
            continue
        axes.errorbar(
            row["value"],
            place,
            xerr=error_lengths(ends.iloc[[place]], "value"),
            marker="o",
            markersize=7,
            markerfacecolor=COLORS[0] if row["differs"] else "white",
            color=COLORS[0] if row["differs"] else BASELINE_COLOR,
            elinewidth=1.5,
            capsize=3,
        )
    axes.axvline(none, color="#333333", linewidth=1, linestyle="--")
    name_places(axes, list(own["label"]))
    known = ends[["value", "value_low", "value_high"]].to_numpy(np.float64)
    reach = np.abs(known[np.isfinite(known)] - none).max(initial=0.0)
    if not np.isfinite(known).any():
        say(axes, "not measured")
    if reach < _SMALLEST_REACH:
        axes.set_xlim(none - _SMALLEST_REACH, none + _SMALLEST_REACH)
    axes.set_xlabel("this folder / against" if is_ratio else "tokens per step, this - against")
    return figure


def _of(lines: pd.DataFrame, measure: str) -> pd.DataFrame:
    return lines.loc[lines["measure"] == measure]


def _rows(frame: pd.DataFrame) -> list[Mapping[Any, Any]]:
    return list(frame.to_dict("records"))
