"""Time split of a step into inputs, target, verify and draft.

On a CPU the marks are host times. On a GPU they are device events in the stream, read when the
step's output is read, so that timing never waits for the device. Phases that ran inside one launch
cannot be told apart: they are NaN, and only the total counts.

Unless the marks are part of the launch: a timer made `in_graph` is given to a function that is
captured, and every launch records its events anew. It belongs to one graph, so its times have to be
read before that graph is launched again: one step in flight at a time. Such events are nodes of the
graph and cost device time, which is why they are a variant that is asked for (`phase_events`).
"""

import time

import torch

PHASES = ("inputs", "target", "verify", "draft")


class StepTimer:
    """Marks of one step.

    Args:
        on_gpu: mark by device events.
        in_graph: the marks are made inside a function that may be captured, which begins with
            `restart`; made outside of any capture.
    """

    def __init__(self, on_gpu: bool, in_graph: bool = False) -> None:
        self._on_gpu, self._in_graph = on_gpu, in_graph
        self.inside: StepTimer | None = None  # splits what is one span here
        self._spare: list[torch.cuda.Event] = []
        if on_gpu and in_graph:
            events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(5)]
            for event in events:
                event.record()  # the first record creates an event, which no capture should do
            self._spare = events
        self._names: list[str] = []
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        if not in_graph:
            self._mark()

    def restart(self) -> None:
        """Mark the beginning of a step anew."""
        self._names.clear()
        self._marks.clear()
        self._spare = [*self._events, *self._spare] if self._in_graph else []
        self._events.clear()
        self._mark()

    def end(self, name: str) -> None:
        """Set the end of what ran since the last mark; `name` is a phase, or several in one."""
        self._names.append(name)
        self._mark()

    def _mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = self._spare.pop(0) if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

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
        spans: dict[str, float] = {}
        for timer in (self, self.inside):
            if timer is not None:
                for name, span in zip(timer._names, timer._spans_ms(), strict=True):
                    spans[name] = spans.get(name, 0.0) + span
        return {phase: spans.get(phase, float("nan")) for phase in PHASES}

    def total_ms(self) -> float:
        """Return milliseconds from the first mark to the last."""
        return sum(self._spans_ms())
