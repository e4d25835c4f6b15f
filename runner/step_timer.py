"""Time split of a step into inputs, target, verify and draft.

On a CPU the marks are host times. On a GPU they are device events in the stream, read when the
step's output is read, so that timing never waits for the device.
"""

import time

import torch

PHASES = ("inputs", "target", "verify", "draft")


class StepTimer:
    """Marks of one step: one more than there are phases.

    Args:
        on_gpu: mark by device events.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Set the boundary between two phases (or the start, or the end)."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def phases_ms(self) -> dict[str, float]:
        """Return milliseconds a phase; on a GPU call it after the step has run."""
        if self._on_gpu:
            ends = zip(self._events[:-1], self._events[1:], strict=True)
            spans = [start.elapsed_time(end) for start, end in ends]
        else:
            ends = zip(self._marks[:-1], self._marks[1:], strict=True)
            spans = [(end - start) * 1e3 for start, end in ends]
        return dict(zip(PHASES, spans, strict=True))
