"""A scheduler with made-up outcomes: no engine, no model."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdec.kv_cache import BlockAllocator
from specdec.request import Request
from specdec.scheduler import ScheduledStep, Scheduler, SchedulerConfig, SchedulerOutput
from specdec.types import SamplingParams


def make_request(name: str, prompt_len: int, max_tokens: int, draft_budget: int = 0) -> Request:
    tokens = list(range(prompt_len))
    return Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=tokens,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_total_len=prompt_len + max_tokens,
        draft_budget=draft_budget,
        token_ids=list(tokens),
    )


def make_scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_reqs: int = 8,
    max_num_batched_tokens: int = 64,
    num_speculative_tokens: int = 0,
    uniform_verify: bool = False,
    make: type[Scheduler] = Scheduler,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_reqs, max_num_batched_tokens, num_speculative_tokens, uniform_verify
    )
    return make(config, BlockAllocator(num_blocks, block_size))


@dataclass
class Entry:
    """One request's part of a step."""

    request: Request
    num_tokens: int
    is_prefill: bool
    is_last_chunk: bool

    @property
    def samples(self) -> bool:
        return not self.is_prefill or self.is_last_chunk


def entries(output: SchedulerOutput) -> list[Entry]:
    """Return who runs in a step."""
    step = output.step
    if step is None:
        return []
    columns = zip(
        step.requests,
        step.num_tokens.tolist(),
        step.is_prefill.tolist(),
        step.is_last_chunk.tolist(),
        strict=True,
    )
    return [Entry(*values) for values in columns]


def computed(scheduler: Scheduler, request: Request) -> int:
    """Return the scheduler's bound on what a request has computed."""
    if request not in scheduler.running:
        return 0
    return int(scheduler.table.num_computed_tokens[scheduler.running.index(request)])


def known_len(scheduler: Scheduler, request: Request) -> int:
    """Return the tokens that a request had when it took its row."""
    return int(scheduler.table.prefill_len[scheduler.running.index(request)])


def commit_all(
    scheduler: Scheduler, output: SchedulerOutput, num_drafts: int | None = None
) -> None:
    """Commit a step in which every place sampled one token and no draft was accepted."""
    step = output.step
    assert step is not None
    for request in step.requests:
        request.token_ids.append(0)
    zeros = np.zeros(len(step.requests), dtype=np.int32)
    rejected = np.where(step.is_prefill, 0, step.num_tokens - 1)
    drafts = None if num_drafts is None else zeros + num_drafts
    places, _ = scheduler.commit(step, zeros, zeros + 1, rejected, drafts)
    assert places is None


class Simulation:
    """A scheduler with made-up outcomes, read `in_flight - 1` steps after they were scheduled.

    Each step is checked against what must hold of any schedule.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        in_flight: int = 1,
        accept: Callable[[int], int] = lambda num_drafts: num_drafts,
    ) -> None:
        self.scheduler, self.in_flight, self.accept = scheduler, in_flight, accept
        self.flights: deque[tuple[ScheduledStep, np.ndarray]] = deque()
        self.arrivals: list[Request] = []
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.started: list[str] = []

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.arrivals.append(request)

    def step(self) -> SchedulerOutput:
        before = {id(r): computed(self.scheduler, r) for r in self.arrivals}
        output = self.scheduler.schedule(len(self.flights))
        self._check(output, before)
        self.preempted += [r.request_id for r in output.preempted]
        self.started += [r.request_id for r in output.new_requests]
        for request in output.new_requests:
            request.generation += 1
        if output.step is not None:
            generations = np.array([r.generation for r in output.step.requests])
            self.flights.append((output.step, generations))
        drained = output.must_drain or output.step is None
        while self.flights and (drained or len(self.flights) >= self.in_flight):
            self._read(*self.flights.popleft())
        return output

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not (self.scheduler.has_requests or self.flights):
                return
            self.step()
        raise AssertionError(f"still running after {max_steps} steps: {self.scheduler.running}")

    def _check(self, output: SchedulerOutput, before: dict[int, int]) -> None:
        config, blocks = self.scheduler.config, self.scheduler.blocks
        scheduled = [s.request for s in entries(output)]
        assert sum(s.num_tokens for s in entries(output)) <= config.max_num_batched_tokens
        assert len(scheduled) == len({id(r) for r in scheduled})
        assert len(self.scheduler.running) <= config.max_num_reqs
        order = [self.arrivals.index(r) for r in self.scheduler.running]
        assert order == sorted(order), "running requests are not in order of arrival"
        assert [self.arrivals.index(r) for r in scheduled] == sorted(
            self.arrivals.index(r) for r in scheduled
        )
        assert [r for r in scheduled if r in output.new_requests] == output.new_requests
        for entry in entries(output):
            request, start = entry.request, before[id(entry.request)]
            prefill_len = known_len(self.scheduler, request)
            assert entry.num_tokens >= 1
            assert request not in output.preempted
            assert computed(self.scheduler, request) == start + entry.num_tokens
            assert entry.is_prefill == (start < prefill_len)
            end = start + entry.num_tokens
            if entry.is_prefill:
                assert end <= prefill_len
                assert entry.is_last_chunk == (end == prefill_len)
            elif config.uniform_verify:
                assert entry.num_tokens == 1 + config.num_speculative_tokens
            else:
                assert entry.num_tokens <= 1 + request.draft_budget
            assert end <= output.max_seq_len
            assert max(end, prefill_len) < output.max_total_len
            # Never more blocks than the columns of a block table.
            assert len(request.block_ids) <= blocks.blocks_for(request.max_total_len)
            held = len(request.block_ids) * blocks.block_size
            reached = end + config.num_speculative_tokens
            assert held >= min(reached, request.max_total_len)
        for request, at, new_blocks in output.new_blocks:
            assert request.block_ids[at:] == new_blocks
        for request in output.preempted:
            assert not self.flights, "preempted with steps in flight"
            assert request.block_ids == []
        owned = [block for r in self.arrivals for block in r.block_ids]
        assert len(owned) == len(set(owned))
        assert len(owned) + blocks.num_free == blocks.num_blocks

    def _read(self, step: ScheduledStep, generations: np.ndarray) -> None:
        """Commit a step as the engine does."""
        samples = step.samples.tolist()
        num_sampled, num_rejected, num_drafts = [], [], []
        for place, request in enumerate(step.requests):
            is_prefill, num_tokens = bool(step.is_prefill[place]), int(step.num_tokens[place])
            room = request.max_total_len - len(request.token_ids)
            accepted = 0 if is_prefill else self.accept(num_tokens - 1)
            num_sampled.append(min(accepted + 1, room) if samples[place] else 0)
            num_rejected.append(0 if is_prefill else num_tokens - num_sampled[-1])
            num_drafts.append(self.accept(request.draft_budget))
        places, must_trim = self.scheduler.commit(
            step,
            generations,
            np.array(num_sampled),
            np.array(num_rejected),
            np.array(num_drafts) if self.in_flight == 1 else None,
        )
        owned = list(range(len(step.requests))) if places is None else places.tolist()
        running = set(self.scheduler.running)
        assert owned == [i for i, r in enumerate(step.requests) if r in running]
        for place, trims in zip(owned, must_trim.tolist(), strict=True):
            request = step.requests[place]
            request.token_ids += [0] * num_sampled[place]
            assert trims == (len(request.token_ids) == request.max_total_len)
        lengths = [len(r.token_ids) for r in self.scheduler.running]
        assert self.scheduler.table.total_len.tolist() == lengths
        in_flight = [
            sum(self._will_sample(r, *f) for f in self.flights) for r in self.scheduler.running
        ]
        least = [length + more for length, more in zip(lengths, in_flight, strict=True)]
        assert self.scheduler.table.least_len.tolist() == least
        for place in owned:
            request = step.requests[place]
            if len(request.token_ids) == request.max_total_len:
                self.scheduler.remove(request)
                self.finished.append(request.request_id)

    def _will_sample(self, request: Request, step: ScheduledStep, generations: np.ndarray) -> int:
        if request not in step.requests:
            return 0
        place = step.requests.index(request)
        return int(step.samples[place]) if generations[place] == request.generation else 0
