"""Random arrivals, aborts and preemptions for an engine, and the texts that come of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec import Engine, SamplingParams
from specdec.types import RequestOutput

VOCAB_SIZE = 97


@dataclass(frozen=True)
class Arrival:
    """A request of a schedule."""

    step: int
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None  # steps


@dataclass
class ScheduleResult:
    """What a schedule gave."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    num_preemptions: int = 0

    def texts(self) -> dict[str, list[int]]:
        """Return the token ids of the requests that were not aborted."""
        return {
            name: out.token_ids
            for name, out in self.outputs.items()
            if out.finish_reason != "abort"
        }


def draw_schedule(
    seed: int, num_requests: int = 9, longest_prompt: int = 30, max_tokens: int = 24
) -> list[Arrival]:
    """Draw arrivals from a seed: greedy and sampled requests, some with a budget, some aborted."""
    rng = np.random.default_rng(seed)
    arrivals, step = [], 0
    for i in range(num_requests):
        step += int(rng.integers(0, 4))
        sampled = rng.random() < 0.5
        params = SamplingParams(
            temperature=0.8 if sampled else 0.0,
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([0, 7])),
            seed=i,
            max_tokens=int(rng.integers(1, max_tokens + 1)),
            num_speculative_tokens=None if rng.random() < 0.7 else int(rng.integers(0, 3)),
        )
        length = int(rng.integers(1, longest_prompt + 1))
        abort = int(rng.integers(1, 8)) if rng.random() < 0.2 else None
        prompt = rng.integers(0, VOCAB_SIZE, length).tolist()
        arrivals.append(Arrival(step, prompt, params, abort))
    return arrivals


def run_schedule(
    engine: Engine,
    arrivals: list[Arrival],
    after_step: Callable[[Engine], Any] | None = None,
) -> ScheduleResult:
    """Run a schedule to its end.

    Args:
        engine: fresh, or at rest.
        arrivals: in order of their steps.
        after_step: called behind each step, while the steps in flight run.
    """
    result, aborts, waiting = ScheduleResult(), {}, list(enumerate(arrivals))
    step = 0
    while waiting or engine.has_requests:
        while waiting and waiting[0][1].step <= step:
            index, arrival = waiting.pop(0)
            engine.add_request(str(index), arrival.prompt, arrival.params)
            if arrival.abort_after is not None:
                aborts[str(index)] = step + arrival.abort_after
        for name in [name for name, when in aborts.items() if when <= step]:
            del aborts[name]
            if name in engine.unfinished_ids:
                engine.abort(name)
        for increment in engine.step():
            if increment.output is not None:
                result.outputs[increment.request_id] = increment.output
        if after_step is not None:
            after_step(engine)
        step += 1
        assert step < 5000, "the schedule does not end"
    result.num_preemptions = sum(out.stats.num_preemptions for out in result.outputs.values())
    return result
