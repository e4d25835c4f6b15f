"""What decode steps were measured to cost, and a piecewise linear interpolation between them.

A *point* is what the decode steps (`specdec.metrics`) with one number of requests cost on average,
in one arm: `target_ms` (inputs, the target's pass and the verification), `draft_ms` (proposing) and
`rest_ms` (what is left of the wall time: the host). Where a launch held several phases only
`step_ms`, their sum, is known.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.overview_data import AUTOREGRESSIVE
from specdec.errors import ConfigError
from specdec.metrics import decode_steps

POINT_COLUMNS = (
    "series",  # a drafter, or AUTOREGRESSIVE
    "k",  # drafts a step at most; 0 where nothing drafts
    "num_reqs",  # that the steps ran
    "context",  # committed tokens of a request, on average
    "positions",  # verified of a request, on average
    "tokens",  # committed of a request and step, on average
    "num_steps",
    "target_ms",  # NaN, like the two below, where a launch held several phases
    "draft_ms",
    "rest_ms",
    "step_ms",
)
_TARGET_PHASES = ["inputs_ms", "target_ms", "verify_ms"]
_SAME_CONTEXT = 1.25  # contexts that differ by less are one


class Interpolated(NamedTuple):
    """A value, and whether it lies outside of what was measured."""

    value: float
    is_extrapolated: bool


def measure_costs(requests: pd.DataFrame, steps: pd.DataFrame, arms: pd.DataFrame) -> pd.DataFrame:
    """Return the points of some arms: a frame with POINT_COLUMNS.

    Args:
        requests, steps: traces of `specdec.analysis.Runs`.
        arms: rows with `run`, `arm`, `series`, `k`; arms of one series and K are pooled.
    """
    tables: list[pd.DataFrame] = []
    verify = requests.loc[requests["is_verify"].astype(bool)]
    context = verify.groupby(["run", "arm", "step"])["context_len"].mean().rename("context")
    for run, rows in arms.groupby("run", sort=False):
        decode = decode_steps(requests.loc[requests["run"] == run], steps.loc[steps["run"] == run])
        own = decode.drop(columns=["run"], errors="ignore").assign(run=run)
        own = own.merge(context, left_on=["run", "arm", "step"], right_index=True, how="left")
        tables.append(own.merge(rows[["arm", "series", "k"]], on="arm"))
    if not tables or not sum(map(len, tables)):
        return pd.DataFrame(columns=list(POINT_COLUMNS))
    joined = pd.concat([table for table in tables if len(table)], ignore_index=True)
    split = joined["target_ms"].notna() & joined["launch_ms"].fillna(0.0).eq(0.0)
    joined["target_ms"] = joined[_TARGET_PHASES].fillna(0.0).sum(axis=1).where(split)
    joined["draft_ms"] = joined["draft_ms"].fillna(0.0).where(split)
    joined["rest_ms"] = joined["step_ms"] - joined["target_ms"] - joined["draft_ms"]
    joined["positions"] = joined["num_tokens"] / joined["num_reqs"]
    joined["tokens"] = joined["num_committed"] / joined["num_reqs"]
    joined["num_steps"] = 1
    joined["context"] = _merged(joined.groupby("run")["context"].transform("mean"))
    means = {name: "mean" for name in POINT_COLUMNS[4:] if name != "num_steps"}
    grouped = joined.groupby(["series", "k", "num_reqs", "context"], sort=False)
    return grouped.agg(means | {"num_steps": "size"}).reset_index().loc[:, list(POINT_COLUMNS)]


def read_bench(path: Path, scope: str | None = None) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the points of a record of `experiments.bench_step`, and its provenance.

    Args:
        path: a JSON file, as in `benchmarks/results`.
        scope: graph scope; None takes the first that the record has.

    Raises:
        ConfigError: it is no such record, or lacks the scope.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        config, lines = record["config"], record["lines"]
        scopes = [line["scope"] for line in lines]
        context = config["prompt_len"] + config["num_steps"] / 2
        k = int(config["num_speculative_tokens"])
        scope = scope or scopes[0]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} is no record of bench step ({error!r}); give one that "
            "`python -m experiments.bench_step --out` wrote"
        ) from error
    rows = [_bench_point(line, k, context) for line in lines if line["scope"] == scope]
    if not rows:
        raise ConfigError(f"{path} has no scope {scope!r}; it has {', '.join(sorted(set(scopes)))}")
    return pd.DataFrame(rows, columns=list(POINT_COLUMNS)), record.get("provenance", {})


def _bench_point(line: Mapping[str, Any], k: int, context: float) -> tuple[Any, ...]:
    drafts = line["drafter"] != "none"
    series, k = (line["drafter"], k) if drafts else (AUTOREGRESSIVE, 0)
    unknown = (np.nan, np.nan, np.nan)
    step_ms = line["step_us"] / 1e3
    # What random weights accept says nothing: `tokens` is unknown.
    return (series, k, line["num_reqs"], context, k + 1, np.nan, 1, *unknown, step_ms)


def interpolate(points: Mapping[tuple[float, ...], float], at: Sequence[float]) -> Interpolated:
    """Interpolate between points of any number of coordinates, one coordinate after the other.

    Along the first coordinate, the value at each measured one is interpolated over the others; then
    it is linear between the two nearest. Those that need no extrapolation in the others are
    preferred. Beyond the outermost, the line from the first to the last goes on, or the value of
    the only one stands; either is marked.

    Args:
        points: coordinates -> value; not empty. They need not form a grid.
        at: where the value is wanted.
    """
    if not at:
        return Interpolated(points[()], False)
    lines: dict[float, dict[tuple[float, ...], float]] = {}
    for place, value in points.items():
        lines.setdefault(place[0], {})[place[1:]] = value
    found = {x: interpolate(line, at[1:]) for x, line in lines.items()}
    inside = sorted(
        (x, value) for x, (value, is_extrapolated) in found.items() if not is_extrapolated
    )
    if inside and inside[0][0] <= at[0] <= inside[-1][0]:
        xs, values = zip(*inside, strict=True)
        return Interpolated(float(np.interp(at[0], xs, values)), False)
    known = inside or sorted((x, value) for x, (value, _) in found.items())
    return Interpolated(_continued(known, at[0]), True)


def _continued(known: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value of a piecewise linear line, which goes on with its overall slope."""
    xs, values = zip(*known, strict=True)
    value = float(np.interp(at, xs, values))
    if len(xs) > 1:
        # The overall slope: that of two neighbours which differ by little is mostly noise.
        slope = (values[-1] - values[0]) / (xs[-1] - xs[0])
        value += slope * (at - min(max(at, xs[0]), xs[-1]))
    return max(value, 0.0)


def _merged(contexts: Iterable[float]) -> list[float]:
    """Return the contexts with those that are about the same replaced by their middle."""
    labels: dict[float, float] = {}
    groups: list[list[float]] = []
    for value in sorted(set(contexts)):
        if not groups or value > _SAME_CONTEXT * groups[-1][-1]:
            groups.append([])
        groups[-1].append(value)
    for group in groups:
        labels |= dict.fromkeys(group, (group[0] + group[-1]) / 2)
    return [labels[value] for value in contexts]
