"""Which requests run in a step, and how many tokens of each.

Running requests come first, in order of arrival; a prompt is run in chunks inside what the token
budget leaves. Where KV blocks run short, the request that arrived last is preempted: it gives back
row and blocks and waits, in front, to be added again with all its tokens.

What is known of the running requests is kept in columns of one table, so that a step in which all
of them go on costs a few array operations, however many they are. Only where tokens or blocks do
not suffice for all is every request looked at.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specdec.errors import CapacityError
from specdec.kv_cache import BlockAllocator
from specdec.request import Request
from specdec.running import UNLIMITED, RunningTable

# Blocks that a growing request gets beyond what it needs, while nothing waits and half of all
# blocks stay free: they are not given back before it ends.
_BLOCKS_AHEAD = 4


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """Who runs in a step, in the order of the batch.

    A batch that goes on as it was is the same object again.
    """

    requests: list[Request]
    num_tokens: np.ndarray  # [R] int32
    is_prefill: np.ndarray  # [R] bool
    is_last_chunk: np.ndarray  # [R] bool, a prefill that reaches all known tokens
    samples: np.ndarray  # [R] int32: 1 where a place will commit at least one token
    verifies: list[bool]  # [R], whether its tokens are no prefill
    columns: slice | np.ndarray  # [R] int64, of the running table when it was scheduled
    num_removed: int  # requests that had left the table before; columns hold until it grows
    num_verified: int  # drafts that each verification was planned for
    num_drafted: int  # drafts that it proposes for each request's next step


@dataclass(slots=True)
class SchedulerOutput:
    """A step's schedule and what has to be done before it runs."""

    step: ScheduledStep | None = None
    new_requests: list[Request] = field(default_factory=list)  # they take a row in this step
    # Request, where its new blocks begin in its table, and the blocks.
    new_blocks: list[tuple[Request, int, list[int]]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)  # their rows are to be freed
    must_drain: bool = False  # outcomes in flight have to be read before anything is preempted
    # Bounds on what the step's requests hold: context after it, and tokens after its commit.
    max_seq_len: int = 0
    max_total_len: int = 0
    num_steps: int = 1  # that run so, one behind the other in one launch


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    Args:
        max_num_reqs: running requests at most.
        max_num_batched_tokens: tokens a step at most.
        num_speculative_tokens: K.
        uniform_verify: all verifications of a step get the same number of positions, whatever the
            request's budget and the number of its drafts, so that all of them have one shape.
    """

    max_num_reqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    uniform_verify: bool = False


class Scheduler:
    """Continuous batching with chunked prefill and preemption.

    Args:
        config: limits.
        blocks: the KV block allocator.
        next_length: returns how many drafts a step of so many requests proposes for each of them,
            at most K; asked once a step. None = always K.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockAllocator,
        next_length: Callable[[int], int] | None = None,
    ) -> None:
        self.config = config
        self._next_length = next_length or (lambda num_reqs: config.num_speculative_tokens)
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.table = RunningTable(config.max_num_reqs)
        self._steady: ScheduledStep | None = None  # the last step, where the next may repeat it
        self._drafts_known = False
        self._last_drafted = config.num_speculative_tokens

    def check(self, request: Request) -> None:
        """Check that a request could finish, if only alone.

        Raises:
            CapacityError: it could not.
        """
        needed = self.blocks.blocks_for(request.max_total_len)
        if needed > self.blocks.num_blocks:
            raise CapacityError(
                f"request {request.request_id!r} may grow to {request.max_total_len} tokens, which "
                f"takes {needed} KV blocks of {self.blocks.block_size}; there are "
                f"{self.blocks.num_blocks}; raise num_kv_blocks or lower max_tokens"
            )

    def add(self, request: Request) -> None:
        """Queue a new request; see `check` for its errors."""
        self.check(request)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that ended; its blocks are free for the next step."""
        if request in self.running:
            self._leave(self.running.index(request))
        else:
            self.waiting.remove(request)
        self.blocks.free(request.block_ids)

    @property
    def has_requests(self) -> bool:
        """Return whether anything waits or runs."""
        return bool(self.waiting or self.running)

    # --- before a step --------------------------------------------------------------------------

    def verifying(self) -> list[tuple[Request, int]]:
        """Return the running requests that can verify in the next step, and how many drafts each.

        Every outcome has been read.
        """
        most_drafts = np.minimum(self.table.full_len - 1, self._last_drafted).tolist()
        columns = zip(self.running, self.table.is_prefilling.tolist(), most_drafts, strict=True)
        return [(request, most) for request, prefills, most in columns if not prefills]

    def set_num_drafts(self, num_drafts: dict[Request, int]) -> None:
        """Let requests verify so many drafts in the next step, where it verifies no other position.

        Args:
            num_drafts: of requests whose drafts did not come from the last step.
        """
        if self.config.uniform_verify:
            return
        for column, request in enumerate(self.running):
            if request in num_drafts:
                self.table.verify_len[column] = 1 + num_drafts[request]

    @property
    def steady(self) -> ScheduledStep | None:
        """Return the last step where the next may repeat it."""
        return self._steady

    def schedule(self, num_in_flight: int = 0, most_steps: int = 1) -> SchedulerOutput:
        """Decide the next step and advance the CPU's bounds as if all drafts were accepted.

        Args:
            num_in_flight: steps scheduled whose outcome was not read.
            most_steps: steps that may be decided at once, where the last one is repeated: so many,
                or one.
        """
        output = SchedulerOutput()
        if self._steady is not None:
            if most_steps > 1 and self._repeat_often(self._steady, output, most_steps):
                return output
            if self._repeat(self._steady, output):
                return output
        budget = self.config.max_num_batched_tokens
        wants = self._wants()
        ends = self.table.num_computed_tokens + wants
        if wants.sum() > budget or not self._grow_all(ends, output):
            wants = self._fit(output, num_in_flight)
        if self.waiting and not output.preempted and not output.must_drain:
            wants = np.concatenate([wants, self._admit(output, budget - int(wants.sum()))])
        if wants.any():
            self._advance(wants, output)
        return output

    def _repeat(self, step: ScheduledStep, output: SchedulerOutput) -> bool:
        """Schedule the last step again, where that is what the rules give; else change nothing."""
        table = self.table
        if self.waiting and len(self.running) < self.config.max_num_reqs:
            return False
        if True in (table.least_len >= table.max_total_len).tolist():
            return False
        ends = table.num_computed_tokens + step.num_tokens
        if not self._grow_all(ends, output):
            return False
        table.num_computed_tokens[:] = ends
        table.least_len += step.samples
        num_drafted = self._next_length(len(step.requests))
        if num_drafted != step.num_drafted:
            step = dataclasses.replace(step, num_drafted=num_drafted)
            self._steady = None
            self._plan_drafts(slice(0, len(table)), num_drafted)
        output.step = step
        output.max_seq_len = max(ends.tolist())
        output.max_total_len = output.max_seq_len + 1
        return True

    def _repeat_often(self, step: ScheduledStep, output: SchedulerOutput, num_steps: int) -> bool:
        """Schedule the last step some times over, where the rules allow it; else change nothing.

        Blocks are handed out for the case that every draft is accepted. A request may reach its end
        on the way: it commits nothing in the steps behind.
        """
        table = self.table
        if self.waiting and len(self.running) < self.config.max_num_reqs:
            return False
        least_len, max_total_len = table.least_len, table.max_total_len
        if True in (least_len >= max_total_len).tolist():
            return False
        if True not in (least_len + num_steps <= max_total_len).tolist():
            return False  # nobody can use the last one
        ends = table.num_computed_tokens + num_steps * step.num_tokens
        if not self._grow_all(ends, output):
            return False
        table.num_computed_tokens[:] = ends
        table.least_len += num_steps * step.samples
        for _ in range(num_steps):
            num_drafted = self._next_length(len(step.requests))
            assert num_drafted == step.num_drafted, f"{num_drafted} drafts, not {step.num_drafted}"
        output.step, output.num_steps = step, num_steps
        output.max_seq_len = max(ends.tolist())
        output.max_total_len = output.max_seq_len + 1
        return True

    def _wants(self) -> np.ndarray:
        """Return [n] int32: tokens that each running request would run, were there no limits."""
        table = self.table
        # Whether another verification can be of use before outcomes in flight are read.
        verifies = table.least_len < table.max_total_len
        left = table.prefill_len - table.num_computed_tokens
        verify_len = table.verify_len
        if self.config.uniform_verify:
            # A request that waited, or has just joined, may have been given another number.
            verify_len = verify_len[verifies & (left <= 0)].max(initial=1)
        return np.where(left > 0, left, np.where(verifies, verify_len, 0))

    def _grow_all(self, ends: np.ndarray, output: SchedulerOutput) -> bool:
        """Get the blocks for the lengths that a step reaches; none, where too few are free."""
        table, blocks = self.table, self.blocks
        short = ends > table.capacity
        if True not in short.tolist():
            return True
        columns = np.flatnonzero(short)
        # The drafter's K come behind the step's own positions.
        lookahead = self.config.num_speculative_tokens
        ends = np.minimum(ends[columns] + lookahead, table.max_total_len[columns])
        held = table.capacity[columns] + lookahead
        missing = -((held - ends) // blocks.block_size)
        spare = blocks.num_free - int(missing.sum())
        if spare < 0:
            return False
        ahead = 0
        left = spare - _BLOCKS_AHEAD * len(columns)
        if not self.waiting and left >= blocks.num_blocks // 2:
            ahead = _BLOCKS_AHEAD * blocks.block_size
        for column, end in zip(columns.tolist(), ends.tolist(), strict=True):
            grown = self._grow(self.running[column], end + ahead, column, output)
            assert grown, "blocks were counted before"
        return True

    def _grow(self, request: Request, num_tokens: int, column: int, out: SchedulerOutput) -> bool:
        """Let a running request hold some tokens, at most as many as it may ever have."""
        held = len(request.block_ids)
        end = min(num_tokens, request.max_total_len)
        new_blocks = self.blocks.grow(request.block_ids, end)
        if new_blocks is None:
            return False
        if new_blocks:
            out.new_blocks.append((request, held, new_blocks))
            self.table.capacity[column] = self._capacity(request)
        return True

    def _capacity(self, request: Request) -> int:
        """Return what a step of a request may reach with the blocks that it holds."""
        held = len(request.block_ids) * self.blocks.block_size
        if held >= request.max_total_len:
            return UNLIMITED
        return held - self.config.num_speculative_tokens

    def _fit(self, output: SchedulerOutput, num_in_flight: int) -> np.ndarray:
        """Go through the running requests where tokens or blocks do not suffice for all.

        Returns:
            [n] int32: tokens of each that still runs, 0 where it waits for the next step.
        """
        budget, chosen = self.config.max_num_batched_tokens, []
        wants, prefills = self._wants().tolist(), self.table.is_prefilling.tolist()
        computed = self.table.num_computed_tokens.tolist()
        while len(chosen) < len(self.running):  # only requests from here on can be preempted
            column = len(chosen)
            num_tokens = wants[column]
            if num_tokens > budget:  # a prompt is cut, a verification never
                num_tokens = budget if prefills[column] else 0
            if num_tokens:
                end = computed[column] + num_tokens + self.config.num_speculative_tokens
                if not self._allocate(column, end, output, num_in_flight):
                    break
            chosen.append(num_tokens)
            budget -= num_tokens
        chosen += [0] * (len(self.running) - len(chosen))
        return np.array(chosen, dtype=np.int32)

    def _allocate(self, column: int, end: int, output: SchedulerOutput, num_in_flight: int) -> bool:
        """Get blocks, preempting later arrivals; False where the request itself cannot run."""
        request = self.running[column]
        while not self._grow(request, end, column, output):
            if num_in_flight:
                output.must_drain = True
                return False
            victim = self.running[-1]
            self._preempt(victim)
            output.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(self.running.index(request))
        self.blocks.free(request.block_ids)
        request.stats.num_preemptions += 1
        self.waiting.appendleft(request)

    def preempt_all(self) -> None:
        """Send every running request back to wait, first come first."""
        running = list(self.running)
        for request in running:
            self.blocks.free(request.block_ids)
            request.stats.num_preemptions += 1
        self.waiting.extendleft(reversed(running))
        self.running.clear()
        self.table.clear()
        self._steady = None

    def _leave(self, column: int) -> None:
        del self.running[column]
        self.table.remove(column)
        self._steady = None

    def _admit(self, output: SchedulerOutput, budget: int) -> np.ndarray:
        """Start waiting requests, first come first served, while rows, tokens and blocks last.

        Returns:
            [number admitted] int32: their tokens.
        """
        config, admitted = self.config, []
        while self.waiting and budget > 0 and len(self.running) < config.max_num_reqs:
            request = self.waiting[0]
            num_tokens = min(len(request.token_ids), budget)
            end = min(num_tokens + config.num_speculative_tokens, request.max_total_len)
            new_blocks = self.blocks.grow(request.block_ids, end)
            if new_blocks is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            drafts = config.num_speculative_tokens
            if not config.uniform_verify:
                drafts = min(drafts, request.draft_budget)
            self.table.append(request, self._capacity(request), 1 + drafts)
            output.new_requests.append(request)
            output.new_blocks.append((request, 0, new_blocks))
            admitted.append(num_tokens)
            budget -= num_tokens
        return np.array(admitted, dtype=np.int32)

    def _advance(self, wants: np.ndarray, output: SchedulerOutput) -> None:
        """Build the step of those that run, and move the table behind it."""
        table, requests = self.table, list(self.running)
        columns: slice | np.ndarray = slice(0, len(requests))
        if not wants.all():
            columns = np.flatnonzero(wants)
            wants = wants[columns]
            requests = [requests[column] for column in columns.tolist()]
        prefill_len, start = table.prefill_len[columns], table.num_computed_tokens[columns]
        end = start + wants
        is_prefill = start < prefill_len
        is_last_chunk = is_prefill & (end == prefill_len)
        verifies = (~is_prefill).tolist()
        num_verified = self._last_drafted
        if self.config.uniform_verify:
            num_verified = int(wants[~is_prefill].max(initial=1)) - 1
        num_drafted = self._next_length(len(requests))
        output.step = step = ScheduledStep(
            requests=requests,
            num_tokens=wants,
            is_prefill=is_prefill,
            is_last_chunk=is_last_chunk,
            samples=(~is_prefill | is_last_chunk).astype(np.int32),
            verifies=verifies,
            columns=columns,
            num_removed=table.num_removed,
            num_verified=num_verified,
            num_drafted=num_drafted,
        )
        output.max_seq_len = max(end.tolist())
        output.max_total_len = max(output.max_seq_len, *prefill_len.tolist()) + 1
        table.num_computed_tokens[columns] = end
        table.least_len[columns] += step.samples
        self._plan_drafts(columns, num_drafted)
        steady = not self._drafts_known and len(requests) == len(self.running) and all(verifies)
        steady = steady and bool((table.verify_len == wants).all())
        self._steady = step if steady else None

    def _plan_drafts(self, columns: slice | np.ndarray, num_drafted: int) -> None:
        """Let requests verify as many drafts in their next step as the one at hand proposes."""
        table = self.table
        table.verify_len[columns] = np.minimum(table.full_len[columns], 1 + num_drafted)
        self._last_drafted = num_drafted

    # --- after a step ---------------------------------------------------------------------------

    def commit(
        self,
        step: ScheduledStep,
        generations: np.ndarray,
        num_sampled: np.ndarray,
        num_rejected: np.ndarray,
        num_drafts: np.ndarray | None = None,
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Take in a step's outcome, in the order in which steps were scheduled.

        Args:
            step: as it was scheduled.
            generations: [R], of the rows when it ran; an outcome never reaches a later owner.
            num_sampled: [R] tokens that it committed.
            num_rejected: [R] positions that it computed for nothing.
            num_drafts: [R] drafts that wait for the next step, where that is known in time.

        Returns:
            The places whose requests still run, None for all; and for each of them whether its run
            has to be trimmed because of its length (or because of stop strings): bool.
        """
        table, columns, places, samples = self.table, step.columns, None, step.samples
        if step.num_removed != table.num_removed:
            places, columns = self._locate(step, generations)
            samples, num_sampled = samples[places], num_sampled[places]
            num_rejected = num_rejected[places]
            num_drafts = None if num_drafts is None else num_drafts[places]
        if num_drafts is not None and not self.config.uniform_verify:
            # The next step verifies no position without a draft.
            table.verify_len[columns] = 1 + num_drafts
            self._drafts_known = True
        if isinstance(columns, slice):  # then these are views
            computed, total_len = table.num_computed_tokens[columns], table.total_len[columns]
            least_len = table.least_len[columns]
            computed -= num_rejected
            least_len -= samples
            least_len += num_sampled
            total_len += num_sampled
            return places, total_len >= table.trim_len[columns]
        table.num_computed_tokens[columns] -= num_rejected
        table.least_len[columns] += num_sampled - samples
        table.total_len[columns] += num_sampled
        return places, table.total_len[columns] >= table.trim_len[columns]

    def _locate(
        self, step: ScheduledStep, generations: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find an earlier step's requests: the places of those that still run, their columns."""
        column_of = {request: column for column, request in enumerate(self.running)}
        places, columns = [], []
        owners = zip(step.requests, generations.tolist(), strict=True)
        for place, (request, generation) in enumerate(owners):
            column = column_of.get(request)
            if column is not None and request.generation == generation:
                places.append(place)
                columns.append(column)
        return np.array(places, dtype=np.int64), np.array(columns, dtype=np.int64)
