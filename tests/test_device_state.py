"""A GPU's clock and power beside what is measured on it."""

import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments.device_state import DeviceWatch, Sample, read_samples, summarize


def test_samples_are_read_and_what_is_none_is_left_out() -> None:
    text = (
        "2026/11/30 23:59:59.250, 1980, 302.10, 0x0000000000000000\n"
        "Unable to determine the device handle\n"
        "2026/11/30 23:59:59.350, 1410, 699.87, 0x0000000000000004\n"
        "2026/11/30 23:59:59.450, [N/A], 700.00, 0x4\n"
        "2026/11/30 23:59:59.5"
    )
    first, second = read_samples(text)
    assert (first.sm_mhz, first.watts, first.reasons) == (1980, 302.1, 0)
    assert (second.sm_mhz, second.watts, second.reasons) == (1410, 699.87, 4)
    assert second.at_s - first.at_s == pytest.approx(0.1)
    assert datetime.fromtimestamp(first.at_s).second == 59


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
        assert watch.between(0, 1e12) is None


def test_a_watch_sees_what_lies_between_two_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        f'echo "$@" > {tmp_path}/arguments\n'
        'while :; do echo "$(date "+%Y/%m/%d %H:%M:%S.%3N"), 1800, 650.5, 0x4"; sleep 0.05; done\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    properties = SimpleNamespace(uuid="1f0e")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with DeviceWatch(torch.device("cuda")) as watch:
        started = time.time()
        deadline = started + 20
        while watch.between(started, time.time()) is None and time.time() < deadline:
            time.sleep(0.02)
        watch.stop()
        state = watch.between(started, time.time())
        before = watch.between(started - 100, started - 50)
    assert state is not None
    assert (state["sm_mhz"], state["watts"]) == (1800, 650.5)
    assert state["limited_by"] == {"power": 1.0}
    assert before is None
    said = (tmp_path / "arguments").read_text()
    assert "--id=GPU-1f0e" in said
    assert "clocks.sm,power.draw" in said


def test_a_tool_that_fails_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Field \"x\" is not a valid field to query.'\nexit 2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    properties = SimpleNamespace(uuid="1f0e")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with DeviceWatch(torch.device("cuda")) as watch:
        watch.stop()
        assert watch.between(0, 1e12) is None
