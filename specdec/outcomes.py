"""What a step gave to whom, and the statistics that follow from it.

The outcome of a verification is a pair (num_sampled, num_judged), at most K + 1 and K. A request
counts its outcomes in a flat list, in the cell num_sampled * (K + 1) + num_judged; everything else
waits until it ends: num_accepted = min(num_sampled - 1, num_judged).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from specdec.request import Request
from specdec.types import FinishReason, Increment, RequestStats


class Outcomes(NamedTuple):
    """What a step gave to the requests that still own their rows, one entry each."""

    requests: list[Request]
    verifies: list[bool]  # no prefill
    runs: list[list[int]]  # tokens; those behind num_sampled mean nothing
    num_sampled: list[int]
    num_judged: list[int]  # valid drafts


def judged(
    num_sampled: int, num_judged: int, num_kept: int, finish_reason: FinishReason | None
) -> tuple[int, int]:
    """Return how many drafts were judged and accepted; those behind the end were for nothing."""
    if finish_reason is not None:
        num_judged = min(num_judged, num_kept)
    return num_judged, min(num_sampled - 1, num_judged)


def new_outcomes(num_speculative_tokens: int) -> list[int]:
    """Return zeros for every outcome there can be."""
    return [0] * ((num_speculative_tokens + 2) * (num_speculative_tokens + 1))


def fold_outcomes(outcomes: list[int], stats: RequestStats) -> None:
    """Add counted verifications to a request's statistics, and count from zero again."""
    width = len(stats.drafted_per_position) + 1
    for cell, times in enumerate(outcomes):
        if times:
            num_sampled, num_judged = divmod(cell, width)
            num_accepted = min(num_sampled - 1, num_judged)
            count_outcome(stats, num_sampled, num_judged, num_accepted, times)
            outcomes[cell] = 0


def count_outcome(
    stats: RequestStats, num_committed: int, num_judged: int, num_accepted: int, times: int = 1
) -> None:
    """Add verifications with one outcome to a request's statistics."""
    stats.num_verify_steps += times
    stats.num_verify_tokens += num_committed * times
    stats.num_drafted += num_judged * times
    stats.num_accepted += num_accepted * times
    for i in range(num_judged):
        stats.drafted_per_position[i] += times
    for i in range(num_accepted):
        stats.accepted_per_position[i] += times


def trace_lines(
    step: int, num_tokens: Sequence[int], outcomes: Outcomes, increments: Sequence[Increment]
) -> Iterator[tuple[Any, ...]]:
    """Return a step's lines for the trace, in the order of `specdec.trace.REQUEST_COLUMNS`.

    Args:
        step: index of the step.
        num_tokens: tokens that each request ran.
        outcomes: of the step.
        increments: what became of them, one for each request that got tokens.
    """
    committed = (values for values in zip(num_tokens, *outcomes, strict=True) if values[4])
    for values, increment in zip(committed, increments, strict=True):
        num_positions, request, verifies, _, num_sampled, num_judged = values
        num_kept, reason = len(increment.new_token_ids), increment.finish_reason
        yield (
            request.request_id,
            request.label,
            step,
            verifies,
            len(request.token_ids) - num_kept,
            num_positions,
            *judged(num_sampled, num_judged, num_kept, reason),
            num_kept,
            reason or "",
        )
