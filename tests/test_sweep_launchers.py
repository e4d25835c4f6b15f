"""Sweeps through real launchers, and one that is killed: the results are those of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sweep_cases import acceptance, save_chat_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
# Drafts that are partly accepted, at temperature 0 and with seeded noise.
AXES = ["drafter.num_layers=1,2", "num_speculative_tokens=2,3", "sampling.temperature=0,1"]
SETTING = ["drafter=layer_skip", "debug=default", "target.dtype=float32", "sweep.workers=2"]
NUM_JOBS = 8


def start(*overrides: str) -> subprocess.Popen[str]:
    """Start the app in a process group of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "HYDRA_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.sweep", "-m", *AXES, *SETTING, *overrides],
        cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Return what the app printed, as one line; it must have ended well."""
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    return " ".join(said.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the sweep in one process."""
    folder = tmp_path_factory.mktemp("alone")
    finish(start(f"target.name={model}", f"hydra.sweep.dir={folder}"))
    found = acceptance(folder)
    assert len(found) == NUM_JOBS
    assert sum(accepted for rows in found.values() for *_, accepted in rows) > 0
    return folder


@pytest.mark.parametrize("launcher", ["joblib", "ray", "submitit_local"])
def test_workers_accept_what_one_process_accepts(
    launcher: str, model: Path, alone: Path, tmp_path: Path
) -> None:
    given = [f"target.name={model}", f"hydra.sweep.dir={tmp_path}", f"hydra/launcher={launcher}"]
    said = finish(start(*given))
    assert f"{NUM_JOBS} of {NUM_JOBS} jobs are done" in said
    assert acceptance(tmp_path) == acceptance(alone)
    runs = [path.parents[2].name for path in tmp_path.glob("*/wandb/offline-run-*/*.wandb")]
    assert len(runs) == len(set(runs)) == NUM_JOBS
    threads = {
        json.loads(path.read_text())["threads"] for path in tmp_path.glob("*/provenance.json")
    }
    assert threads == {max(1, len(os.sched_getaffinity(0)) // 2)}
    # What is done starts no worker.
    again = finish(start(*given))
    assert f"{NUM_JOBS} of {NUM_JOBS} jobs are there already" in again
    assert "Launch" not in again
    assert "ray with config" not in again


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_killed_sweep_goes_on_with_what_is_missing(
    launcher: str, model: Path, alone: Path, tmp_path: Path
) -> None:
    given = [f"target.name={model}", f"hydra.sweep.dir={tmp_path}", f"hydra/launcher={launcher}"]
    process = start(*given)
    give_up = time.monotonic() + 300
    while len(list(tmp_path.glob("*/done.json"))) < 3:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < give_up
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = {path: path.read_bytes() for path in tmp_path.glob("*/done.json")}
    assert 3 <= len(before) < NUM_JOBS
    said = finish(start(*given))
    assert f"{len(before)} of {NUM_JOBS} jobs are there already" in said
    assert all(path.read_bytes() == marker for path, marker in before.items())
    assert len(list(tmp_path.glob("*/done.json"))) == NUM_JOBS
    assert acceptance(tmp_path) == acceptance(alone)
    # What the cut jobs had begun is gone: each job has one run of the tracker.
    assert len(list(tmp_path.glob("*/wandb/offline-run-*"))) == NUM_JOBS
