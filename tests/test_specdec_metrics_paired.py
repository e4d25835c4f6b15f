"""Two arms against each other, on numbers that are counted by hand, and their paired intervals."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from specdec import metrics
from specdec.trace import REQUEST_COLUMNS
from specdec.units import ArmTraces


def request_rows(per_prompt: dict[str, list[int]]) -> pd.DataFrame:
    """Return a trace: for each prompt its prefill and what each verification step committed."""
    rows: list[tuple[Any, ...]] = []
    for name, committed in per_prompt.items():
        rows.append((name, "", 0, False, 5, 5, 0, 0, 1, ""))
        rows += [(name, "", i, True, 9, 5, 4, n - 1, n, "") for i, n in enumerate(committed, 1)]
    return pd.DataFrame(rows, columns=list(REQUEST_COLUMNS[: len(rows[0])]))


def timing_rows(rows: list[tuple[int, int, int, float]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["group", "num_prompts", "num_tokens", "wall_s"])


def traces(
    per_prompt: dict[str, list[int]],
    timings: list[tuple[int, int, int, float]],
    baseline: list[tuple[int, int, int, float]] | None = None,
) -> ArmTraces:
    own = timing_rows(timings)
    return ArmTraces(
        request_rows(per_prompt), own, own if baseline is None else timing_rows(baseline)
    )


def lines_of(one: ArmTraces, other: ArmTraces) -> dict[str, dict[Any, Any]]:
    table = metrics.compare_arms(one, other)
    return {line["measure"]: line for line in table.to_dict("records")}


ONE = {"a": [3, 3], "b": [2], "c": [4, 1, 1]}  # 14 tokens in 6 steps
OTHER = {"a": [1, 1, 1], "b": [2, 2], "c": [1, 1, 1]}  # 10 tokens in 8 steps


def test_values_and_changes_match_the_hand_count() -> None:
    one = traces(ONE, [(0, 1, 7, 1.0), (1, 1, 3, 0.5), (2, 1, 7, 0.5)])
    one = one._replace(baseline=timing_rows([(0, 1, 7, 2.0), (1, 1, 3, 1.0), (2, 1, 7, 1.0)]))
    other = traces(OTHER, [(0, 1, 4, 2.0), (1, 1, 5, 1.0), (2, 1, 4, 1.0)])
    lines = lines_of(one, other)
    length, speed, speedup = (lines[key] for key in ("accepted_length", "tokens_per_s", "speedup"))
    assert (length["one"], length["other"]) == (14 / 6, 10 / 8)
    assert length["value"] == 14 / 6 - 10 / 8
    assert (speed["one"], speed["other"], speed["value"]) == (17 / 2, 13 / 4, (17 / 2) / (13 / 4))
    assert (speedup["one"], speedup["other"], speedup["value"]) == (2.0, 1.0, 2.0)
    assert [line["change"] for line in lines.values()] == ["difference", "ratio", "ratio"]
    assert [line["num_units"] for line in lines.values()] == [3, 3, 3]
    # Both speed-ups are the same in every group, so their ratio has no spread.
    assert (speedup["low"], speedup["high"], speedup["differs"]) == (2.0, 2.0, True)


def test_only_prompts_that_both_answered_count() -> None:
    one = traces(ONE, [(0, 1, 7, 1.0), (1, 1, 3, 0.5), (2, 1, 7, 0.5)])
    fewer = {key: OTHER[key] for key in ("c", "a")}  # in another order and other groups
    other = traces(fewer, [(0, 1, 4, 1.0), (1, 1, 4, 2.0)])
    lines = lines_of(one, other)
    assert lines["accepted_length"]["one"] == 12 / 5
    assert lines["accepted_length"]["other"] == 6 / 6
    assert lines["tokens_per_s"]["one"] == 14 / 1.5
    assert lines["tokens_per_s"]["other"] == 8 / 3
    assert [line["num_units"] for line in lines.values()] == [2, 2, 2]


def test_groups_of_other_sizes_meet_in_the_smallest_common_blocks() -> None:
    names = "abcdefg"
    singles = traces({n: [2] for n in names}, [(i, 1, 10 + i, 1.0) for i in range(7)])
    # Pairs and a last one that also holds a prompt which the singles lack.
    wide = {n: [2] for n in "bacdefgz"}
    pairs = traces(wide, [(i, 2, 100 + i, 1.0) for i in range(4)])
    speed = lines_of(singles, pairs)["tokens_per_s"]
    assert speed["num_units"] == 3
    assert (speed["one"], speed["other"]) == (
        (10 + 11 + 12 + 13 + 14 + 15) / 6,
        (100 + 101 + 102) / 3,
    )
    # Groups of two against groups of three: all six prompts are one block.
    threes = traces({n: [2] for n in "abcdef"}, [(0, 3, 60, 1.0), (1, 3, 30, 2.0)])
    twos = traces({n: [2] for n in "abcdef"}, [(i, 2, 40, 1.0) for i in range(3)])
    speed = lines_of(threes, twos)["tokens_per_s"]
    assert (speed["num_units"], speed["value"]) == (1, 30 / 40)
    assert np.isnan([speed["low"], speed["high"]]).all()
    assert not speed["differs"]


def test_a_group_that_a_baseline_lacks_is_in_no_block() -> None:
    one = traces(
        ONE, [(0, 1, 7, 1.0), (1, 1, 3, 0.5), (2, 1, 7, 0.5)], [(0, 1, 7, 2.0), (1, 1, 3, 1.0)]
    )
    speed = lines_of(one, traces(OTHER, [(0, 1, 4, 2.0), (1, 1, 5, 1.0), (2, 1, 4, 1.0)]))
    assert speed["tokens_per_s"]["num_units"] == 2
    assert speed["tokens_per_s"]["one"] == 10 / 1.5


def test_nothing_in_common_is_nan_and_no_difference() -> None:
    one = traces({"a": [2], "b": [2]}, [(0, 2, 6, 1.0)])
    other = traces({"c": [2], "d": [2]}, [(0, 2, 6, 1.0)])
    table = metrics.compare_arms(one, other)
    assert table[["one", "other", "value", "low", "high"]].isna().all(axis=None)
    assert list(table["num_units"]) == [0, 0, 0]
    assert not table["differs"].any()
    # Groups whose prompts do not add up to those of the trace cannot be told apart.
    vague = lines_of(one._replace(timings=timing_rows([(0, 1, 6, 1.0)])), one)
    assert np.isnan(vague["tokens_per_s"]["value"])
    assert vague["accepted_length"]["value"] == 0.0


def alike(num_prompts: int, gain: float) -> tuple[ArmTraces, ArmTraces]:
    """Return two arms whose prompts differ wildly; the first commits `gain` as much as the second.

    Its steps are fewer, its tokens the same.
    """
    rng = np.random.default_rng(11)
    slow: dict[str, list[int]] = {}
    fast: dict[str, list[int]] = {}
    rows: list[list[tuple[int, int, int, float]]] = [[], []]
    for i in range(num_prompts):
        size, steps = int(rng.integers(1, 9)), int(rng.integers(10, 40))
        slow[f"{i:02}"] = [size] * steps
        fast[f"{i:02}"] = [size] * max(1, round(steps / gain))
        wall_s = float(rng.lognormal(sigma=1.5))
        rows[0].append((i, 1, 64, wall_s / gain))
        rows[1].append((i, 1, 64, wall_s))
    return traces(fast, rows[0]), traces(slow, rows[1])


def test_both_arms_draw_the_same_prompts() -> None:
    fast, slow = alike(20, gain=1.25)
    lines = lines_of(fast, slow)
    # Every group gains the same: the paired interval of the ratio has no width at all,
    speed = lines["tokens_per_s"]
    assert (speed["low"], speed["high"]) == pytest.approx((1.25, 1.25))
    assert speed["differs"]
    # where that of a side alone spans a factor.
    alone = metrics.tokens_per_s(slow.timings)
    assert alone.high / alone.low > 2
    length = lines["accepted_length"]
    alone = metrics.accepted_length(slow.requests)
    assert length["high"] - length["low"] < (alone.high - alone.low) / 5


def test_prompts_without_a_verification_step_pull_no_bound_to_one() -> None:
    """They end with their first token; a resample that drew them alone has no length."""
    ended = {name: [] for name in "cdefghij"}
    timings = [(i, 1, 4, 1.0) for i in range(10)]
    one = traces({"a": [3, 3], "b": [4, 4]} | ended, timings)
    other = traces({"a": [2, 2], "b": [2, 2]} | ended, timings)
    assert metrics.accepted_length(one.requests) == (3.5, 3.0, 4.0)
    line = lines_of(one, other)["accepted_length"]
    assert (line["value"], line["low"], line["high"]) == (1.5, 1.0, 2.0)
    assert line["differs"]
    alone = traces({"a": [3, 3], "b": []} | ended, timings)
    line = lines_of(alone, other)["accepted_length"]
    assert line["value"] == 1.0
    assert np.isnan([line["low"], line["high"]]).all()
    none = traces({"a": [], "b": []} | ended, timings)
    line = lines_of(none, none)["accepted_length"]
    assert (line["one"], line["value"], line["low"], line["high"]) == (1.0, 0.0, 0.0, 0.0)


def test_equal_arms_do_not_differ() -> None:
    fast, _ = alike(12, gain=1.25)
    table = metrics.compare_arms(fast, fast)
    assert list(table["value"]) == [0.0, 1.0, 1.0]
    assert not table["differs"].any()


@pytest.mark.parametrize("measure", ["accepted_length", "tokens_per_s"])
def test_intervals_agree_with_scipy(measure: str) -> None:
    rng = np.random.default_rng(17)
    one: dict[str, list[int]] = {}
    other: dict[str, list[int]] = {}
    for i in range(30):
        one[f"{i:02}"] = list(rng.integers(1, 6, int(rng.integers(5, 30))))
        other[f"{i:02}"] = list(rng.integers(1, 5, int(rng.integers(5, 30))))
    seconds = rng.uniform(1.0, 2.0, (30, 2))
    groups = [
        [(i, 1, sum(texts[f"{i:02}"]), float(seconds[i, side])) for i in range(30)]
        for side, texts in enumerate((one, other))
    ]
    line = lines_of(traces(one, groups[0]), traces(other, groups[1]))[measure]
    tokens = [np.array([sum(v) for v in texts.values()]) for texts in (one, other)]
    steps = [np.array([len(v) for v in texts.values()]) for texts in (one, other)]
    divisors = steps if measure == "accepted_length" else [seconds[:, 0], seconds[:, 1]]

    def change(a: Any, b: Any, c: Any, d: Any, axis: int) -> Any:
        first, second = a.sum(axis=axis) / b.sum(axis=axis), c.sum(axis=axis) / d.sum(axis=axis)
        return first - second if measure == "accepted_length" else first / second

    expected = scipy.stats.bootstrap(
        (tokens[0], divisors[0], tokens[1], divisors[1]),
        change,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(1),
    )
    assert line["value"] == pytest.approx(change(tokens[0], divisors[0], tokens[1], divisors[1], 0))
    # A bound's Monte Carlo error at 2,000 resamples is 0.06 standard errors; 0.3 are allowed.
    slack = 0.3 * float(expected.standard_error)
    assert line["low"] == pytest.approx(expected.confidence_interval.low, abs=slack)
    assert line["high"] == pytest.approx(expected.confidence_interval.high, abs=slack)
