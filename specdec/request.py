"""A request as scheduler and engine know it on the CPU."""

from dataclasses import dataclass, field
from typing import Any

from specdec.ending import Detokenizer
from specdec.grammar import Grammar
from specdec.types import RequestStats, SamplingParams, TokenLogprobs


@dataclass(eq=False, slots=True)
class Request:
    """One sample of a user's request, from `add_request` to its end.

    What a running request has computed is in the scheduler's table; the truth is in the state's
    row.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_len: int
    draft_budget: int  # drafts a step at most
    sample_index: int = 0  # of the user's request; keys the noise beside the seed
    label: Any = None  # the caller's own mark, carried into traces (a category, say)
    trace_key: tuple[Any, int] | None = None  # see specdec.trace
    token_ids: list[int] = field(default_factory=list)  # prompt and committed tokens
    stats: RequestStats = field(default_factory=RequestStats)
    detokenizer: Detokenizer = field(default_factory=lambda: Detokenizer(None))
    end_token_ids: frozenset[int] = frozenset()  # EOS and stop tokens that end this text
    outcomes: list[int] = field(default_factory=list)  # see specdec.outcomes
    grammar: Grammar | None = None  # that the text follows, and how far it has come

    # One a new token, and one a prompt token; None where they are not asked for.
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    # Set while the request holds a row; reset by preemption.
    row: int | None = None
    generation: int = 0
    block_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin the lists of log-probabilities; samples share those of the first one's prompt."""
        if self.params.logprobs is not None:
            self.logprobs = []
        if self.params.prompt_logprobs is not None and self.sample_index == 0:
            self.prompt_logprobs = [None]

    @property
    def num_prompt_tokens(self) -> int:
        """Return the length of the user's prompt."""
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Return the committed new tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def trim_len(self) -> int:
        """Return the length from which on a run has to be trimmed, whatever its tokens are."""
        return 0 if self.params.stop_strings else self.max_total_len
