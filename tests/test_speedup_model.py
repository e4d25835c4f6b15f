"""The speed-up model against values computed by hand, and against made-up runs of a known law."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments.model_plots import model_section
from experiments.overview_data import AUTOREGRESSIVE, Overview, without_metrics
from experiments.speedup_model import (
    PREDICTION_COLUMNS,
    SpeedupModel,
    batch_sizes,
    best_k,
    compare,
    conditional_acceptance,
    expected_tokens,
    fit,
    main,
)
from experiments.step_costs import POINT_COLUMNS, interpolate, read_bench
from specdec.analysis import load
from specdec.errors import ConfigError
from specdec.metrics import accepted_length
from tests.run_folders import draft_ms, host_ms, step_ms, target_ms, write_run

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def overview(tmp_path_factory: pytest.TempPathFactory) -> Overview:
    """Two drafters at K = 2 and 6, in batches of 1, 2 and 8."""
    folder = tmp_path_factory.mktemp("runs")
    drafts = [(name, k, p) for name, p in (("ngram", 0.4), ("eagle3", 0.7)) for k in (2, 6)]
    for size in (1, 2, 8):
        write_run(folder / f"b{size}", drafts=drafts, batch_size=size, num_prompts=16)
    return without_metrics(load(folder))


@pytest.mark.parametrize(
    ("acceptance", "k", "tokens", "is_beyond"),
    [
        ([0.5, 0.5], 2, 1.75, False),
        ([0.8, 0.5, 0.25], 1, 1.8, False),
        ([0.8, 0.5, 0.25], 3, 1 + 0.8 + 0.4 + 0.1, False),
        ([0.5, 0.5], 3, 1.875, True),
        ([0.5, 0.0, math.nan], 3, 1.5, False),
        ([0.0], 4, 1.0, True),
    ],
)
def test_expected_tokens_by_hand(
    acceptance: list[float], k: int, tokens: float, is_beyond: bool
) -> None:
    found = expected_tokens(np.array(acceptance), k)
    assert found == (pytest.approx(tokens), is_beyond)


def test_expected_tokens_of_constant_acceptance_is_the_closed_form() -> None:
    tokens, _ = expected_tokens(np.full(5, 0.6), 5)
    assert tokens == pytest.approx((1 - 0.6**6) / (1 - 0.6))


def rows_of(k: int, committed: list[int], verify: list[bool] | None = None) -> pd.DataFrame:
    verify = verify or [True] * len(committed)
    return pd.DataFrame({"k": k, "num_committed": committed, "is_verify": verify})


def test_conditional_acceptance_by_hand() -> None:
    two = rows_of(2, [1, 2, 3, 3, 9], [True, True, True, True, False])
    found = conditional_acceptance(two, list(two["k"]))
    assert found.tolist() == pytest.approx([3 / 4, 2 / 3])


def test_arms_of_smaller_k_say_nothing_of_later_positions() -> None:
    both = pd.concat([rows_of(2, [1, 2, 3, 3]), rows_of(1, [1, 2])], ignore_index=True)
    found = conditional_acceptance(both, list(both["k"]))
    assert found.tolist() == pytest.approx([4 / 6, 2 / 3])


def test_expected_tokens_of_one_arm_is_its_mean_accepted_length(overview: Overview) -> None:
    requests = overview.runs.requests
    for arm, k in (("ngram K=6", 6), ("eagle3 K=2", 2)):
        own = requests.loc[(requests["arm"] == arm) & (requests["run"] == "b8")]
        tokens, _ = expected_tokens(conditional_acceptance(own, list(own["k"])), k)
        assert tokens == pytest.approx(accepted_length(own).value)


GRID = {(1.0, 1.0): 10.0, (1.0, 3.0): 14.0, (3.0, 1.0): 20.0, (3.0, 3.0): 28.0}


@pytest.mark.parametrize(
    ("at", "value", "is_extrapolated"),
    [
        ((2, 2), 18.0, False),
        ((1, 3), 14.0, False),
        ((3, 5), 36.0, True),  # 28 and two more of slope 4
        ((5, 1), 30.0, True),
        ((0, 1), 5.0, True),
        ((-9, 1), 0.0, True),  # no time is negative
    ],
)
def test_interpolation_by_hand(
    at: tuple[float, float], value: float, is_extrapolated: bool
) -> None:
    assert interpolate(GRID, at) == (pytest.approx(value), is_extrapolated)


def test_a_coordinate_with_one_point_stands_and_is_marked() -> None:
    assert interpolate({(2.0,): 7.0}, (2,)) == (7.0, False)
    assert interpolate({(2.0,): 7.0}, (3,)) == (7.0, True)


def test_lines_that_surround_the_place_are_preferred() -> None:
    points = {(1.0, 1.0): 10.0, (1.0, 4.0): 16.0, (2.0, 2.0): 99.0, (3.0, 1.0): 20.0}
    points[(3.0, 4.0)] = 32.0
    assert interpolate(points, (2, 3)) == (pytest.approx(21.0), False)


def points_of(*lines: tuple[Any, ...]) -> pd.DataFrame:
    """Return points from (series, k, num_reqs, target, draft, rest)."""
    full = [
        (name, k, reqs, 100.0, k + 1.0, 1.0, 10, *parts, sum(parts))
        for name, k, reqs, *parts in lines
    ]
    return pd.DataFrame(full, columns=list(POINT_COLUMNS))


def test_a_prediction_by_hand() -> None:
    points = points_of(
        (AUTOREGRESSIVE, 0, 1, 10.0, 0.0, 1.0),
        ("d", 2, 1, 12.0, 2.0, 1.0),
        ("d", 4, 1, 16.0, 6.0, 2.0),
    )
    model = SpeedupModel(points, {"d": np.array([0.5, 0.5, 0.5, 0.5])})
    line = model.predict("d", 3, 1, 100.0)
    assert tuple(line) == PREDICTION_COLUMNS
    # target 14, draft 4, rest 1.5; 1 + 1/2 + 1/4 + 1/8 tokens; 11 ms without drafts
    assert line["step_ms"] == pytest.approx(19.5)
    assert line["speedup"] == pytest.approx(1.875 / 19.5 * 11.0)
    assert not line["is_extrapolated"]
    below = model.predict("d", 1, 1, 100.0)  # the target is known there, drafting is not
    assert below["target_ms"] == pytest.approx(11.0)
    assert below["draft_ms"] == pytest.approx(0.0)
    assert below["is_extrapolated"]
    assert model.predict("d", 3, 2, 100.0)["is_extrapolated"]
    assert model.predict("d", 3, 1, 200.0)["is_extrapolated"]


def test_steps_known_as_a_whole_are_interpolated_as_a_whole() -> None:
    points = points_of(
        (AUTOREGRESSIVE, 0, 1, 10.0, 0.0, 1.0),
        ("d", 2, 1, 12.0, 2.0, 1.0),
        ("d", 4, 1, 16.0, 6.0, 2.0),
    ).assign(target_ms=np.nan, draft_ms=np.nan, rest_ms=np.nan)
    line = SpeedupModel(points, {"d": np.full(4, 0.5)}).predict("d", 3, 1, 100.0)
    assert line["step_ms"] == pytest.approx(19.5)
    assert math.isnan(line["target_ms"])


@pytest.mark.parametrize("fused", [False, True])
def test_unmeasured_points_follow_the_law_of_the_runs(tmp_path: Path, fused: bool) -> None:
    drafts = [("eagle3", 2, 0.7), ("eagle3", 6, 0.7)]
    for size in (1, 8):
        folder = tmp_path / f"b{size}"
        write_run(folder, drafts=drafts, batch_size=size, num_prompts=16, fused=fused)
    model = fit(without_metrics(load(tmp_path)), "")
    context = float(model.points["context"].iloc[0])
    assert model.points["context"].nunique() == 1
    for k, num_reqs in ((2, 1), (4, 1), (5, 4), (3, 8)):
        line = model.predict("eagle3", k, num_reqs, context)
        assert line["step_ms"] == pytest.approx(step_ms(num_reqs, k)), (k, num_reqs)
        assert line["ar_step_ms"] == pytest.approx(step_ms(num_reqs, 0))
        assert not line["is_extrapolated"]
        if not fused:
            assert line["target_ms"] == pytest.approx(target_ms(num_reqs, k + 1))
            assert line["draft_ms"] == pytest.approx(draft_ms(num_reqs, k))
            assert line["rest_ms"] == pytest.approx(host_ms(num_reqs))
    assert model.predict("eagle3", 7, 1, context)["is_extrapolated"]
    assert model.predict("eagle3", 4, 16, context)["is_extrapolated"]


def test_a_point_is_predicted_exactly_from_itself(tmp_path: Path) -> None:
    write_run(tmp_path / "run", drafts=[("eagle3", 3, 0.6)])
    overview = without_metrics(load(tmp_path))
    compared = compare(fit(overview, ""), overview, "")
    assert compared[["series", "k", "num_reqs"]].to_numpy().tolist() == [["eagle3", 3, 1]]
    assert compared["measured"].item() > 1
    assert compared["error"].item() == pytest.approx(0.0, abs=1e-12)
    assert compared["held_out"].isna().all()  # nothing surrounds it


def test_held_out_points_are_predicted_without_themselves(tmp_path: Path) -> None:
    write_run(tmp_path / "run", drafts=[("eagle3", k, 0.6) for k in (2, 4, 6)], num_prompts=64)
    overview = without_metrics(load(tmp_path))
    model = fit(overview, "")
    model.points.loc[model.points["k"] == 4, ["draft_ms", "step_ms"]] += 1000.0
    compared = compare(model, overview, "").set_index("k")
    assert list(compared["held_out"].notna()) == [False, True, False]
    honest = compare(fit(overview, ""), overview, "").set_index("k")
    # The slow point spoils what was measured, and not what the others say of it.
    assert compared.loc[4, "held_out"] == pytest.approx(honest.loc[4, "held_out"])
    assert abs(float(honest.loc[4, "held_out_error"])) < 0.1
    assert float(compared.loc[4, "held_out_error"]) > 10


def test_the_best_k_of_each_batch_size() -> None:
    lines = [(1, 1, 1.2, False), (2, 1, 1.5, False), (3, 1, 1.9, True)]
    lines += [(1, 8, 0.9, False), (2, 8, 0.7, False), (1, 16, 1.1, True), (2, 16, 1.3, True)]
    surface = pd.DataFrame(
        [("d", k, b, 100.0, 2.0, 9.0, 2.0, 1.0, 12.0, 10.0, s, mark) for k, b, s, mark in lines],
        columns=list(PREDICTION_COLUMNS),
    )
    best = best_k(surface)
    assert best["num_reqs"].tolist() == [1, 8, 16]
    assert best["k"].tolist() == [2, 0, 2]  # a guess wins only where there are but guesses
    assert best["speedup"].tolist() == [1.5, 1.0, 1.3]
    assert best["step_ms"].tolist() == [12.0, 10.0, 12.0]


def test_batch_sizes_are_those_asked_for_and_powers_of_two_between() -> None:
    points = points_of(*(("d", 2, reqs, 1.0, 1.0, 1.0) for reqs in (1, 3, 12)))
    assert batch_sizes(points, [3, 12]) == [3, 4, 8, 12]
    assert batch_sizes(points, [1]) == [1]
    assert batch_sizes(points, [1, 64]) == [1]  # so many never ran together


def test_costs_of_a_bench_record(tmp_path: Path) -> None:
    points, provenance = read_bench(ROOT / "benchmarks" / "results" / "step_h200.json")
    assert provenance["device"] == "NVIDIA H200"
    baseline = points.loc[points["series"] == AUTOREGRESSIVE]
    assert baseline["num_reqs"].tolist() == [1, 8, 64]
    assert set(baseline["k"]) == {0}
    assert set(points["k"]) == {0, 4}
    assert (points["step_ms"] > 1).all()
    other = tmp_path / "other.json"
    empty = {"config": {"prompt_len": 8, "num_steps": 2, "num_speculative_tokens": 2}, "lines": []}
    other.write_text(json.dumps(empty))
    with pytest.raises(ConfigError, match="no record of bench step"):
        read_bench(other)
    other.write_text(json.dumps({"bench": "attention"}))
    with pytest.raises(ConfigError, match="no record of bench step"):
        read_bench(other)
    with pytest.raises(ConfigError, match="no scope 'sideways'"):
        read_bench(ROOT / "benchmarks" / "results" / "step_h200.json", "sideways")


def test_the_command_names_the_best_k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", drafts=[("ngram", 2, 0.6), ("ngram", 4, 0.6)])
    assert main([str(tmp_path)]) == 0
    assert "ngram, batch size 1: best K=" in capsys.readouterr().out
    record = ROOT / "benchmarks" / "results" / "step_h200.json"
    assert main([str(tmp_path), "--costs", str(record)]) == 0
    assert "ngram, batch size 64: best K=" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 1


def test_the_section_shows_surfaces_and_the_error(overview: Overview, tmp_path: Path) -> None:
    section = model_section(tmp_path / "images", overview)
    assert [plot.heading for plot in section.plots] == ["ngram", "eagle3"]
    assert "best K=" in section.plots[0].alt
    assert any("Relative error at the 12 measured points" in note for note in section.notes)
    written = pd.read_csv(tmp_path / "images" / "speedup_model.csv")
    assert sorted(set(written["k"])) == [1, 2, 3, 4, 5, 6]
    assert sorted(set(written["num_reqs"])) == [1, 2, 4, 8]
    assert written.loc[written["k"] == 1, "is_extrapolated"].all()
    assert not written.loc[written["k"] >= 2, "is_extrapolated"].any()


def test_one_point_of_a_drafter_makes_no_surface(tmp_path: Path) -> None:
    write_run(tmp_path / "run", drafts=[("ngram", 4, 0.5)])
    section = model_section(tmp_path / "images", without_metrics(load(tmp_path)))
    assert not section.plots
    assert not section.tables
    assert "two K or two batch sizes" in section.notes[0]
