"""EAGLE-3 heads that we save are those that the package `speculators` loads, and the other way.

The package is installed beside this environment, without what it depends on for other purposes,
and runs in a process of its own (`tests.exchange_speculators`). Half a minute.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.head_cases import CASES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
# What an import of its EAGLE-3 model needs, and our own dependencies do not bring.
PACKAGES = [
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    "datasets==5.1.0",
    "dill==0.4.1",
    "distro==1.9.0",
    "jiter==0.19.0",
    "loguru==0.7.3",
    "multiprocess==0.70.19",
    "openai==3.57.0",
    "psutil==7.2.2",
    "pydantic-settings==2.16.3",
    "python-dotenv==1.2.4",
    "xxhash==4.1.0",
]
NAMES = [name for name, case in CASES.items() if case.method == "eagle3"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Install the package and take every head there and back; returns what was found."""
    folder = tmp_path_factory.mktemp("exchange")
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "0"]
    target = ["--target", str(folder / "site")]
    command = [sys.executable, "-m", "pip", "install", *options, *target, *PACKAGES]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=90)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        reason = (str(error.stderr or "").strip().splitlines() or ["it took too long"])[-1]
        pytest.skip(f"pip cannot install {PACKAGES[0]}: {reason}")
    path = os.pathsep.join([str(ROOT), str(folder / "site")])
    (folder / "heads").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.exchange_speculators", str(folder / "heads")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_tensors_and_layers_are_the_same_there_and_back(found: dict[str, Any], name: str) -> None:
    seen = found[name]
    assert seen["lost there"] == []
    assert seen["lost back"] == []
    assert seen["layers there"] == seen["layers back"] == seen["layers"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_head_that_it_saved_are_the_same_bit_for_bit(
    found: dict[str, Any], name: str
) -> None:
    assert found[name]["texts"] == 3
    assert found[name]["same logits"]


@pytest.mark.parametrize("name", NAMES)
def test_its_own_forward_gives_the_logits_that_we_draft_from(
    found: dict[str, Any], name: str
) -> None:
    assert found[name]["largest error"] < 1e-4
    assert found[name]["spread"] > 0.1  # they are not all alike
