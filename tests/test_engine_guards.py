"""What keeps an engine sound: the empty step, interruptions, memory, statistics at the very end."""

import functools
import time
from typing import Any

import numpy as np
import pytest
import torch

from drafters.ngram import NgramDrafter
from runner.input_batch import padding_plan
from sampler.sampler import Sampler
from specdec import LLM, SamplingParams
from specdec.errors import CapacityError, UnsupportedError
from specdec.protocols import VerifyContext
from specdec.registry import build_config
from specdec.trace import StepTrace
from tests.models import random_prompts, tiny_model, tiny_target

K = 3
PROMPT = random_prompts((12,))[0]
DRAFTERS: dict[str, Any] = {
    "none": "none",
    "ngram": "ngram",
    "draft_model": {"name": "draft_model", "model": "target"},
    "oracle": {"name": "oracle", "texts": [PROMPT]},
}


@functools.cache
def target() -> Any:
    return tiny_target(tiny_model("llama"))


def make_llm(drafter: Any = "ngram", verifier: str = "rejection", **options: Any) -> LLM:
    return LLM(target(), drafter, verifier, K, **{"max_model_len": 128, **options})


def greedy(max_tokens: int = 20, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def tensors_of(llm: LLM) -> dict[str, torch.Tensor]:
    """Return copies of everything a step could write to: state, and KV but the trash block."""
    runner = llm.engine.runner
    state = {f"state.{k}": v for k, v in vars(runner.state.view()).items()}
    state["drafts"], state["kind"] = runner.state.draft_tokens, runner.state.draft_kind
    for i, kv in enumerate(runner.kv_caches):
        for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
            state[f"kv{i}.{layer}"] = torch.stack([keys, values])[:, : kv.trash_slot]
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize(("query_len", "is_prefill"), [(8, True), (K + 1, False), (1, False)])
def test_empty_step_touches_no_state(drafter: Any, query_len: int, is_prefill: bool) -> None:
    llm = make_llm(drafter)
    llm.generate([PROMPT], greedy())  # row 0 then holds a text longer than the empty step
    before = tensors_of(llm)
    if not is_prefill:  # nothing verifies more than the engine's own K + 1 positions
        query_len = min(query_len, llm.engine.num_speculative_tokens + 1)
    plan = padding_plan(2, query_len, is_prefill)
    output = llm.engine.runner.execute_model(plan).output.wait()
    assert output.num_sampled.tolist() == [0, 0]
    for name, tensor in tensors_of(llm).items():
        assert torch.equal(tensor, before[name]), name


def test_interrupted_generate_leaves_nothing_queued() -> None:
    llm = make_llm()
    expected = llm.generate([PROMPT], greedy())[0].token_ids

    def interrupt(increment: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT[:5]], greedy(), on_increment=interrupt)
    assert llm.engine.unfinished_ids == set()
    assert llm.generate([PROMPT], greedy())[0].token_ids == expected


def test_requests_of_the_caller_do_not_reach_the_callback_of_generate() -> None:
    llm = make_llm()
    llm.engine.add_request("mine", PROMPT, greedy(30))
    seen = set()
    llm.generate([PROMPT[:5]], greedy(4), on_increment=lambda i: seen.add(i.request_id))
    assert seen
    assert "mine" not in seen
    assert llm.engine.unfinished_ids == {"mine"}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_traced_step_times_add_up_to_no_more_than_the_wall_clock(steps_in_flight: int) -> None:
    trace = StepTrace()
    llm = LLM(
        target(),
        "ngram",
        "greedy",
        K,
        trace,
        max_model_len=128,
        max_steps_in_flight=steps_in_flight,
    )
    started = time.perf_counter()
    llm.generate([PROMPT], greedy(60))
    wall_ms = (time.perf_counter() - started) * 1e3
    steps = trace.steps()
    assert len(steps) > 10
    assert steps["step_ms"].sum() <= wall_ms


def test_drafts_behind_a_stop_token_drawn_after_a_rejection_are_not_counted() -> None:
    text = make_llm("none").generate([PROMPT], greedy())[0].token_ids
    stop = text[1]
    assert stop != text[0]
    wrong = [*PROMPT, text[0], (stop + 1) % 97, *text[2:]]  # drafts: wrong at once, then two more
    llm = make_llm({"name": "oracle", "texts": [wrong]})
    out = llm.generate([PROMPT], greedy(stop_token_ids=[stop]))[0]
    assert out.token_ids == text[:2]
    assert out.stats.drafted_per_position == [1, 0, 0]
    assert out.stats.accepted_per_position == [0, 0, 0]


def test_numpy_seed_is_taken_as_the_same_integer() -> None:
    llm = make_llm(verifier="sampled_match")
    params = [SamplingParams(max_tokens=8, seed=seed) for seed in (np.int64(2**62 + 3), 2**62 + 3)]
    first, second = llm.generate([PROMPT, PROMPT], params)  # pyright: ignore[reportArgumentType]
    assert first.token_ids == second.token_ids


def test_kv_cache_beyond_the_memory_is_one_sentence() -> None:
    with pytest.raises(CapacityError, match=r"1000000000000 KV blocks take .* GiB"):
        make_llm(num_kv_blocks=10**12)


def test_stop_string_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="stop strings need a tokenizer"):
        make_llm().generate([PROMPT], greedy(stop="x"))


def test_drafter_sees_its_last_drafts_when_it_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def observe(self: NgramDrafter, ctx: VerifyContext) -> None:
        seen.append(self.buffers.draft_tokens[0].tolist())

    monkeypatch.setattr(NgramDrafter, "observe", observe)
    # Every token of the vocabulary has occurred, so that there always is a match.
    out = make_llm("ngram", max_num_reqs=1).generate([list(range(97))], greedy(10))[0]
    assert out.stats.num_drafted > 0
    assert any(draft >= 0 for drafts in seen for draft in drafts)


def test_uniform_and_gumbel_noise_of_a_drafter_are_unlike() -> None:
    verifier = build_config("verifier", "rejection")
    sampler = Sampler(verifier[0].cls(verifier[1]), 2, 97, torch.device("cpu"))
    noise = sampler.noise()
    rows, positions = torch.tensor([1]), torch.tensor([7])
    uniform = noise.uniform(rows, positions)
    gumbel = noise.gumbel(rows, positions, torch.arange(97))
    assert not torch.isclose(-(-(1 - uniform).log()).log(), gumbel[0]).any()
