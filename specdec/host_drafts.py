"""Asks a drafter that runs on the host, and stages what it proposes for the step that follows.

Before a step is scheduled every outcome was read, so the drafter sees whole texts, and the number
of its drafts is known to the scheduler. They are staged once the step is known, for the rows that
verify in it: nothing that was asked for an earlier owner of a row can reach a later one.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from runner.states import RequestState
from specdec.config import EngineConfig
from specdec.log import warn_once
from specdec.protocols import Drafter, HostDrafter, HostRequest, HostRow
from specdec.request import Request
from specdec.scheduler import ScheduledStep, Scheduler

logger = logging.getLogger(__name__)

_REASON = "the drafter runs on the host"


def steps_in_flight(drafter: Drafter, config: EngineConfig, default: int) -> int:
    """Return how many steps an engine with this drafter enqueues before it reads an outcome.

    Args:
        drafter: one that runs on the host needs the outcome of every step.
        config: what was asked for.
        default: of the device.
    """
    if not drafter.capabilities.on_cpu:
        return config.max_steps_in_flight or default
    if default > 1:
        warn_once(logger, f"{_REASON} ({type(drafter).__name__}): one step in flight at a time")
    return 1


class HostDrafts:
    """The drafts that come from the host, for the requests of one engine.

    Args:
        drafter: asked only if its capabilities say `on_cpu`.
        state: the rows.
        scheduler: knows who runs; is told how many positions are worth verifying.
        launches: counts what did not run in a graph, and why.
        vocab_size: of the target.
        agree: turns the drafts of this rank, [n, K] int64 with -1 for none, into those of all.
    """

    def __init__(
        self,
        drafter: Drafter,
        state: RequestState,
        scheduler: Scheduler,
        launches: Counter[str],
        vocab_size: int,
        agree: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.enabled = drafter.capabilities.on_cpu and state.num_speculative_tokens > 0
        self._drafter, self._state, self._scheduler = cast(HostDrafter, drafter), state, scheduler
        self._launches, self._vocab_size, self._agree = launches, vocab_size, agree
        self._requests: dict[Request, HostRequest] = {}
        self._proposed: dict[Request, list[int]] = {}  # for the step at hand
        self._ended: deque[HostRequest] = deque()  # of which the drafter does not know yet

    def propose(self) -> None:
        """Ask for the drafts of every request that can verify some in the next step.

        Nothing may be in flight.
        """
        if not self.enabled:
            return
        self._proposed, requests, rows = {}, [], []
        for request, num_drafts in self._scheduler.verifying():
            num_drafts = min(num_drafts, self._limit(request))
            if num_drafts > 0:
                assert request.row is not None
                requests.append(request)
                rows.append(HostRow(self._of(request), request.row, num_drafts))
        if not rows:
            return
        self._launches[f"draft eager: {_REASON}"] += 1
        runs = self._drafter.propose_on_host(rows)
        if self._agree is not None:
            width = self._state.num_speculative_tokens
            padded = [[*run, *[-1] * width][:width] for run in runs]
            runs = self._agree(np.array(padded, dtype=np.int64)).tolist()
        for request, row, run in zip(requests, rows, runs, strict=True):
            drafts = self._checked(run[: row.num_drafts])
            if drafts:
                self._proposed[request] = drafts
        self._scheduler.set_num_drafts({r: len(d) for r, d in self._proposed.items()})

    def stage(self, scheduled: ScheduledStep) -> None:
        """Stage what was proposed for the rows that verify in a step."""
        if not self._proposed:
            return
        width = self._state.num_speculative_tokens
        for request, verifies in zip(scheduled.requests, scheduled.verifies, strict=True):
            drafts = self._proposed.get(request)
            if drafts and verifies:
                assert request.row is not None
                padded = drafts + [-1] * (width - len(drafts))
                self._state.host_drafts.stage_write(request.row, 0, padded)

    def read_draft_tokens(self) -> np.ndarray:
        """Return the drafts that the next step verifies, [N, K] int64, -1 = none; waits for them.

        Where the host proposed for a row, these; else those that the device holds.
        """
        drafts = self._state.read_draft_tokens()
        if self._proposed:
            drafts = drafts.copy()
        for request, run in self._proposed.items():
            if request.row is not None:
                drafts[request.row] = -1
                drafts[request.row, : len(run)] = run
        return drafts

    def end(self, request: Request) -> None:
        """Take in that a text ended; `tell_ended` tells the drafter."""
        if self.enabled:
            self._ended.append(self._of(request))
            self._requests.pop(request)
            self._proposed.pop(request, None)

    def tell_ended(self) -> None:
        """Hand over the texts that ended, each once: a drafter may fail over one."""
        while self._ended:
            self._drafter.end_request(self._ended.popleft())

    def _of(self, request: Request) -> HostRequest:
        """Return what stands for a request, the same object each time."""
        if request not in self._requests:
            self._requests[request] = HostRequest(
                request.request_id,
                request.sample_index,
                request.num_prompt_tokens,
                request.token_ids,
            )
        return self._requests[request]

    def _limit(self, request: Request) -> int:
        """Return the drafts that a row can use; `runner.postprocess` has the same on the device."""
        total_len = len(request.token_ids)
        room = min(request.max_total_len - 1, self._state.draft_context) - total_len
        return min(request.draft_budget, room)

    def _checked(self, run: Sequence[Any]) -> list[int]:
        """Return the drafts before the first -1.

        Raises:
            ValueError: a draft is no token of the target.
        """
        drafts = [int(token) for token in run]
        if -1 in drafts:
            drafts = drafts[: drafts.index(-1)]
        wrong = [token for token in drafts if not 0 <= token < self._vocab_size]
        if wrong:
            raise ValueError(
                f"drafter {type(self._drafter).__name__} proposed token {wrong[0]}, which is not "
                f"in the target's vocabulary [0, {self._vocab_size})"
            )
        return drafts
