"""A trace of two conversations, counted by hand: turns, -1, EOS in a run, caps, resume, shares."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from specdec import metrics
from specdec.trace import REQUEST_COLUMNS

ARM = {"arm": "x K=2", "k": 2}
VERDICT = {"status": "equal", "dtype": "float32", "num_compared": 2, "num_equal": 2, "note": ""}
ENTRY = {**ARM, "drafter": "x", "verifier": "greedy", "temperature": 0.0, "lossless": True}
ENTRY["verdict"] = VERDICT
NO_TIMINGS = pd.DataFrame(columns=["arm", "group", "category", "num_tokens", "wall_s"])

ROWS: list[tuple[Any, ...]] = [
    # id, label, step, is_verify, context, positions, drafted, accepted, committed, reason
    ("7/1", "chat", 0, False, 4, 4, 0, 0, 1, ""),  # the prompt's last chunk sampled one
    ("8/1", "code", 0, False, 3, 3, 0, 0, 1, ""),
    ("7/1", "chat", 1, True, 5, 3, 2, 2, 3, ""),
    ("8/1", "code", 1, True, 4, 3, 1, 0, 1, ""),  # its second draft was -1
    ("7/1", "chat", 2, True, 8, 3, 1, 1, 1, "stop"),  # the first accepted draft was EOS: the
    #   second, behind the end, was not judged, and no bonus was kept
    ("8/1", "code", 2, True, 5, 3, 0, 0, 1, ""),  # both drafts were -1
    # 8/1 loses its row, and comes back with a step that samples but judges nothing
    ("7/2", "chat", 3, False, 12, 12, 0, 0, 1, ""),  # the second turn's prompt
    ("8/1", "code", 4, False, 6, 6, 0, 0, 1, ""),
    ("7/2", "chat", 4, True, 13, 3, 2, 1, 2, ""),
    ("8/1", "code", 5, True, 7, 3, 2, 2, 2, "length"),  # room for two of the three
    ("7/2", "chat", 5, True, 15, 3, 2, 0, 1, "length"),
]


@pytest.fixture
def trace() -> pd.DataFrame:
    frame = pd.DataFrame(ROWS, columns=list(REQUEST_COLUMNS[: len(ROWS[0])]))
    turn = [int(name[-1]) for name in frame["request_id"]]
    return frame.assign(arm=ARM["arm"], turn=turn)


def test_the_whole_trace(trace: pd.DataFrame) -> None:
    (line,) = metrics.summarise_arms(trace, NO_TIMINGS, [ENTRY]).to_dict("records")
    assert line["num_prompts"] == 2  # conversations, not turns
    assert line["num_verify_steps"] == 7
    assert line["accepted_length"] == (3 + 1 + 1 + 1 + 2 + 2 + 1) / 7
    assert (line["num_drafted"], line["num_accepted"]) == (10, 6)
    assert line["acceptance_rate"] == 6 / 10
    assert line["undrafted_share"] == (0 + 1 + 1 + 2 + 0 + 0 + 0) / 21
    assert [line["acceptance_at_1"], line["acceptance_at_2"]] == [4 / 6, 2 / 4]
    assert np.isnan([line["tokens_per_s"], line["speedup"]]).all()


def test_positions(trace: pd.DataFrame) -> None:
    first, second = metrics.position_table(trace, [ARM]).to_dict("records")
    # The first: drafted in all steps but one, accepted in four of these.
    assert (first["num_drafted"], first["num_reached"], first["num_accepted"]) == (6, 6, 4)
    assert first["unconditional"] == first["conditional"] == 4 / 6
    # The second: drafted four times, three of them behind an accepted first one.
    assert (second["num_drafted"], second["num_reached"], second["num_accepted"]) == (4, 3, 2)
    assert (second["unconditional"], second["conditional"]) == (2 / 4, 2 / 3)


def test_categories_pool_the_turns_of_their_prompts(trace: pd.DataFrame) -> None:
    chat, code = metrics.summarise_categories(trace, NO_TIMINGS, [ENTRY]).to_dict("records")
    assert (chat["category"], chat["num_prompts"], chat["num_verify_steps"]) == ("chat", 1, 4)
    assert chat["accepted_length"] == (3 + 1 + 2 + 1) / 4
    assert chat["acceptance_rate"] == (2 + 1 + 1 + 0) / (2 + 1 + 2 + 2)
    assert (code["category"], code["num_prompts"], code["num_verify_steps"]) == ("code", 1, 3)
    assert code["accepted_length"] == (1 + 1 + 2) / 3
    assert code["acceptance_rate"] == 2 / 3
    # Pooled, not averaged over the categories.
    whole = metrics.accepted_length(trace).value
    assert whole != (chat["accepted_length"] + code["accepted_length"]) / 2
    assert whole == (4 * chat["accepted_length"] + 3 * code["accepted_length"]) / 7


def test_a_resumed_request_gives_no_verification_step(trace: pd.DataFrame) -> None:
    resumed = (trace["step"] == 4) & ~trace["is_verify"]
    assert resumed.sum() == 1
    without = trace.loc[~resumed]
    for measure in (metrics.accepted_length, metrics.acceptance_rate, metrics.undrafted_share):
        assert measure(without) == measure(trace)


def test_random_tokens_are_flagged_and_absent_means_false(trace: pd.DataFrame) -> None:
    for entry, flagged in ((ENTRY, False), ({**ENTRY, "random_tokens": True}, True)):
        for table in (metrics.summarise_arms, metrics.summarise_categories):
            assert list(table(trace, NO_TIMINGS, [entry])["random_tokens"].unique()) == [flagged]


def test_a_share_of_one_prompt_alone_has_no_interval(trace: pd.DataFrame) -> None:
    # Without the second conversation's last step only the first one reaches position 2.
    own = trace.loc[~((trace["request_id"] == "8/1") & (trace["step"] == 5))]
    second = metrics.position_table(own, [ARM]).to_dict("records")[1]
    assert (second["num_reached"], second["conditional"]) == (2, 1 / 2)
    assert np.isnan([second["conditional_low"], second["conditional_high"]]).all()
    assert second["unconditional"] == 1 / 3
    assert np.isnan(second["unconditional_low"])
    assert not np.isnan(metrics.acceptance_rate(own).low)


def made_up_trace(num_prompts: int = 24) -> pd.DataFrame:
    rng = np.random.default_rng(23)
    rows: list[tuple[Any, ...]] = []
    for i in range(num_prompts):
        chance = rng.uniform(0.3, 0.95)
        for step in range(int(rng.integers(8, 40))):
            drafted = int(rng.integers(0, 3))
            accepted = int((rng.random(drafted) < chance).cumprod().sum())
            rows.append((f"p{i:02}", "", step, True, 9, 3, drafted, accepted, accepted + 1, ""))
    return pd.DataFrame(rows, columns=list(REQUEST_COLUMNS[:10])).assign(arm=ARM["arm"])


def test_intervals_of_every_share_agree_with_scipy() -> None:
    trace = made_up_trace()
    reached = (trace["num_drafted"] >= 2) & (trace["num_accepted"] >= 1)
    second = metrics.position_table(trace, [ARM]).to_dict("records")[1]
    shares = {
        "accepted length": (metrics.accepted_length(trace), trace["num_committed"], 1),
        "acceptance rate": (
            metrics.acceptance_rate(trace),
            trace["num_accepted"],
            trace["num_drafted"],
        ),
        "unconditional": (
            tuple(second[f"unconditional{end}"] for end in ("", "_low", "_high")),
            trace["num_accepted"] >= 2,
            trace["num_drafted"] >= 2,
        ),
        "conditional": (
            tuple(second[f"conditional{end}"] for end in ("", "_low", "_high")),
            trace["num_accepted"] >= 2,
            reached,
        ),
    }
    for name, (result, numerator, denominator) in shares.items():
        sums = (
            trace.assign(up=numerator, down=denominator).groupby("request_id")[["up", "down"]].sum()
        )
        expected = scipy.stats.bootstrap(
            (np.asarray(sums["up"]), np.asarray(sums["down"])),
            lambda up, down, axis: up.sum(axis=axis) / down.sum(axis=axis),
            paired=True,
            vectorized=True,
            method="percentile",
            n_resamples=10_000,
            rng=np.random.default_rng(1),
        )
        assert result[0] == sums["up"].sum() / sums["down"].sum(), name
        # A bound's Monte Carlo error at 2,000 resamples is 0.06 standard errors; 0.3 are allowed.
        slack = 0.3 * float(expected.standard_error)
        low, high = expected.confidence_interval
        assert result[1:] == pytest.approx((low, high), abs=slack), name
