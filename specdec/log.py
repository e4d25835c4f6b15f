"""Logging, one-time warnings and the progress bar: the only place that writes to a terminal."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

_HANDLER_NAME = "specdec"
_warned: set[str] = set()


def setup_logging(level: int = logging.INFO) -> None:
    """Attach one handler on stderr to the root logger; calling it again changes nothing."""
    root = logging.getLogger()
    if not any(handler.get_name() == _HANDLER_NAME for handler in root.handlers):
        handler = _terminal_handler()
        handler.set_name(_HANDLER_NAME)
        root.addHandler(handler)
    root.setLevel(level)
    for noisy in ("httpx", "urllib3", "filelock", "matplotlib", "git"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _terminal_handler() -> logging.Handler:
    try:
        from rich.console import Console
        from rich.logging import RichHandler
    except ModuleNotFoundError:  # a GPU host may have no more than the library itself needs
        plain = logging.StreamHandler()
        plain.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%X"))
        return plain
    return RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%X")


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time this very message is given in the process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


@contextmanager
def progress(description: str, total: int) -> Iterator["ProgressBar"]:
    """Show a progress bar on stderr while the block runs; silent when stderr is no terminal."""
    # One bar is enough for the ranks of a job, which share a terminal.
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield ProgressBar(None, 0)
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ModuleNotFoundError:
        warn_once(logger, "rich is not installed: no progress bars are shown")
        yield ProgressBar(None, 0)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield ProgressBar(bar, bar.add_task(description, total=total, note=""))


class ProgressBar:
    """Handle of a running progress bar; without a bar it shows nothing."""

    def __init__(self, bar: "Progress | None", task_id: int) -> None:
        self._bar = bar
        self._task_id = task_id

    def advance(self, note: str = "") -> None:
        """Move one unit forward and show `note` (for instance tokens/s) behind the bar."""
        if self._bar is not None:
            self._bar.update(self._task_id, advance=1, note=note)  # pyright: ignore[reportArgumentType]
