"""However many drafts a step proposes, texts are those of plain decoding."""

from typing import Any

import numpy as np
import pytest

from runner.cuda_graphs import GraphKey
from runner.loader import LoadedTarget
from specdec import LLM, Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.testing.lengths import RandomLengthConfig
from specdec.trace import StepTrace
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
DRAFTERS: list[Any] = [
    "ngram",
    {"name": "draft_model", "model": "target"},
    {"name": "draft_model", "model": "target", "sampling": "gumbel", "temperature": 2.0},
]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(tiny_model("llama"))


def make_engine(target: LoadedTarget, drafter: Any, **options: Any) -> Engine:
    verifier = options.pop("verifier", "sampled_match")
    return Engine(target, drafter, verifier, K, **{**SIZES, **options})


def autoregressive(target: LoadedTarget, arrivals: list[Arrival]) -> dict[str, list[int]]:
    engine = make_engine(target, "none", num_kv_blocks=200)
    whole = [Arrival(a.step, a.prompt, a.params, None) for a in arrivals]
    return run_schedule(engine, whole).texts()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_text_is_that_of_plain_decoding_while_the_length_changes(
    target: LoadedTarget, seed: int, steps_in_flight: int
) -> None:
    arrivals = draw_schedule(seed)
    expected = autoregressive(target, arrivals)
    num_preemptions = num_accepted = 0
    for i, (name, scope) in enumerate(SCOPES.items()):
        drafter = DRAFTERS[(seed + i) % len(DRAFTERS)]
        lengths = [[], [0, 3], [1, 2, 3], [0, 1, 3]][(seed + i) % 4]
        engine = make_engine(
            target,
            drafter,
            max_steps_in_flight=steps_in_flight,
            draft_length=RandomLengthConfig(seed=seed + i, lengths=lengths),
            **scope,
        )
        result = run_schedule(engine, arrivals)
        num_preemptions += result.num_preemptions
        for request_id, output in result.outputs.items():
            where = name, drafter, request_id
            assert output.token_ids == expected[request_id][: len(output.token_ids)], where
            assert output.finish_reason == "abort" or output.token_ids == expected[request_id]
        assert len(+engine.draft_length.counts) == len(engine.draft_length.choices)
        num_accepted += sum(output.stats.num_accepted for output in result.outputs.values())
    assert num_preemptions > 0
    assert num_accepted > 0


OTHERS: list[Any] = [
    "suffix",
    {"name": "layer_skip", "num_layers": 2, "sampling": "gumbel"},
    {
        "name": "mixed",
        "policy": "best",
        "explore_every": 2,
        "drafters": ["ngram", {"name": "layer_skip", "num_layers": 2}],
    },
    {"name": "mixed", "drafters": ["suffix", {"name": "layer_skip", "num_layers": 2}]},
]


@pytest.mark.parametrize("scope", ["step", "none"])
@pytest.mark.parametrize("drafter", OTHERS, ids=["suffix", "layers", "best", "host first"])
def test_drafters_of_every_kind_follow_the_length(
    target: LoadedTarget, drafter: Any, scope: str
) -> None:
    arrivals = draw_schedule(7)
    expected = autoregressive(target, arrivals)
    policy = RandomLengthConfig(seed=2, lengths=[0, 1, 3])
    engine = make_engine(target, drafter, draft_length=policy, **SCOPES[scope])
    result = run_schedule(engine, arrivals)
    for request_id, output in result.outputs.items():
        assert output.token_ids == expected[request_id][: len(output.token_ids)], request_id
        assert output.finish_reason == "abort" or output.token_ids == expected[request_id]


@pytest.mark.parametrize("scope", ["step", "none"])
def test_greedy_text_is_that_of_plain_decoding(target: LoadedTarget, scope: str) -> None:
    prompts = random_prompts([9, 3, 20, 14])
    params = SamplingParams(temperature=0.0, max_tokens=20)
    options: dict[str, Any] = {"max_model_len": 64, "graph_scope": scope, "device": "cpu"}
    expected = LLM(target, "none", "greedy", **options).generate(prompts, params)
    llm = LLM(
        target,
        {"name": "draft_model", "model": "target"},
        "greedy",
        K,
        draft_length={"name": "random_in_tests", "seed": 5},
        **options,
    )
    outputs = llm.generate(prompts, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in expected]
    # The target itself drafts: whatever was verified is accepted.
    assert all(out.stats.num_accepted == out.stats.num_drafted > 0 for out in outputs)


def test_every_pair_of_lengths_is_captured_and_steps_take_the_pair_that_they_are(
    target: LoadedTarget,
) -> None:
    trace = StepTrace()
    lengths = [0, 1, 3]
    engine = make_engine(
        target,
        "ngram",
        graph_scope="step",
        graph_num_reqs=[1, 4],
        num_kv_blocks=80,
        trace=trace,
        draft_length=RandomLengthConfig(seed=1, lengths=lengths),
    )
    keys = engine.runner.graphs.keys
    pairs = {(k.num_reqs, k.num_verified, k.num_drafted) for k in keys if k.part == "step"}
    assert pairs == {(size, v, d) for size in (1, 4) for v in lengths for d in lengths}
    drafted = {(k.num_reqs, k.num_drafted) for k in keys if k.part == "propose"}
    assert drafted == {(size, d) for size in (1, 4) for d in (1, 3)}

    launched: list[GraphKey] = []
    launch = engine.runner.graphs.launch

    def watched(key: GraphKey) -> Any:
        launched.append(key)
        return launch(key)

    engine.runner.graphs.launch = watched  # pyright: ignore[reportAttributeAccessIssue]
    for i, prompt in enumerate(random_prompts([5, 9, 7])):
        engine.add_request(str(i), prompt, SamplingParams(seed=i, max_tokens=30))
    while engine.has_requests:
        engine.step()
    steps = trace.steps()
    decode = steps[steps["num_tokens"] == steps["num_reqs"] * (steps["num_verified"] + 1)]
    shapes = [(k.num_verified, k.num_drafted) for k in launched if k.part == "step"]
    planned = list(zip(decode["num_verified"], decode["num_drafted"], strict=True))
    assert len(shapes) > 15
    assert shapes == planned[-len(shapes) :]
    # What a step verifies is what the one before drafted.
    assert (steps["num_verified"].to_numpy()[2:] == steps["num_drafted"].to_numpy()[1:-1]).all()
    assert not any("verify unlike" in what for what in engine.runner.graphs.launches)
    counts = steps["num_drafted"].value_counts().to_dict()
    assert counts == dict(engine.draft_length.counts)


def test_positions_behind_the_drafted_ones_do_not_count(target: LoadedTarget) -> None:
    engine = make_engine(
        target,
        {"name": "draft_model", "model": "target"},
        verifier="greedy",
        num_kv_blocks=80,
        draft_length={"name": "by_batch_size", "table": {1: 3, 2: 1}},
    )
    arrivals = [
        Arrival(0, prompt, SamplingParams(temperature=0.0, max_tokens=20), None)
        for prompt in random_prompts([4, 6, 5])
    ]
    stats = [out.stats for out in run_schedule(engine, arrivals).outputs.values()]
    drafted = np.sum([s.drafted_per_position for s in stats], axis=0)
    assert drafted[0] > drafted[1]
    assert all(s.accepted_per_position == s.drafted_per_position for s in stats)


@pytest.mark.parametrize("scope", ["step", "none"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_length_follows_the_batch_as_it_grows_and_shrinks(
    target: LoadedTarget, scope: str, steps_in_flight: int
) -> None:
    trace = StepTrace()
    engine = make_engine(
        target,
        {"name": "draft_model", "model": "target"},
        num_kv_blocks=80,
        graph_scope=scope,
        max_steps_in_flight=steps_in_flight,
        trace=trace,
        draft_length={"name": "by_batch_size", "table": {1: 3, 2: 2, 4: 0}},
    )
    arrivals = [
        Arrival(6 * i, prompt, SamplingParams(max_tokens=40 - 12 * i, seed=i), None)
        for i, prompt in enumerate(random_prompts([4, 6, 5]))
    ]
    run_schedule(engine, arrivals)
    steps = trace.steps()
    wanted = steps["num_reqs"].map({1: 3, 2: 2, 3: 0})
    assert (steps["num_drafted"] == wanted).all()
    assert set(steps["num_reqs"]) == {1, 2, 3}
    report = engine.draft_length.report()
    assert report["counts"] == {
        str(length): int((steps["num_drafted"] == length).sum()) for length in (0, 2, 3)
    }
    assert report["why"] == ["up to 1 requests: 3", "up to 2 requests: 2", "up to 4 requests: 0"]


def test_fixed_length_captures_one_shape_a_size_and_is_the_default(target: LoadedTarget) -> None:
    for options in ({}, {"draft_length": "fixed"}):
        engine = make_engine(target, "ngram", graph_scope="step", graph_num_reqs=[2], **options)
        keys = engine.runner.graphs.keys
        assert [(k.part, k.num_verified, k.num_drafted, k.plain) for k in keys] == [
            ("step", K, K, False),
            ("propose", K, K, False),
            ("step", K, K, True),
        ]
        assert engine.draft_length.report() == {"name": "fixed", "counts": {"3": 0}, "why": []}


@pytest.mark.parametrize(
    ("draft_length", "parts"),
    [
        ("fixd", ["'fixd'", "'fixed'", "by_batch_size, confidence, fixed, goodput"]),
        ({"name": "by_batch_size"}, ["table={}", "{8: 4, 64: 1}"]),
        ({"name": "by_batch_size", "table": {0: 1}}, ["table={0: 1}"]),
        ({"name": "by_batch_size", "table": {4: 9}}, ["9 drafts", "num_speculative_tokens=3"]),
        ({"name": "confidence", "threshold": 1.5}, ["threshold=1.5", "[0, 1]"]),
        ({"name": "confidence"}, ["NgramDrafter", "how probable"]),
        ({"name": "goodput", "choices": [2, 1]}, ["choices=[2, 1]", "rising"]),
        ({"name": "goodput", "choices": [1, 7]}, ["7 drafts"]),
        ({"name": "goodput", "half_life": 0}, ["half_life=0", "at least 1"]),
        ({"name": "goodput", "choice": [1]}, ["'choice'", "'choices'"]),
    ],
)
def test_wrong_policies_are_refused_in_one_sentence(
    target: LoadedTarget, draft_length: Any, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        make_engine(target, "ngram", draft_length=draft_length)
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scope", ["step", "none"])
def test_goodput_is_learned_from_the_engines_own_steps(target: LoadedTarget, scope: str) -> None:
    prompts = random_prompts([9, 3, 7])
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=50) for i in range(3)]
    trace = StepTrace()
    options: dict[str, Any] = {"max_model_len": 64, "graph_scope": scope, "device": "cpu"}
    expected = LLM(target, "none", "sampled_match", **options).generate(prompts, params)
    policy = {"name": "goodput", "choices": [0, 2, 3], "explore_steps": 2}
    llm = LLM(
        target,
        {"name": "draft_model", "model": "target"},
        "sampled_match",
        K,
        trace=trace,
        draft_length=policy,
        **options,
        graph_num_reqs=[4],
    )
    outputs = llm.generate(prompts, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in expected]
    learned: Any = llm.engine.draft_length
    steps = trace.steps()
    assert sum(learned.counts.values()) == len(steps)
    assert min(learned.counts.values()) >= 3
    # Costs are those of steps that verified as many as they drafted, and no prompt tokens.
    pure = steps[(steps["num_verified"] == steps["num_drafted"]) & (steps["num_reqs"] == 3)]
    measured = learned.goodput(3)
    assert set(measured) == {0, 2, 3}
    seconds = pure[pure["num_drafted"] == 0]["step_ms"] / 1e3
    assert 1 / seconds.max() <= measured[0] <= 1 / seconds.min()
    # The first draft is accepted as often as the request's statistics say.
    drafted = sum(out.stats.drafted_per_position[0] for out in outputs)
    accepted = sum(out.stats.accepted_per_position[0] for out in outputs)
    assert learned.acceptance()[0] == pytest.approx(accepted / drafted, abs=0.15)


def test_without_drafts_there_is_nothing_to_choose(target: LoadedTarget) -> None:
    engine = make_engine(target, "none", draft_length="goodput")
    assert engine.draft_length.choices == (0,)
