"""Trackers: what they write, and that none of them stops a run."""

import csv
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import wandb
from PIL import Image

from specdec.errors import ConfigError
from specdec.tracker import (
    CsvConfig,
    CsvTracker,
    NullTracker,
    TrackerConfig,
    WandbConfig,
    WandbTracker,
    make_tracker,
)

ROWS = [{"arm": "none", "accepted_length": 1.0}, {"arm": "ngram K=4", "accepted_length": 1.7}]


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what a developer's own account would change."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def use(tracker: Any, folder: Path) -> None:
    tracker.log({"accept/length/none": 1.0}, step=0)
    tracker.log({"accept/length/none": 1.5}, step=1)
    tracker.log_table("arms", ROWS)
    tracker.log_artifact_folder(folder, "run-x")
    tracker.finish()


def test_a_table_has_the_columns_of_its_first_row(tmp_path: Path) -> None:
    tracker = make_tracker(CsvConfig(), {}, tmp_path)
    tracker.log_table("arms", [{"a": 1, "b": 2}, {"b": 20, "a": 10}, {"b": 3}])
    (path,) = tmp_path.rglob("arms.csv")
    with path.open() as file:
        assert list(csv.reader(file)) == [["a", "b"], ["1", "2"], ["10", "20"], ["", "3"]]


def test_the_null_tracker_leaves_nothing(tmp_path: Path) -> None:
    tracker = make_tracker(TrackerConfig(), {}, tmp_path)
    assert isinstance(tracker, NullTracker)
    use(tracker, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert tracker.location is None


def test_the_csv_tracker_writes_numbers_and_tables(tmp_path: Path) -> None:
    tracker = make_tracker(CsvConfig(), {}, tmp_path / "run")
    use(tracker, tmp_path)
    with (tmp_path / "run" / "metrics.csv").open() as stream:
        assert list(csv.reader(stream)) == [
            ["step", "name", "value"],
            ["0", "accept/length/none", "1.0"],
            ["1", "accept/length/none", "1.5"],
        ]
    with (tmp_path / "run" / "arms.csv").open() as stream:
        assert list(csv.DictReader(stream))[1] == {"arm": "ngram K=4", "accepted_length": "1.7"}
    assert tracker.location == str(tmp_path / "run" / "metrics.csv")


def test_a_csv_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = CsvTracker(tmp_path)

    def refuse(*args: Any) -> None:
        raise OSError(28, f"no space for {tmp_path.name}")

    monkeypatch.setattr(CsvTracker, "_write", staticmethod(refuse))
    use(tracker, tmp_path)
    assert len(caplog.records) == 1
    assert "the run goes on" in caplog.text


def test_wandb_offline_lies_in_the_run_folder_and_keeps_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "arms.json").write_text("[]")
    secrets = {"api_key": "sk-123", "x-api-key": "sk-123"}
    settings = {"num_speculative_tokens": 4, "drafter": {**secrets, "max_n": 3}}
    config = WandbConfig(group="sweep", tags=["quick"])
    tracker = make_tracker(config, settings, tmp_path, "ngram K=4")
    assert isinstance(tracker, WandbTracker)
    use(tracker, tmp_path)
    (record,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    wanted = (b"accept/length/none", b"num_speculative_tokens", b"sweep", b"quick", b"run-x")
    give_up = time.monotonic() + 20
    data = record.read_bytes()
    while not all(kept in data for kept in wanted) and time.monotonic() < give_up:
        time.sleep(0.05)  # the client's own process closes the file a moment after finish returns
        data = record.read_bytes()
    assert [kept for kept in wanted if kept not in data] == []
    assert b"sk-123" not in data
    assert tracker.location is not None
    assert str(record.parent) in tracker.location
    assert "wandb sync" in tracker.location
    assert wandb.run is None
    # What was set for the client is taken back: the next job has another folder.
    assert os.environ.keys().isdisjoint({"WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_SILENT"})
    said = capfd.readouterr()
    assert said.out + said.err == ""


@pytest.mark.parametrize(
    ("mode", "key", "expected"),
    [
        ("auto", None, "offline"),
        ("auto", "x" * 40, "online"),
        ("offline", "x" * 40, "offline"),
        ("disabled", None, "disabled"),
    ],
)
def test_auto_is_online_only_with_a_key(
    mode: str, key: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    assert WandbConfig(mode=mode).resolved_mode() == expected


def test_disabled_wandb_is_the_null_tracker(tmp_path: Path) -> None:
    assert isinstance(make_tracker(WandbConfig(mode="disabled"), {}, tmp_path), NullTracker)


def test_without_network_an_online_run_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = wandb.init

    def unreachable(**options: Any) -> Any:
        if options["mode"] == "online":
            raise wandb.errors.CommError("no route to host")
        return original(**options)

    monkeypatch.setattr(wandb, "init", unreachable)
    tracker = WandbTracker(WandbConfig(mode="online"), {}, tmp_path)
    use(tracker, tmp_path)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert caplog.text.count("no route to host") == 1


def test_a_client_that_breaks_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**options: Any) -> Any:
        raise RuntimeError("the service died")

    monkeypatch.setattr(wandb, "init", broken)
    with caplog.at_level(logging.WARNING):
        tracker = WandbTracker(WandbConfig(mode="offline"), {}, tmp_path)
        use(tracker, tmp_path)
    assert [record.message for record in caplog.records] == [
        "tracker wandb cannot start (the service died); the run goes on"
    ]
    assert tracker.location is None


def test_a_failed_run_is_marked_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []

    class Run:
        url = "there"

        class settings:
            sync_dir = "here"

        def finish(self, exit_code: int) -> None:
            codes.append(exit_code)

    monkeypatch.setattr(wandb, "init", lambda **options: Run())
    for failed in (False, True):
        WandbTracker(WandbConfig(mode="offline"), {}, tmp_path).finish(failed)
    assert codes == [0, 1]


def test_an_unknown_tracker_or_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'tensorboard' is not known; known: csv, none, wandb"):
        make_tracker(TrackerConfig(name="tensorboard"), {}, tmp_path)
    with pytest.raises(ConfigError, match=r"tracker\.mode='on' is not allowed; give auto"):
        WandbConfig(mode="on")


def test_importing_the_module_does_not_import_wandb() -> None:
    import subprocess
    import sys

    code = "import sys, specdec.tracker; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pictures_and_files_of_many_runs_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, Any]] = []
    artifacts: list[wandb.Artifact] = []

    class Run:
        class settings:
            sync_dir = "here"

        def log(self, values: dict[str, Any]) -> None:
            logged.append(values)

        def log_artifact(self, artifact: wandb.Artifact) -> None:
            artifacts.append(artifact)

        def finish(self, exit_code: int) -> None:
            """End."""

    monkeypatch.setattr(wandb, "init", lambda **options: Run())
    picture, trace = tmp_path / "pareto.png", tmp_path / "steps.parquet"
    Image.new("RGB", (2, 2)).save(picture)
    trace.write_bytes(b"steps")
    tracker = WandbTracker(WandbConfig(mode="offline"), {}, tmp_path)
    tracker.log_pictures({"pareto": picture})
    tracker.log_artifact_files({"job/steps.parquet": trace}, "sweep of a night", "traces")
    tracker.finish()
    assert isinstance(logged[0]["pareto"], wandb.Image)
    (artifact,) = artifacts
    assert (artifact.name, artifact.type) == ("sweep-of-a-night", "traces")
    assert set(artifact.manifest.entries) == {"job/steps.parquet"}
