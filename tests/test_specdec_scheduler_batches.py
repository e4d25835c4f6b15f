"""Whole batches scheduled at once: uniform shapes, repeated steps, the same as one by one."""

import numpy as np
import pytest

from specdec.scheduler import ScheduledStep, Scheduler, SchedulerOutput
from tests.simulation import Simulation, commit_all, entries, make_request, make_scheduler


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 4])
@pytest.mark.parametrize("num_drafts", [None, 0])
def test_uniform_verifications_have_one_shape_whatever_their_drafts(
    num_speculative_tokens: int, num_drafts: int | None
) -> None:
    k = num_speculative_tokens
    scheduler = make_scheduler(num_speculative_tokens=k, uniform_verify=True)
    for budget in range(k + 1):
        scheduler.add(make_request(str(budget), prompt_len=3, max_tokens=20, draft_budget=budget))
    commit_all(scheduler, scheduler.schedule(), num_drafts)
    for _ in range(3):
        output = scheduler.schedule()
        assert [s.num_tokens for s in entries(output)] == [1 + k] * (k + 1)
        commit_all(scheduler, output, num_drafts)


def test_uniform_verification_that_does_not_fit_the_budget_waits_whole() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=7, num_speculative_tokens=3, uniform_verify=True
    )
    for name in "ab":
        scheduler.add(make_request(name, prompt_len=2, max_tokens=20, draft_budget=0))
    commit_all(scheduler, scheduler.schedule())
    assert [s.num_tokens for s in entries(scheduler.schedule())] == [4]


def test_batch_that_goes_on_is_the_same_step_until_it_changes() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3, uniform_verify=True)
    for name in "ab":
        scheduler.add(make_request(name, prompt_len=2, max_tokens=60, draft_budget=3))
    commit_all(scheduler, scheduler.schedule())
    first = scheduler.schedule()
    commit_all(scheduler, first)
    second = scheduler.schedule()
    assert second.step is first.step
    commit_all(scheduler, second)
    scheduler.add(make_request("c", prompt_len=2, max_tokens=60))
    third = scheduler.schedule()
    commit_all(scheduler, third)
    assert [s.num_tokens for s in entries(third)] == [4, 4, 2]
    fourth = scheduler.schedule()
    commit_all(scheduler, fourth)
    assert fourth.step is not first.step
    scheduler.remove(scheduler.running[0])
    assert [s.request.request_id for s in entries(scheduler.schedule())] == ["b", "c"]


class OneByOne(Scheduler):
    """A scheduler that looks at every request of every step."""

    def _repeat(self, step: ScheduledStep, output: SchedulerOutput) -> bool:
        return False

    def _grow_all(self, ends: np.ndarray, output: SchedulerOutput) -> bool:
        return False


@pytest.mark.parametrize("seed", range(40))
def test_whole_batches_are_scheduled_as_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.scheduler._BLOCKS_AHEAD", 0)
    draw = np.random.default_rng(seed)
    k, in_flight = int(draw.integers(0, 4)), int(draw.integers(1, 4))
    sizes: dict[str, int] = {
        "num_blocks": int(draw.integers(8, 40)),
        "max_num_reqs": int(draw.integers(1, 6)),
        "max_num_batched_tokens": int(draw.integers(k + 1, 40)),
        "num_speculative_tokens": k,
    }
    uniform = bool(draw.integers(2))
    requests = [
        (int(draw.integers(1, 20)), int(draw.integers(1, 12)), int(draw.integers(0, k + 1)))
        for _ in range(8)
    ]
    steps: list[list[tuple[object, ...]]] = []
    for make in (Scheduler, OneByOne):
        rng = np.random.default_rng(seed)
        scheduler = make_scheduler(**sizes, uniform_verify=uniform, make=make)
        simulation = Simulation(
            scheduler, in_flight, lambda n, rng=rng: int(rng.integers(0, n + 1))
        )
        seen: list[tuple[object, ...]] = []
        for i, request in enumerate(requests):
            simulation.add(make_request(str(i), *request))
        while scheduler.has_requests or simulation.flights:
            output = simulation.step()
            seen.append(
                (
                    [(e.request.request_id, e.num_tokens, e.is_prefill) for e in entries(output)],
                    [(r.request_id, at, blocks) for r, at, blocks in output.new_blocks],
                    [r.request_id for r in output.preempted],
                    output.must_drain,
                    output.max_seq_len,
                    output.max_total_len,
                )
            )
        steps.append(seen)
    assert steps[0] == steps[1]


def test_blocks_are_handed_out_ahead_only_while_there_are_plenty() -> None:
    for num_blocks, held in ((100, 8), (11, 4)):
        scheduler = make_scheduler(num_blocks=num_blocks, block_size=4)
        request = make_request("a", prompt_len=12, max_tokens=32)
        scheduler.add(request)
        commit_all(scheduler, scheduler.schedule())
        assert len(request.block_ids) == 3
        commit_all(scheduler, scheduler.schedule())
        assert len(request.block_ids) == held, num_blocks
