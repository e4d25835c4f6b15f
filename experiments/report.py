"""Rebuild a run's report from its traces: `python -m experiments.report <run folder>`.

Reads what `experiments.run` left in the folder and writes `report.html` (one self-contained page),
`plots/*.png`, `summary.csv` and `categories.csv`. The formulas are in `specdec.metrics`.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from rich.console import Console

from experiments import tables
from experiments.plots import write_plots
from experiments.tables import render_table
from specdec.errors import CapacityError, ConfigError, SpecdecError
from specdec.metrics import (
    idle_positions,
    position_table,
    summarise_arms,
    summarise_categories,
    time_split,
)
from specdec.trace import OPTIONAL_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS

_TABLES = {
    "requests.parquet": (*(c for c in REQUEST_COLUMNS if c not in OPTIONAL_COLUMNS), "arm"),
    "steps.parquet": (*STEP_COLUMNS, "arm"),
    "timings.parquet": ("arm", "group", "category", "num_tokens", "wall_s"),
}
_TEXTS = ("arms.json", "provenance.json", "config.yaml")
_ARM_KEYS = {"arm", "drafter", "k", "verifier", "temperature", "lossless", "verdict"}
_ARM_KEYS |= {"device", "graph_scope", "launches", "capture", "draft_length"}
_CAPTURE_KEYS = {"num_graphs", "seconds", "num_bytes"}
_VERDICT_KEYS = {"status", "dtype", "num_compared", "num_equal", "note"}


@dataclass
class Run:
    """What a run folder holds."""

    requests: pd.DataFrame
    steps: pd.DataFrame
    timings: pd.DataFrame
    arms: list[dict[str, Any]]  # the autoregressive arm first
    provenance: dict[str, Any]
    config_text: str


def load_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ConfigError: a file is missing or unreadable, or lacks columns or keys.
    """
    missing = [name for name in (*_TABLES, *_TEXTS) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} is no complete run folder: {', '.join(missing)} missing; "
            "give a folder that `python -m experiments.run` finished"
        )
    frames: dict[str, pd.DataFrame] = {}
    name = ""
    try:
        for name, columns in _TABLES.items():
            frames[name] = pd.read_parquet(folder / name)
            _check_names(folder / name, columns, frames[name].columns)
        name = "arms.json"
        arms = json.loads((folder / name).read_text(encoding="utf-8"))
        _check_arms(folder / name, arms)
        name = "provenance.json"
        provenance = json.loads((folder / name).read_text(encoding="utf-8"))
        name = "config.yaml"
        config_text = (folder / name).read_text(encoding="utf-8")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / name} cannot be read ({error}); run it again") from error
    known = {arm["arm"] for arm in arms}
    for name, frame in frames.items():
        unknown = sorted(set(frame["arm"]) - known)
        if unknown:
            raise ConfigError(f"{folder / name} has the arms {unknown}, which arms.json lacks")
    requests, steps, timings = frames.values()
    return Run(requests, steps, timings, arms, provenance, config_text)


def _check_names(path: Path, needed: Iterable[str], given: Iterable[str]) -> None:
    lacking = [name for name in needed if name not in set(given)]
    if lacking:
        raise ConfigError(f"{path} lacks {', '.join(lacking)}; run it again with this version")


def _check_arms(path: Path, arms: Any) -> None:
    if not isinstance(arms, list) or not arms:
        raise ConfigError(f"{path} names no arm; the first must be the autoregressive one")
    for arm in arms:
        _check_names(path, sorted(_ARM_KEYS), arm)
        _check_names(path, sorted(_VERDICT_KEYS), arm["verdict"])
        _check_names(path, sorted(_CAPTURE_KEYS), arm["capture"])
    names = [arm["arm"] for arm in arms]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path} names an arm twice: {names}; every arm needs a name of its own")


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
        raise CapacityError(
            f"{folder} cannot be written ({error.strerror or error}); free some space or make it "
            "writable, then run `python -m experiments.report` on it"
        ) from error


def _write_report(run: Run, folder: Path) -> Path:
    summary = summarise_arms(run.requests, run.timings, run.arms)
    categories = summarise_categories(run.requests, run.timings, run.arms)
    positions = position_table(run.requests, run.arms)
    times = time_split(run.requests, run.steps, run.arms)
    idle = idle_positions(run.requests, run.steps, run.arms)
    summary.to_csv(folder / "summary.csv", index=False)
    categories.to_csv(folder / "categories.csv", index=False)
    plots = write_plots(folder / "plots", summary, categories, positions, times)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        lead=tables.lead(summary),
        setting=_setting(run.provenance),
        baseline=summary["arm"][0],
        summary=tables.summary_table(summary),
        categories=tables.category_tables(categories),
        positions=tables.position_lines(positions),
        times=tables.time_lines(times),
        launches=tables.launch_lines(run.arms),
        lengths=tables.length_lines(run.arms),
        idle=tables.idle_lines(idle, run.arms),
        verdicts=tables.verdict_table(summary),
        plots={plot.name: plot for plot in plots},
        timed_dtype=run.provenance.get("dtype", "the timed dtype"),
        provenance=list(_flatten(run.provenance)),
        config_text=run.config_text,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def read_tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read `summary.csv` and `categories.csv` back; only an empty cell is a missing value."""
    summary, categories = (
        pd.read_csv(folder / name, keep_default_na=False, na_values=[""], dtype={"arm": str})
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
            text = "unknown" if value is None else json.dumps(value)
            yield f"{prefix}{key}", value if isinstance(value, str) else text


def main(argv: Sequence[str] | None = None) -> int:
    """Rebuild a report and show its tables; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="run folder, as experiments.run writes it")
    folder: Path = parser.parse_args(argv).folder
    try:
        path = build_report(folder)
    except SpecdecError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=120)
    for table in render_table(*read_tables(folder)):
        console.print(table)
    console.print(f"report: {path}", soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
