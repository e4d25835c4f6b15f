"""What a GPU does while it is measured: its clock, its power, and what holds it back.

A device slows itself down where dense work meets its power or temperature limit, so two runs of the
same kernels differ by several percent. `DeviceWatch` lets `nvidia-smi` tell the state several times
a second, in a process of its own, and is asked afterwards what it was between two moments.
"""

import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch

_PERIOD_MS = 50
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
Window = tuple[float, float]  # seconds since the epoch


@dataclass(frozen=True)
class Sample:
    """The state at one moment: seconds since the epoch, MHz, watts, and the bits that limit."""

    at_s: float
    sm_mhz: float
    watts: float
    reasons: int


class DeviceWatch:
    """Keeps a GPU's state while it is open; a context. Elsewhere it knows nothing.

    What tells it writes to a pipe, so it ends with this process, however that ends.

    Args:
        device: to watch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> "DeviceWatch":
        """Begin."""
        tool = shutil.which("nvidia-smi") if self._device.type == "cuda" else None
        if tool is not None:
            uuid = torch.cuda.get_device_properties(self._device).uuid
            command = [tool, f"--id=GPU-{uuid}", f"--query-gpu={','.join(_FIELDS)}"]
            command += ["--format=csv,noheader,nounits", f"--loop-ms={_PERIOD_MS}"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
            self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
            self._reader.daemon = True
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.stop()

    def stop(self) -> None:
        """Take no more samples; those that are on the way are still read."""
        if self._process is not None and self._reader is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()
            self._process = self._reader = None

    def during(self, windows: Iterable[Window]) -> dict[str, Any] | None:
        """Return the state in the windows together; None where none is known."""
        windows = list(windows)
        inside = [
            sample
            for sample in list(self._samples)
            if any(start <= sample.at_s <= end for start, end in windows)
        ]
        return summarize(inside)

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            sample = read_sample(line)
            if sample is not None:
                self._samples.append(sample)


def read_sample(line: str) -> Sample | None:
    """Return the sample of a line; None for a message, or what a device does not tell."""
    cells = [cell.strip() for cell in line.split(",")]
    try:
        at, mhz, watts, reasons = cells
        moment = datetime.strptime(at, _TIME).timestamp()  # both in local time
        return Sample(moment, float(mhz), float(watts), int(reasons, 16))
    except ValueError:
        return None


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
