"""The scheduler alone: budgets, order, chunks, preemption. Outcomes of steps are made up."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import CapacityError
from specdec.kv_cache import BlockAllocator
from specdec.request import Request
from specdec.scheduler import ScheduledRequest, Scheduler, SchedulerConfig, SchedulerOutput
from specdec.types import SamplingParams

QUICK = settings(max_examples=150, deadline=None, derandomize=True)


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
) -> Scheduler:
    config = SchedulerConfig(max_num_reqs, max_num_batched_tokens, num_speculative_tokens)
    return Scheduler(config, BlockAllocator(num_blocks, block_size))


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
        self.flights: deque[list[ScheduledRequest]] = deque()
        self.arrivals: list[Request] = []
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.started: list[str] = []

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.arrivals.append(request)

    def step(self) -> SchedulerOutput:
        computed = {id(r): r.num_computed_tokens for r in self.arrivals}
        in_flight = {id(r): r.num_in_flight for r in self.arrivals}
        output = self.scheduler.schedule()
        self._check(output, computed, in_flight)
        self.preempted += [r.request_id for r in output.preempted]
        self.started += [s.request.request_id for s in output.scheduled if s.is_new]
        if output.scheduled:
            self.flights.append(output.scheduled)
        drained = output.must_drain or not output.scheduled
        while self.flights and (drained or len(self.flights) >= self.in_flight):
            self._read(self.flights.popleft())
        return output

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not (self.scheduler.has_requests or self.flights):
                return
            self.step()
        raise AssertionError(f"still running after {max_steps} steps: {self.scheduler.running}")

    def _check(
        self, output: SchedulerOutput, computed: dict[int, int], in_flight: dict[int, int]
    ) -> None:
        config, blocks = self.scheduler.config, self.scheduler.blocks
        scheduled = [s.request for s in output.scheduled]
        assert sum(s.num_tokens for s in output.scheduled) <= config.max_num_batched_tokens
        assert len(scheduled) == len({id(r) for r in scheduled})
        assert len(self.scheduler.running) <= config.max_num_reqs
        order = [self.arrivals.index(r) for r in self.scheduler.running]
        assert order == sorted(order), "running requests are not in order of arrival"
        assert [self.arrivals.index(r) for r in scheduled] == sorted(
            self.arrivals.index(r) for r in scheduled
        )
        for entry in output.scheduled:
            request, start = entry.request, 0 if entry.is_new else computed[id(entry.request)]
            assert entry.num_tokens >= 1
            assert request not in output.preempted
            assert request.num_computed_tokens == start + entry.num_tokens
            assert entry.is_prefill == (start < request.prefill_len)
            if entry.is_prefill:
                end = start + entry.num_tokens
                assert end <= request.prefill_len
                assert entry.is_last_chunk == (end == request.prefill_len)
            else:
                assert entry.num_tokens <= 1 + request.draft_budget
            # Never more blocks than the columns of a block table.
            assert len(request.block_ids) <= blocks.blocks_for(request.max_total_len)
            held = len(request.block_ids) * blocks.block_size
            assert held >= min(start + entry.num_tokens, request.max_total_len)
            at = entry.new_blocks_start
            assert request.block_ids[at:] == entry.new_blocks
        for request in output.preempted:
            assert not any(in_flight.values()), "preempted with steps in flight"
            assert request.block_ids == []
        owned = [block for r in self.arrivals for block in r.block_ids]
        assert len(owned) == len(set(owned))
        assert len(owned) + blocks.num_free == blocks.num_blocks

    def _read(self, flight: Sequence[ScheduledRequest]) -> None:
        """Commit a step as the engine does."""
        for entry in flight:
            request = entry.request
            samples = not entry.is_prefill or entry.is_last_chunk
            request.num_in_flight -= 1
            request.num_in_flight_sampling -= samples
            if request.request_id in self.finished or not samples:
                continue
            num_drafts = 0 if entry.is_prefill else entry.num_tokens - 1
            room = request.max_total_len - len(request.token_ids)
            num_sampled = min(self.accept(num_drafts) + 1, room)
            if not entry.is_prefill:
                request.num_computed_tokens -= entry.num_tokens - num_sampled
            request.token_ids += [0] * num_sampled
            if self.in_flight == 1:
                request.num_drafts = self.accept(request.draft_budget)
            if len(request.token_ids) == request.max_total_len:
                self.scheduler.remove(request)
                self.finished.append(request.request_id)


@dataclass(frozen=True)
class Workload:
    """What hypothesis draws."""

    requests: list[tuple[int, int, int]]  # prompt_len, max_tokens, draft budget
    num_blocks: int
    max_num_reqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    in_flight: int
    seed: int


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    k = draw(st.integers(0, 4))
    one = st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, k))
    return Workload(
        requests=draw(st.lists(one, min_size=1, max_size=6)),
        num_blocks=draw(st.integers(8, 20)),  # 8 blocks of 4 hold one request of 32 tokens
        max_num_reqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.integers(k + 1, k + 12)),  # some verifications wait
        num_speculative_tokens=k,
        in_flight=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
    )


@QUICK
@given(workloads())
def test_every_request_finishes_within_all_limits(workload: Workload) -> None:
    rng = np.random.default_rng(workload.seed)
    scheduler = make_scheduler(
        num_blocks=workload.num_blocks,
        max_num_reqs=workload.max_num_reqs,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        num_speculative_tokens=workload.num_speculative_tokens,
    )
    simulation = Simulation(
        scheduler, workload.in_flight, lambda drafts: int(rng.integers(0, drafts + 1))
    )
    for i, sizes in enumerate(workload.requests):
        simulation.add(make_request(str(i), *sizes))
        if rng.random() < 0.5:
            simulation.step()
    simulation.run()
    assert sorted(simulation.finished) == [str(i) for i in range(len(workload.requests))]
    assert scheduler.blocks.num_free == workload.num_blocks
    first_starts = list(dict.fromkeys(simulation.started))
    assert first_starts == [str(i) for i in range(len(workload.requests))]


def test_prompt_is_covered_exactly_once_by_its_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=7)
    request = make_request("a", prompt_len=23, max_tokens=2)
    scheduler.add(request)
    chunks = []
    while request.is_prefilling:
        (entry,) = scheduler.schedule().scheduled
        chunks.append((entry.num_tokens, entry.is_last_chunk))
    assert chunks == [(7, False), (7, False), (7, False), (2, True)]


def test_running_requests_come_before_new_ones() -> None:
    simulation = Simulation(make_scheduler(max_num_batched_tokens=6, num_speculative_tokens=3))
    simulation.add(make_request("a", prompt_len=2, max_tokens=20, draft_budget=3))
    simulation.step()
    simulation.add(make_request("b", prompt_len=9, max_tokens=2))
    simulation.add(make_request("c", prompt_len=1, max_tokens=2))
    output = simulation.step()
    # "a" verifies 4 tokens, the prompt of "b" gets what is left of 6, and "c" waits behind it.
    assert [(s.request.request_id, s.num_tokens) for s in output.scheduled] == [("a", 4), ("b", 2)]


def test_verification_that_does_not_fit_the_budget_waits_whole() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=7, num_speculative_tokens=3)
    requests = [make_request(name, prompt_len=2, max_tokens=20, draft_budget=3) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    for request in requests:
        request.token_ids.append(0)
    # 4 + 4 tokens are more than 7: a verification is never cut.
    assert [s.num_tokens for s in scheduler.schedule().scheduled] == [4]


def test_known_number_of_drafts_shortens_the_verification() -> None:
    scheduler = make_scheduler(num_speculative_tokens=4)
    request = make_request("a", prompt_len=3, max_tokens=20, draft_budget=4)
    scheduler.add(request)
    scheduler.schedule()
    request.token_ids.append(0)
    request.num_drafts = 2
    assert scheduler.schedule().scheduled[0].num_tokens == 3
    assert scheduler.schedule().scheduled[0].num_tokens == 5, "unknown again: the whole budget"


def test_request_that_could_not_finish_alone_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(CapacityError, match="17 tokens, which takes 5 KV blocks of 4; there are 4"):
        scheduler.add(make_request("big", prompt_len=10, max_tokens=7))
    assert not scheduler.has_requests
    scheduler.add(make_request("fits", prompt_len=10, max_tokens=6))
    assert scheduler.has_requests


def crowded(in_flight: int) -> Simulation:
    """Three requests of up to 12 tokens, all rows, in 7 blocks of 4: two fit to the end."""
    simulation = Simulation(make_scheduler(num_blocks=7, max_num_reqs=3), in_flight)
    for name in "abc":
        simulation.add(make_request(name, prompt_len=5, max_tokens=7))
    return simulation


def test_last_arrival_is_preempted_and_resumes_before_new_ones() -> None:
    simulation = crowded(in_flight=1)
    simulation.add(make_request("d", prompt_len=1, max_tokens=1))
    while not simulation.preempted:
        simulation.step()
    assert simulation.preempted == ["c"]
    victim = simulation.scheduler.waiting[0]
    assert victim.request_id == "c"
    # It comes back as a new request that prefills all its tokens.
    assert victim.prefill_len == len(victim.token_ids) > victim.num_prompt_tokens
    assert victim.num_computed_tokens == 0
    assert victim.stats.num_preemptions == 1
    simulation.run()
    assert simulation.started == ["a", "b", "c", "c", "d"]
    assert simulation.finished[:2] == ["a", "b"]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_nothing_is_preempted_before_steps_in_flight_are_read(in_flight: int) -> None:
    simulation = crowded(in_flight)
    drained = []
    while not simulation.preempted:
        output = simulation.step()
        if output.must_drain:
            assert output.preempted == []
            drained.append(len(simulation.flights))
    # With one step in flight there is nothing to wait for.
    assert drained == ([] if in_flight == 1 else [0])
    simulation.run()
    assert sorted(simulation.finished) == ["a", "b", "c"]


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    simulation = crowded(in_flight=1)
    while True:
        output = simulation.step()
        if output.preempted:
            break
    assert not any(s.is_new for s in output.scheduled)


def test_request_with_its_last_tokens_in_flight_is_not_scheduled_again() -> None:
    simulation = Simulation(make_scheduler(), in_flight=3)
    simulation.add(make_request("a", prompt_len=4, max_tokens=2))
    lengths = [len(simulation.step().scheduled) for _ in range(4)]
    assert lengths == [1, 1, 0, 0]
    assert simulation.finished == ["a"]


def test_removed_request_gives_its_blocks_back_from_wherever_it_is() -> None:
    scheduler = make_scheduler(max_num_reqs=1)
    running, waiting = make_request("a", 6, 3), make_request("b", 6, 3)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.schedule()
    assert scheduler.blocks.num_free < 100
    scheduler.remove(running)
    scheduler.remove(waiting)
    assert scheduler.blocks.num_free == 100
    assert not scheduler.has_requests
