"""Stages the masks of a step for the requests whose text follows a grammar."""

from typing import Protocol

import numpy as np

from specdec.grammar import Grammar, GrammarBackend
from specdec.request import Request
from specdec.scheduler import ScheduledStep


class DraftSource(Protocol):
    """Who knows the drafts that the next step verifies, such as `runner.states.RequestState`."""

    def read_draft_tokens(self) -> np.ndarray: ...


class MaskTable(Protocol):
    """Who takes masks for rows, such as `sampler.processors.grammar.GrammarMasks`."""

    def stage(self, row: int, masks: np.ndarray) -> None: ...


class GrammarSteps:
    """The requests of one engine whose text follows a grammar.

    Args:
        backend: computes masks.
        drafts: read once nothing is in flight.
        table: takes the masks.
        num_speculative_tokens: K.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        drafts: DraftSource,
        table: MaskTable,
        num_speculative_tokens: int,
    ) -> None:
        self._backend, self._drafts, self._table = backend, drafts, table
        self._num_lines = num_speculative_tokens + 1
        self._requests: set[Request] = set()

    def add(self, request: Request) -> None:
        """Look after a request from now on, where it follows a grammar."""
        if request.grammar is not None:
            self._requests.add(request)

    def remove(self, request: Request) -> None:
        """Look after it no longer."""
        self._requests.discard(request)

    @property
    def need_outcomes(self) -> bool:
        """Return whether no step may be scheduled before those in flight were read.

        The masks of a step depend on the text before it, and on the drafts that it verifies.
        """
        return any(request.row is not None for request in self._requests)

    def stage(self, scheduled: ScheduledStep) -> None:
        """Walk over the drafts of a step and stage its masks; its requests have their rows."""
        if not self._requests:
            return
        columns = zip(
            scheduled.requests, scheduled.verifies, scheduled.samples.tolist(), strict=True
        )
        rows: list[int] = []
        walks: list[tuple[Grammar, list[int]]] = []
        draft_tokens: np.ndarray | None = None
        for request, verifies, samples in columns:
            if request.grammar is None or not samples:
                continue
            assert request.row is not None
            drafts: list[int] = []
            if verifies:
                if draft_tokens is None:
                    draft_tokens = self._drafts.read_draft_tokens()
                drafts = [t for t in draft_tokens[request.row].tolist() if t >= 0]
            rows.append(request.row)
            walks.append((request.grammar, drafts))
        if not walks:
            return
        masks = self._backend.masks(walks, self._num_lines)
        for row, (_, drafts), lines in zip(rows, walks, masks, strict=True):
            self._table.stage(row, lines[: len(drafts) + 1])
