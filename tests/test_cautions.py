"""What a lead says against its own numbers: disturbed timings, unshown leads, skipped prompts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import report
from experiments.cautions import skipped_caution, timing_cautions
from experiments.overview import _lead
from experiments.overview_data import make_overview
from experiments.tables import lead
from specdec.analysis import load
from specdec.slow_groups import count_slow_groups
from tests.run_folders import write_run

QUIET = "Run again on a quiet machine."


def arm(name: str, k: int, speedup: float, length: float, **more: Any) -> dict[str, Any]:
    """Return a row of a summary, with an interval of a tenth around the speed-up."""
    row = {"arm": name, "k": k, "speedup": speedup, "accepted_length": length, "verdict": "equal"}
    row |= {"speedup_low": 0.9 * speedup, "speedup_high": 1.1 * speedup, "random_tokens": False}
    row |= {"num_prompts": 6, "num_turns": 6, "num_skipped": 0, "num_groups": 6}
    return row | {"num_slow_groups": 0} | more


def summary(*arms: dict[str, Any], **of_baseline: Any) -> pd.DataFrame:
    return pd.DataFrame([arm("none", 0, 1.0, 1.0, **of_baseline), *arms])


def comparison(value: float, low: float, high: float) -> pd.DataFrame:
    line = {"measure": "speedup", "change": "ratio", "value": value, "low": low, "high": high}
    return pd.DataFrame([line | {"differs": low > 1 or high < 1}])


def said(frame: pd.DataFrame, compared: pd.DataFrame | None = None) -> str:
    return lead(frame, lambda one, other: compared)


def timings(**seconds: list[float]) -> pd.DataFrame:
    """Return ten tokens a group, arms by their seconds."""
    rows = [
        {"arm": name, "group": group, "num_tokens": 10, "wall_s": wall_s}
        for name, own in seconds.items()
        for group, wall_s in enumerate(own)
    ]
    return pd.DataFrame(rows)


def test_a_speedup_above_the_accepted_length_is_not_believed() -> None:
    text = said(summary(arm("draft_model K=3", 3, 5.67, 2.05)))
    assert (
        "Too fast to be true: draft_model K=3 (5.67x with a mean accepted length of 2.05)" in text
    )
    assert text.endswith(QUIET)
    assert "Too fast" in said(summary(arm("ngram K=2", 2, 1.31, 1.0)))
    for speedup, length in ((1.8, 2.05), (2.1, 2.05), (np.nan, 1.0)):
        assert QUIET not in said(summary(arm("ngram K=2", 2, speedup, length)))


def test_requests_that_run_together_may_gain_more_than_the_mean() -> None:
    for groups, is_doubted in ((6, True), (2, False)):
        text = said(summary(arm("ngram K=2", 2, 2.6, 2.0, num_groups=groups)))
        assert ("Too fast" in text) == is_doubted
    assert "Too fast" in said(summary(arm("ngram K=2", 2, 3.2, 2.0, num_groups=2)))


def test_many_doubted_arms_are_counted() -> None:
    arms = [arm(f"a{i}", 2, 3.0, 1.0) for i in range(5)]
    (text, _) = timing_cautions(summary(*arms))
    assert "a2 (3.00x with a mean accepted length of 1.00) and 2 more." in text


def test_slow_groups_name_their_arm_and_count() -> None:
    text = said(summary(arm("ngram K=2", 2, 1.2, 2.0), num_slow_groups=1))
    assert "1 of 6 groups of prompts of none took more than 5 times the arm's median" in text
    assert text.endswith(QUIET)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"none": [1.1, 43.0, 1.2, 1.1], "ngram": [0.6, 0.7, 0.6, 0.6]}, {"none": 1, "ngram": 0}),
        ({"none": [1.1, 43.0]}, {"none": 1}),  # one slow group of two
        ({"none": [1.1, 5.4, 1.2, 1.1]}, {"none": 0}),
        # A long prompt is slow in both arms, the more so in the one that decodes faster.
        ({"none": [1.0, 5.5, 1.0], "ngram": [0.5, 4.0, 0.5]}, {"none": 0, "ngram": 0}),
        ({"none": [1.0, 5.5, 1.0], "ngram": [0.5, 40.0, 0.5]}, {"none": 0, "ngram": 1}),
        ({"none": [1.0, 1.0, 1.0], "ngram": [0.5]}, {"none": 0, "ngram": 0}),  # a cut run
    ],
)
def test_groups_that_are_slow_in_one_arm_are_counted(
    seconds: dict[str, list[float]], expected: dict[str, int]
) -> None:
    assert count_slow_groups(timings(**seconds)) == expected


def test_slow_groups_of_nothing() -> None:
    frame = timings(none=[1.0, 2.0])
    assert count_slow_groups(frame.iloc[:0]) == {}
    assert count_slow_groups(frame.assign(num_tokens=0)) == {}
    assert count_slow_groups(frame.assign(wall_s=0.0)) == {"none": 0}


def test_a_lead_that_the_comparison_does_not_show_is_told() -> None:
    frame = summary(arm("ngram K=2", 2, 1.5, 2.0), arm("suffix K=2", 2, 1.4, 2.0))
    told = "Its lead over the next, suffix K=2, is not shown"
    assert told in said(frame, comparison(1.07, 0.95, 1.2))
    assert "1.070x [0.950, 1.200]" in said(frame, comparison(1.07, 0.95, 1.2))
    for shown in (comparison(1.07, 1.02, 1.2), comparison(1.07, np.nan, np.nan), None):
        assert "is not shown" not in said(frame, shown)


def test_an_arm_that_changes_the_output_is_no_next() -> None:
    frame = summary(
        arm("ngram K=2", 2, 1.5, 2.0), arm("suffix K=2", 2, 1.4, 2.0, verdict="different")
    )
    text = said(frame, comparison(1.07, 0.95, 1.2))
    assert "its lead" not in text.lower()
    assert "Left out, because their output is different or lossy: suffix K=2." in text


def test_an_interval_is_told_where_there_is_none() -> None:
    lone = {"speedup_low": np.nan, "speedup_high": np.nan, "num_groups": 1}
    for prompts, kind in ((1, "one prompt"), (4, "one group of prompts")):
        row = arm("ngram K=2", 2, 1.2, 2.0, num_prompts=prompts, **lone)
        assert f"at 1.20x (no interval: {kind}) the speed of" in said(summary(row))


def test_skipped_prompts_are_counted() -> None:
    one = {"num_skipped": 1, "num_turns": 1, "num_prompts": 1}
    row = arm("ngram K=2", 2, 1.2, 2.0, **one)
    assert "1 of 2 prompts did not fit and is not in these figures." in said(summary(row, **one))
    told = "Some prompts did not fit and are not in these figures: 1 of 2 in ngram K=2."
    assert told in said(summary(row))
    assert skipped_caution(summary()) == ""
    turns = summary(num_skipped=2, num_turns=7)
    assert skipped_caution(turns) == "2 of 9 turns did not fit and are not in these figures."


def disturb(folder: Path, arm: str = "none") -> None:
    path = folder / "timings.parquet"
    frame = pd.read_parquet(path)
    frame.loc[(frame["arm"] == arm) & (frame["group"] == 1), "wall_s"] *= 40
    frame.to_parquet(path, index=False)


def test_the_report_of_a_disturbed_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", num_prompts=4, num_tokens=12)
    told = "1 of 4 groups of prompts of none took more than 5 times"
    for is_disturbed in (False, True):
        assert report.main([str(folder)]) == 0
        page = (folder / "report.html").read_text(encoding="utf-8").replace("&#39;", "'")
        for text in (page, " ".join(capsys.readouterr().out.split())):
            assert (told in text) == (QUIET in text) == ("Too fast" in text) == is_disturbed
        slow = pd.read_csv(folder / "summary.csv")["num_slow_groups"]
        assert list(slow) == [int(is_disturbed), 0, 0, 0, 0]
        disturb(folder)


def test_the_overview_of_a_disturbed_run_says_so(tmp_path: Path) -> None:
    for run, size in (("one", 1), ("two", 2)):
        write_run(tmp_path / run, num_prompts=4, num_tokens=12, batch_size=size)
    assert QUIET not in _lead(make_overview(load(tmp_path)))
    disturb(tmp_path / "two")
    text = _lead(make_overview(load(tmp_path)))
    assert "1 of 2 groups of prompts of autoregressive at batch size 2 took" in text
    assert "Too fast to be true" in text


def test_several_runs_in_the_terminal_are_doubted_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = [("ngram", 2, 0.4)]
    for run, skipped in (("one", 0), ("two", 1)):
        extra = {"num_skipped": skipped}
        write_run(tmp_path / run, drafts=drafts, num_prompts=3, num_tokens=12, arm_extra=extra)
    disturb(tmp_path / "two")
    assert report.main([str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 groups of prompts of none (two) took more than 5 times" in out
    assert QUIET in out
    assert "Some prompts did not fit and are not in these figures: 1 of 4 in two." in out


def test_the_overview_tells_an_interval_with_one_and_an_unshown_lead(tmp_path: Path) -> None:
    drafts = [("ngram", 2, 0.4), ("suffix", 2, 0.4)]
    folder = write_run(tmp_path / "run", drafts=drafts, num_prompts=4, num_tokens=12)
    path = folder / "timings.parquet"
    frame = pd.read_parquet(path)
    noise = np.random.default_rng(0).uniform(0.5, 1.5, len(frame))
    frame.assign(wall_s=noise).to_parquet(path, index=False)
    text = _lead(make_overview(load(tmp_path)))
    assert "The interval includes 1" in text
    assert "Its lead over the next, " in text
    assert "is not shown" in text


def test_arms_that_were_asked_other_prompts_are_not_compared(tmp_path: Path) -> None:
    for run in ("one", "two"):
        prompts = {"path": f"{run}/questions.jsonl"}
        drafts = [("ngram", 2, 0.4)]
        write_run(tmp_path / run, drafts=drafts, num_prompts=4, config={"prompts": prompts})
    assert "Its lead" not in _lead(make_overview(load(tmp_path)))


def test_skipped_prompts_are_on_every_page_and_in_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = [("ngram", 2, 0.4)]
    write_run(tmp_path / "whole", drafts=drafts, num_prompts=2)
    folder = write_run(
        tmp_path / "part", drafts=drafts, num_prompts=2, arm_extra={"num_skipped": 1}
    )
    told = "1 of 3 prompts did not fit and is not in these figures."
    assert report.main([str(folder)]) == 0
    assert told in (folder / "report.html").read_text(encoding="utf-8")
    assert told in " ".join(capsys.readouterr().out.split())
    assert list(pd.read_csv(folder / "summary.csv")["num_skipped"]) == [1, 1]
    runs = load(tmp_path)
    assert list(runs.arms["num_skipped"]) == [1, 1, 0, 0]
    assert list(runs.summary()["num_skipped"]) == [1, 1, 0, 0]
    assert "not in these figures: 1 of 3 in part." in _lead(make_overview(runs))
    # An older run does not say how many it skipped.
    entries = json.loads((tmp_path / "whole" / "arms.json").read_text())
    assert all("num_skipped" not in entry for entry in entries)


def test_the_number_judged_at_each_position_is_in_the_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_prompts=4, num_tokens=12)
    report.build_report(folder)
    written = pd.read_csv(folder / "summary.csv").set_index("arm")
    requests = pd.read_parquet(folder / "requests.parquet")
    for name in ("ngram K=2", "ngram K=4"):
        drafted = requests.loc[requests["arm"] == name, "num_drafted"]
        for place in range(1, 5):
            assert written.loc[name, f"num_drafted_at_{place}"] == sum(drafted >= place)
