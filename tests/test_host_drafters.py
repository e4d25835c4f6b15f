"""Drafters that run on the host: never a wrong text, whatever becomes of requests and rows."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from drafters.base import DrafterBase, DrafterConfig
from runner.async_output import OutputRing
from runner.buffers import StagedTables
from runner.models.hf import HFModel
from sampler.processors.grammar import GrammarMasks
from specdec import LLM, Engine, SamplingParams, StructuredOutputsParams
from specdec import host_drafts as host_drafts_module
from specdec.errors import ConfigError
from specdec.protocols import DraftContext, DrafterCapabilities, HostRequest, HostRow
from specdec.registry import register_drafter
from tests.models import random_prompts, scripted_model, tiny_model, tiny_target
from tests.schedules import Arrival, draw_schedule, run_schedule
from tests.test_engine_recovery import Fault, fail_once
from tests.test_graph_scopes import SCOPES, SIZES, autoregressive

K = 3
HOST = "draft eager: the drafter runs on the host"


@functools.cache
def target() -> Any:
    return tiny_target(tiny_model("llama"))


def make_engine(drafter: Any = "suffix", verifier: str = "sampled_match", **options: Any) -> Engine:
    return Engine(target(), drafter, verifier, K, **{**SIZES, **options})


@dataclasses.dataclass
class KnowingConfig(DrafterConfig):
    """Texts by prompt, and how often a draft is wrong."""

    name: str = "test_knows_on_host"
    texts: list[list[int]] = dataclasses.field(default_factory=list)
    wrong_every: int = 5


@register_drafter("test_knows_on_host", KnowingConfig)
class KnowsOnHost(DrafterBase):
    """Replays given texts from the host, now and then wrongly; checks all that it is shown."""

    capabilities = DrafterCapabilities(on_cpu=True, reads_token_table=False)
    config: KnowingConfig

    def __init__(self, config: KnowingConfig) -> None:
        super().__init__(config)
        self.seen: dict[HostRequest, list[int]] = {}
        self.ended: list[HostRequest] = []
        self.asked = 0

    def propose(self, ctx: DraftContext) -> None:
        pass

    def propose_on_host(self, rows: Sequence[HostRow]) -> list[list[int]]:
        assert len({row.row for row in rows}) == len(rows)
        return [self._propose(row) for row in rows]

    def _propose(self, row: HostRow) -> list[int]:
        tokens = list(row.request.token_ids)
        before = self.seen.get(row.request, [])
        assert tokens[: len(before)] == before, "a text that was seen has changed"
        assert row.request not in self.ended
        assert 1 <= row.num_drafts <= K
        self.seen[row.request] = tokens
        prompt = tokens[: row.request.prompt_len]
        text = next((t for t in self.config.texts if t[: len(prompt)] == prompt), tokens)
        drafts = text[len(tokens) : len(tokens) + row.num_drafts]
        self.asked += 1
        if self.asked % self.config.wrong_every == 0:
            drafts = [(token + 1) % 97 for token in drafts]
        return drafts

    def end_request(self, request: HostRequest) -> None:
        assert list(request.token_ids)[: len(self.seen.get(request, []))] == self.seen.get(
            request, []
        )
        self.ended.append(request)


def knowing(arrivals: list[Arrival], expected: dict[str, list[int]]) -> dict[str, Any]:
    texts = [arrival.prompt + expected[str(i)] for i, arrival in enumerate(arrivals)]
    return {"name": "test_knows_on_host", "texts": texts}


@pytest.mark.parametrize(("seed", "scope"), [*enumerate([*SCOPES, "none", "step"])])
def test_text_is_that_of_plain_decoding_under_random_schedules(seed: int, scope: str) -> None:
    arrivals = draw_schedule(seed)
    expected = autoregressive(target(), arrivals)
    for drafter in ("suffix", knowing(arrivals, expected)):
        engine = make_engine(drafter, **SCOPES[scope])
        result = run_schedule(engine, arrivals)
        assert len(result.outputs) == len(arrivals)
        for request_id, output in result.outputs.items():
            assert output.token_ids == expected[request_id][: len(output.token_ids)]
        for request_id, text in result.texts().items():
            assert text == expected[request_id]
        launches = engine.runner.graphs.launches
        assert launches[HOST] > 0
        assert (launches["step"] > 0) == (SCOPES[scope]["graph_scope"] == "step")
        assert not engine._host_drafts._requests
    assert isinstance(engine.drafter, KnowsOnHost)
    assert len(engine.drafter.ended) == len(arrivals)
    accepted = sum(output.stats.num_accepted for output in result.outputs.values())
    drafted = sum(output.stats.num_drafted for output in result.outputs.values())
    assert drafted > accepted > drafted / 2


@pytest.mark.parametrize("scope", ["step", "none"])
def test_preempted_requests_come_back_as_themselves(scope: str) -> None:
    num_preemptions = 0
    for seed in range(4):
        arrivals = [
            dataclasses.replace(arrival, step=0, abort_after=None)
            for arrival in draw_schedule(seed)
        ]
        expected = autoregressive(target(), arrivals)
        engine = make_engine(knowing(arrivals, expected), **SCOPES[scope])
        result = run_schedule(engine, arrivals)
        assert result.texts() == expected
        num_preemptions += result.num_preemptions
    assert num_preemptions > 0


def test_what_is_always_right_is_always_accepted_and_verifies_no_empty_position() -> None:
    prompts = random_prompts((5, 17, 9))
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=1 + 3 * (K + 1))
    plain = LLM(target(), "none", "sampled_match", max_model_len=64).generate(prompts, params)
    texts = [p + out.token_ids for p, out in zip(prompts, plain, strict=True)]
    drafter = {"name": "test_knows_on_host", "texts": texts, "wrong_every": 1000}
    llm = LLM(target(), drafter, "sampled_match", K, max_model_len=64)
    for out, wanted in zip(llm.generate(prompts, params), plain, strict=True):
        assert out.token_ids == wanted.token_ids
        assert out.stats.num_verify_steps == 3
        assert out.stats.accepted_per_position == [3] * K


def test_positions_without_a_draft_are_not_verified_on_a_cpu() -> None:
    arrivals = draw_schedule(1)
    shapes = []
    for drafter in ("none", "suffix"):
        engine = make_engine(drafter, "sampled_match")
        execute = engine.runner.execute_model

        def recorded(plan: Any, execute: Any = execute, **options: Any) -> Any:
            shapes.append((drafter, plan.query_lens_np[~plan.is_prefill_np].copy()))  # noqa: B023
            return execute(plan, **options)

        engine.runner.execute_model = recorded
        run_schedule(engine, arrivals)
    lens = np.concatenate([lens for name, lens in shapes if name == "suffix"])
    assert 1 in lens  # a row without a match runs one position, beside rows with drafts
    assert lens.max() > 1


@pytest.mark.parametrize("call", [5])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HFModel, "forward_with_layers"),
        (OutputRing, "read"),
        (StagedTables, "apply"),
        (OutputRing, "end_step"),
        (KnowsOnHost, "propose_on_host"),
    ],
    ids=["forward", "wait", "staged writes", "event", "drafter"],
)
@pytest.mark.parametrize("scope", ["none", "step"])
def test_text_goes_on_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, after: bool, scope: str
) -> None:
    arrivals = [
        dataclasses.replace(arrival, step=0, abort_after=None)
        for arrival in draw_schedule(2, num_requests=5)
    ]
    expected = autoregressive(target(), arrivals)
    engine = make_engine(knowing(arrivals, expected), **SCOPES[scope])
    for i, arrival in enumerate(arrivals):
        engine.add_request(str(i), arrival.prompt, arrival.params)
    fail_once(monkeypatch, owner, name, call, after)
    texts, faults = {}, 0
    for _ in range(400):
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
    assert texts == expected


def test_samples_of_a_request_are_texts_of_their_own() -> None:
    prompt = random_prompts((11,))[0]
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=20, n=3)
    plain = LLM(target(), "none", "sampled_match", max_model_len=64).generate([prompt], params)
    texts = [prompt + sample.token_ids for sample in plain[0].outputs]
    drafter = {"name": "test_knows_on_host", "texts": texts[1:2], "wrong_every": 1000}
    llm = LLM(target(), drafter, "sampled_match", K, max_model_len=64)
    (out,) = llm.generate([prompt], params)
    assert [s.token_ids for s in out.outputs] == [s.token_ids for s in plain[0].outputs]
    accepted = [sample.stats.num_accepted for sample in out.outputs]
    assert accepted[1] > 12 > max(accepted[0], accepted[2])
    knows: Any = llm.engine.drafter
    assert {(r.request_id, r.sample_index) for r in knows.ended} == {
        (knows.ended[0].request_id, i) for i in range(3)
    }


def test_the_last_tokens_of_a_text_and_a_budget_limit_what_is_asked_for() -> None:
    rows: list[HostRow] = []

    @register_drafter("test_notes_rows", DrafterConfig)
    class NotesRows(KnowsOnHost):
        def __init__(self, config: DrafterConfig) -> None:
            super().__init__(KnowingConfig())

        def propose_on_host(self, asked: Sequence[HostRow]) -> list[list[int]]:
            rows.extend(asked)
            return [[1, 2, 3, 4, 5, 6] for _ in asked]  # more than any row can use

    llm = LLM(target(), "test_notes_rows", "sampled_match", K, max_model_len=64)
    budgets: Sequence[int | None] = [None, 0, 1]
    params = [
        SamplingParams(temperature=0, max_tokens=5, num_speculative_tokens=b) for b in budgets
    ]
    for out in llm.generate(random_prompts((4, 5, 6)), params):
        assert len(out.token_ids) == 5
    asked = {row.request.prompt_len: set() for row in rows}
    for row in rows:
        asked[row.request.prompt_len].add(row.num_drafts)
    assert asked == {4: {3, 2, 1}, 6: {1}}


def test_a_request_that_follows_a_grammar_is_drafted_for() -> None:
    pytest.importorskip("llguidance")
    from tests.models import byte_tokenizer

    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer))
    known = tiny_target(model, tokenizer)
    params = SamplingParams(
        temperature=0, max_tokens=16, structured_outputs=StructuredOutputsParams(regex="(ab)+c")
    )
    plain = LLM(known, "none", "greedy", max_model_len=64).generate(["xyz"], params)[0]
    prompt = tokenizer("xyz")["input_ids"]
    drafter = {"name": "test_knows_on_host", "texts": [prompt + plain.token_ids], "wrong_every": 3}
    llm = LLM(known, drafter, "greedy", K, max_model_len=64)
    staged = []
    stage = GrammarMasks.stage

    def noting(self: Any, row: int, masks: np.ndarray) -> None:
        staged.append(len(masks))
        stage(self, row, masks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarMasks, "stage", noting)
        (out,) = llm.generate(["xyz"], params)
    assert out.token_ids == plain.token_ids
    assert out.stats.num_accepted > 0
    assert max(staged) == K + 1


def test_a_token_outside_the_vocabulary_is_named() -> None:
    drafter = {"name": "test_knows_on_host", "texts": [[1, 2, 3, *[500] * 40]]}
    llm = LLM(target(), drafter, "greedy", K, max_model_len=64)
    with pytest.raises(ValueError, match=r"KnowsOnHost proposed token 500, .*\[0, 97\)"):
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8))


def test_more_steps_in_flight_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_steps_in_flight=2 .*SuffixDrafter.* give 1"):
        make_engine(max_steps_in_flight=2)
    assert make_engine(max_steps_in_flight=1).max_steps_in_flight == 1


def test_the_one_step_in_flight_is_said_where_the_device_could_do_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    assert engine.max_steps_in_flight == 1
    with caplog.at_level(logging.WARNING):
        assert host_drafts_module.steps_in_flight(engine.drafter, engine.config, 2) == 1
    assert "the drafter runs on the host (SuffixDrafter): one step in flight" in caplog.text


def test_a_drafter_without_the_methods_of_the_host_is_refused() -> None:
    @register_drafter("test_half_a_host", DrafterConfig)
    class HalfAHost(DrafterBase):
        capabilities = DrafterCapabilities(on_cpu=True)

        def propose_on_host(self, rows: Any) -> Any:
            return []

    with pytest.raises(ConfigError, match="HalfAHost says on_cpu and has no method end_request"):
        make_engine("test_half_a_host")


def test_suffix_drafts_from_outputs_of_earlier_requests() -> None:
    chain = tiny_target(scripted_model([(i + 1) % 100 for i in range(100)]))
    llm = LLM(chain, "suffix", "greedy", K, max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=41)
    (first,) = llm.generate([[3, 4, 5]], params)
    (again,) = llm.generate([[3, 4, 5]], params)
    assert first.token_ids == again.token_ids
    assert first.stats.num_drafted == 0
    assert first.stats.accepted_length == 1.0
    assert again.stats.num_accepted == again.stats.num_drafted > 25
