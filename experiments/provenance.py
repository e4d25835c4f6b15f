"""What a run was: code, command, versions, device. Nothing that names a person or a machine."""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import specdec
from runner.models.linear_choices import choices_digest, load_choices

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "transformers", "triton")
# A path that starts at the root, at home or above the current folder: at the start of an argument,
# or of a value or a list's entry in it. Not the "//" of an address.
_OUTSIDE = re.compile(r"(?<![^=\[,{(:'\"\s])(?:~\w*|\.\.?)?/(?!/)(?:\\.|[^,\]})'\"\s\\])*")


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
    commit, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != _ROOT:  # a copy in a checkout of something else
        commit = status = None
    return {
        "commit": commit,
        "dirty": None if status is None else bool(status),
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "duration_s": None,
        "versions": _versions(),
        "device": device_name(device),
        "linear_choices": hash_linear_choices(device, dtype),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def shown_path(name: str) -> str:
    """Return a path as a record has it, for a record is published: no folder outside is named.

    Args:
        name: a file or folder; below the current folder it is shown relative to that, elsewhere
            as its last part. A hub id stays what it is.
    """
    relative = os.path.relpath(os.path.expanduser(name))
    outside = relative == os.pardir or relative.startswith(os.pardir + os.sep)
    return Path(os.path.abspath(os.path.expanduser(name))).name if outside else relative


def shown_command(module: str, arguments: Iterable[str], paths: Iterable[str] = ()) -> str:
    """Return a command line as a record has it.

    Args:
        module: what python runs.
        arguments: as they were typed.
        paths: values in them that are known to be paths; others are found by how they begin.
    """
    known = sorted(set(paths), key=len, reverse=True)

    def shown(argument: str) -> str:
        for path in known:
            argument = argument.replace(path, shown_path(path))
        return _OUTSIDE.sub(lambda found: shown_path(found[0]), argument)

    return shlex.join(["python", "-m", module, *map(shown, arguments)])


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


def hash_linear_choices(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a hash of how linear layers are computed on a GPU; None elsewhere.

    Two runs of one commit whose hashes differ sum in another order: one of them read a file of
    choices of its own.
    """
    if device.type != "cuda":
        return None
    return choices_digest(load_choices(torch.cuda.get_device_name(device), dtype))


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
            ["git", "--no-optional-locks", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
