"""The files of a run folder, each replaced in one step, so that a kill leaves whole files.

A folder that holds a run takes no other: files of two would lie beside one another.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from experiments.arms import Arm, turn_line
from experiments.cli import tell_failure
from specdec.errors import CapacityError, ConfigError
from specdec.latencies import latency_frame

# What a run writes and nothing else does; the first is there before anything is timed.
_OF_A_RUN = ("arms.json", "timings.parquet")
_FLUSH_EVERY_S = 3.0
_FLUSH_SHARE = 0.05  # of a long run's time at most: whole files are written each time


class RunFolder:
    """Writes what a run has measured so far.

    Args:
        path: the folder; it is made where it does not exist.

    Raises:
        CapacityError: (every method) a file cannot be written; older files stay as they are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next_flush = float("-inf")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        self._replace(name, lambda path: path.write_text(text, encoding="utf-8"))

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def write_frame(self, name: str, frame: pd.DataFrame) -> None:
        """Write a Parquet file."""
        self._replace(name, lambda path: frame.to_parquet(path, index=False))

    def flush_if_due(self, arms: Sequence[Arm]) -> bool:
        """Write traces, timings and texts, unless that was done a moment ago; return whether."""
        is_due = time.monotonic() >= self._next_flush
        if is_due:
            self.flush(arms)
        return is_due

    def flush(self, arms: Sequence[Arm]) -> None:
        """Write traces, timings and texts of all arms so far."""
        started = time.monotonic()
        self.write_frame("requests.parquet", _join([arm.requests() for arm in arms]))
        self.write_frame("steps.parquet", _join([arm.steps() for arm in arms]))
        latencies = [latency for arm in arms for latency in arm.latencies]
        self.write_frame("latencies.parquet", latency_frame(latencies))
        timings = [timing for arm in arms for timing in arm.timings]
        self.write_frame("timings.parquet", pd.DataFrame(timings))
        lines = [turn_line(arm.spec, turn) for arm in arms for turn in arm.turns]
        self.write_text("texts.jsonl", "".join(f"{line}\n" for line in lines))
        ended = time.monotonic()
        self._next_flush = ended + max(_FLUSH_EVERY_S, (ended - started) / _FLUSH_SHARE)

    def _replace(self, name: str, write: Callable[[Path], Any]) -> None:
        part = self.path / f".{name}.part"
        try:
            write(part)
            os.replace(part, self.path / name)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise _cannot_write(self.path / name, error) from error


class UnwrittenFolder(RunFolder):
    """The run folder of a rank that writes nothing: the first rank of its job does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def flush_if_due(self, arms: Sequence[Arm]) -> bool:
        """Write nothing."""
        return False

    def flush(self, arms: Sequence[Arm]) -> None:
        """Write nothing."""

    def _replace(self, name: str, write: Callable[[Path], Any]) -> None:
        """Write nothing."""


def refuse_used_folder(path: Path) -> None:
    """Refuse a folder in which a run has begun to measure.

    Raises:
        ConfigError: it holds files of a run.
    """
    found = [name for name in _OF_A_RUN if (path / name).exists()]
    if found:
        raise ConfigError(
            f"{path} holds a run already ({', '.join(found)}); give another hydra.run.dir, or "
            "remove the folder"
        )


class KeepsRuns(Callback):
    """Refuses a folder that holds a run before Hydra writes its own files into it."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """End the process as a user's mistake does: Hydra would only warn of another error."""
        try:
            refuse_used_folder(Path(config.hydra.run.dir))
        except ConfigError as error:
            raise SystemExit(tell_failure(error)) from None


def _join(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate; frames without rows would only spoil the column types."""
    return pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)


def _cannot_write(path: Path, error: OSError) -> CapacityError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason, fix = "no space is left on the disk", "free some space"
    else:
        reason, fix = error.strerror or str(error), "make the folder writable"
    return CapacityError(
        f"{path} cannot be written ({reason}); {fix} or set hydra.run.dir to another folder; "
        "what was written before stays"
    )
