"""How long steps take, as the host sees it, and their line in the trace."""

import math
import time
from typing import Any

from runner.async_output import StepHandle


class StepClock:
    """Measures steps from one read to the next."""

    def __init__(self) -> None:
        self._last_read = 0.0

    def read(self, started: float) -> float:
        """Return the seconds of a step whose outcome was read just now.

        With more than one step in flight, a step's time begins where the last one's ended.

        Args:
            started: when the host began to schedule it.
        """
        now = time.perf_counter()
        seconds = now - max(started, self._last_read)
        self._last_read = now
        return seconds


def step_line(
    step: int, handle: StepHandle, seconds: float, num_committed: int, num_steps: int
) -> tuple[Any, ...]:
    """Return a step's line for the trace, up to `step_ms` of `specdec.trace.STEP_COLUMNS`.

    Args:
        step: its index.
        handle: of the step, which was timed and read.
        seconds: that it took, or its share of its launch.
        num_committed: tokens kept of it.
        num_steps: of its launch.
    """
    timer, plan = handle.timer, handle.plan
    assert timer is not None
    phases, total_ms = timer.phases_ms(), timer.total_ms()
    # A launch of several steps is one span: each of them takes an equal share of it.
    total_ms /= num_steps
    known_ms = sum(ms for ms in phases.values() if not math.isnan(ms))
    step_ms = seconds * 1e3
    return (
        step,
        plan.num_reqs,
        plan.num_tokens,
        handle.num_computed_tokens,
        num_committed,
        *phases.values(),
        max(0.0, total_ms - known_ms),
        max(0.0, step_ms - total_ms),
        step_ms,
    )
