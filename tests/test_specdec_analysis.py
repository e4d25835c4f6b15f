"""Run folders as frames: what is found, what is left out, labels, and comparisons."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from specdec import analysis, metrics
from specdec.errors import ConfigError
from specdec.trace import REQUEST_COLUMNS, STEP_COLUMNS
from tests.test_experiments_report import ARMS, write_run


def write_finished(folder: Path, config: dict[str, Any] | None = None, **provenance: Any) -> Path:
    """Write the run folder of a run that came to its end."""
    write_run(folder, ARMS[:2], prompts_per_category=1, num_tokens=12)
    told = json.loads((folder / "provenance.json").read_text())
    told |= {"duration_s": 3.5, **provenance}
    (folder / "provenance.json").write_text(json.dumps(told))
    values = {
        "target": {"name": "smollm2-135m"},
        "batch_size": 1,
        "prompts": {"path": None, "per_category": 1, "limit": None},
        "sampling": {"max_tokens": 12},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values | (config or {})))
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs at different depths, one that was killed, and one that lacks a file."""
    folder = tmp_path_factory.mktemp("sweep")
    write_finished(folder / "b1")
    write_finished(folder / "deep" / "b4", {"batch_size": 4})
    write_finished(folder / "killed", duration_s=None)
    (write_finished(folder / "torn") / "steps.parquet").unlink()
    for name in (".hydra", "wandb"):  # copies of others, and no runs of their own
        write_finished(folder / "b1" / name)
        write_finished(folder / name)
    return folder


def test_runs_are_found_at_any_depth_and_the_others_are_named_once(
    sweep: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runs = analysis.load(sweep)
    assert list(runs.arms["run"].unique()) == ["b1", "deep/b4"]
    (record,) = caplog.records
    message = record.getMessage()
    assert "2 of 4" in message
    assert "killed: it did not come to its end" in message
    assert "torn: " in message
    assert "steps.parquet missing" in message


def test_unfinished_runs_are_taken_where_they_are_asked_for(sweep: Path) -> None:
    runs = analysis.load(sweep, unfinished=True)
    assert set(runs.arms["run"]) == {"b1", "deep/b4", "killed"}


@pytest.mark.parametrize("name", ["killed", "torn", "nowhere"])
def test_no_run_at_all_is_told(sweep: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="holds no finished run") as error:
        analysis.load(sweep / name)
    reason = {"killed": "did not come to its end", "torn": "steps.parquet missing", "nowhere": ""}
    assert reason[name] in str(error.value)


def test_a_run_folder_itself_is_named_as_it_is(sweep: Path) -> None:
    assert set(analysis.load(sweep / "b1").arms["run"]) == {"b1"}


def test_arms_tell_what_each_was(sweep: Path) -> None:
    arms = analysis.load(sweep).arms
    assert list(arms.columns[:3]) == ["run", "arm", "name"]
    assert not arms["name"].duplicated().any()
    row = arms.set_index("name").loc["ngram K=4 batch_size=4"]
    assert (row["run"], row["arm"], row["drafter"], row["k"]) == (
        "deep/b4",
        "ngram K=4",
        "ngram",
        4,
    )
    assert (row["verifier"], row["temperature"], row["lossless"]) == ("greedy", 0.0, True)
    assert (row["target"], row["batch_size"], row["max_tokens"]) == ("smollm2-135m", 4, 12)
    assert (row["prompts"], row["dtype"]) == ("builtin per_category=1", "bfloat16")
    assert (row["device"], row["commit"], row["seed"]) == ("cpu <generic>", "0123abc", 0)
    assert not arms["random_tokens"].any()


def test_a_further_value_of_an_arm_is_a_column(tmp_path: Path) -> None:
    folder = write_finished(tmp_path / "run")
    entries = json.loads((folder / "arms.json").read_text())
    for entry in entries:
        entry |= {"random_tokens": True, "arrival_rate": 2.5}
    (folder / "arms.json").write_text(json.dumps(entries))
    arms = analysis.load(folder).arms
    assert arms["random_tokens"].all()
    assert list(arms["arrival_rate"]) == [2.5, 2.5]


def test_runs_of_one_configuration_are_told_apart_by_their_folder(tmp_path: Path) -> None:
    write_finished(tmp_path / "one")
    write_finished(tmp_path / "two")
    names = list(analysis.load(tmp_path).arms["name"])
    assert names == ["none (one)", "ngram K=4 (one)", "none (two)", "ngram K=4 (two)"]


def test_traces_are_those_of_the_runs(sweep: Path) -> None:
    runs = analysis.load(sweep)
    for table, name, columns in (
        (runs.requests, "requests.parquet", REQUEST_COLUMNS),
        (runs.steps, "steps.parquet", STEP_COLUMNS),
        (runs.timings, "timings.parquet", ("group", "category", "num_prompts", "wall_s")),
    ):
        assert list(table.columns[:2]) == ["run", "arm"]
        assert set(columns) <= set(table.columns)
        own = table.loc[table["run"] == "deep/b4"].drop(columns="run").reset_index(drop=True)
        written = pd.read_parquet(sweep / "deep" / "b4" / name)
        pd.testing.assert_frame_equal(own[list(written.columns)], written)


def test_summary_joins_the_metrics_of_each_run(sweep: Path) -> None:
    runs = analysis.load(sweep)
    summary = runs.summary()
    pd.testing.assert_frame_equal(summary[list(runs.arms.columns)], runs.arms)
    run = analysis.load_run(sweep / "b1")
    alone = metrics.summarise_arms(run.requests, run.timings, run.arms)
    own = summary.loc[summary["run"] == "b1"].reset_index(drop=True)
    pd.testing.assert_frame_equal(own[list(alone.columns)], alone, check_dtype=False)


def test_tables_of_all_runs_name_run_and_label(sweep: Path) -> None:
    runs = analysis.load(sweep)
    labels = set(runs.arms["name"])
    for table in (runs.categories(), runs.times()):
        assert list(table.columns[:3]) == ["run", "arm", "name"]
        assert set(table["name"]) == labels
    positions = runs.positions()
    assert positions.groupby("name")["position"].max().to_dict() == {
        "ngram K=4 batch_size=1": 4,
        "ngram K=4 batch_size=4": 4,
    }


def test_compare_finds_arms_by_label_by_pair_and_by_name(sweep: Path) -> None:
    runs = analysis.load(sweep)
    pair = runs.compare("ngram K=4 batch_size=4", ("b1", "none"))
    values = pair.set_index("measure")
    assert values.loc["accepted_length", "other"] == 1.0
    assert values.loc["accepted_length", "value"] > 0
    alone = analysis.load(sweep / "b1")
    table = alone.compare("ngram K=4", "none").set_index("measure")
    speedup = alone.summary().set_index("arm").loc["ngram K=4"]
    assert table.loc["tokens_per_s", "value"] == pytest.approx(speedup["speedup"])
    assert table.loc["tokens_per_s", "low"] == pytest.approx(speedup["speedup_low"])


def test_compare_refuses_what_it_cannot_tell(sweep: Path, tmp_path: Path) -> None:
    runs = analysis.load(sweep)
    with pytest.raises(ConfigError, match="stands for several arms; give one of 'ngram K=4 b"):
        runs.compare("ngram K=4", "none")
    with pytest.raises(ConfigError, match="is no arm; give one of 'none"):
        runs.compare("ngram K=5", ("b1", "none"))
    write_finished(tmp_path / "builtin")
    write_finished(tmp_path / "file", {"prompts": {"path": "mine.jsonl"}})
    runs = analysis.load(tmp_path)
    with pytest.raises(ConfigError, match="not asked the same prompts"):
        runs.compare(("builtin", "ngram K=4"), ("file", "ngram K=4"))


def test_columns_that_came_later_are_missing_values_in_older_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_finished(tmp_path / "old")
    monkeypatch.setattr(analysis, "OPTIONAL_COLUMNS", (*analysis.OPTIONAL_COLUMNS, "num_verified"))
    frame = pd.read_parquet(folder / "steps.parquet").drop(columns="num_verified")
    frame.to_parquet(folder / "steps.parquet", index=False)
    assert analysis.load_run(folder).steps["num_verified"].isna().all()
    frame.drop(columns="step_ms").to_parquet(folder / "steps.parquet", index=False)
    with pytest.raises(ConfigError, match=r"steps\.parquet lacks step_ms"):
        analysis.load_run(folder)


def test_a_config_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    folder = write_finished(tmp_path / "run")
    (folder / "config.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        analysis.load_run(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [("arms.json", "[1]"), ("provenance.json", "[]"), ("config.yaml", "tar"), ("arms.json", "{}")],
)
def test_a_file_of_another_shape_is_named_and_the_other_runs_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, text: str
) -> None:
    write_finished(tmp_path / "sound")
    (write_finished(tmp_path / "torn") / name).write_text(text)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        analysis.load_run(tmp_path / "torn")
    with caplog.at_level(logging.WARNING):
        assert list(analysis.load(tmp_path).entries) == ["sound"]
    assert "torn" in caplog.text


def test_a_run_that_was_cut_before_it_measured_is_told(tmp_path: Path) -> None:
    folder = write_finished(tmp_path / "cut", duration_s=None)
    pd.DataFrame([]).to_parquet(folder / "timings.parquet", index=False)
    with pytest.raises(ConfigError, match="cut before its first questions were answered"):
        analysis.load_run(folder)


def test_turns_are_one_prompt_beside_a_run_without_turns(tmp_path: Path) -> None:
    for name in ("old", "new"):
        folder = write_finished(tmp_path / name)
        frame = pd.read_parquet(folder / "requests.parquet")
        frame["request_id"] = [f"q/{1 + i % 2}" for i in range(len(frame))]
        frame["turn"] = [1 + i % 2 for i in range(len(frame))]
        if name == "old":
            frame = frame.drop(columns="turn")
        frame.to_parquet(folder / "requests.parquet", index=False)
    summary = analysis.load(tmp_path).summary().set_index("run")
    assert list(summary.loc["new", "num_prompts"]) == [1, 1]
    assert list(summary.loc["old", "num_prompts"]) == [2, 2]


def test_the_package_itself_imports_no_pandas() -> None:
    code = "import sys, specdec; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
