"""A step that fails or is interrupted, at any place, leaves an engine that goes on rightly."""

import functools
from typing import Any

import pytest
import torch

from drafters.base import DrafterBase, DrafterConfig
from runner.async_output import OutputRing
from runner.buffers import StagedTables
from runner.models.hf import HFModel
from runner.rows import scatter_rows
from specdec import LLM, Engine, SamplingParams
from specdec.protocols import (
    DraftBuffers,
    DraftContext,
    DrafterCapabilities,
    StateView,
    TargetView,
    VerifyContext,
)
from specdec.registry import register_drafter
from tests.models import random_prompts, tiny_model, tiny_target

K = 3
NUM_TOKENS = 16
PROMPTS = random_prompts((5, 17, 9, 3))
PARAMS = [SamplingParams(temperature=t, seed=1, max_tokens=NUM_TOKENS) for t in (0, 0.8, 0, 0.8)]


@functools.cache
def target() -> Any:
    return tiny_target(tiny_model("llama"))


def make_engine(drafter: Any = "ngram", **options: Any) -> Engine:
    sizes = {"max_model_len": 64, "max_num_reqs": 3, "max_num_batched_tokens": 24}
    return Engine(target(), drafter, "sampled_match", K, **{**sizes, **options})


@functools.cache
def expected() -> list[list[int]]:
    llm = LLM(target(), "none", "sampled_match", max_model_len=64)
    return [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]


class Fault(Exception):
    """What a test makes happen."""


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, after: bool
) -> None:
    """Make the given call of a method raise, before or after it has done its work."""
    method, calls = getattr(owner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call and not after:
            raise Fault
        result = method(*args, **kwargs)
        if len(calls) == call:
            raise Fault
        return result

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("call", [1, 3, 6])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HFModel, "forward_with_layers"),
        (OutputRing, "read"),
        (StagedTables, "apply"),
        (OutputRing, "end_step"),
    ],
    ids=["forward", "wait", "staged writes", "event"],
)
@pytest.mark.parametrize("scope", ["none", "step"])
def test_text_goes_on_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, after: bool, scope: str
) -> None:
    engine = make_engine(graph_scope=scope, max_steps_in_flight=2, graph_num_reqs=[1, 3])
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)
    fail_once(monkeypatch, owner, name, call, after)
    texts, faults = {}, 0
    for _ in range(200):
        if not engine.has_requests:
            break
        try:
            increments = engine.step()
        except Fault:
            faults += 1
            continue
        for increment in increments:
            if increment.output is not None:
                texts[increment.request_id] = increment.output.token_ids
    assert faults == 1
    assert [texts[str(i)] for i in range(len(PROMPTS))] == expected()
    state = engine.runner.state
    assert state.num_free_rows == state.max_num_reqs
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks


def test_generate_works_after_an_interrupt_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(target(), "ngram", "sampled_match", K, max_model_len=64, max_steps_in_flight=2)
    with monkeypatch.context() as patch:
        fail_once(patch, OutputRing, "read", 5, after=False)
        with pytest.raises(Fault):
            llm.generate(PROMPTS, PARAMS)
    assert not llm.engine.has_requests
    for _ in range(2):
        assert [out.token_ids for out in llm.generate(PROMPTS, PARAMS)] == expected()


def test_generate_leaves_the_requests_of_its_caller_alone() -> None:
    llm = LLM(target(), "ngram", "sampled_match", K, max_model_len=64)
    llm.engine.add_request("mine", PROMPTS[1], PARAMS[1])
    assert llm.generate([PROMPTS[0]], PARAMS[0])[0].token_ids == expected()[0]
    mine: list[int] = []
    while llm.engine.has_requests:
        for increment in llm.engine.step():
            assert increment.request_id == "mine"
            mine += increment.new_token_ids
    assert mine == expected()[1]


def test_a_new_request_starts_beside_running_ones_that_grow() -> None:
    engine = make_engine("none", max_model_len=240, num_kv_blocks=24, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(name, random_prompts([30])[0], params)
    for _ in range(30):
        engine.step()
    engine.add_request("late", random_prompts([40])[0], params)
    started = [any(i.request_id == "late" for i in engine.step()) for _ in range(6)]
    assert any(started)


class ByTheBook:
    """The six methods of the drafter protocol and nothing else."""

    capabilities = DrafterCapabilities()

    def __init__(self, config: DrafterConfig) -> None:
        self.seen: list[tuple[list[int], int]] = []

    def load(self, target: TargetView) -> None:
        pass

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        self.buffers = buffers

    def add_request(self, req_state_idx: int) -> None:
        pass

    def propose(self, ctx: DraftContext) -> None:
        # Reads what belongs to the step's tokens: it may, as it does not split off a first pass.
        last = ctx.input_ids[ctx.query_start_loc[1:].long() - 1]
        drafts = last[:, None].expand(-1, K).clamp(min=0)
        scatter_rows(self.buffers.draft_tokens, ctx.idx_mapping, drafts)

    def observe(self, ctx: VerifyContext) -> None:
        rows = ctx.idx_mapping.tolist()
        for place, row in enumerate(rows):
            if row >= 0:
                drafts = self.buffers.draft_tokens[row].tolist()
                self.seen.append((drafts, int(ctx.is_verify[place])))

    def state_bytes(self) -> int:
        return 0


register_drafter("test_by_the_book", DrafterConfig)(ByTheBook)


@pytest.mark.parametrize("scope", ["none", "step"])
def test_a_drafter_that_has_just_the_protocol_runs_in_every_scope(scope: str) -> None:
    engine = make_engine("test_by_the_book", graph_scope=scope, graph_num_reqs=[3])
    texts = {}
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)
    while engine.has_requests:
        for increment in engine.step():
            if increment.output is not None:
                texts[increment.request_id] = increment.output.token_ids
    assert [texts[str(i)] for i in range(len(PROMPTS))] == expected()
    drafter: Any = engine.drafter
    verified = [drafts for drafts, is_verify in drafter.seen if is_verify]
    others = [drafts for drafts, is_verify in drafter.seen if not is_verify]
    assert any(max(drafts) >= 0 for drafts in verified)
    assert all(max(drafts) < 0 for drafts in others), "drafts of an earlier owner are seen"


@register_drafter("test_resets_rows", DrafterConfig)
class ResetsRows(DrafterBase):
    """Keeps a tensor that a step made, and resets a row of it for a new owner."""

    capabilities = DrafterCapabilities(graph_safe=False)
    kept: torch.Tensor | None = None

    def add_request(self, req_state_idx: int) -> None:
        if self.kept is not None:
            self.kept[req_state_idx] = 0

    def propose(self, ctx: DraftContext) -> None:
        if self.kept is None:
            self.kept = torch.zeros_like(ctx.state.total_len)
        self.kept += 1


def test_a_row_can_be_reset_in_what_a_step_made() -> None:
    engine = make_engine("test_resets_rows")
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, PARAMS[0])
        for _ in range(3):
            engine.step()


def test_nothing_stays_of_requests_that_were_aborted_before_an_error() -> None:
    llm = LLM(target(), "ngram", "sampled_match", K, max_model_len=64, max_num_reqs=3)

    def abort_and_fail(increment: Any) -> None:
        for name in llm.engine.unfinished_ids:
            llm.engine.abort(name)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, PARAMS, on_increment=abort_and_fail)
    assert not llm.engine.has_requests
    assert len(llm.generate(PROMPTS, PARAMS)) == len(PROMPTS)
