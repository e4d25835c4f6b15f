"""Predict the speed-up of every K and batch size from measured step costs and acceptance.

    python -m experiments.speedup_model <folder of runs> [--costs <record of bench_step>]

Expected tokens of a step with K drafts, if a[i] is the chance that the draft at position i is
committed, given that those before it were:

    E(K) = 1 + sum over i = 1..K of a[1] * a[2] * ... * a[i]

(for a constant a this is (1 - a^(K+1)) / (1 - a), Leviathan et al. 2023, equation 1). A position
without a draft, behind the text's end or cut by a cap counts as not committed:

    a[i] = #(num_committed > i) / #(num_committed > i - 1)

over the verify rows of all arms of the drafter with K >= i. So E(K) of a single arm is exactly its
mean accepted length. Speed-up over autoregressive decoding, in decode steps (so without the
prompts' steps, which both have), with B requests of context C:

    S(K, B, C) = E(K) / T(K, B, C) * T(AR, B, C)
    T(K, B, C) = target(V(K), B, C) + draft(K, B, C) + rest(K, B, C)

T is the time of a step: `target` for V(K) verified positions a request (K + 1, fewer where
positions without a draft are left out) is that of all arms together, the autoregressive one
included; `draft` and `rest` (the host) are the drafter's own. Where launches hold several phases, T
is interpolated as a whole, over K. Between measured points all are piecewise linear in K (or V), C
and B (`experiments.step_costs.interpolate`); what lies outside of the measured points is marked.

The best K of a batch size is the one of the highest S among those that are not marked, or among all
where all are; 0 where none is above 1.

The prediction is compared with decode steps that were measured: S = committed tokens / step time
of the arm, over that of the autoregressive arm, at the same B. `predicted` has the point itself
among its data; `held_out` is predicted without it, where the others surround it.
"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from experiments.overview_data import AUTOREGRESSIVE, Overview, without_metrics
from experiments.step_costs import Interpolated, interpolate, measure_costs, read_bench
from specdec.analysis import load
from specdec.errors import SpecdecError
from specdec.log import setup_logging

Array = npt.NDArray[np.float64]

PREDICTION_COLUMNS = (
    "series",
    "k",
    "num_reqs",
    "context",
    "expected_tokens",  # E(K)
    "target_ms",  # NaN, like the two below, where the step is known as a whole only
    "draft_ms",
    "rest_ms",
    "step_ms",  # T(K, B, C)
    "ar_step_ms",  # T(AR, B, C)
    "speedup",
    "is_extrapolated",
)
_SHARED = "target_ms"
_OWN = ("draft_ms", "rest_ms")


@dataclass
class SpeedupModel:
    """The speed-up of one setting.

    Args:
        points: from `experiments.step_costs.measure_costs`, the autoregressive ones included.
        acceptance: series -> a[i] from i = 1, from `conditional_acceptance`.
    """

    points: pd.DataFrame
    acceptance: dict[str, Array]

    def __post_init__(self) -> None:
        """Look which costs are known."""
        self._is_split = bool(len(self.points)) and all(map(math.isfinite, self.points[_SHARED]))
        self._curves: dict[tuple[str | None, str, str], dict[tuple[float, ...], float]] = {}

    def can_predict(self, series: str) -> bool:
        """Return whether costs and acceptance of a drafter and of its rival are known."""
        known = set(self.points["series"])
        return {series, AUTOREGRESSIVE} <= known and series in self.acceptance

    def predict(self, series: str, k: int, num_reqs: int, context: float) -> dict[str, float]:
        """Return a line with PREDICTION_COLUMNS.

        Args:
            series: for which `can_predict`.
            k: drafts a step, from 1; beyond the measured acceptance its last value stands.
        """
        tokens, is_beyond = expected_tokens(self.acceptance[series], k)
        parts = self._step(series, k, num_reqs, context)
        baseline = self._step(AUTOREGRESSIVE, 0, num_reqs, context)["step_ms"]
        known = [*parts.values(), baseline]
        step_ms = parts["step_ms"].value
        line = {"series": series, "k": k, "num_reqs": num_reqs, "context": context}
        line["expected_tokens"] = tokens
        line |= {name: np.nan for name in (_SHARED, *_OWN)}
        line |= {name: part.value for name, part in parts.items()}
        line["ar_step_ms"] = baseline.value
        line["speedup"] = tokens / step_ms * baseline.value if step_ms else np.nan
        line["is_extrapolated"] = is_beyond or any(part.is_extrapolated for part in known)
        return line

    def _step(self, series: str, k: int, num_reqs: int, context: float) -> dict[str, Interpolated]:
        """Return the parts of a step's time and their sum."""
        at = (k, context, num_reqs)
        if not self._is_split:
            return {"step_ms": interpolate(self._curve(series, "k", "step_ms"), at)}
        positions = interpolate(self._curve(series, "k", "positions"), at)
        shared = self._curve(None, "positions", _SHARED)
        parts = {_SHARED: interpolate(shared, (positions.value, *at[1:]))}
        parts |= {name: interpolate(self._curve(series, "k", name), at) for name in _OWN}
        total = sum(part.value for part in parts.values())
        is_extrapolated = any(part.is_extrapolated for part in (positions, *parts.values()))
        return {**parts, "step_ms": Interpolated(total, is_extrapolated)}

    def _curve(self, series: str | None, x: str, y: str) -> dict[tuple[float, ...], float]:
        """Return (x, context, number of requests) -> y, points at one place averaged by steps.

        Args:
            series: whose points; None takes all.
            x, y: columns of the points.
        """
        key = series, x, y
        if key not in self._curves:
            sums: dict[tuple[float, ...], tuple[float, float]] = {}
            columns = ["series", x, "context", "num_reqs", y, "num_steps"]
            for name, *place, value, weight in self.points[columns].itertuples(index=False):
                if series in (None, name):
                    total, count = sums.get(tuple(place), (0.0, 0.0))
                    sums[tuple(place)] = total + value * weight, count + weight
            self._curves[key] = {place: total / count for place, (total, count) in sums.items()}
        return self._curves[key]

    def surface(self, series: str, batch_sizes: Sequence[int], context: float) -> pd.DataFrame:
        """Return predictions for every K up to the largest measured and every batch size."""
        own = self.points.loc[self.points["series"] == series, "k"]
        lines = [
            self.predict(series, k, num_reqs, context)
            for num_reqs in batch_sizes
            for k in range(1, int(own.max()) + 1)
        ]
        return pd.DataFrame(lines, columns=list(PREDICTION_COLUMNS))


def conditional_acceptance(requests: pd.DataFrame, k_of_arm: Sequence[int]) -> Array:
    """Return a[i], [largest K] float64, of the arms of one drafter; NaN behind a 0.

    Args:
        requests: the request trace of those arms.
        k_of_arm: K of each row's arm.
    """
    verify = requests["is_verify"].to_numpy(bool)
    committed = requests["num_committed"].to_numpy(np.int64)[verify]
    k = np.asarray(k_of_arm, dtype=np.int64)[verify]
    result = np.full(int(k.max(initial=0)), np.nan)
    for i in range(1, len(result) + 1):
        own = committed[k >= i]
        before = int((own > i - 1).sum())
        if before:
            result[i - 1] = (own > i).sum() / before
    return result


def expected_tokens(acceptance: Array, k: int) -> tuple[float, bool]:
    """Return E(K), and whether K lies beyond the acceptance that was measured."""
    shares = np.nan_to_num(acceptance[:k])  # behind a 0 nothing is reached
    beyond = k - len(acceptance)
    if beyond > 0:
        shares = np.r_[shares, np.full(beyond, shares[-1] if len(shares) else 0.0)]
    return 1.0 + float(np.cumprod(shares).sum()), beyond > 0


def best_k(surface: pd.DataFrame) -> pd.DataFrame:
    """Return the line of the best K for each batch size; k = 0 where no K is above 1."""
    known = surface.dropna(subset=["speedup"])
    ranked = known.sort_values(["is_extrapolated", "speedup"], ascending=[True, False])
    best = ranked.drop_duplicates(["series", "num_reqs"]).sort_index().reset_index(drop=True)
    loses = best["speedup"] <= 1
    best.loc[loses, "k"] = 0
    best.loc[loses, ["expected_tokens", "speedup"]] = 1.0
    best.loc[loses, "step_ms"] = best.loc[loses, "ar_step_ms"]
    best.loc[loses, [_SHARED, *_OWN]] = np.nan
    return best


def asked_sizes(arms: pd.DataFrame, points: pd.DataFrame) -> list[int]:
    """Return the batch sizes of some arms; those measured where their runs do not say."""
    known = {int(size) for size in arms["batch_size"] if size is not None and size == size}
    return sorted(known) or sorted(set(map(int, points["num_reqs"])))


def batch_sizes(points: pd.DataFrame, asked: Sequence[int]) -> list[int]:
    """Return the batch sizes to predict: those asked for, and the powers of two between them."""
    most = max(map(int, points["num_reqs"]))
    sizes = {size for size in asked if size <= most} or {most}
    powers = {2**i for i in range(most.bit_length()) if min(sizes) < 2**i < max(sizes)}
    return sorted(sizes | powers)


def fit(overview: Overview, setting: str, costs: pd.DataFrame | None = None) -> SpeedupModel:
    """Return the model of a setting.

    Args:
        overview: from `experiments.overview_data`.
        setting: one of its settings.
        costs: points measured elsewhere; None takes those of the runs.
    """
    arms = overview.summary.loc[overview.summary["setting"] == setting]
    keys = arms[["run", "arm", "series", "k"]]
    own = _requests_of(overview, setting)
    if costs is None:
        steps = overview.runs.steps.merge(keys[["run", "arm"]], on=["run", "arm"])
        costs = measure_costs(own.drop(columns=["series", "k"]), steps, keys)
    drafting = own.loc[own["k"] > 0]
    acceptance = {
        str(name): conditional_acceptance(rows, list(rows["k"]))
        for name, rows in drafting.groupby("series", sort=False)
    }
    return SpeedupModel(costs, acceptance)


def compare(model: SpeedupModel, overview: Overview, setting: str) -> pd.DataFrame:
    """Return measured speed-ups of decode steps beside the predicted ones, a line per point.

    Only points of the batch sizes that were asked for; `measured`, `predicted`, `error` (predicted
    / measured - 1), `held_out` and `held_out_error`, NaN where the others do not surround it.
    """
    arms = overview.summary.loc[overview.summary["setting"] == setting]
    asked = asked_sizes(arms, model.points)
    columns = ["series", "k", "num_reqs", "measured", "predicted", "error"]
    columns += ["held_out", "held_out_error", "num_steps"]
    points = model.points.to_dict("records")
    drafting = _requests_of(overview, setting)
    rates = {
        (row["num_reqs"], row["context"]): row["tokens"] / row["step_ms"]
        for row in points
        if row["series"] == AUTOREGRESSIVE
    }
    lines: list[tuple[object, ...]] = []
    for row in points:
        rate = rates.get((row["num_reqs"], row["context"]))
        if row["series"] == AUTOREGRESSIVE or row["num_reqs"] not in asked or rate is None:
            continue
        if not model.can_predict(row["series"]):
            continue
        at = (row["series"], row["k"], row["num_reqs"], row["context"])
        measured = row["tokens"] / row["step_ms"] / rate
        predicted = model.predict(*at)["speedup"]
        held_out = _held_out(model, drafting, at)
        errors = predicted / measured - 1, held_out / measured - 1
        lines.append(
            (*at[:3], measured, predicted, errors[0], held_out, errors[1], row["num_steps"])
        )
    frame = pd.DataFrame(lines, columns=columns)
    return frame.sort_values(columns[:3], ignore_index=True)


def _held_out(
    model: SpeedupModel, drafting: pd.DataFrame, at: tuple[str, int, int, float]
) -> float:
    """Predict a point from the others alone; NaN where they do not surround it.

    Args:
        model: has the point among its points.
        drafting: the request trace of the setting, with `series` and `k`.
        at: series, K, number of requests and context of the point.
    """
    series, k, num_reqs, _ = at
    points = model.points
    same = (points["series"] == series) & (points["k"] == k) & (points["num_reqs"] == num_reqs)
    others = drafting.loc[(drafting["series"] == series) & (drafting["k"] != k)]
    rest = points.loc[~same]
    if others.empty or series not in set(rest["series"]):
        return np.nan
    smaller = SpeedupModel(rest, {series: conditional_acceptance(others, list(others["k"]))})
    line = smaller.predict(*at)
    return np.nan if line["is_extrapolated"] else line["speedup"]


def _requests_of(overview: Overview, setting: str) -> pd.DataFrame:
    """Return the request trace of a setting, with `series` and `k` of each arm."""
    arms = overview.summary.loc[overview.summary["setting"] == setting]
    requests = overview.runs.requests.drop(columns=["k"], errors="ignore")
    return requests.merge(arms[["run", "arm", "series", "k"]], on=["run", "arm"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the best K of every drafter and batch size; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.speedup_model")
    parser.add_argument("folder", type=Path, help="holds run folders at any depth")
    parser.add_argument("--costs", type=Path, help="step costs from a record of bench_step")
    parser.add_argument("--scope", help="graph scope of that record; the first, if not given")
    given = parser.parse_args(argv)
    setup_logging(logging.WARNING)
    try:
        overview = without_metrics(load(given.folder))
        costs = read_bench(given.costs, given.scope)[0] if given.costs else None
    except SpecdecError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    for setting in overview.drafting["setting"].unique():
        model = fit(overview, setting, costs)
        arms = overview.summary.loc[overview.summary["setting"] == setting]
        asked = asked_sizes(arms, model.points) if costs is None else list(costs["num_reqs"])
        for series in filter(model.can_predict, model.acceptance):
            context = typical_context(model.points)
            best = best_k(model.surface(series, batch_sizes(model.points, asked), context))
            for row in best.to_dict("records"):
                mark = " (extrapolated)" if row["is_extrapolated"] else ""
                print(
                    f"{setting or 'all'}: {series}, batch size {row['num_reqs']}: best K="
                    f"{row['k']}, speed-up {row['speedup']:.2f}x, {row['expected_tokens']:.2f} "
                    f"tokens in {row['step_ms']:.2f} ms against {row['ar_step_ms']:.2f} ms{mark}"
                )
    return 0


def typical_context(points: pd.DataFrame) -> float:
    """Return the context that most steps had."""
    return float(points.groupby("context")["num_steps"].sum().idxmax())  # pyright: ignore


if __name__ == "__main__":
    sys.exit(main())
