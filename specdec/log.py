"""Logging, one-time warnings and the progress bar: the only place that writes to a terminal."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_warned: set[str] = set()


def setup_logging(level: int = logging.INFO) -> None:
    """Attach one handler on stderr to the root logger; calling it again changes nothing."""
    root = logging.getLogger()
    if not any(isinstance(handler, RichHandler) for handler in root.handlers):
        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%X")
        root.addHandler(handler)
    root.setLevel(level)
    for noisy in ("httpx", "urllib3", "filelock", "matplotlib", "git"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time this very message is given in the process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


@contextmanager
def progress(description: str, total: int) -> Iterator["ProgressBar"]:
    """Show a progress bar on stderr while the block runs; silent when stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        yield ProgressBar(bar, bar.add_task(description, total=total, note=""))


class ProgressBar:
    """Handle of a running progress bar."""

    def __init__(self, bar: Progress, task_id: int) -> None:
        self._bar = bar
        self._task_id = task_id

    def advance(self, note: str = "") -> None:
        """Move one unit forward and show `note` (for instance tokens/s) behind the bar."""
        self._bar.update(self._task_id, advance=1, note=note)  # pyright: ignore[reportArgumentType]
