"""What a step gave to whom, and the statistics that follow from it.

The outcome of a verification is a pair (num_sampled, num_judged), at most K + 1 and K. A request
counts its outcomes in a flat list, in the cell num_sampled * (K + 1) + num_judged; everything else
waits until it ends: num_accepted = min(num_sampled - 1, num_judged).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec.draft_length.base import StepOutcome
from specdec.request import Request
from specdec.scheduler import ScheduledStep
from specdec.trace import StepTrace
from specdec.types import FinishReason, Increment, Logprob, RequestStats, TokenLogprobs


class Outcomes(NamedTuple):
    """What a step gave to the requests that still own their rows, one entry each."""

    requests: list[Request]
    verifies: list[bool]  # no prefill
    runs: list[list[int]]  # tokens; those behind num_sampled mean nothing
    num_sampled: list[int]
    num_judged: list[int]  # valid drafts


def as_seen_by_policy(scheduled: ScheduledStep, outcomes: Outcomes, seconds: float) -> StepOutcome:
    """Return a step as a policy of the draft length may learn from it."""
    verified = zip(outcomes.verifies, outcomes.num_sampled, strict=True)
    return StepOutcome(
        num_reqs=len(scheduled.requests),
        num_verified=scheduled.num_verified,
        num_drafted=scheduled.num_drafted,
        seconds=seconds,
        num_sampled=np.array([n for verifies, n in verified if verifies], dtype=np.int64),
        only_verifies=all(scheduled.verifies),
    )


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


def trace_outcomes(
    trace: StepTrace,
    step: int,
    scheduled: ScheduledStep,
    places: np.ndarray | None,
    requests: Sequence[Request],
    counts: tuple[np.ndarray, np.ndarray],
    increments: Sequence[Increment],
) -> int:
    """Add a step's rows to the trace, one for each request that got tokens.

    Args:
        trace: where to.
        step: index of the step.
        scheduled: the step.
        places: those of the step that the following speak of, None for all.
        requests: [P], their tokens appended.
        counts: [P] tokens sampled and [P] valid drafts judged.
        increments: what became of them, one for each request that got tokens.

    Returns:
        How many tokens were committed.
    """
    num_sampled, num_valid = counts
    total_len = np.array([len(r.token_ids) for r in requests], dtype=np.int32)
    columns = [
        trace.keys_of(scheduled.requests),
        scheduled.is_prefill,
        scheduled.num_tokens,
    ]
    if places is not None:
        columns = [column[places] for column in columns]
    if len(increments) < len(num_sampled):  # chunks in the middle of a prompt
        got = num_sampled > 0
        columns = [column[got] for column in columns]
        num_sampled, num_valid, total_len = num_sampled[got], num_valid[got], total_len[got]
    num_kept, num_drafted = num_sampled, num_valid
    num_accepted = np.minimum(num_sampled - 1, num_valid)
    reasons: np.ndarray | int = 0
    finish_reasons: list[FinishReason | None] = [
        increment.finish_reason for increment in increments
    ]
    if any(finish_reasons):  # a run is cut only where the text ends
        num_kept, num_drafted = num_kept.copy(), num_drafted.copy()
        reasons = np.zeros_like(num_kept)
        for place, reason in enumerate(finish_reasons):
            if reason is not None:
                num_kept[place] = len(increments[place].new_token_ids)
                num_drafted[place], num_accepted[place] = judged(
                    num_sampled[place], num_valid[place], num_kept[place], reason
                )
                reasons[place] = trace.reason_of(reason)
    keys, is_prefill, num_positions = columns
    trace.add_requests(
        len(increments),
        (
            keys,
            step,
            ~is_prefill,
            total_len - num_kept,
            num_positions,
            num_valid,
            num_drafted,
            num_accepted,
            num_kept,
            reasons,
        ),
    )
    return int(num_kept.sum())


def append_logprobs(
    records: np.ndarray, requests: Sequence[Request], increments: Sequence[Increment]
) -> None:
    """Give requests the log-probabilities of the tokens that they kept of a step.

    Args:
        records: [P, W, 3, entries] int32, see `to_logprobs`; what lies behind the kept tokens of a
            request means nothing.
        requests: P, those that asked for some, their tokens appended.
        increments: of the step; they are given theirs, too.
    """
    new_tokens = {(i.request_id, i.sample_index): len(i.new_token_ids) for i in increments}
    wanted = [request.params.logprobs or 0 for request in requests]
    planes = _planes(records, max(wanted, default=0))
    kept: dict[tuple[str, int], list[TokenLogprobs]] = {}
    for request, num_logprobs, *lines in zip(requests, wanted, *planes, strict=True):
        logprobs = request.logprobs
        assert logprobs is not None
        num_new = new_tokens.get((request.request_id, request.sample_index), 0)
        # Those of a step that was interrupted while it was read are lost: they name nothing.
        before = len(request.token_ids) - request.num_prompt_tokens - num_new
        logprobs += [{} for _ in range(before - len(logprobs))]
        new = to_logprobs([plane[:num_new] for plane in lines], num_logprobs)
        logprobs += new
        kept[request.request_id, request.sample_index] = new
    for increment in increments:
        increment.logprobs = kept.get((increment.request_id, increment.sample_index))


def append_prompt_logprobs(records: np.ndarray, first: int, request: Request) -> None:
    """Give a request those of a piece of its prompt.

    Args:
        records: [tokens, 3, entries] int32, see `to_logprobs`.
        first: index in the prompt of the first of them.
        request: that asked for them.
    """
    logprobs, num_logprobs = request.prompt_logprobs, request.params.prompt_logprobs
    assert logprobs is not None
    assert num_logprobs is not None
    assert len(logprobs) == first, f"{len(logprobs)} tokens came before, not {first}"
    logprobs += to_logprobs(_planes(records, num_logprobs), num_logprobs)


def _planes(records: np.ndarray, num_logprobs: int) -> list[list[Any]]:
    """Return ids, log-probabilities and ranks [..., entries] of records, as lists."""
    records = records[..., : num_logprobs + 1]
    values = records[..., 1, :].copy().view(np.float32)
    return [plane.tolist() for plane in (records[..., 0, :], values, records[..., 2, :])]


def to_logprobs(planes: Sequence[list[list[Any]]], num_logprobs: int) -> list[TokenLogprobs]:
    """Return what records say, one a token.

    Args:
        planes: ids (-1 = nothing here), log-probabilities and ranks, [tokens][entries]; the token
            itself comes first.
        num_logprobs: most likely tokens that were asked for.
    """
    num_entries, found = num_logprobs + 1, []
    for ids, values, ranks in zip(*planes, strict=True):
        if -1 in ids:  # more was asked for than the vocabulary has
            num_entries = min(num_entries, ids.index(-1))
        found.append(dict(zip(ids[:num_entries], map(Logprob, values, ranks), strict=False)))
    return found
