"""What a run was: code, command, versions, device. Nothing that names a person or a machine."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import specdec

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "transformers", "triton")


def collect_provenance(
    command: str, seed: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what `provenance.json` holds; `duration_s` stays null until the run is over.

    Args:
        command: what was typed, without the folder of the interpreter.
        seed: of the run.
        device: where the target runs.
        dtype: of the timed runs.
    """
    status = _git("status", "--porcelain")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "duration_s": None,
        "versions": _versions(),
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def device_name(device: torch.device) -> str:
    """Return the product name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = names[0] if names else platform.processor() or platform.machine()
    return f"CPU {model}, {os.cpu_count()} cores"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "specdec": specdec.__version__,
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _git(*arguments: str) -> str | None:
    """Return what git says about the project's folder, None where it cannot say anything."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
