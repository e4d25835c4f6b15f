"""The scheduler alone: budgets, order, chunks, preemption. Outcomes of steps are made up."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import CapacityError
from tests.simulation import (
    Entry,
    Simulation,
    commit_all,
    computed,
    entries,
    make_request,
    make_scheduler,
)

QUICK = settings(max_examples=150, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Workload:
    """What hypothesis draws."""

    requests: list[tuple[int, int, int]]  # prompt_len, max_tokens, draft budget
    num_blocks: int
    max_num_reqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    in_flight: int
    uniform_verify: bool
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
        uniform_verify=draw(st.booleans()),
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
        uniform_verify=workload.uniform_verify,
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
    while computed(scheduler, request) < 23:
        (entry,) = entries(scheduler.schedule())
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
    assert [(s.request.request_id, s.num_tokens) for s in entries(output)] == [("a", 4), ("b", 2)]


def test_verification_that_does_not_fit_the_budget_waits_whole() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=7, num_speculative_tokens=3)
    requests = [make_request(name, prompt_len=2, max_tokens=20, draft_budget=3) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    commit_all(scheduler, scheduler.schedule())
    # 4 + 4 tokens are more than 7: a verification is never cut.
    assert [s.num_tokens for s in entries(scheduler.schedule())] == [4]


def test_known_number_of_drafts_shortens_the_verification() -> None:
    scheduler = make_scheduler(num_speculative_tokens=4)
    request = make_request("a", prompt_len=3, max_tokens=20, draft_budget=4)
    scheduler.add(request)
    commit_all(scheduler, scheduler.schedule(), num_drafts=2)
    assert entries(scheduler.schedule())[0].num_tokens == 3
    assert entries(scheduler.schedule())[0].num_tokens == 5, "unknown again: the whole budget"


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
    output = simulation.step()
    while not simulation.preempted:
        output = simulation.step()
    assert simulation.preempted == ["c"]
    victim = simulation.scheduler.waiting[0]
    assert victim.request_id == "c"
    # It comes back as a new request that prefills all its tokens.
    num_tokens = len(victim.token_ids)
    assert num_tokens > victim.num_prompt_tokens
    assert victim.stats.num_preemptions == 1
    while len(simulation.started) == 3:
        output = simulation.step()
    assert Entry(victim, num_tokens, is_prefill=True, is_last_chunk=True) in entries(output)
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
    assert output.new_requests == []


def test_request_with_its_last_tokens_in_flight_is_not_scheduled_again() -> None:
    simulation = Simulation(make_scheduler(), in_flight=3)
    simulation.add(make_request("a", prompt_len=4, max_tokens=2))
    lengths = [len(entries(simulation.step())) for _ in range(4)]
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
