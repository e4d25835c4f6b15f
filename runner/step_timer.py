"""Time split of a step into inputs, target, verify and draft.

On a CPU the marks are host times. On a GPU they are device events in the stream, read when the
step's output is read, so that timing never waits for the device. Phases that ran inside one launch
cannot be told apart: they are NaN, and only the total counts.
"""

import time

import torch

PHASES = ("inputs", "target", "verify", "draft")


class StepTimer:
    """Marks of one step.

    Args:
        on_gpu: mark by device events.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._names: list[str] = []
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._mark()

    def end(self, name: str) -> None:
        """Set the end of what ran since the last mark; `name` is a phase, or several in one."""
        self._names.append(name)
        self._mark()

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _spans_ms(self) -> list[float]:
        if self._on_gpu:
            pairs = zip(self._events[:-1], self._events[1:], strict=True)
            return [start.elapsed_time(end) for start, end in pairs]
        pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
        return [(end - start) * 1e3 for start, end in pairs]

    def phases_ms(self) -> dict[str, float]:
        """Return milliseconds a phase, NaN for one inside a longer launch.

        On a GPU call it after the step has run.
        """
        spans = dict.fromkeys(self._names, 0.0)
        for name, span in zip(self._names, self._spans_ms(), strict=True):
            spans[name] += span
        return {phase: spans.get(phase, float("nan")) for phase in PHASES}

    def total_ms(self) -> float:
        """Return milliseconds from the first mark to the last."""
        return sum(self._spans_ms())
