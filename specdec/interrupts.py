"""Lets an interrupt wait for the end of what must not be half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class InterruptShield:
    """A context in which SIGINT waits for the end, or for the next part that may be broken off.

    A second one does not wait. Contexts inside one another are one. Outside of the main thread,
    where no interrupt comes, and where SIGINT has no handler in Python, nothing is changed.
    """

    def __init__(self) -> None:
        self._depth, self._is_lifted = 0, False
        self._handler: Any = None
        self._asked: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        """Begin."""
        self._depth += 1
        if self._depth > 1 or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler, self._asked, self._is_lifted = handler, None, False
            signal.signal(signal.SIGINT, self._take)

    def __exit__(self, *exc: object) -> None:
        """End, and hand over an interrupt that waits."""
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, self._handler = self._handler, None
        signal.signal(signal.SIGINT, handler)
        if self._asked is not None:
            handler(*self._asked)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let interrupts through inside the context."""
        self._is_lifted = True
        try:
            if self._handler is not None and self._asked is not None:
                self._take(*self._asked)
            yield
        finally:
            self._is_lifted = False

    def _take(self, signum: int, frame: FrameType | None) -> None:
        """Take an interrupt."""
        if not self._is_lifted and self._asked is None:
            self._asked = signum, frame
            return
        self._asked = None
        self._handler(signum, frame)
