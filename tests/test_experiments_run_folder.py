"""A folder that holds a run takes no other, and stays as it is."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

import experiments.run
from experiments.run import RunResult
from experiments.schemas import RunConfig


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the schema of runs, in whose place tests of sweeps store that of sweeps."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the app without a model in the test's folder `same`."""

    def execute(config: RunConfig, path: Path, *_: Any) -> RunResult:
        (path / "arms.json").write_text(f"K={config.num_speculative_tokens}")
        return RunResult(path, path / "report.html", [], None)

    def run(*overrides: str) -> int:
        folder = f"hydra.run.dir={tmp_path}/same"
        monkeypatch.setattr(sys, "argv", ["run.py", *overrides, folder])
        return experiments.run.main()

    monkeypatch.setattr(experiments.run, "execute", execute)
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["arms.json", "timings.parquet"])
def test_a_second_run_is_refused_before_anything_is_written(
    name: str, main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("num_speculative_tokens=2") == 0
    (tmp_path / "same" / "arms.json").rename(tmp_path / "same" / name)
    before = contents(tmp_path)
    capsys.readouterr()
    assert main("num_speculative_tokens=3") == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith(f"error: {tmp_path}/same holds a run already ({name}); ")
    assert "give another hydra.run.dir, or remove the folder" in said.err
    assert contents(tmp_path) == before


def test_a_run_that_measured_nothing_can_be_repeated_in_its_folder(
    main: Callable[..., int], tmp_path: Path
) -> None:
    assert main("batch_size=0") == 1
    (tmp_path / "same" / "config.yaml").write_text("of a run whose target was not found")
    assert main() == 0
    assert (tmp_path / "same" / "arms.json").is_file()


def test_jobs_of_hydras_own_multirun_are_kept_too(
    main: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["-m", "num_speculative_tokens=2", f"hydra.sweep.dir={tmp_path}/many"]
    assert main(*given) == 0
    assert main("-m", "num_speculative_tokens=3", given[-1]) == 1
    assert f"{tmp_path}/many/0 holds a run already" in capsys.readouterr().err
    assert (tmp_path / "many" / "0" / "arms.json").read_text() == "K=2"
