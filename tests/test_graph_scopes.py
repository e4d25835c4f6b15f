"""Text does not depend on what of a step is a graph, under random arrival, abort and preemption.

A CPU has no graphs: there a captured part is the function itself, called on the padded shapes and
fixed addresses that a graph would have. tests/test_gpu_graphs.py repeats it with real graphs.
"""

import dataclasses
from typing import Any

import pytest

from runner.loader import LoadedTarget
from specdec import Engine, SamplingParams
from tests.models import random_prompts, tiny_model, tiny_target
from tests.schedules import Arrival, draw_schedule, run_schedule

K = 3
SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_num_reqs": 5,
    "block_size": 4,
    "num_kv_blocks": 18,
}
SCOPES = {
    "step": {"graph_scope": "step", "graph_num_reqs": [1, 2, 4]},
    "step, one size": {"graph_scope": "step", "graph_num_reqs": [5]},
    "draft": {"graph_scope": "draft", "graph_num_reqs": [2, 5]},
    "none": {"graph_scope": "none"},
}
DRAFTERS: list[Any] = ["none", "ngram", {"name": "draft_model", "model": "target"}]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(tiny_model("llama"))


def make_engine(target: LoadedTarget, drafter: Any, verifier: str, **options: Any) -> Engine:
    return Engine(target, drafter, verifier, K, **{**SIZES, **options})


def autoregressive(target: LoadedTarget, arrivals: list[Arrival]) -> dict[str, list[int]]:
    engine = make_engine(target, "none", "sampled_match", num_kv_blocks=200)
    whole = [Arrival(a.step, a.prompt, a.params, None) for a in arrivals]
    return run_schedule(engine, whole).texts()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_text_is_that_of_plain_decoding_in_every_scope(
    target: LoadedTarget, seed: int, steps_in_flight: int
) -> None:
    arrivals = draw_schedule(seed)
    expected = autoregressive(target, arrivals)
    num_preemptions = 0
    for name, scope in SCOPES.items():
        drafter = DRAFTERS[(seed + len(name)) % len(DRAFTERS)]
        engine = make_engine(
            target, drafter, "sampled_match", max_steps_in_flight=steps_in_flight, **scope
        )
        result = run_schedule(engine, arrivals)
        num_preemptions += result.num_preemptions
        for request_id, text in result.texts().items():
            assert text == expected[request_id], (name, drafter, request_id)
        for request_id, output in result.outputs.items():
            assert output.token_ids == expected[request_id][: len(output.token_ids)]
    assert num_preemptions > 0


@pytest.mark.parametrize("scope", SCOPES)
def test_steps_in_flight_run_to_the_very_end_of_max_model_len(
    target: LoadedTarget, scope: str
) -> None:
    prompts = random_prompts([19, 63, 3, 62])
    params = SamplingParams(temperature=0.7, max_tokens=500, seed=5)
    arrivals = [Arrival(0, prompt, params, None) for prompt in prompts]
    expected = autoregressive(target, arrivals)
    options = {**SCOPES[scope], "num_kv_blocks": 80, "max_steps_in_flight": 2}
    for drafter in DRAFTERS[1:]:
        result = run_schedule(make_engine(target, drafter, "sampled_match", **options), arrivals)
        assert result.texts() == expected
    for name, prompt in enumerate(prompts):
        assert len(prompt) + len(expected[str(name)]) == SIZES["max_model_len"]


def test_the_parts_that_ran_are_counted_with_the_reason_for_what_ran_eager(
    target: LoadedTarget,
) -> None:
    arrivals = [
        dataclasses.replace(arrival, step=0, abort_after=None) for arrival in draw_schedule(1)
    ]
    options = {**SCOPES["step"], "num_kv_blocks": 80}
    engine = make_engine(target, "ngram", "sampled_match", **options)
    run_schedule(engine, arrivals)
    launches = engine.runner.graphs.launches
    assert launches["step"] > 0
    assert launches["propose"] > 0
    assert launches["target eager: the step runs prompt tokens"] > 0
    assert launches["target eager: more than 4 requests"] > 0
    engine = make_engine(target, "ngram", "sampled_match", **SCOPES["none"])
    run_schedule(engine, arrivals)
    assert set(engine.runner.graphs.launches) == {
        "target eager: graph_scope is none",
        "propose eager: graph_scope is none",
    }


@pytest.mark.parametrize("scope", ["step", "draft"])
def test_requests_with_and_without_extras_take_their_own_shapes_and_keep_their_texts(
    target: LoadedTarget, scope: str
) -> None:
    prompts = random_prompts([9, 14, 5, 7])
    plain = [SamplingParams(temperature=0.8, seed=i, max_tokens=14) for i in range(4)]
    extra = [
        plain[0],
        dataclasses.replace(plain[1], repetition_penalty=1.7, max_tokens=6),
        dataclasses.replace(plain[2], logprobs=3, max_tokens=6),
        plain[3],
    ]
    texts = {}
    for name, params in (("plain", plain), ("extra", extra)):
        arrivals = [Arrival(2 * i, p, params[i], None) for i, p in enumerate(prompts)]
        eager = make_engine(target, "none", "sampled_match", num_kv_blocks=80)
        options = {**SCOPES[scope], "num_kv_blocks": 80}
        engine = make_engine(target, "ngram", "sampled_match", **options)
        result = run_schedule(engine, arrivals)
        texts[name] = result.texts()
        assert texts[name] == run_schedule(eager, arrivals).texts()
        seen = {key.plain for key in engine.runner.graphs.keys if key.part == "step"}
        assert seen == ({True, False} if scope == "step" else set())
        logprobs = result.outputs["2"].logprobs
        assert (logprobs is not None and len(logprobs) == 6) == (name == "extra")
    assert texts["plain"]["0"] == texts["extra"]["0"]
    assert texts["plain"]["1"][:6] != texts["extra"]["1"]
