"""A GPU's clock and power beside what is measured on it."""

import subprocess
import sys
import textwrap
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments.device_state import DeviceWatch, Sample, read_sample, summarize

ROOT = Path(__file__).parent.parent
STATE = 'echo "$(date "+%Y/%m/%d %H:%M:%S.%3N"), 1800, 650.5, 0x4"'


@pytest.fixture
def fake_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the path of an `nvidia-smi` that a test writes."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    properties = SimpleNamespace(uuid="1f0e")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return tmp_path / "nvidia-smi"


def write_tool(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def test_a_sample_is_read_and_what_is_none_is_left_out() -> None:
    first = read_sample("2026/11/30 23:59:59.250, 1980, 302.10, 0x0000000000000000\n")
    second = read_sample("2026/11/30 23:59:59.350, 1410, 699.87, 0x0000000000000004")
    assert first is not None
    assert second is not None
    assert (first.sm_mhz, first.watts, first.reasons) == (1980, 302.1, 0)
    assert (second.sm_mhz, second.watts, second.reasons) == (1410, 699.87, 4)
    assert second.at_s - first.at_s == pytest.approx(0.1)
    assert datetime.fromtimestamp(first.at_s).second == 59
    assert read_sample("Unable to determine the device handle") is None
    assert read_sample("2026/11/30 23:59:59.450, [N/A], 700.00, 0x4") is None
    assert read_sample("2026/11/30 23:59:59.5") is None


def test_a_summary_says_how_long_which_limit_held() -> None:
    samples = [Sample(0, 1980, 400, 0), Sample(1, 1500, 700, 4), Sample(2, 1400, 690, 0x24)]
    assert summarize(samples) == {
        "samples": 3,
        "sm_mhz_min": 1400,
        "sm_mhz": 1500,
        "sm_mhz_max": 1980,
        "watts": 690,
        "limited_by": {"power": 0.67, "temperature (software)": 0.33},
    }
    assert summarize([]) is None


def test_a_cpu_is_not_watched() -> None:
    with DeviceWatch(torch.device("cpu")) as watch:
        assert watch.during([(0, 1e12)]) is None


def test_a_watch_sees_what_lies_in_its_windows(fake_tool: Path) -> None:
    write_tool(
        fake_tool,
        f'echo "$@" > {fake_tool.parent}/arguments\nwhile :; do {STATE}; sleep 0.05; done',
    )
    with DeviceWatch(torch.device("cuda")) as watch:
        started = time.time()
        while watch.during([(started, time.time())]) is None and time.time() < started + 20:
            time.sleep(0.02)
        watch.stop()
        state = watch.during([(0, 1), (started, time.time())])
        before = watch.during([(started - 100, started - 50)])
    assert state is not None
    assert (state["sm_mhz"], state["watts"]) == (1800, 650.5)
    assert state["limited_by"] == {"power": 1.0}
    assert before is None
    said = (fake_tool.parent / "arguments").read_text()
    assert "--id=GPU-1f0e" in said
    assert "clocks.sm,power.draw" in said


def test_a_tool_that_fails_is_no_state(fake_tool: Path) -> None:
    write_tool(fake_tool, "echo 'Field \"x\" is not a valid field to query.'\nexit 2")
    with DeviceWatch(torch.device("cuda")) as watch:
        assert watch._process is not None
        assert watch._reader is not None
        assert watch._process.wait(20) == 2
        watch._reader.join(20)
        assert not watch._reader.is_alive()
        assert watch.during([(0, 1e12)]) is None


def test_the_tool_ends_with_a_process_that_is_killed(fake_tool: Path) -> None:
    write_tool(
        fake_tool,
        f"echo $$ > {fake_tool.parent}/pid\nwhile :; do {STATE} || exit; sleep 0.05; done",
    )
    script = """
        import os, signal, time, types
        import torch
        from experiments.device_state import DeviceWatch
        torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="1f0e")
        with DeviceWatch(torch.device("cuda")) as watch:
            while watch.during([(0, 1e12)]) is None:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == -9
    pid = Path("/proc") / (fake_tool.parent / "pid").read_text().strip()
    deadline = time.time() + 10
    while pid.exists() and time.time() < deadline:
        time.sleep(0.05)
    assert not pid.exists()
