"""Build the overview of a sweep: `python -m experiments.overview <folder>`.

Reads every finished run folder at or below the folder and writes into it `overview.html` (one
self-contained page), `overview/*.png` and `overview.csv` (all arms, all numbers). The formulas are
in `specdec.metrics`, those of the predicted speed-up in `experiments.speedup_model`.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.model_plots import model_section
from experiments.overview_data import (
    Overview,
    differences,
    flatten,
    make_overview,
)
from experiments.overview_plots import write_sections
from experiments.pages import cannot_write, unknown_text, write_page
from experiments.tables import (
    HtmlTable,
    Row,
    arm_label,
    category_label,
    interval_text,
    lead,
    number_text,
    verdict_text,
)
from specdec.analysis import Runs, load
from specdec.errors import ConfigError, SpecdecError
from specdec.log import setup_logging


def build_overview(folder: Path, runs: Runs | None = None) -> Path:
    """Write the overview of the finished runs at or below a folder.

    Args:
        folder: gets the overview.
        runs: those below it, where they are loaded already.

    Returns:
        The path of `overview.html`.

    Raises:
        ConfigError: there is no finished run.
        CapacityError: the folder cannot be written.
    """
    overview = make_overview(load(folder) if runs is None else runs)
    try:
        return _write_overview(overview, folder)
    except OSError as error:
        raise cannot_write(folder, error, "experiments.overview") from error


def _write_overview(overview: Overview, folder: Path) -> Path:
    overview.summary.to_csv(folder / "overview.csv", index=False)
    images = folder / "overview"
    for old in images.glob("*.png"):  # of a sweep that has grown since: its panels may be others
        old.unlink()
    sections = [*write_sections(images, overview), model_section(images, overview)]
    return write_page(
        folder / "overview.html",
        "overview.html.j2",
        num_runs=len(overview.runs.entries),
        lead=_lead(overview),
        setting=_setting(overview),
        warnings=_warnings(overview.runs),
        arms=_arms_table(overview),
        categories=_categories_table(overview),
        sections=sections,
        provenance=_provenance(overview.runs),
        runs=_runs_table(overview.runs),
    )


def _lead(overview: Overview) -> str:
    """Return the result in a few sentences."""
    runs = overview.runs
    rows = overview.summary.to_dict("records")
    labelled = overview.summary.assign(label=[_label(row, overview.axes) for row in rows])

    def compare(one: Row, other: Row) -> pd.DataFrame | None:
        try:
            return runs.compare((one["run"], one["arm"]), (other["run"], other["arm"]))
        except ConfigError:  # they were asked other prompts
            return None

    return lead(labelled, compare, "label")


def _label(row: Row, axes: Sequence[str]) -> str:
    """Return how a sentence names an arm."""
    text = f"{row['series']} with K={row['k']}" if row["k"] else str(row["series"])
    if row["setting"]:
        text += f" ({row['setting']})"
    return f"{text} at batch size {row['batch_size']}" if "batch_size" in axes else text


def _setting(overview: Overview) -> str:
    """Return what all arms have in common."""
    names = ("target", "temperature", "verifier", "batch_size", "prompts", "dtype", "device")
    row = overview.summary.iloc[0]
    common = [
        f"{name.replace('_', ' ')} {row[name]}" for name in names if name not in overview.axes
    ]
    return "The same in all arms: " + "; ".join(common) + "." if common else ""


def _warnings(runs: Runs) -> list[str]:
    found = differences(runs)
    texts: list[str] = []
    if found:
        texts.append(
            "The runs were not made alike, so times may not compare between them. "
            f"Different: {' | '.join(found)}."
        )
    if any(made.get("dirty") for made in runs.provenance.values()):
        texts.append("Some runs were made with uncommitted changes.")
    if any(runs.arms["random_tokens"]):
        texts.append(
            "Prompts of random tokens are in use, flagged in the tables: acceptance on them says "
            "nothing about text."
        )
    return texts


def _arms_table(overview: Overview) -> HtmlTable:
    axes = [name for name in overview.axes if name != "random_tokens"]
    headers = ["Drafter", "K", *(_header(name) for name in axes)]
    headers += ["Mean accepted length (bonus included)", "Speed-up", "Tokens/s", "Ms per token"]
    headers += ["Acceptance rate", "Equality verdict", "Run"]
    rows = [
        [
            arm_label(row, "series"),
            str(row["k"]),
            *(_axis_text(name, row[name]) for name in axes),
            interval_text(row, "accepted_length", "{:.2f}"),
            interval_text(row, "speedup", "{:.2f}x"),
            interval_text(row, "tokens_per_s", "{:.1f}"),
            interval_text(row, "ms_per_token", "{:.2f}"),
            interval_text(row, "acceptance_rate", "{:.1%}"),
            verdict_text(row),
            str(row["run"]),
        ]
        for row in overview.summary.to_dict("records")
    ]
    caption = (
        "One line per run and arm; in brackets the 95 % bootstrap interval. A dash: nothing to "
        "measure. A click on a column's head sorts."
    )
    is_text = [not pd.api.types.is_numeric_dtype(overview.summary[name]) for name in axes]
    text_columns = (0, *(2 + i for i, text in enumerate(is_text) if text))
    return HtmlTable(caption, headers, rows, (*text_columns, len(headers) - 2, len(headers) - 1))


def _header(name: str) -> str:
    return (name if "." in name else name.replace("_", " ")).capitalize()


def _axis_text(name: str, value: Any) -> str:
    if name == "commit":
        return str(value)[:12]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _categories_table(overview: Overview) -> HtmlTable:
    """Return accepted lengths, a line per arm and a column per category."""
    names = list(overview.categories["category"].unique())
    cells = {
        (row["run"], row["arm"], row["category"]): interval_text(row, "accepted_length", "{:.2f}")
        for row in overview.categories.to_dict("records")
    }
    rows = [
        [
            arm_label(row, "series"),
            str(row["k"]),
            *([str(row["batch_size"])] if "batch_size" in overview.axes else []),
            *([row["setting"]] if any(overview.summary["setting"]) else []),
            *(cells.get((row["run"], row["arm"], name), "-") for name in names),
        ]
        for row in overview.drafting.to_dict("records")
    ]
    headers = ["Drafter", "K"]
    text_columns = [0]
    if "batch_size" in overview.axes:
        headers.append("Batch size")
    if any(overview.summary["setting"]):
        text_columns.append(len(headers))
        headers.append("Setting")
    headers += [category_label(name) for name in names]
    caption = "Mean accepted length (bonus included) of the arms that draft."
    return HtmlTable(caption, headers, rows, tuple(text_columns))


def _provenance(runs: Runs) -> list[tuple[str, str]]:
    """Return each fact of the surroundings with all values that it has over the runs."""
    flat = [dict(flatten(made)) for made in runs.provenance.values()]
    keys = dict.fromkeys(key for values in flat for key in values)
    own = ("command", "started", "duration_s", "seed")  # of each run: in the table of runs
    lines: list[tuple[str, str]] = []
    for key in keys:
        if key not in own:
            values = dict.fromkeys(_fact(values.get(key), key) for values in flat)
            lines.append((key, "; ".join(values)))
    return lines


def _fact(value: Any, key: str = "") -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return unknown_text(key) if value is None else str(value)


def _runs_table(runs: Runs) -> HtmlTable:
    rows = [
        [
            run,
            str(made.get("commit") or "unknown")[:12],
            str(made.get("started") or "unknown"),
            number_text(float(made.get("duration_s") or "nan"), "{:.1f}"),
            _fact(made.get("seed")),
            str(made.get("command") or "unknown"),
        ]
        for run, made in runs.provenance.items()
    ]
    headers = ["Run", "Commit", "Started", "Duration, s", "Seed", "Command"]
    return HtmlTable("The runs and how they were started.", headers, rows, (0, 1, 2, 5))


def main(argv: Sequence[str] | None = None) -> int:
    """Build an overview; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.overview", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds run folders at any depth: a sweep's, say")
    folder: Path = parser.parse_args(argv).folder
    setup_logging(logging.WARNING)
    try:
        path = build_overview(folder)
    except SpecdecError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"overview: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
