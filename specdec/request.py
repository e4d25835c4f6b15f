"""A request as scheduler and engine know it on the CPU."""

from dataclasses import dataclass, field
from typing import Any

from specdec.types import RequestStats, SamplingParams


@dataclass(eq=False)
class Request:
    """One request from `add_request` to its end.

    The CPU's `num_computed_tokens` is an optimistic bound, used for sizing: it takes every verified
    position as accepted until the step's outcome is read. The truth is in the state's row.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_len: int
    draft_budget: int  # drafts a step at most
    label: Any = None  # the caller's own mark, carried into traces (a category, say)
    token_ids: list[int] = field(default_factory=list)  # prompt and committed tokens
    stats: RequestStats = field(default_factory=RequestStats)

    # Set while the request holds a row; reset by preemption.
    row: int | None = None
    generation: int = 0
    prefill_len: int = 0
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_in_flight: int = 0  # steps enqueued whose outcome was not read
    num_in_flight_sampling: int = 0  # those of them that will commit at least one token
    num_drafts: int | None = None  # valid drafts waiting in the row; None = not known

    @property
    def num_prompt_tokens(self) -> int:
        """Return the length of the user's prompt."""
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Return the committed new tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_prefilling(self) -> bool:
        """Return whether prompt (or resumed) tokens are still to be run."""
        return self.num_computed_tokens < self.prefill_len
