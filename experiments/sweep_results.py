"""What a sweep ends with: a table of its jobs, the overview, and a tracker's run of the whole."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.run_folder import RunFolder
from experiments.sweep_jobs import Outcome, group_of, is_debug, wandb_of
from specdec.tracker import WandbConfig, hide_secret, make_tracker

RECORD = "sweep.json"
_TABLE_WIDTH = 120
_METRICS = ("accepted_length", "acceptance_rate", "tokens_per_s", "speedup")
# What later questions need of a job: the traces, and what says how they came about.
_TRACES = ("*.parquet", "arms.json", "config.yaml", "provenance.json", "summary.csv")


def finish_sweep(config: DictConfig, outcomes: Sequence[Outcome], folder: Path) -> int:
    """Write the overview and the record, track them, and print the table and what failed.

    Args:
        config: of the sweep, with the key "hydra".
        outcomes: of all jobs of the command.
        folder: of the sweep.

    Returns:
        The exit code: 1 where a job is not done.

    Raises:
        SpecdecError: a run folder cannot be read, or the overview not be written.
    """
    done = sorted(outcome.job.key for outcome in outcomes if outcome.is_done)
    failed = [outcome for outcome in outcomes if not outcome.is_done]
    try:
        if done:
            _show(config, outcomes, done, folder)
    finally:
        varied = _varied(outcomes)
        for outcome in failed:
            values = _values(outcome).items()
            shown = " ".join(f"{key}={value}" for key, value in values if key in varied)
            print(f"failed: {outcome.job.key} {shown}: {outcome.reason}", file=sys.stderr)
    print(f"{len(done)} of {len(outcomes)} jobs are done")
    return int(bool(failed))


def _show(
    config: DictConfig, outcomes: Sequence[Outcome], done: Sequence[str], folder: Path
) -> None:
    """Print the table of the finished jobs, and build, track and record the overview."""
    from experiments.overview import build_overview  # here: it draws, which is slow to import

    console = Console()
    console.width = max(console.width if console.is_terminal else 0, _TABLE_WIDTH)
    rows = job_rows(outcomes, folder)
    if rows:
        console.print(render_jobs(rows))
    console.print(f"overview {build_overview(folder)}", soft_wrap=True, highlight=False)
    record = _read_record(folder)
    tracked = record["tracked"]
    if tracked != done:  # otherwise the tracker has it all
        location = _track(config, rows, done, folder)
        if location is not None:
            tracked = list(done)
            console.print(f"tracker  {location}", soft_wrap=True, highlight=False)
    jobs = record["jobs"]  # those of other commands in this folder stay
    for outcome in outcomes:
        if outcome.job.mistake is None:
            jobs[outcome.job.key] = {
                "overrides": list(outcome.job.overrides),
                "seconds": outcome.seconds,
                "failed": outcome.reason,
            }
    RunFolder(folder).write_json(RECORD, {"jobs": jobs, "tracked": tracked})


def job_rows(outcomes: Sequence[Outcome], folder: Path) -> list[dict[str, Any]]:
    """Return a row for each drafting arm of each finished job, for the rest its only arm.

    Its columns: the job's folder, the keys in which the sweep's jobs differ, the arm, its metrics.
    """
    varied = _varied(outcomes)
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        job = outcome.job.key
        path = folder / job / "summary.csv"
        if not outcome.is_done or not path.is_file():
            continue
        summary = pd.read_csv(path)
        for arm in summary.iloc[1:].to_dict("records") or summary.to_dict("records"):
            row = {"job": job} | {key: _values(outcome).get(key, "") for key in varied}
            row |= {"arm": str(arm["arm"])} | {name: float(arm[name]) for name in _METRICS}
            rows.append(row | {"seconds": outcome.seconds})
    return rows


def _varied(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the keys in which jobs differ, in the order in which they were given."""
    given = [_values(outcome) for outcome in outcomes]
    keys = dict.fromkeys(key for values in given for key in values)
    return [key for key in keys if len({values.get(key) for values in given}) > 1]


def _values(outcome: Outcome) -> dict[str, str]:
    """Return a job's overrides as keys and values."""
    pairs = (override.partition("=") for override in outcome.job.overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def render_jobs(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the jobs as a table for a terminal of 120 columns.

    Args:
        rows: from `job_rows`, at least one.
    """
    caption = "speed-ups are those within a job"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, pad_edge=False, collapse_padding=True)
    settings = [key for key in rows[0] if key not in ("job", "arm", "seconds", *_METRICS)]
    table.add_column("job", no_wrap=True)
    for key in settings:
        # With spaces a long key is folded where its words end.
        name = key.rpartition(".")[2].replace("_", " ")
        table.add_column(name, min_width=max(map(len, name.split())), max_width=20)
    table.add_column("arm", overflow="fold", min_width=15, max_width=26)
    for name in ("mean accepted length (bonus included)", "accepted, %", "tokens/s", "speed-up"):
        table.add_column(name, justify="right", max_width=9)
    table.add_column("job, s", justify="right", no_wrap=True)
    for row in rows:
        cells = (
            *(row["job"], *(row[key] for key in settings), row["arm"]),
            _number(row["accepted_length"], "{:.2f}"),
            _number(100 * row["acceptance_rate"], "{:.1f}"),
            _number(row["tokens_per_s"], "{:.1f}"),
            _number(row["speedup"], "{:.2f}x"),
            _number(row["seconds"], "{:.1f}"),
        )
        table.add_row(*map(escape, cells))
    return table


def _number(value: float, form: str) -> str:
    return "-" if value != value else form.format(value)


def _read_record(folder: Path) -> dict[str, Any]:
    """Return what earlier commands recorded in the folder; a damaged record counts for nothing."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {"jobs": dict(record["jobs"]), "tracked": record["tracked"]}
    except (OSError, ValueError, TypeError, KeyError):
        return {"jobs": {}, "tracked": None}


def _track(
    config: DictConfig, rows: Sequence[dict[str, Any]], done: Sequence[str], folder: Path
) -> str | None:
    """Record the sweep as a tracker's run of its own; return where it can be seen.

    Only Weights & Biases is given one: for other trackers the files in the folder are it.
    """
    options = OmegaConf.to_object(config.tracker)
    if not isinstance(options, WandbConfig):
        return None
    group = group_of(options, config.sweep.group, folder)
    options = wandb_of(options, group, is_debug(config.hydra))
    options = dataclasses.replace(options, job_type="overview")
    overrides = [hide_secret(text) for text in config.hydra.overrides.task]
    tracker = make_tracker(options, {"sweep": overrides}, folder, f"{group}, overview")
    failed = True
    try:
        tracker.log({"sweep/jobs": float(len(done))})
        tracker.log_table("jobs", rows)
        overview = folder / "overview.csv"
        if overview.is_file():
            frame = pd.read_csv(overview)
            tracker.log_table("overview", frame.to_dict("records"))  # pyright: ignore[reportArgumentType]
        tracker.log_pictures({p.stem: p for p in sorted((folder / "overview").glob("*.png"))})
        files = {path.name: path for path in sorted(folder.glob("overview.*"))}
        for key in done:
            own = [path for pattern in _TRACES for path in sorted((folder / key).glob(pattern))]
            files |= {f"{key}/{path.name}": path for path in own}
        tracker.log_artifact_files(files, f"sweep-{group}", "traces")
        failed = False
        return tracker.location
    finally:
        tracker.finish(failed)
