"""The metrics on a trace that is small enough to count by hand, and their intervals."""

import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from specdec import metrics
from specdec.trace import OPTIONAL_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS

ARM = "ngram K=3"


def arm_entry(name: str, k: int) -> dict[str, Any]:
    verdict = {"status": "equal", "dtype": "float32", "num_compared": 2, "num_equal": 2, "note": ""}
    return {
        "arm": name,
        "drafter": name.split()[0],
        "drafter_config": {},
        "k": k,
        "verifier": "greedy",
        "temperature": 0.0,
        "lossless": True,
        "verdict": verdict,
    }


ARMS = [arm_entry("none", 0), arm_entry(ARM, 3)]
NUM_REQS = [2, 2, 2, 2, 2, 1]  # of the arm's steps in `requests`


def request_rows(rows: list[tuple[Any, ...]], arm: str) -> pd.DataFrame:
    columns = [name for name in REQUEST_COLUMNS if name not in OPTIONAL_COLUMNS]
    return pd.DataFrame(rows, columns=columns).assign(arm=arm)


def step_rows(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    lengths = (3, 3, 1)  # verified, drafted, launched together: no metric looks at them
    frame = pd.DataFrame([(*row, *lengths) for row in rows], columns=list(STEP_COLUMNS))
    return frame.assign(arm=ARM)


@pytest.fixture
def requests() -> pd.DataFrame:
    """Two prompts under K = 3, and the same two without drafts."""
    speculative = [
        # id, label, step, is_verify, context, positions, drafted, accepted, committed, reason
        ("a", "qa", 0, False, 5, 5, 0, 0, 1, ""),
        ("b", "code", 0, False, 7, 7, 0, 0, 1, ""),
        ("a", "qa", 1, True, 6, 4, 3, 3, 4, ""),
        ("b", "code", 1, True, 8, 4, 3, 0, 1, ""),
        ("a", "qa", 2, True, 10, 4, 2, 1, 2, ""),  # the third draft was -1
        # b was preempted; in step 2 it runs a chunk without a row, in step 3 the last one
        ("a", "qa", 3, True, 12, 4, 0, 0, 1, ""),  # all drafts were -1
        ("b", "code", 3, False, 9, 5, 0, 0, 1, ""),
        ("a", "qa", 4, True, 13, 4, 2, 2, 2, "stop"),  # three accepted, the second was EOS
        ("b", "code", 4, True, 10, 4, 3, 2, 3, ""),
        ("b", "code", 5, True, 13, 4, 1, 1, 1, "length"),  # two accepted, room for one
    ]
    plain = [("a", "qa", 0, False, 5, 5, 0, 0, 1, ""), ("b", "code", 0, False, 7, 7, 0, 0, 1, "")]
    plain += [("a", "qa", step, True, 5 + step, 1, 0, 0, 1, "") for step in range(1, 10)]
    plain += [("b", "code", step, True, 7 + step, 1, 0, 0, 1, "") for step in range(1, 7)]
    frames = [request_rows(plain, "none"), request_rows(speculative, ARM)]
    return pd.concat(frames, ignore_index=True)


@pytest.fixture
def timings() -> pd.DataFrame:
    """Three groups, one of which holds both categories."""
    rows = [
        ("none", 0, 0, "qa", 1, 10, 2.0),
        ("none", 0, 1, "code", 1, 20, 2.0),
        ("none", 0, 2, "mixed", 2, 10, 4.0),
        (ARM, 3, 0, "qa", 1, 10, 1.0),
        (ARM, 3, 1, "code", 1, 20, 0.5),
        (ARM, 3, 2, "mixed", 2, 10, 0.5),
    ]
    columns = ["arm", "k", "group", "category", "num_prompts", "num_tokens", "wall_s"]
    return pd.DataFrame(rows, columns=columns)


def of_arm(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    return frame.loc[frame["arm"] == arm]


def test_accepted_length_pools_verify_rows_and_leaves_prefill_out(requests: pd.DataFrame) -> None:
    own = of_arm(requests, ARM)
    assert metrics.accepted_length(own).value == 14 / 7
    assert metrics.accepted_length(own.loc[own["label"] == "qa"]).value == 9 / 4
    assert metrics.accepted_length(own.loc[own["label"] == "code"]).value == 5 / 3


def test_no_drafts_give_exactly_one(requests: pd.DataFrame) -> None:
    assert metrics.accepted_length(of_arm(requests, "none")) == (1.0, 1.0, 1.0)


def test_no_verify_row_gives_one_and_undefined_rates(requests: pd.DataFrame) -> None:
    prefill = requests.loc[~requests["is_verify"]]
    assert metrics.accepted_length(prefill) == (1.0, 1.0, 1.0)
    assert metrics.accepted_length(requests.iloc[:0]).value == 1.0
    assert np.isnan(metrics.acceptance_rate(prefill)).all()
    assert np.isnan(metrics.undrafted_share(prefill)).all()


def test_acceptance_rate_counts_valid_drafts_only(requests: pd.DataFrame) -> None:
    assert metrics.acceptance_rate(of_arm(requests, ARM)).value == 9 / 14
    assert np.isnan(metrics.acceptance_rate(of_arm(requests, "none")).value)


def test_undrafted_share_counts_positions_without_a_valid_draft(requests: pd.DataFrame) -> None:
    assert metrics.undrafted_share(of_arm(requests, ARM)).value == 7 / 28
    assert metrics.undrafted_share(of_arm(requests, "none")).value == 0.0


def test_positions_match_the_hand_count(requests: pd.DataFrame) -> None:
    table = metrics.position_table(requests, ARMS)
    assert list(table["arm"]) == [ARM] * 3  # the arm without drafts has no line
    assert list(table["position"]) == [1, 2, 3]
    assert list(table["num_drafted"]) == [6, 5, 3]
    assert list(table["num_reached"]) == [6, 4, 2]
    assert list(table["num_accepted"]) == [5, 3, 1]
    assert list(table["unconditional"]) == [5 / 6, 3 / 5, 1 / 3]
    assert list(table["conditional"]) == [5 / 6, 3 / 4, 1 / 2]


def test_a_position_without_drafts_is_nan(requests: pd.DataFrame) -> None:
    table = metrics.position_table(requests, [arm_entry(ARM, 4)])
    last = table.iloc[-1]
    assert (last["position"], last["num_drafted"], last["num_accepted"]) == (4, 0, 0)
    assert table.iloc[-1][["unconditional", "conditional", "conditional_high"]].isna().all()


def test_time_split_keeps_steps_in_which_every_request_verified(requests: pd.DataFrame) -> None:
    rows = [
        (step, reqs, 4, 4, 4, 1.0, 10.0 * step, 2.0, 3.0, 0.0, 4.0, 10.0 + 10.0 * step)
        for step, reqs in enumerate(NUM_REQS)
    ]
    steps = step_rows(rows)
    none, own = metrics.time_split(requests, steps, ARMS).to_dict("records")
    # 0 and 3 ran a prompt's last chunk, 2 a chunk that has no row.
    assert own["num_steps"] == 3
    assert own["target_ms"] == pytest.approx(10 * (1 + 4 + 5) / 3)
    assert own["step_ms"] == pytest.approx(10 + 100 / 3)
    assert own["draft_share"] == pytest.approx(3 / (10 + 100 / 3))
    assert sum(own[f"{phase}_share"] for phase in metrics.PHASES) == pytest.approx(1)
    assert own["launch_share"] == 0
    assert none["num_steps"] == 0
    assert np.isnan(none["target_ms"])
    assert np.isnan(none["launch_ms"])


def test_a_phase_inside_a_launch_counts_as_0_unless_it_always_was(requests: pd.DataFrame) -> None:
    # Decode steps are 1, 4 and 5: the last ran eager, in the others one launch held all.
    unknown = (np.nan,) * 4
    rows = [
        (0, 2, 12, 12, 2, 1.0, 80.0, 1.0, 9.0, 0.0, 9.0, 100.0),
        (1, 2, 8, 8, 5, *unknown, 6.0, 2.0, 8.0),
        (4, 2, 8, 8, 5, *unknown, 9.0, 1.0, 10.0),
        (5, 1, 4, 4, 1, 1.0, 6.0, np.nan, 2.0, 0.0, 3.0, 12.0),
    ]
    own = metrics.time_split(requests, step_rows(rows), ARMS).to_dict("records")[1]
    assert (own["inputs_ms"], own["target_ms"], own["draft_ms"]) == (1 / 3, 2.0, 2 / 3)
    assert (own["launch_ms"], own["host_ms"], own["step_ms"]) == (5.0, 2.0, 10.0)
    assert np.isnan(own["verify_ms"])
    assert np.isnan(own["verify_share"])
    assert own["launch_share"] == pytest.approx(1 / 2)
    assert sum(own[f"{p}_share"] for p in metrics.PHASES if p != "verify") == pytest.approx(1)


def test_idle_positions_are_padding_and_undrafted_ones_of_decode_steps(
    requests: pd.DataFrame,
) -> None:
    times = (0.0,) * 7
    # num_tokens and num_computed_tokens; only 1, 4 and 5 are decode steps.
    tokens = [(12, 99), (8, 8), (9, 99), (9, 99), (8, 16), (4, 8)]
    rows = [(i, NUM_REQS[i], *tokens[i], 4, *times) for i in range(6)]
    none, own = metrics.idle_positions(requests, step_rows(rows), ARMS).to_dict("records")
    assert (own["num_steps"], own["num_computed"]) == (3, 32)
    assert own["num_padding"] == 8 + 4
    assert own["num_undrafted"] == (0 + 0) + (1 + 0) + 2
    assert own["padding_share"] == 1 - (8 + 8 + 4) / 32
    assert own["undrafted_share"] == 3 / 32
    assert own["idle_share"] == 15 / 32
    assert (none["num_steps"], none["num_computed"]) == (0, 0)
    assert np.isnan([none["padding_share"], none["undrafted_share"], none["idle_share"]]).all()


def test_speed_is_a_ratio_of_sums(timings: pd.DataFrame) -> None:
    none, own = of_arm(timings, "none"), of_arm(timings, ARM)
    assert metrics.tokens_per_s(none).value == 40 / 8
    assert metrics.tokens_per_s(own).value == 40 / 2
    assert metrics.speedup(own, none).value == 4.0
    assert metrics.speedup(none, none) == (1.0, 1.0, 1.0)


def test_speedup_leaves_out_groups_that_one_arm_lacks(timings: pd.DataFrame) -> None:
    none, own = of_arm(timings, "none"), of_arm(timings, ARM)
    assert metrics.speedup(own.iloc[:2], none).value == (30 / 1.5) / (30 / 4)
    assert metrics.speedup(own, none.iloc[:2]).value == (30 / 1.5) / (30 / 4)
    assert np.isnan(metrics.speedup(own.iloc[:1], none.iloc[1:]).value)


def test_speedup_draws_the_same_groups_for_both_arms() -> None:
    rng = np.random.default_rng(5)
    wall_s = rng.lognormal(sigma=2.0, size=20)
    none = pd.DataFrame({"group": range(20), "num_tokens": 64, "wall_s": wall_s})
    # Groups differ wildly, the speed-up does not: only unpaired draws would show a spread.
    twice = none.assign(wall_s=wall_s / 2).sample(frac=1.0, random_state=0)
    low, high = metrics.speedup(twice, none)[1:]
    assert low == pytest.approx(2.0)
    assert high == pytest.approx(2.0)
    spread = metrics.tokens_per_s(none)
    assert spread.high / spread.low > 2


def per_prompt_sums(num_prompts: int) -> np.ndarray:
    """Return [num_prompts, 2]: committed tokens and steps of prompts that differ."""
    rng = np.random.default_rng(3)
    steps = rng.integers(5, 60, num_prompts)
    return np.stack([steps * rng.uniform(1.0, 4.0, num_prompts), steps], axis=1)


def test_interval_agrees_with_scipy() -> None:
    sums = per_prompt_sums(30)
    result = metrics.estimate(sums, lambda s: s[:, 0] / s[:, 1])
    expected = scipy.stats.bootstrap(
        (sums[:, 0], sums[:, 1]),
        lambda committed, steps, axis: committed.sum(axis=axis) / steps.sum(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(1),
    )
    assert result.value == sums[:, 0].sum() / sums[:, 1].sum()
    # A bound's Monte Carlo error at 2,000 resamples is 0.06 standard errors; 0.3 are allowed.
    slack = 0.3 * float(expected.standard_error)
    assert result.low == pytest.approx(expected.confidence_interval.low, abs=slack)
    assert result.high == pytest.approx(expected.confidence_interval.high, abs=slack)


def test_speedup_interval_agrees_with_scipy() -> None:
    rng = np.random.default_rng(7)
    none = pd.DataFrame({"group": range(25), "num_tokens": 64, "wall_s": rng.uniform(1, 2, 25)})
    fast = none.assign(wall_s=none["wall_s"] / rng.uniform(1.0, 3.0, 25))
    result = metrics.speedup(fast, none)
    expected = scipy.stats.bootstrap(
        (np.asarray(none["wall_s"]), np.asarray(fast["wall_s"])),
        lambda slow, quick, axis: slow.sum(axis=axis) / quick.sum(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(1),
    )
    slack = 0.3 * float(expected.standard_error)
    assert result.low == pytest.approx(expected.confidence_interval.low, abs=slack)
    assert result.high == pytest.approx(expected.confidence_interval.high, abs=slack)


def test_interval_is_over_prompts_not_over_steps() -> None:
    # Steps of one prompt are alike: one prompt always commits 1, the other always 4.
    rows = [
        (name, "", step, True, 9 + step, 4, 3, committed - 1, committed, "")
        for name, committed in (("a", 1), ("b", 4))
        for step in range(100)
    ]
    result = metrics.accepted_length(request_rows(rows, ARM))
    assert result == (2.5, 1.0, 4.0)


def test_turns_of_a_conversation_are_one_prompt() -> None:
    rows = [
        (f"{name}/{turn}", "", turn, True, 9, 4, 3, committed - 1, committed, "")
        for name, committed in (("a", 1), ("b", 4))
        for turn in range(1, 9)
    ]
    requests = request_rows(rows, ARM)
    turns = requests.assign(turn=requests["step"])
    assert metrics.accepted_length(turns) == (2.5, 1.0, 4.0)
    assert metrics.accepted_length(requests).low > 1.0  # sixteen requests, without the column
    empty = pd.DataFrame(columns=["arm", "group", "category", "num_tokens", "wall_s"])
    assert list(metrics.summarise_arms(turns, empty, ARMS)["num_prompts"]) == [0, 2]


def test_interval_is_the_same_every_time_and_nan_below_two_units() -> None:
    sums = per_prompt_sums(12)
    first = metrics.estimate(sums, lambda s: s[:, 0] / s[:, 1])
    metrics.estimate(sums[:5], lambda s: s[:, 0] / s[:, 1])
    assert metrics.estimate(sums, lambda s: s[:, 0] / s[:, 1]) == first
    single = metrics.estimate(sums[:1], lambda s: s[:, 0] / s[:, 1])
    assert single.value == sums[0, 0] / sums[0, 1]
    assert np.isnan(single[1:]).all()


def test_summary_has_one_line_per_arm(requests: pd.DataFrame, timings: pd.DataFrame) -> None:
    summary = metrics.summarise_arms(requests, timings, ARMS)
    none, own = summary.to_dict("records")
    assert (none["arm"], none["accepted_length"], none["speedup"]) == ("none", 1.0, 1.0)
    assert (own["arm"], own["accepted_length"], own["speedup"]) == (ARM, 2.0, 4.0)
    assert (own["num_prompts"], own["num_verify_steps"], own["num_tokens"]) == (2, 7, 40)
    assert (own["verdict"], own["verdict_dtype"], own["verdict_num_equal"]) == (
        "equal",
        "float32",
        2,
    )
    assert [own[f"acceptance_at_{i}"] for i in (1, 2, 3)] == [5 / 6, 3 / 5, 1 / 3]
    assert np.isnan(none["acceptance_at_1"])
    assert own["accepted_length_low"] <= 2.0 <= own["accepted_length_high"]


def test_an_arm_without_rows_is_summarised(requests: pd.DataFrame, timings: pd.DataFrame) -> None:
    empty = requests.iloc[:0], timings.iloc[:0]
    summary = metrics.summarise_arms(*empty, ARMS)
    assert list(summary["accepted_length"]) == [1.0, 1.0]
    assert np.isnan(summary["speedup"]).all()
    assert metrics.summarise_categories(*empty, ARMS).empty


def test_categories_use_only_groups_of_their_own(
    requests: pd.DataFrame, timings: pd.DataFrame
) -> None:
    table = metrics.summarise_categories(requests, timings, ARMS).set_index(["arm", "category"])
    assert list(table.index) == [("none", "qa"), ("none", "code"), (ARM, "qa"), (ARM, "code")]
    assert list(table["accepted_length"]) == [1.0, 1.0, 9 / 4, 5 / 3]
    assert list(table["speedup"]) == [1.0, 1.0, 2.0, 4.0]
    assert np.isnan(table["speedup_low"]).all()  # one group each
    mixed = metrics.summarise_categories(requests, timings.assign(category=None), ARMS)
    assert list(mixed["accepted_length"]) == [1.0, 1.0, 9 / 4, 5 / 3]
    assert np.isnan(mixed["speedup"]).all()


def test_metrics_need_no_torch() -> None:
    code = "import sys, specdec.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
