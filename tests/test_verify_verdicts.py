"""What a report may say of each rule, and that its parameters are checked before a model loads."""

import pytest

from experiments.arms import plan_arms
from experiments.equality import IN_DISTRIBUTION, LOSSY, NOT_CHECKED, REFERENCE, first_verdict
from specdec.errors import ConfigError
from specdec.registry import known_names, resolve
from tests.test_experiments_configs import compose_run

SYNTHETIC = ["verifier=synthetic", "verifier.mean_length=2"]


@pytest.mark.parametrize(
    ("overrides", "greedy", "sampled"),
    [
        (["verifier=block"], NOT_CHECKED, IN_DISTRIBUTION),
        (["verifier=coupled"], NOT_CHECKED, NOT_CHECKED),  # texts are compared
        (["verifier=typical"], LOSSY, LOSSY),
        (SYNTHETIC, LOSSY, LOSSY),
    ],
)
def test_rule_and_temperature_decide_what_can_be_said(
    overrides: list[str], greedy: str, sampled: str
) -> None:
    for sampling, status in (("greedy", greedy), ("temp08", sampled)):
        config = compose_run(*overrides, f"sampling={sampling}")
        verdict, compares = first_verdict(plan_arms(config)[1], config, "float32")
        assert verdict.status == status
        assert compares == (status == NOT_CHECKED)
        assert bool(verdict.note) == (status in (LOSSY, NOT_CHECKED))
        # The autoregressive arm beside it is the reference, whatever the rule.
        assert first_verdict(plan_arms(config)[0], config, "float32")[0].status == REFERENCE


def test_synthetic_acceptance_is_labelled_beside_its_verdict() -> None:
    config = compose_run(*SYNTHETIC)
    verdict, _ = first_verdict(plan_arms(config)[1], config, "float32")
    assert "systems work only" in verdict.note


def test_only_lossless_rules_promise_a_text() -> None:
    promises = {}
    own = ("greedy", "rejection", "block", "sampled_match", "coupled", "typical", "synthetic")
    assert set(own) <= set(known_names("verifier"))
    for name in own:
        cls = resolve("verifier", name).cls
        promises[name] = (cls.lossless, cls.text_equal)
        assert cls.name == name
    assert promises == {
        "greedy": (True, True),
        "rejection": (True, False),
        "block": (True, False),
        "sampled_match": (True, True),
        "coupled": (True, True),
        "typical": (False, False),
        "synthetic": (False, False),
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["verifier=synthetic"], "needs rates or mean_length"),
        (["verifier=synthetic", "verifier.rates=[0.9]"], "1 rates for num_speculative_tokens=4"),
        (["verifier=synthetic", "verifier.mean_length=6"], "give at most 5"),
        (["verifier=typical", "verifier.epsilon=2"], r"epsilon=2\.0 is not allowed"),
        (["drafter=draft_model", "drafter.top_k=3"], "no effect with sampling='argmax'"),
    ],
)
def test_a_mistake_is_one_sentence_before_a_model_loads(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_run(*overrides)


def test_values_reach_the_rule() -> None:
    config = compose_run("verifier=typical", "verifier.delta=0.7")
    assert (config.verifier.config.epsilon, config.verifier.config.delta) == (0.09, 0.7)
    config = compose_run("verifier=synthetic", "verifier.rates=[0.9,0.5,0.2,0.1]")
    assert config.verifier.config.rates == [0.9, 0.5, 0.2, 0.1]
