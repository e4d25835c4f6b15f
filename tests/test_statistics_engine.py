"""What the engine's statistics say of drafters whose acceptance is known beforehand."""

import functools
from typing import Any

import pytest

from specdec import LLM, RequestOutput, SamplingParams
from tests.models import random_prompts, scripted_model, tiny_model, tiny_target

K = 4
TEXT = list(range(3, 60))
NUM_TOKENS = 40
NUM_REQUESTS = 250
SCOPES: list[dict[str, Any]] = [
    {"max_steps_in_flight": 1, "graph_scope": "none"},
    {"max_steps_in_flight": 2, "graph_scope": "step", "graph_num_reqs": [NUM_REQUESTS]},
]


@functools.cache
def counting_target() -> Any:
    """Return a target whose greedy text counts up: no token comes twice."""
    return tiny_target(scripted_model([(i + 1) % 100 for i in range(100)]))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def oracle_outputs(rates: list[float], options: dict[str, Any]) -> list[RequestOutput]:
    drafter = {"name": "oracle", "texts": [TEXT], "rates": rates}
    sizes = {"max_model_len": 128, "max_num_reqs": NUM_REQUESTS, "max_num_batched_tokens": 1250}
    llm = LLM(counting_target(), drafter, "greedy", K, **sizes, **options)
    params = [
        SamplingParams(temperature=0, max_tokens=NUM_TOKENS, seed=i) for i in range(NUM_REQUESTS)
    ]
    outputs = llm.generate([TEXT[:3]] * NUM_REQUESTS, params)
    assert all(output.token_ids == TEXT[3 : 3 + NUM_TOKENS] for output in outputs)
    return outputs


def deviations(outputs: list[RequestOutput], rates: list[float]) -> list[float]:
    """Return by how many standard deviations each position's acceptance is off its rate.

    How many drafts a step has is known before any of them is judged, so of those that were drafted
    at a position the product of the rates up to there is accepted.
    """
    stats, found, expected = [output.stats for output in outputs], [], 1.0
    for i, rate in enumerate(rates):
        expected *= rate
        drafted = sum(s.drafted_per_position[i] for s in stats)
        accepted = sum(s.accepted_per_position[i] for s in stats)
        assert drafted > 1000
        deviation = (expected * (1 - expected) * drafted) ** 0.5
        found.append(abs(accepted - expected * drafted) / deviation)
    return found


RATES = [0.9, 0.5, 0.8, 0.6]
BOUND = 5.0


@pytest.mark.parametrize("options", SCOPES, ids=["eager", "two in flight"])
def test_oracle_reports_the_rates_that_were_set(options: dict[str, Any]) -> None:
    assert max(deviations(oracle_outputs(RATES, options), RATES)) < BOUND


def test_an_oracle_of_other_rates_is_noticed() -> None:
    outputs = oracle_outputs([0.9, 0.7, 0.8, 0.6], SCOPES[0])
    assert max(deviations(outputs, RATES)) > BOUND


@pytest.mark.parametrize("options", SCOPES, ids=["eager", "two in flight"])
def test_no_match_is_no_draft_and_a_mean_accepted_length_of_one(options: dict[str, Any]) -> None:
    llm = LLM(counting_target(), "ngram", "greedy", K, max_model_len=128, **options)
    for output in llm.generate([[3, 4, 5], [9, 10]], greedy(NUM_TOKENS)):
        stats = output.stats
        assert stats.num_drafted == stats.num_accepted == 0
        assert stats.drafted_per_position == [0] * K
        assert stats.num_verify_steps == stats.num_verify_tokens == NUM_TOKENS - 1
        assert stats.accepted_length == 1.0


@pytest.mark.parametrize("options", SCOPES, ids=["eager", "two in flight"])
def test_the_target_as_its_own_draft_is_accepted_whole(options: dict[str, Any]) -> None:
    target = tiny_target(tiny_model("llama"))
    drafter = {"name": "draft_model", "model": "target"}
    llm = LLM(target, drafter, "greedy", K, max_model_len=64, max_num_reqs=4, **options)
    for output in llm.generate(random_prompts((5, 30, 12)), greedy(1 + 4 * (K + 1))):
        assert output.stats.accepted_per_position == [4] * K
        assert output.stats.drafted_per_position == [4] * K
        assert output.stats.accepted_length == K + 1
