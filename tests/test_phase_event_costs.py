"""What phase events cost, where an arm stands beside the one that differs in nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import figures, report
from experiments.phase_event_costs import find_pairs, phase_event_lines
from specdec.analysis import load
from specdec.metrics import compare_steps
from specdec.units import ArmTraces
from tests.run_folders import write_run
from tests.test_overview import Page
from tests.test_specdec_metrics_paired import request_rows, timing_rows

PLAIN, EVENTS = "ngram K=4", "ngram K=4 events"
DRAFTS = [("ngram", 4, 0.5), ("eagle3", 4, 0.7)]
CAUSE = "Phase events change the time of a decode step of"


@pytest.fixture(scope="module", autouse=True)
def coarse_images() -> Iterator[None]:
    """Draw quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 40)
        yield


def add_events(folder: Path, factor: float = 1.25, **changed: Any) -> Path:
    """Add a twin of ngram with phase events, whose steps take longer by a factor."""
    for name in ("requests", "steps", "timings"):
        path = folder / f"{name}.parquet"
        frame = pd.read_parquet(path)
        twin = frame.loc[frame["arm"] == PLAIN].assign(arm=EVENTS)
        for column in ("step_ms", "wall_s"):
            if column in twin:
                twin[column] *= factor
        pd.concat([frame, twin]).to_parquet(path, index=False)
    entries = [e | {"phase_events": False} for e in json.loads((folder / "arms.json").read_text())]
    twin = next(e for e in entries if e["arm"] == PLAIN)
    entries.append(twin | {"arm": EVENTS, "phase_events": True, **changed})
    (folder / "arms.json").write_text(json.dumps(entries))
    return folder


def write_alone(folder: Path, events: bool, **options: Any) -> Path:
    """Write a run in which all arms have phase events, or none has."""
    engine = {"engine": {"max_num_reqs": 1, "phase_events": events}}
    extra = {"phase_events": events}
    return write_run(folder, drafts=DRAFTS[:1], arm_extra=extra, config=engine, **options)


def step_rows(step_ms: list[float]) -> pd.DataFrame:
    frame = pd.DataFrame({"arm": "x", "step": range(len(step_ms)), "step_ms": step_ms})
    return frame.assign(num_reqs=1)


def arm_of(committed: dict[str, list[int]], groups: list[tuple[int, int, int, float]]) -> ArmTraces:
    """Return an arm whose prompts run one after the other: a prefill step, then its own."""
    rows = request_rows(committed).assign(arm="x")
    timings = timing_rows(groups)
    return ArmTraces(rows.assign(step=range(len(rows))), timings, timings)


def test_the_cost_is_that_of_decode_steps_by_hand() -> None:
    groups = [(0, 1, 7, 1.0), (1, 1, 3, 0.5), (2, 1, 1, 0.1)]
    arm = arm_of({"a": [3, 3], "b": [2], "c": []}, groups)
    plain = step_rows([50.0, 10.0, 12.0, 50.0, 20.0, 50.0])  # prefills take 50 ms
    slow = step_rows([90.0, 11.0, 13.0, 90.0, 24.0, 90.0])
    found = compare_steps(arm, arm, (slow, plain))
    assert (found["one"], found["other"]) == (48 / 3, 42 / 3)
    assert found["value"] == pytest.approx(48 / 42 - 1)
    assert found["num_units"] == 3  # a text without a decode step is one that adds nothing
    # A resample of one text alone is at either end: (11 + 13) / (10 + 12) and 24 / 20.
    assert 24 / 22 - 1 - 1e-9 <= found["low"] < found["value"] < found["high"] <= 0.2 + 1e-9


def test_groups_that_one_arm_lacks_do_not_count() -> None:
    both = arm_of({"a": [3], "b": [2]}, [(0, 1, 4, 1.0), (1, 1, 3, 0.5)])
    alone = arm_of({"b": [2]}, [(0, 1, 3, 0.5)])
    found = compare_steps(both, alone, (step_rows([50.0, 99.0, 50.0, 30.0]), step_rows([50, 20])))
    assert (found["one"], found["other"], found["num_units"]) == (30.0, 20.0, 1)
    assert np.isnan(found["low"])
    other = arm_of({"z": [2]}, [(0, 1, 3, 0.5)])
    nothing = compare_steps(both, other, (step_rows([50.0] * 4), step_rows([50.0] * 2)))
    assert np.isnan(nothing["value"])
    assert nothing["num_units"] == 0


def test_arms_of_a_run_say_it_on_every_page_and_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = add_events(write_run(tmp_path / "one", drafts=DRAFTS))
    (sentence,) = phase_event_lines(load(tmp_path))
    assert sentence.startswith(f"{CAUSE} {EVENTS} by +25.0% [+25.0, +25.0]: ")
    assert sentence.endswith(f" ms of {PLAIN}.")
    times = load(tmp_path).times().set_index("arm")["step_ms"]
    assert f"{times[EVENTS]:.2f} ms, against {times[PLAIN]:.2f} ms" in sentence
    assert report.main([str(tmp_path)]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert sentence in Page(tmp_path / "overview.html").text
    assert report.main([str(folder)]) == 0
    assert sentence in Page(folder / "report.html").text


def test_an_interval_that_includes_none_is_told(tmp_path: Path) -> None:
    folder = add_events(write_run(tmp_path / "one", drafts=DRAFTS))
    steps = pd.read_parquet(folder / "steps.parquet")
    mine = steps["arm"] == EVENTS
    noise = np.random.default_rng(0).choice([0.5, 1.5], int(mine.sum()))
    steps.loc[mine, "step_ms"] *= noise / 1.25
    steps.to_parquet(folder / "steps.parquet", index=False)
    (sentence,) = phase_event_lines(load(tmp_path))
    assert sentence.endswith("The interval includes 0: no cost is shown.")


@pytest.mark.parametrize(
    "changed",
    [{"k": 5}, {"drafter_config": {"name": "ngram", "max_n": 9}}, {"phase_events": False}],
)
def test_an_arm_that_differs_in_more_is_no_partner(tmp_path: Path, changed: dict[str, Any]) -> None:
    add_events(write_run(tmp_path / "one", drafts=DRAFTS), **changed)
    assert phase_event_lines(load(tmp_path)) == []


def test_arms_of_older_traces_have_no_partner(tmp_path: Path) -> None:
    folder = add_events(write_run(tmp_path / "one", drafts=DRAFTS))
    entries = json.loads((folder / "arms.json").read_text())
    for entry in entries[:-1]:
        del entry["phase_events"]
    (folder / "arms.json").write_text(json.dumps(entries))
    assert phase_event_lines(load(tmp_path)) == []
    assert report.main([str(folder)]) == 0
    assert CAUSE not in Page(folder / "report.html").text


def test_runs_that_differ_in_phase_events_alone_are_partners(tmp_path: Path) -> None:
    write_alone(tmp_path / "a", events=False)
    write_alone(tmp_path / "b", events=True)
    runs = load(tmp_path)
    assert list(find_pairs(runs)) == [(("b", arm), ("a", arm)) for arm in ("none", PLAIN)]
    assert [line.partition(" by ")[2][:6] for line in phase_event_lines(runs)] == ["+0.0% "] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"provenance": {"commit": "89abcdef" * 5}},
        {"provenance": {"dirty": True}},
        {"provenance": {"threads": 8}},
        {"provenance": {"versions": {"python": "3.11.9", "torch": "2.12.0"}}},
    ],
)
def test_runs_that_differ_in_more_are_no_partners(tmp_path: Path, options: dict[str, Any]) -> None:
    write_alone(tmp_path / "a", events=False)
    write_alone(tmp_path / "b", events=True, **options)
    assert list(find_pairs(load(tmp_path))) == []


def test_a_partner_of_the_same_run_comes_first_and_none_is_taken_twice(tmp_path: Path) -> None:
    for name in ("b", "c"):
        add_events(write_run(tmp_path / name, drafts=DRAFTS))
    write_run(tmp_path / "a", drafts=DRAFTS[:1], arm_extra={"phase_events": True})
    write_run(tmp_path / "d", drafts=DRAFTS[:1], arm_extra={"phase_events": False})
    pairs = dict(find_pairs(load(tmp_path)))
    assert pairs["b", EVENTS] == ("b", PLAIN)
    assert pairs["c", EVENTS] == ("c", PLAIN)
    assert pairs["a", PLAIN] == ("d", PLAIN)
    assert pairs["a", "none"] == ("b", "none")


def test_arms_that_ran_no_group_in_common_are_told(tmp_path: Path) -> None:
    folder = add_events(write_run(tmp_path / "one", drafts=DRAFTS))
    timings = pd.read_parquet(folder / "timings.parquet")
    timings.loc[timings["arm"] == EVENTS, "num_prompts"] += 1
    timings.to_parquet(folder / "timings.parquet", index=False)
    (sentence,) = phase_event_lines(load(tmp_path))
    assert sentence.startswith(f"What phase events cost {EVENTS} cannot be told")
