"""Every metric of a report, each stated once, here, and computed from traces and timings.

A *verify row* is a row of the request trace with `is_verify`: one request in one verification
step. Sums run over the verify rows of one arm (or of one arm and category), pooled over requests.

Mean accepted length (bonus included)
    sum(num_committed) / number of verify rows; 1.0 where there is none. The token that the last
    chunk of a prompt samples (also when a preempted request resumes) is in neither, and the last
    step counts what was kept after trimming. So a run without drafts gives exactly 1.0.
Acceptance rate
    sum(num_accepted) / sum(num_drafted). Drafts of -1 and drafts behind the text's end are in
    neither.
Acceptance at position i = 1..K, over valid drafts
    unconditional = #(num_accepted >= i) / #(num_drafted >= i);
    conditional   = #(num_accepted >= i) / #(num_drafted >= i and num_accepted >= i - 1):
    the share among drafts whose predecessors were all accepted. The unconditional rate of i is of
    the drafts that were judged at i alone: where a drafter's runs vary in length, each position
    has another denominator, and the rates cannot be read as one falling curve.
Undrafted share
    sum(num_positions - 1 - num_drafted) / sum(num_positions): verified positions that held no
    valid draft (a draft of -1, or one behind the text's end) and so could commit nothing.
Tokens per second
    sum(num_tokens) / sum(wall_s) over the groups of prompts that ran together.
Milliseconds per output token
    of a request, from the start of its first verify row's step to the end of its last one's: wall
    time / sum(num_committed), pooled over requests. What a reader waits for a token: steps in
    between that ran other requests' prompt tokens count.
Speed-up
    tokens/s of the arm / tokens/s of the autoregressive arm, both over the groups that both ran.
    A category has one only from groups that hold nothing else; other groups belong to none.
Slow groups
    wall_s / num_tokens of the group > 5 x the arm's median (of two middle ones the lower) x the
    least such multiple in another arm, where that is above 1: long prompts are slow in all arms.

The remaining ones run over *decode steps*: steps in which each request has a verify row. So no
step counts that ran prompt tokens (a chunk in the middle of a prompt has no row) or that also
worked for a request which had already ended.

Time split
    mean milliseconds of each phase per decode step. Phases that ran inside one launch cannot be
    told apart: their times are NaN, and the launch's stands under "launch". A NaN counts as 0 in
    the mean, unless the phase is NaN in every decode step: then so is its mean. The share of a
    phase is its mean over the sum of the means that are known.
Padding share
    1 - sum(num_tokens) / sum(num_computed_tokens): positions that a step of a fixed shape
    computed for no request.
Idle positions
    (padding + undrafted positions) / sum(num_computed_tokens): positions that were computed for
    nothing. Undrafted as above, but over the verify rows of the decode steps.

Two arms, of one run or of two, are compared over the prompts that both answered (`compare_arms`):

Difference of accepted lengths
    mean accepted length of the arm - that of the other.
Ratio of tokens/s, ratio of speed-ups
    the arm's / the other's, summed over *blocks*: the smallest sets of whole groups with which both
    arms ran the same prompts. Where both ran them in the same groups, a block is a group. Each
    speed-up is against the autoregressive arm of the arm's own run, so that two runs on machines
    of different speed can be compared by it.
Cost of phase events
    milliseconds per decode step of an arm with them / those of the arm that differs from it in
    nothing else - 1, over blocks. The wall time of a step, `step_ms`: on a GPU an arm with phase
    events has one step in flight, so what that costs is in it.
The arms *differ* where the interval excludes 0 (a ratio's: 1). Each interval stands alone: of
twenty comparisons of equal arms, one is expected to differ.

A metric whose denominator is zero is NaN, but for the accepted length.

Intervals are 95 % percentile bootstraps: the units (prompts; for timings the groups) are drawn
with replacement, NUM_RESAMPLES times from a fixed seed, and the statistic is taken of the
resampled sums; resamples without a defined value are left out. A prompt is a request, but the
turns of one conversation, which are alike, are one prompt: where the trace has the column `turn`,
a request id that ends in "/<turn>" stands for what comes before. The speed-up draws the same
groups for both arms, a comparison the same prompts or blocks. Fewer than two units, or than two
that count in a share's denominator, give NaN; from a handful an interval is too narrow. The result
is that of `scipy.stats.bootstrap(..., paired=True, method="percentile")`, which the tests compare
with; on sums per unit all resamples are one matrix product.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specdec.intervals import Array, Estimate, estimate, ratio, share
from specdec.slow_groups import count_slow_groups
from specdec.units import (
    ArmTraces,
    counted,
    paired_lengths,
    paired_speeds,
    paired_steps,
    prompts_of,
    sums_by,
    undrafted,
    verify_rows,
)

# "launch": device time inside launches that hold several phases; "host": the rest of the step.
PHASES = ("inputs", "target", "verify", "draft", "launch", "host")

Arm = Mapping[str, Any]  # an entry of a run's arms.json


def accepted_length(requests: pd.DataFrame) -> Estimate:
    """Return the mean accepted length (bonus included), in tokens per verification step."""
    return _prompt_ratio(requests, "num_committed", "num_rows", empty=1.0)


def acceptance_rate(requests: pd.DataFrame) -> Estimate:
    """Return accepted drafts / valid drafts."""
    return _prompt_ratio(requests, "num_accepted", "num_drafted")


def undrafted_share(requests: pd.DataFrame) -> Estimate:
    """Return the share of verified positions that held no valid draft."""
    return _prompt_ratio(requests, "num_undrafted", "num_positions")


def tokens_per_s(timings: pd.DataFrame) -> Estimate:
    """Return new tokens per second of wall time, over groups of prompts."""
    sums = sums_by(timings, "group", ["num_tokens", "wall_s"])
    return estimate(sums, lambda s: ratio(s[:, 0], s[:, 1]))


def ms_per_token(requests: pd.DataFrame, steps: pd.DataFrame) -> Estimate:
    """Return milliseconds per output token of a request, over prompts.

    Args:
        requests: rows of one arm.
        steps: rows of the same arm of the step trace.
    """
    rows = verify_rows(requests)
    taken = steps.set_index("step")["step_ms"].fillna(0.0).sort_index()
    ended = taken.cumsum()
    started = ended - taken
    names = ["request_id", *(["sample_index"] if "sample_index" in rows else [])]
    spans = rows.assign(prompt=prompts_of(rows)).groupby(names, dropna=False)
    runs = spans.agg(
        prompt=("prompt", "first"),
        first=("step", "min"),
        last=("step", "max"),
        num_tokens=("num_committed", "sum"),
    )
    runs["wall_ms"] = np.asarray(ended.reindex(runs["last"])) - np.asarray(
        started.reindex(runs["first"])
    )
    known = runs.dropna(subset=["wall_ms"])  # a killed run may lack the last steps
    sums = sums_by(known, "prompt", ["wall_ms", "num_tokens"])
    return estimate(sums, lambda s: ratio(s[:, 0], s[:, 1]))


def speedup(timings: pd.DataFrame, baseline: pd.DataFrame) -> Estimate:
    """Return tokens/s relative to a baseline over the groups that both ran.

    Args:
        timings: rows of one arm.
        baseline: rows of the autoregressive arm.
    """
    columns = ["num_tokens", "wall_s"]
    own = timings.loc[timings["group"].isin(baseline["group"])]
    other = baseline.loc[baseline["group"].isin(timings["group"])]
    sums = np.hstack([sums_by(own, "group", columns), sums_by(other, "group", columns)])
    return estimate(sums, lambda s: ratio(ratio(s[:, 0], s[:, 1]), ratio(s[:, 2], s[:, 3])))


def position_table(requests: pd.DataFrame, arms: Sequence[Arm]) -> pd.DataFrame:
    """Return acceptance by draft position.

    Args:
        requests: the request trace, with the column `arm`.
        arms: the arms in order; one with k = 0 has no line.

    Returns:
        One line per arm and position (1-based): `num_drafted`, `num_reached` (valid drafts whose
        predecessors were all accepted), `num_accepted`, and `unconditional` and `conditional`
        with their `_low` and `_high`.
    """
    columns = ["arm", "position", "num_drafted", "num_reached", "num_accepted"]
    columns += _names("unconditional") + _names("conditional")
    lines: list[dict[str, Any]] = []
    for arm in arms:
        rows = verify_rows(_of_arm(requests, arm["arm"]))
        prompts = prompts_of(rows)
        for position in range(1, _num_positions(rows, arm) + 1):
            drafted = rows["num_drafted"] >= position
            counts = pd.DataFrame(
                {
                    "prompt": prompts,
                    "num_drafted": drafted,
                    "num_reached": drafted & (rows["num_accepted"] >= position - 1),
                    "num_accepted": rows["num_accepted"] >= position,
                }
            )
            sums = sums_by(counts, "prompt", columns[2:5])
            totals = [int(total) for total in sums.sum(axis=0)]
            line = dict(zip(columns, [arm["arm"], position, *totals], strict=False))
            line |= _named("unconditional", share(sums[:, 2], sums[:, 0]))
            line |= _named("conditional", share(sums[:, 2], sums[:, 1]))
            lines.append(line)
    return pd.DataFrame(lines, columns=columns)


def time_split(requests: pd.DataFrame, steps: pd.DataFrame, arms: Sequence[Arm]) -> pd.DataFrame:
    """Return where the time of a decode step goes.

    Args:
        requests: the request trace, with the column `arm`.
        steps: the step trace, with the column `arm`.
        arms: the arms in order.

    Returns:
        One line per arm: `num_steps` (decode steps), `<phase>_ms` and `<phase>_share` for each of
        PHASES, `step_ms` (mean wall time from a step's launch to its commit; with two steps in
        flight, from the commit before to its own).
    """
    decode = decode_steps(requests, steps)
    lines: list[dict[str, Any]] = []
    for arm in arms:
        own = _of_arm(decode, arm["arm"])
        phases_ms = {phase: _mean_known(own, f"{phase}_ms") for phase in PHASES}
        total_ms = float(np.nansum(list(phases_ms.values())))
        line: dict[str, Any] = {"arm": arm["arm"], "num_steps": len(own)}
        line |= {f"{phase}_ms": mean_ms for phase, mean_ms in phases_ms.items()}
        for phase, mean_ms in phases_ms.items():
            line[f"{phase}_share"] = mean_ms / total_ms if total_ms else np.nan
        lines.append(line | {"step_ms": _mean_known(own, "step_ms")})
    return pd.DataFrame(lines)


def idle_positions(
    requests: pd.DataFrame, steps: pd.DataFrame, arms: Sequence[Arm]
) -> pd.DataFrame:
    """Return which positions were computed for nothing.

    Args:
        requests, steps, arms: as for `time_split`.

    Returns:
        One line per arm, over its decode steps: `num_steps`, `num_computed` (positions that the
        target ran), `num_padding` and `num_undrafted` of them, and `padding_share`,
        `undrafted_share` and `idle_share` (both) of those computed.
    """
    decode = decode_steps(requests, steps)
    lines: list[dict[str, Any]] = []
    for arm in arms:
        own = _of_arm(decode, arm["arm"])
        computed, used, undrafted = (
            int(_total(own, name)) for name in ("num_computed_tokens", "num_tokens", "undrafted")
        )
        padding = computed - used
        line: dict[str, Any] = {"arm": arm["arm"], "num_steps": len(own), "num_computed": computed}
        line |= {"num_padding": padding, "num_undrafted": undrafted}
        for name, count in (
            ("padding_share", padding),
            ("undrafted_share", undrafted),
            ("idle_share", padding + undrafted),
        ):
            line[name] = count / computed if computed else np.nan
        lines.append(line)
    return pd.DataFrame(lines)


def decode_steps(requests: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the decode steps' rows of the step trace, with a column `undrafted`."""
    rows = (
        requests.assign(undrafted=undrafted(requests))
        .groupby(["arm", "step"])
        .agg(
            num_rows=("is_verify", "size"),
            num_verify=("is_verify", "sum"),
            undrafted=("undrafted", "sum"),
        )
    )
    joined = steps.merge(rows, left_on=["arm", "step"], right_index=True, how="inner")
    decode = joined["num_verify"].eq(joined["num_reqs"]) & joined["num_rows"].eq(joined["num_reqs"])
    return joined.loc[decode]


def summarise_arms(
    requests: pd.DataFrame, timings: pd.DataFrame, arms: Sequence[Arm]
) -> pd.DataFrame:
    """Return the headline numbers.

    Args:
        requests: the request trace, with the column `arm`.
        timings: one row per arm and group of prompts.
        arms: entries of arms.json, the autoregressive arm first.

    Returns:
        One line per arm: what the arm is, its verdict, counts, `accepted_length`,
        `acceptance_rate`, `undrafted_share`, `tokens_per_s` and `speedup`, each with `_low` and
        `_high`, and `acceptance_at_<i>` (unconditional, i from 1) of `num_drafted_at_<i>` drafts.
    """
    positions = position_table(requests, arms)
    num_positions = max(positions["position"], default=0)
    baseline, slow = _of_arm(timings, arms[0]["arm"]), count_slow_groups(timings)
    lines: list[dict[str, Any]] = []
    for arm in arms:
        name, verdict = arm["arm"], arm["verdict"]
        line = {key: arm[key] for key in _ARM_KEYS} | _flags(arm)
        line |= {"verdict": verdict["status"], "verdict_dtype": verdict["dtype"]}
        line |= {f"verdict_{key}": verdict[key] for key in ("num_compared", "num_equal", "note")}
        own, own_timings = _of_arm(requests, name), _of_arm(timings, name)
        line |= {"num_turns": own["request_id"].nunique()}
        line |= {"num_skipped": int(arm.get("num_skipped", 0)), "num_groups": len(own_timings)}
        line |= {"num_slow_groups": slow.get(name, 0)} | _measure(own, own_timings, baseline)
        by_position = _of_arm(positions, name).set_index("position")
        rates, drafted = by_position["unconditional"], by_position["num_drafted"]
        places = range(1, num_positions + 1)
        line |= {f"acceptance_at_{place}": rates.get(place, np.nan) for place in places}
        line |= {f"num_drafted_at_{place}": drafted.get(place, 0) for place in places}
        lines.append(line)
    return pd.DataFrame(lines)


def summarise_categories(
    requests: pd.DataFrame, timings: pd.DataFrame, arms: Sequence[Arm]
) -> pd.DataFrame:
    """Return the numbers by prompt category, in the order of the trace.

    Args:
        requests, timings, arms: as for `summarise_arms`.

    Returns:
        One line per arm and category of its prompts, with the measures of `summarise_arms`; the
        timings are NaN for a category whose prompts only ran in mixed groups.
    """
    columns = ["arm", "k", "category", *_flags({})]
    columns += _measure(requests.iloc[:0], timings.iloc[:0], timings)
    lines: list[dict[str, Any]] = []
    for arm in arms:
        own, own_timings = _of_arm(requests, arm["arm"]), _of_arm(timings, arm["arm"])
        baseline = _of_arm(timings, arms[0]["arm"])
        for category in own["label"].unique():
            line = {"arm": arm["arm"], "k": arm["k"], "category": category}
            line |= _flags(arm) | _measure(
                own.loc[own["label"] == category],
                own_timings.loc[own_timings["category"] == category],
                baseline.loc[baseline["category"] == category],
            )
            lines.append(line)
    return pd.DataFrame(lines, columns=columns)


def compare_arms(one: ArmTraces, other: ArmTraces) -> pd.DataFrame:
    """Return how an arm differs from another.

    Args:
        one, other: arms of one run, or of two runs that asked the same prompts.

    Returns:
        A line for each `measure` ("accepted_length", "tokens_per_s", "speedup"): its value for
        `one` and `other` over what both ran, their `change` ("difference" or "ratio") as `value`
        with `low` and `high`, whether they differ (`differs`), and `num_units` (prompts or blocks
        that were drawn).
    """
    lengths, speeds = paired_lengths(one, other), paired_speeds(one, other)
    lines: list[dict[str, Any]] = []
    for measure, change, sums, values in (
        ("accepted_length", "difference", lengths, _two_lengths(lengths)),
        ("tokens_per_s", "ratio", speeds, _two_speeds),
        ("speedup", "ratio", speeds, _two_speedups),
    ):
        combine = np.subtract if change == "difference" else ratio
        result = Estimate(np.nan, np.nan, np.nan)
        both = [np.nan, np.nan]
        if len(sums):
            result = _changed(sums, values, combine)
            both = [float(v[0]) for v in values(sums.sum(axis=0, keepdims=True))]
        none = 0.0 if change == "difference" else 1.0
        line: dict[str, Any] = {"measure": measure, "one": both[0], "other": both[1]}
        line |= {"change": change, **result._asdict()}
        line |= {"differs": result.low > none or result.high < none, "num_units": len(sums)}
        lines.append(line)
    return pd.DataFrame(lines)


def compare_steps(
    one: ArmTraces, other: ArmTraces, steps: tuple[pd.DataFrame, pd.DataFrame]
) -> dict[str, float]:
    """Return by how much longer an arm's decode steps take than another's, as a share.

    Args:
        one, other: as for `compare_arms`.
        steps: of each its rows of the step trace.

    Returns:
        `one` and `other` (ms per decode step over what both ran), the share as `value` with `low`
        and `high`, and `num_units` (blocks).
    """
    decode = [decode_steps(arm.requests, own) for arm, own in zip((one, other), steps, strict=True)]
    sums = paired_steps(one, other, (decode[0], decode[1]))
    if not len(sums):
        return dict.fromkeys(("one", "other", "value", "low", "high"), np.nan) | {"num_units": 0}
    result = estimate(sums, lambda s: ratio(*_two_steps(s)) - 1)
    both = [float(v[0]) for v in _two_steps(sums.sum(axis=0, keepdims=True))]
    return {"one": both[0], "other": both[1], **result._asdict(), "num_units": len(sums)}


def _two_steps(sums: Array) -> tuple[Array, Array]:
    return ratio(sums[:, 0], sums[:, 1]), ratio(sums[:, 2], sums[:, 3])


def _two_lengths(units: Array) -> Callable[[Array], tuple[Array, Array]]:
    """Return what takes both accepted lengths of sums; an arm is 1 where no unit has a verify row.

    A resample that drew none of the units with some has no length, as in `share`.
    """
    empty = [np.nan if units[:, column].any() else 1.0 for column in (1, 3)]

    def lengths(sums: Array) -> tuple[Array, Array]:
        return ratio(sums[:, 0], sums[:, 1], empty[0]), ratio(sums[:, 2], sums[:, 3], empty[1])

    return lengths


def _changed(
    sums: Array,
    values: Callable[[Array], tuple[Array, Array]],
    combine: Callable[[Array, Array], Array],
) -> Estimate:
    """Return the change of a measure; no interval where one unit alone counts in a denominator."""
    result = estimate(sums, lambda s: combine(*values(s)))
    is_alone = 1 in np.count_nonzero(sums[:, 1::2], axis=0)
    return Estimate(result.value, np.nan, np.nan) if is_alone else result


def _two_speeds(sums: Array) -> tuple[Array, Array]:
    return ratio(sums[:, 0], sums[:, 1]), ratio(sums[:, 4], sums[:, 5])


def _two_speedups(sums: Array) -> tuple[Array, Array]:
    one, other = _two_speeds(sums)
    return ratio(one, ratio(sums[:, 2], sums[:, 3])), ratio(other, ratio(sums[:, 6], sums[:, 7]))


_ARM_KEYS = ("arm", "drafter", "k", "verifier", "temperature", "lossless")


def _flags(arm: Arm) -> dict[str, bool]:
    """Return what a reader must know of an arm's prompts."""
    return {"random_tokens": bool(arm.get("random_tokens", False))}


def _measure(
    requests: pd.DataFrame, timings: pd.DataFrame, baseline: pd.DataFrame
) -> dict[str, Any]:
    """Return the measures that arms and categories share."""
    rows = verify_rows(requests)
    return {
        "num_prompts": prompts_of(requests).nunique(),
        "num_verify_steps": len(rows),
        **_named("accepted_length", accepted_length(requests)),
        "num_drafted": int(_total(rows, "num_drafted")),
        "num_accepted": int(_total(rows, "num_accepted")),
        **_named("acceptance_rate", acceptance_rate(requests)),
        **_named("undrafted_share", undrafted_share(requests)),
        "num_tokens": int(_total(timings, "num_tokens")),
        "wall_s": _total(timings, "wall_s"),
        **_named("tokens_per_s", tokens_per_s(timings)),
        **_named("speedup", speedup(timings, baseline)),
    }


def _names(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


def _named(name: str, result: Estimate) -> dict[str, float]:
    return dict(zip(_names(name), result, strict=True))


def _of_arm(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    return frame.loc[frame["arm"] == arm]


def _num_positions(rows: pd.DataFrame, arm: Arm) -> int:
    return max(int(arm["k"]), max(rows["num_drafted"], default=0))


def _prompt_ratio(
    requests: pd.DataFrame, numerator: str, denominator: str, empty: float = np.nan
) -> Estimate:
    """Return a ratio of sums over verify rows."""
    columns = [numerator, denominator]
    sums = sums_by(counted(requests, columns), "prompt", columns)
    return share(sums[:, 0], sums[:, 1], empty)


def _total(frame: pd.DataFrame, column: str) -> float:
    return float(np.asarray(frame[column], dtype=np.float64).sum())


def _mean_known(frame: pd.DataFrame, column: str) -> float:
    """Return a mean in which NaN counts as 0; NaN where nothing else is there."""
    values = np.asarray(frame[column], dtype=np.float64)
    return np.nan if np.isnan(values).all() else float(np.nansum(values)) / len(values)
