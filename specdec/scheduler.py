"""Which requests run in a step, and how many tokens of each.

Running requests come first, in order of arrival; a prompt is run in chunks inside what the token
budget leaves. Where KV blocks run short, the request that arrived last is preempted: it gives back
row and blocks and waits, in front, to be added again with all its tokens.
"""

from collections import deque
from dataclasses import dataclass, field

from specdec.errors import CapacityError
from specdec.kv_cache import BlockAllocator
from specdec.request import Request


@dataclass
class ScheduledRequest:
    """One request's part of a step."""

    request: Request
    num_tokens: int
    is_prefill: bool
    is_last_chunk: bool
    new_blocks_start: int
    new_blocks: list[int]
    is_new: bool = False  # it takes a row in this step


@dataclass
class SchedulerOutput:
    """A step's schedule."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)  # their rows are to be freed
    must_drain: bool = False  # outcomes in flight have to be read before anything is preempted


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step."""

    max_num_reqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int


class Scheduler:
    """Continuous batching with chunked prefill and preemption.

    Args:
        config: limits.
        blocks: the KV block allocator.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockAllocator) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            CapacityError: it could not finish even alone.
        """
        needed = self.blocks.blocks_for(request.max_total_len)
        if needed > self.blocks.num_blocks:
            raise CapacityError(
                f"request {request.request_id!r} may grow to {request.max_total_len} tokens, which "
                f"takes {needed} KV blocks of {self.blocks.block_size}; there are "
                f"{self.blocks.num_blocks}; raise num_kv_blocks or lower max_tokens"
            )
        request.prefill_len = len(request.token_ids)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that ended; its blocks are free for the next step."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.blocks.free(request.block_ids)

    @property
    def has_requests(self) -> bool:
        """Return whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and advance the CPU's bounds as if all drafts were accepted."""
        output = SchedulerOutput()
        budget = self.config.max_num_batched_tokens
        index = 0
        while index < len(self.running):  # only requests from here on can be preempted meanwhile
            request = self.running[index]
            index += 1
            if not self._can_run(request):
                continue
            num_tokens = self._num_tokens(request, budget)
            if num_tokens == 0:
                continue
            new_blocks = self._allocate(request, num_tokens, output)
            if output.must_drain:
                break
            if new_blocks is not None:
                output.scheduled.append(self._entry(request, num_tokens, new_blocks))
                budget -= num_tokens
        if not output.preempted and not output.must_drain:
            self._admit(output, budget)
        for entry in output.scheduled:
            entry.request.num_computed_tokens += entry.num_tokens
            entry.request.num_in_flight += 1
            entry.request.num_in_flight_sampling += not entry.is_prefill or entry.is_last_chunk
            entry.request.num_drafts = None
        return output

    def _can_run(self, request: Request) -> bool:
        """Return whether another step can be of use before outcomes in flight are read."""
        known = len(request.token_ids) + request.num_in_flight_sampling
        return request.is_prefilling or known < request.max_total_len

    def _num_tokens(self, request: Request, budget: int) -> int:
        if request.is_prefilling:
            return min(request.prefill_len - request.num_computed_tokens, budget)
        drafts = request.num_drafts
        if drafts is None:
            drafts = min(self.config.num_speculative_tokens, request.draft_budget)
        return 1 + drafts if 1 + drafts <= budget else 0

    def _tokens_to_hold(self, request: Request, num_tokens: int) -> int:
        """Return the positions that need blocks: the step's, and the drafter's K behind them."""
        lookahead = self.config.num_speculative_tokens
        end = request.num_computed_tokens + num_tokens + lookahead
        return min(end, request.max_total_len)

    def _allocate(
        self, request: Request, num_tokens: int, output: SchedulerOutput
    ) -> list[int] | None:
        """Get blocks, preempting later arrivals; None where the request itself had to go."""
        while True:
            hold = self._tokens_to_hold(request, num_tokens)
            new_blocks = self.blocks.grow(request.block_ids, hold)
            if new_blocks is not None:
                return new_blocks
            if any(r.num_in_flight for r in self.running):
                output.must_drain = True
                return None
            victim = self.running[-1]
            self._preempt(victim)
            output.preempted.append(victim)
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.free(request.block_ids)
        request.prefill_len = len(request.token_ids)
        request.num_computed_tokens = 0
        request.num_drafts = None
        request.stats.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        """Start waiting requests, first come first served, while rows, tokens and blocks last."""
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_reqs:
            request = self.waiting[0]
            num_tokens = self._num_tokens(request, budget)
            hold = self._tokens_to_hold(request, num_tokens)
            new_blocks = self.blocks.grow(request.block_ids, hold)
            if new_blocks is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            entry = self._entry(request, num_tokens, new_blocks)
            entry.is_new = True
            output.scheduled.append(entry)
            budget -= num_tokens

    def _entry(self, request: Request, num_tokens: int, new_blocks: list[int]) -> ScheduledRequest:
        is_prefill = request.is_prefilling
        reached = request.num_computed_tokens + num_tokens
        return ScheduledRequest(
            request=request,
            num_tokens=num_tokens,
            is_prefill=is_prefill,
            is_last_chunk=is_prefill and reached == request.prefill_len,
            new_blocks_start=len(request.block_ids) - len(new_blocks),
            new_blocks=new_blocks,
        )
