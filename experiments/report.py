"""Rebuild reports from traces: `python -m experiments.report <folder> [--against <other>]`.

In a run folder it writes `report.html` (one self-contained page), `plots/*.png`, `summary.csv`,
`categories.csv` and `summary.tex`. In a folder of runs, a sweep's for instance, it writes
`comparison.csv` and `comparison.tex`, all arms of all runs, and the overview, as
`python -m experiments.overview` does. With `--against` it compares the arms that both folders
have, of two commits for instance, and writes `against.html` (one self-contained page),
`against/*.png`, `against.csv` and `against.tex` into the first. The formulas are in
`specdec.metrics`.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console, RenderableType
from rich.text import Text

from experiments import latex, tables
from experiments.against_page import write_against_page
from experiments.comparison import compare_runs, match_runs, write_against
from experiments.model_plots import model_section
from experiments.overview import build_overview
from experiments.overview_data import without_metrics
from experiments.pages import cannot_write, unknown_text, write_page
from experiments.phase_event_costs import phase_event_lines
from experiments.plots import write_plots
from experiments.tables import HtmlTable, flag_random_tokens, render_table
from specdec.analysis import Run, is_run_folder, load, load_run
from specdec.errors import SpecdecError
from specdec.log import setup_logging
from specdec.metrics import (
    compare_arms,
    idle_positions,
    position_table,
    summarise_arms,
    summarise_categories,
    time_split,
)

_CUT = "The run did not come to its end: the numbers are of a part of its prompts."


def build_report(folder: Path) -> Path:
    """Write a run's report and tables beside its traces.

    Returns:
        The path of `report.html`.

    Raises:
        ConfigError: see `load_run`.
        CapacityError: the folder cannot be written.
    """
    run = load_run(folder)
    try:
        return _write_report(run, folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _write_report(run: Run, folder: Path) -> Path:
    summary = summarise_arms(run.requests, run.timings, run.arms)
    categories = summarise_categories(run.requests, run.timings, run.arms)
    positions = position_table(run.requests, run.arms)
    times = time_split(run.requests, run.steps, run.arms)
    idle = idle_positions(run.requests, run.steps, run.arms)
    summary.to_csv(folder / "summary.csv", index=False)
    categories.to_csv(folder / "categories.csv", index=False)
    latex.write_summary(folder / "summary.tex", summary, _setting(run.provenance))
    plots = write_plots(folder / "plots", summary, categories, positions, times)

    runs = load(folder, unfinished=True)

    def flagged(table: HtmlTable | None) -> HtmlTable | None:
        return None if table is None else flag_random_tokens(table, run.arms)

    return write_page(
        folder / "report.html",
        "report.html.j2",
        lead=_lead(run, summary),
        setting=_setting(run.provenance),
        baseline=summary["arm"][0],
        summary=flagged(tables.summary_table(summary)),
        paired=flagged(_paired_table(run, summary)),
        categories=[flagged(table) for table in tables.category_tables(categories)],
        positions=flagged(tables.position_lines(positions)),
        times=flagged(tables.time_lines(times)),
        phase_events=phase_event_lines(runs),
        launches=flagged(tables.launch_lines(run.arms)),
        lengths=flagged(tables.length_lines(run.arms)),
        idle=flagged(tables.idle_lines(idle, run.arms)),
        verdicts=flagged(tables.verdict_table(summary)),
        model=model_section(folder / "plots", without_metrics(runs)),
        plots={plot.name: plot for plot in plots},
        timed_dtype=run.provenance.get("dtype", "the timed dtype"),
        provenance=list(_flatten(run.provenance)),
        config_text=run.config_text,
    )


def _lead(run: Run, summary: pd.DataFrame) -> str:
    """Return the result in a few sentences, and whether it is that of a part."""

    def compare(one: tables.Row, other: tables.Row) -> pd.DataFrame:
        return compare_arms(run.traces(one["arm"]), run.traces(other["arm"]))

    text = tables.lead(summary, compare)
    return text if run.is_finished else f"{text} {_CUT}"


def _paired_table(run: Run, summary: pd.DataFrame) -> HtmlTable | None:
    """Return how the other speculative arms differ from the fastest; None where there is none."""
    other = tables.fastest(summary)
    if other is None:
        return None
    names = [name for name in summary["arm"][1:] if name != other]
    changes = {name: compare_arms(run.traces(name), run.traces(other)) for name in names}
    return tables.paired_lines(changes, other)


def read_tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read `summary.csv` and `categories.csv` back; only an empty cell is a missing value."""
    texts: Any = {"arm": str, "category": str}  # also those that look like numbers
    summary, categories = (
        pd.read_csv(folder / name, keep_default_na=False, na_values=[""], dtype=texts)
        for name in ("summary.csv", "categories.csv")
    )
    return summary, categories


def _setting(provenance: Mapping[str, Any]) -> str:
    """Return where and when the run was made, as far as its provenance says so."""
    known = {key: value for key, value in provenance.items() if value}
    if "commit" in known:
        known["commit"] = str(known["commit"])[:12]
    keys = ("device", "dtype", "threads", "started", "commit")
    text = "; ".join(f"{key} {known[key]}" for key in keys if key in known)
    return f"{text} with uncommitted changes" if provenance.get("dirty") is True else text


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for nested mappings."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            text = unknown_text(key) if value is None else json.dumps(value)
            yield f"{prefix}{key}", value if isinstance(value, str) else text


def main(argv: Sequence[str] | None = None) -> int:
    """Rebuild a report or a comparison and show its tables; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="run folder, or a folder that holds some")
    parser.add_argument("--against", type=Path, metavar="OTHER", help="folder to compare it with")
    arguments = parser.parse_args(argv)
    setup_logging(logging.WARNING)
    try:
        shown, written = _rebuild(arguments.folder, arguments.against)
    except SpecdecError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=120)
    for item in shown:
        console.print(item, highlight=False)
    for path in written:
        console.print(f"report: {path}", soft_wrap=True, highlight=False)
    return 0


def _rebuild(folder: Path, against: Path | None) -> tuple[list[RenderableType], list[Path]]:
    """Write what was asked for; return what to show and the files to name."""
    if against is not None:
        found = match_runs(load(folder), load(against))
        shown, paths = write_against(folder, found)
        return shown, [*paths, write_against_page(folder, against, found)]
    if not is_run_folder(folder) and not (folder / "arms.json").is_file():
        runs = load(folder)
        shown, paths = compare_runs(folder, runs)
        shown += [Text(line) for line in phase_event_lines(runs)]
        return shown, [*paths, build_overview(folder, runs)]
    path = build_report(folder)
    shown: list[RenderableType] = [*render_table(*read_tables(folder))]
    return shown if load_run(folder).is_finished else [*shown, Text(_CUT)], [path]


if __name__ == "__main__":
    sys.exit(main())
