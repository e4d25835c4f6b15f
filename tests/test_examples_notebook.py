"""The example notebook runs on a run folder that was just made, and ships without outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.analysis import load
from tests.test_experiments_report import ARMS, write_run

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "analysis.ipynb"


def test_the_notebook_ships_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert sum(cell["cell_type"] == "code" for cell in cells) >= 5
    for cell in cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_an_arm_is_compared_with_another_and_runs_are_counted_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "alone", ARMS[:1])
    for name in ("one", "two"):
        write_run(tmp_path / "runs" / name, ARMS[:2])
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    counting = next(source for source in sources if "num_accepted" in source)
    comparing = next(source for source in sources if "runs.compare" in source)
    known: dict[str, Any] = {"runs": load(tmp_path / "runs", unfinished=True)}
    exec(counting, known)
    assert known["counts"].index.names == ["run", "arm"]
    assert set(known["counts"].index.get_level_values("run")) == {"one", "two"}
    exec(comparing, known)
    assert (known["first"], known["one"], known["other"]) == ("one", ARMS[1][0], ARMS[0][0])


@pytest.mark.slow
def test_the_notebook_shows_frames_a_plot_and_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbclient
    import nbformat

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    overrides = ["debug=default", "prompts.limit=4", "sampling.max_tokens=16"]
    overrides += ["compare=[{drafter:{name:ngram},num_speculative_tokens:8}]"]
    overrides += ["equality.enabled=false", f"hydra.run.dir={tmp_path / 'runs' / 'one'}"]
    command = [sys.executable, "-m", "experiments.run", *overrides]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPECDEC_RUNS", str(tmp_path / "runs"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()  # raises where a cell fails
    shown = [
        output.get("data", {}).get("text/plain", "") + output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    ]
    text = "\n".join(shown)
    assert "ngram K=8 against ngram K=4" in text
    assert all(measure in text for measure in ("accepted_length", "tokens_per_s", "differs"))
    images = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(images) == 1
