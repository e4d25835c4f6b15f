"""Rows from add to finish, preemption, resumption and abort, driven through the engine at random.

The model is a dictionary of what was asked for; the expected text of a request is transformers' own
greedy text of its prompt, run alone.
"""

import functools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runner.buffers import StagedTables
from runner.loader import LoadedTarget
from runner.states import NewRow, RequestState
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.types import Increment, SamplingParams
from tests.models import random_prompts, reference_greedy, tiny_model, tiny_target

NUM_DRAFTS = 3
MAX_MODEL_LEN = 48
NUM_BLOCKS = 16  # of 4 tokens; a request alone takes up to 12, so two long ones do not fit
NUM_ROWS = 3
MAX_NEW = 24
PROMPT_LENS = (1, 3, 7, 12, 18, 25)
CONFIGS = [(drafter, depth) for drafter in ("none", "ngram") for depth in (1, 2)]


@dataclass(frozen=True)
class Toy:
    """A tiny target and the greedy continuation of each prompt."""

    target: LoadedTarget
    prompts: list[list[int]]
    texts: list[list[int]]


@functools.cache
def toy() -> Toy:
    model = tiny_model(
        "llama", seed=1, num_hidden_layers=2, hidden_size=32, intermediate_size=64, head_dim=8
    )
    prompts = random_prompts(PROMPT_LENS, seed=2)
    texts = [reference_greedy(model, prompt, MAX_NEW) for prompt in prompts]
    return Toy(tiny_target(model), prompts, texts)


def make_engine(drafter: str, max_steps_in_flight: int, num_rows: int = NUM_ROWS) -> Engine:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        max_num_reqs=num_rows,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=16,  # longer prompts run in chunks
        num_kv_blocks=NUM_BLOCKS,
        block_size=4,
        max_steps_in_flight=max_steps_in_flight,
    )
    return Engine(toy().target, drafter, "rejection", NUM_DRAFTS, config)


def expected_text(prompt: int, params: SamplingParams) -> tuple[list[int], str]:
    """Return what a request alone gives, and why it ends."""
    room = min(params.max_tokens, MAX_MODEL_LEN - len(toy().prompts[prompt]))
    text = toy().texts[prompt][:room]
    stops = [i for i, token in enumerate(text) if token in (params.stop_token_ids or [])]
    return (text[: stops[0] + 1], "stop") if stops else (text, "length")


@dataclass
class Asked:
    """The model's view of an unfinished request."""

    text: list[int]
    finish_reason: str
    got: list[int] = field(default_factory=list)
    aborted: bool = False


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps, aborts, and takes KV blocks away so that requests are preempted and resume."""

    def __init__(self, drafter: str, max_steps_in_flight: int) -> None:
        super().__init__()
        self.engine = make_engine(drafter, max_steps_in_flight)
        self.asked: dict[str, Asked] = {}
        self.num_added = 0
        self.taken_blocks: list[int] = []
        # Who had a row under which generation: (row, generation) -> request and its preemptions.
        self.owners: dict[tuple[int, int], tuple[str, int]] = {}
        self.generations = self.engine.runner.state.generation_np.copy()

    @rule(
        prompt=st.integers(0, len(PROMPT_LENS) - 1),
        max_tokens=st.integers(1, MAX_NEW),
        stop_at=st.none() | st.integers(0, MAX_NEW - 1),
        budget=st.none() | st.integers(0, NUM_DRAFTS),
    )
    def add(self, prompt: int, max_tokens: int, stop_at: int | None, budget: int | None) -> None:
        stop = None if stop_at is None else [toy().texts[prompt][stop_at]]
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            num_speculative_tokens=budget,
        )
        name = f"request {self.num_added}"
        self.num_added += 1
        self.engine.add_request(name, toy().prompts[prompt], params)
        self.asked[name] = Asked(*expected_text(prompt, params))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            for increment in self.engine.step():
                self._apply(increment)

    def _apply(self, increment: Increment) -> None:
        asked = self.asked[increment.request_id]
        asked.got += increment.new_token_ids
        assert asked.got == asked.text[: len(asked.got)]
        if increment.finish_reason is None:
            return
        assert increment.output is not None
        assert increment.output.token_ids == asked.got
        if asked.aborted:
            assert increment.finish_reason == "abort"
        else:
            assert (asked.got, increment.finish_reason) == (asked.text, asked.finish_reason)
        del self.asked[increment.request_id]

    @precondition(lambda self: any(not asked.aborted for asked in self.asked.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = [name for name, asked in self.asked.items() if not asked.aborted]
        name = data.draw(st.sampled_from(names))
        self.engine.abort(name)
        self.asked[name].aborted = True

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def take_free_blocks_away(self, num_blocks: int) -> None:
        blocks = self.engine.scheduler.blocks
        wanted = len(self.taken_blocks) + min(num_blocks, blocks.num_free)
        assert blocks.grow(self.taken_blocks, wanted * blocks.block_size) is not None

    @rule()
    def give_blocks_back(self) -> None:
        self.engine.scheduler.blocks.free(self.taken_blocks)

    @invariant()
    def rows_are_owned_once_and_none_is_lost(self) -> None:
        scheduler, state = self.engine.scheduler, self.engine.runner.state
        rows = [r.row for r in scheduler.running]
        assert all(row is not None for row in rows)
        assert sorted([*rows, *state._free_rows]) == list(range(NUM_ROWS))
        assert all(r.row is None and not r.block_ids for r in scheduler.waiting)
        unfinished = {r.request_id for r in (*scheduler.running, *scheduler.waiting)}
        assert unfinished == {name for name, asked in self.asked.items() if not asked.aborted}

    @invariant()
    def blocks_are_owned_once_and_none_is_lost(self) -> None:
        scheduler = self.engine.scheduler
        owned = [block for r in scheduler.running for block in r.block_ids]
        everywhere = [*owned, *self.taken_blocks, *scheduler.blocks._free]
        assert sorted(everywhere) == list(range(NUM_BLOCKS))

    @invariant()
    def generations_grow_and_name_one_owner(self) -> None:
        generations = self.engine.runner.state.generation_np
        assert (generations >= self.generations).all()
        self.generations = generations.copy()
        for request in self.engine.scheduler.running:
            assert request.row is not None
            assert request.generation == generations[request.row]
            owner = (request.request_id, request.stats.num_preemptions)
            key = (request.row, request.generation)
            assert self.owners.setdefault(key, owner) == owner

    @invariant()
    def rows_hold_the_tokens_of_their_owner(self) -> None:
        state = self.engine.runner.state
        for request in self.engine.scheduler.running:
            tokens = state.all_token_ids.tensor[request.row, : len(request.token_ids)]
            assert tokens.tolist() == request.token_ids
            table = state.block_table.tensor[request.row, : len(request.block_ids)]
            assert table.tolist() == request.block_ids

    def teardown(self) -> None:
        self.give_blocks_back()
        for _ in range(1000):
            if not self.engine.has_requests:
                break
            self.step(1)
        assert self.asked == {}
        assert self.engine.runner.state.num_free_rows == NUM_ROWS
        assert self.engine.scheduler.blocks.num_free == NUM_BLOCKS


@pytest.mark.parametrize(("drafter", "depth"), CONFIGS)
def test_random_lives_of_requests_keep_rows_blocks_and_texts_apart(
    drafter: str, depth: int
) -> None:
    run_state_machine_as_test(
        lambda: EngineMachine(drafter, depth),
        settings=settings(max_examples=12, stateful_step_count=25, deadline=None, derandomize=True),
    )


def run_all(engine: Engine) -> dict[str, Increment]:
    """Step until nothing is left; return the last increment of each request."""
    last = {}
    for _ in range(1000):
        if not engine.has_requests:
            return last
        for increment in engine.step():
            last[increment.request_id] = increment
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize(("drafter", "depth"), CONFIGS)
def test_preempted_requests_resume_with_the_same_text(drafter: str, depth: int) -> None:
    engine = make_engine(drafter, depth)
    for prompt in (4, 5, 4, 5):
        params = SamplingParams(temperature=0, max_tokens=MAX_NEW)
        engine.add_request(f"{len(engine._groups)}:{prompt}", toy().prompts[prompt], params)
    finished = run_all(engine)
    num_preemptions = 0
    for name, increment in finished.items():
        assert increment.output is not None
        prompt = int(name.split(":")[1])
        expected, _ = expected_text(prompt, SamplingParams(max_tokens=MAX_NEW))
        assert increment.output.token_ids == expected
        num_preemptions += increment.output.stats.num_preemptions
    assert len(finished) == 4
    assert num_preemptions > 0, "nothing was preempted: the test shows nothing"


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_step_in_flight_of_an_aborted_request_is_not_given_to_the_next_owner(
    drafter: str,
) -> None:
    engine = make_engine(drafter, max_steps_in_flight=2, num_rows=1)
    params = SamplingParams(temperature=0, max_tokens=10)
    engine.add_request("first", toy().prompts[2], params)
    for _ in range(3):
        engine.step()
    assert engine._in_flight, "no step in flight: the test shows nothing"
    engine.abort("first")
    engine.add_request("second", toy().prompts[3], params)
    finished = run_all(engine)
    assert finished["first"].finish_reason == "abort"
    assert finished["second"].output is not None
    assert finished["second"].output.token_ids == toy().texts[3][:10]
    assert engine.runner.state.generation_np.tolist() == [2]


def make_state() -> RequestState:
    return RequestState(2, 8, 4, NUM_DRAFTS, torch.device("cpu"))


def test_row_is_initialised_by_what_its_new_owner_brings() -> None:
    state = make_state()
    row = state.add_request(NewRow([5, 6, 7], prompt_len=2, max_total_len=8, draft_budget=1))
    StagedTables(state.tables, state.device).apply()
    assert state.all_token_ids.tensor[row, :3].tolist() == [5, 6, 7]
    expected = {
        "prompt_len": 2,
        "prefill_len": 3,
        "total_len": 3,
        "max_total_len": 8,
        "draft_budget": 1,
        "num_computed_tokens": 0,
    }
    for name, value in expected.items():
        assert int(getattr(state, name).tensor[row]) == value, name


def test_row_is_reused_after_remove_under_a_new_generation() -> None:
    state = make_state()
    new = NewRow([1], prompt_len=1, max_total_len=4, draft_budget=0)
    first, second = state.add_request(new), state.add_request(new)
    assert {first, second} == {0, 1}
    with pytest.raises(RuntimeError, match="all 2 rows are taken"):
        state.add_request(new)
    state.remove_request(first)
    assert state.num_free_rows == 1
    assert state.add_request(new) == first
    assert np.array_equal(state.generation_np[[first, second]], [2, 1])


def test_row_cannot_be_removed_twice() -> None:
    state = make_state()
    row = state.add_request(NewRow([1], prompt_len=1, max_total_len=4, draft_budget=0))
    state.remove_request(row)
    with pytest.raises(KeyError):
        state.remove_request(row)
    assert state.num_free_rows == 2
