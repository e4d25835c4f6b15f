"""Verdicts: what the rule says, what the texts say, and how large a first difference is."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

import experiments.equality
from experiments.arms import ArmSpec, Turn, plan_arms
from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.equality import (
    DIFFERENT,
    EQUAL,
    IN_DISTRIBUTION,
    LOSSY,
    NOT_CHECKED,
    REFERENCE,
    TIE,
    Difference,
    TargetProbe,
    first_verdict,
    judge,
    try_equality,
)
from experiments.schemas import RunConfig, load_config, register_schemas
from runner.models.hf import HFModel
from sampler.noise import STREAM_TARGET, mix_seed, noise_gumbel, noise_key
from sampler.verify.rejection import RejectionVerifier
from specdec.errors import CapacityError
from specdec.types import RequestStats, SamplingParams
from tests.models import random_prompts, tiny_model, tiny_target


def turn(token_ids: Sequence[int], question_id: str = "1", number: int = 1) -> Turn:
    return Turn(
        question_id=question_id,
        category="short",
        turn=number,
        prompt_token_ids=[5, 6],
        token_ids=list(token_ids),
        text="",
        finish_reason="length",
        seed=0,
        stats=RequestStats(),
    )


def never(*args: Any) -> Difference:
    raise AssertionError(f"nothing differs, yet it was measured: {args}")


def differing(gap: float, noise: float = 1e-4) -> Any:
    return lambda *args: Difference(gap, noise)


def compose_run(*overrides: str) -> RunConfig:
    register_schemas()
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        return load_config(compose("run", overrides=list(overrides)))


def test_equal_texts_are_equal() -> None:
    turns = [turn([1, 2, 3]), turn([4], number=2), turn([5], "2")]
    verdict = judge(turns, list(reversed(turns)), "float32", never)
    assert (verdict.status, verdict.num_compared, verdict.num_equal) == (EQUAL, 3, 3)
    assert verdict.note == ""


def test_a_gap_below_the_noise_is_a_tie_with_its_place_and_size() -> None:
    reference, given = [turn([1, 2, 3]), turn([9], "2")], [turn([1, 7, 3]), turn([9], "2")]
    verdict = judge(reference, given, "float32", differing(gap=3e-5))
    assert (verdict.status, verdict.num_compared, verdict.num_equal) == (TIE, 2, 1)
    assert "question 1 turn 1: parts at new token 1" in verdict.note
    assert "gap 3e-05 < noise 0.0001" in verdict.note


def test_a_gap_of_the_noise_or_more_is_a_difference() -> None:
    verdict = judge([turn([1, 2])], [turn([1, 7])], "float32", differing(gap=1e-4))
    assert verdict.status == DIFFERENT
    assert "gap 0.0001 >= noise 0.0001" in verdict.note


def test_one_difference_outweighs_ties_and_is_told_first() -> None:
    reference = [turn([1], str(i)) for i in range(5)]
    given = [turn([2], str(i)) for i in range(5)]
    gaps = {"0": 1e-6, "1": 1e-6, "2": 0.5, "3": 1e-6, "4": 1e-6}

    def measure(expected: Turn, *args: int) -> Difference:
        return Difference(gaps[expected.question_id], 1e-4)

    verdict = judge(reference, given, "float32", measure)
    assert (verdict.status, verdict.num_equal) == (DIFFERENT, 0)
    assert verdict.note.startswith("question 2 ")
    assert verdict.note.endswith("and 2 more")


def test_the_candidates_at_the_first_difference_are_measured() -> None:
    seen: list[tuple[int, int, int]] = []

    def measure(expected: Turn, *place: int) -> Difference:
        seen.append(place)  # pyright: ignore[reportArgumentType]
        return Difference(0.0, 1.0)

    judge([turn([1, 2, 3, 4])], [turn([1, 2, 8, 9])], "float32", measure)
    assert seen == [(2, 3, 8)]


def test_turns_after_a_difference_have_other_histories_and_are_left_out() -> None:
    reference = [turn([1]), turn([2], number=2), turn([3], "2"), turn([4], "2", 2)]
    given = [turn([9]), turn([9], number=2), turn([3], "2"), turn([4], "2", 2)]
    verdict = judge(reference, given, "float32", differing(gap=0.0))
    assert (verdict.num_compared, verdict.num_equal) == (3, 2)


def test_a_text_that_begins_the_other_is_different() -> None:
    verdict = judge([turn([1, 2])], [turn([1])], "float32", never)
    assert verdict.status == DIFFERENT
    assert "one text begins the other (2 and 1 tokens)" in verdict.note


def test_nothing_to_compare_is_not_called_equal() -> None:
    assert judge([turn([1])], [turn([1], "2")], "float32", never).status == NOT_CHECKED


@pytest.mark.parametrize(
    ("overrides", "status", "compares"),
    [
        ([], NOT_CHECKED, True),
        (["verifier=greedy"], NOT_CHECKED, True),
        (["verifier=sampled_match", "sampling=temp08"], NOT_CHECKED, True),
        (["sampling=temp08"], IN_DISTRIBUTION, False),
        (["equality.enabled=false"], NOT_CHECKED, False),
        (["equality.enabled=false", "sampling=temp08"], IN_DISTRIBUTION, False),
    ],
)
def test_rule_and_temperature_decide_what_can_be_said(
    overrides: list[str], status: str, compares: bool
) -> None:
    config = compose_run(*overrides)
    arm = plan_arms(config)[1]
    verdict, needs_texts = first_verdict(arm, config, "bfloat16")
    assert (verdict.status, needs_texts, verdict.dtype) == (status, compares, "bfloat16")


def test_a_lossy_rule_is_called_lossy_at_any_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RejectionVerifier, "lossless", False)
    for sampling in ("greedy", "temp08"):
        config = compose_run(f"sampling={sampling}")
        assert first_verdict(plan_arms(config)[1], config, "float32")[0].status == LOSSY
        assert first_verdict(plan_arms(config)[0], config, "float32")[0].status == REFERENCE


def test_what_cannot_be_loaded_in_float32_is_not_checked_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def too_large(*args: Any) -> None:
        raise CapacityError("32 GB wanted, 24 GB free")

    monkeypatch.setattr(experiments.equality, "load_target", too_large)
    config = compose_run()
    specs: list[ArmSpec] = plan_arms(config)
    verdicts, texts = try_equality(specs, config, [], torch.device("cpu"))
    assert verdicts["ngram K=4"].status == NOT_CHECKED
    assert verdicts["ngram K=4"].note == "32 GB wanted, 24 GB free"
    assert texts == []


@pytest.fixture(scope="module")
def model() -> HFModel:
    """Return a random float32 model behind the runner."""
    return tiny_target(tiny_model()).model


def test_probed_logits_are_those_of_the_model_itself(model: HFModel) -> None:
    (token_ids,) = random_prompts([40])
    plain: Any = tiny_model()
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([token_ids])).logits[0, -32:]
    for ends in ([40], [8, 40], [8, *range(9, 41)], [3, 20, 21, 40]):
        torch.testing.assert_close(
            TargetProbe(model).logits(token_ids, ends)[-32:], expected, atol=1e-3, rtol=1e-4
        )


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 60])
def test_the_gap_is_the_candidates_and_the_noise_is_rounding(length: int, model: HFModel) -> None:
    (token_ids,) = random_prompts([length + 1])
    asked = dataclasses.replace(turn(token_ids[1:]), prompt_token_ids=token_ids[:1])
    found = TargetProbe(model).measure(SamplingParams(temperature=0), asked, length - 1, 3, 8)
    logits = TargetProbe(model).logits(token_ids[:length], [length])[-1]
    assert found.gap == pytest.approx(float((logits[3] - logits[8]).abs()))
    assert found.noise < 1e-3
    if length > 2:  # rounding differs somewhere among so many sums
        assert found.noise > 0


def test_above_temperature_zero_the_gap_holds_the_draws_noise(model: HFModel) -> None:
    (token_ids,) = random_prompts([20])
    asked = dataclasses.replace(turn(token_ids[4:]), prompt_token_ids=token_ids[:4], seed=11)
    found = TargetProbe(model).measure(SamplingParams(temperature=0.5), asked, 16, 3, 8)
    logits = TargetProbe(model).logits(token_ids, [20])[-1]
    key = noise_key(torch.tensor([mix_seed(11, 0)]), torch.tensor([20]), STREAM_TARGET)
    scores = logits[[3, 8]] / 0.5 + noise_gumbel(key, torch.tensor([3, 8], dtype=torch.int32))
    assert found.gap == pytest.approx(0.5 * float((scores[0] - scores[1]).abs()), rel=1e-4)
