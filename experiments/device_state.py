"""What a GPU does while it is measured: its clock, its power, and what holds it back.

A device slows itself down where dense work meets its power or temperature limit, so two runs of the
same kernels differ by several percent. `DeviceWatch` lets `nvidia-smi` write down the state a few
times a second, in a process of its own, and is asked afterwards what it was between two moments.
"""

import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

_PERIOD_MS = 100
_FIELDS = ("timestamp", "clocks.sm", "power.draw", "clocks_event_reasons.active")
_TIME = "%Y/%m/%d %H:%M:%S.%f"
# Bits of `clocks_event_reasons.active` that are limits.
LIMITS = {
    0x4: "power",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Sample:
    """The state at one moment: seconds since the epoch, MHz, watts, and the bits that limit."""

    at_s: float
    sm_mhz: float
    watts: float
    reasons: int


class DeviceWatch:
    """Writes down a GPU's state while it is open; a context. Elsewhere it knows nothing.

    Args:
        device: to watch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "DeviceWatch":
        """Begin."""
        tool = shutil.which("nvidia-smi") if self._device.type == "cuda" else None
        if tool is not None:
            self._folder = tempfile.TemporaryDirectory()
            uuid = torch.cuda.get_device_properties(self._device).uuid
            command = [tool, f"--id=GPU-{uuid}", f"--query-gpu={','.join(_FIELDS)}"]
            command += ["--format=csv,noheader,nounits", f"--loop-ms={_PERIOD_MS}"]
            with self._path.open("wb") as out:
                self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        """End; what was written down is gone then."""
        self.stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def stop(self) -> None:
        """Write down no more."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def between(self, start_s: float, end_s: float) -> dict[str, Any] | None:
        """Return the state between two moments, seconds since the epoch; None where none is known.

        Lines may reach the file late: ask behind `stop`.
        """
        if self._folder is None:
            return None
        text = self._path.read_text(encoding="utf-8", errors="replace")
        return summarize([s for s in read_samples(text) if start_s <= s.at_s <= end_s])

    @property
    def _path(self) -> Path:
        assert self._folder is not None, "only while it is open"
        return Path(self._folder.name) / "states.csv"


def read_samples(text: str) -> list[Sample]:
    """Return the samples of a file; lines that are none are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            at, mhz, watts, reasons = cells
            moment = datetime.strptime(at, _TIME).timestamp()  # both in local time
            found.append(Sample(moment, float(mhz), float(watts), int(reasons, 16)))
        except ValueError:  # a message, an unfinished line, or what a device does not tell
            continue
    return found


def summarize(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Return clocks, power and the share of the time that each limit held; None of nothing."""
    if not samples:
        return None
    clocks = [sample.sm_mhz for sample in samples]
    shares = {
        name: sum(bool(sample.reasons & bit) for sample in samples) / len(samples)
        for bit, name in LIMITS.items()
    }
    return {
        "samples": len(samples),
        "sm_mhz_min": min(clocks),
        "sm_mhz": statistics.median(clocks),
        "sm_mhz_max": max(clocks),
        "watts": statistics.median(sample.watts for sample in samples),
        "limited_by": {name: round(share, 2) for name, share in shares.items() if share},
    }
