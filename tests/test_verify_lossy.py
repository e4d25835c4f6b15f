"""The lossy rules: typical and synthetic acceptance do what they say, and are called lossy."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from sampler.noise import mix_seed
from sampler.verify.synthetic import SyntheticConfig, SyntheticVerifier, rates_of
from sampler.verify.typical import TypicalConfig, TypicalVerifier, judge_typical
from specdec import LLM, SamplingParams
from specdec.checks import check_params
from specdec.errors import ConfigError
from specdec.protocols import DRAFT_KIND_ONE_HOT, VerifyInputs
from tests.models import random_prompts, tiny_model, tiny_target
from tests.statistics import dense_gumbel_sample

K, V = 4, 12
NUM = 10_000


@pytest.fixture(autouse=True)
def dense_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash all of the few tokens at once; test_rejection_law shows that this changes nothing."""
    monkeypatch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)


def random_inputs(num_places: int, seed: int = 0, temperature: float = 1.0) -> VerifyInputs:
    """Build a step of K drafts a place, each anything, at laws from flat to sharp."""
    generator = torch.Generator().manual_seed(seed)
    lines = num_places * (K + 1)
    spread = 4 * torch.rand(lines, 1, generator=generator)
    logits = spread * torch.randn(lines, V, generator=generator)
    logits[::3, 2] = float("-inf")
    drafts = torch.randint(V, (num_places, K + 1), generator=generator)
    drafts[:, K] = -1
    local = torch.arange(K + 1).repeat(num_places)
    return VerifyInputs(
        logits=logits,
        all_greedy=False,
        draft_tokens=drafts.view(-1),
        draft_kind=torch.full((lines,), DRAFT_KIND_ONE_HOT, dtype=torch.int8),
        draft_logits=None,
        cu_num_logits=(K + 1) * torch.arange(num_places + 1, dtype=torch.int32),
        max_num_logits=K + 1,
        expanded_idx_mapping=torch.arange(num_places, dtype=torch.int32).repeat_interleave(K + 1),
        expanded_local_pos=local.int(),
        draw_positions=11 + local,
        temperature=torch.full((num_places,), temperature),
        seeds=torch.tensor([mix_seed(i, 0) for i in range(num_places)]),
    )


# --- typical --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (1.0, 0.5), (0.02, 10.0), (0.0, 0.0)])
def test_a_draft_is_kept_where_it_is_typical(epsilon: float, delta: float) -> None:
    inputs = random_inputs(200)
    law = inputs.logits.double().softmax(1).numpy()
    entropy = -np.where(law > 0, law * np.log(np.where(law > 0, law, 1)), 0).sum(1)
    drafts = inputs.draft_tokens.numpy()
    threshold = np.minimum(epsilon, delta * np.exp(-entropy))
    kept = (drafts >= 0) & (law[np.arange(len(law)), drafts] > threshold)
    found = judge_typical(inputs, epsilon, delta).accepted.numpy()
    assert (found == kept).all()
    assert 0 < found.sum() < (drafts >= 0).sum()


def test_fewer_drafts_are_kept_as_the_threshold_rises() -> None:
    inputs = random_inputs(500)
    for name, fixed in (("epsilon", {"delta": 2.0}), ("delta", {"epsilon": 0.4})):
        before, counts = None, []
        for value in (0.0, 0.01, 0.05, 0.2, 0.7, 1.0):
            kept = judge_typical(inputs, **{name: value, **fixed}).accepted
            # Draft by draft, not in the mean alone.
            assert before is None or not (kept & ~before).any()
            before = kept
            counts.append(int(kept.sum()))
        assert counts[0] > counts[2] > counts[-1], (name, counts)


def test_after_kept_drafts_comes_the_target_s_sample() -> None:
    inputs = random_inputs(NUM // 4, seed=1)
    # One law at every line: the token after the drafts has it, whatever was refused before it.
    logits = torch.tensor([2.0, 1.0, 0.0, float("-inf")]).expand(len(inputs.logits), 4)
    inputs = dataclasses.replace(inputs, logits=logits, draft_tokens=inputs.draft_tokens % 4)
    inputs.draft_tokens[inputs.expanded_local_pos == K] = -1
    outputs = TypicalVerifier(TypicalConfig(epsilon=0.2, delta=1.0)).verify(inputs)
    last = outputs.sampled_tokens.gather(1, outputs.num_sampled[:, None].long() - 1)[:, 0]
    law = logits[0].softmax(0).numpy()
    counts = np.bincount(last.numpy(), minlength=4)
    deviation = np.sqrt(len(last) * law * (1 - law)) + 1e-9
    assert (np.abs(counts - len(last) * law) <= 5 * deviation).all()
    assert len(set(outputs.num_sampled.tolist())) > 2


def test_greedy_rows_compare_the_argmax_under_typical() -> None:
    inputs = random_inputs(300, temperature=0.0)
    kept = judge_typical(inputs, 0.0, 0.0).accepted
    assert torch.equal(kept, inputs.logits.argmax(1) == inputs.draft_tokens)


# --- synthetic ------------------------------------------------------------------------------------


def synthetic(**values: Any) -> SyntheticVerifier:
    verifier = SyntheticVerifier(SyntheticConfig(**values))
    verifier.check(K)
    verifier.bind(K, torch.device("cpu"))
    return verifier


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "values", [{"rates": [0.9, 0.6, 0.55, 0.1]}, {"mean_length": 2.6}, {"rates": [1.0, 0.5, 0, 0]}]
)
def test_measured_rates_are_the_given_ones(values: dict[str, Any], temperature: float) -> None:
    inputs = random_inputs(NUM // 2, temperature=temperature)
    verifier = synthetic(**values)
    outputs = verifier.verify(inputs)
    kept = outputs.num_sampled - 1
    for i, rate in enumerate(rates_of(verifier.config, K)):
        measured = float((kept > i).double().mean())
        assert abs(measured - rate) <= 5 * (rate * (1 - rate) / len(kept)) ** 0.5 + 1e-12
    # What is emitted are the drafts.
    column = torch.arange(K)
    drafts = inputs.draft_tokens.view(-1, K + 1)[:, :K]
    is_kept = column < kept[:, None]
    assert torch.equal(outputs.sampled_tokens[:, :K][is_kept], drafts[is_kept])


def test_a_place_without_a_draft_is_never_accepted() -> None:
    inputs = random_inputs(400)
    holes = inputs.draft_tokens.view(-1, K + 1)
    num_drafts = torch.arange(400) % (K + 1)
    holes[torch.arange(K + 1) >= num_drafts[:, None]] = -1
    outputs = synthetic(rates=[1.0] * K).verify(inputs)
    assert torch.equal(outputs.num_sampled, num_drafts.int() + 1)
    assert ((outputs.sampled_tokens >= 0).sum(1) == outputs.num_sampled).all()


def test_a_mean_length_becomes_falling_rates() -> None:
    for mean in (1.0, 1.7, 3.2, 5.0):
        rates = rates_of(SyntheticConfig(mean_length=mean), K)
        assert 1 + sum(rates) == pytest.approx(mean)
        assert all(a >= b for a, b in itertools.pairwise(rates))


def test_steps_of_a_row_are_independent() -> None:
    verifier = synthetic(rates=[0.5] * K)
    inputs = random_inputs(NUM // 2)
    later = dataclasses.replace(inputs, draw_positions=inputs.draw_positions + 1)
    first, second = (verifier.verify(step).num_sampled > 1 for step in (inputs, later))
    agree = float((first == second).double().mean())
    assert abs(agree - 0.5) < 5 * (0.25 / len(first)) ** 0.5


# --- the engine -----------------------------------------------------------------------------------


def test_engine_keeps_drafts_at_the_given_rates() -> None:
    target = tiny_target(tiny_model("llama", vocab_size=17))
    prompts = random_prompts([30] * 24, vocab_size=17)
    rates = [0.8, 0.5, 0.3]
    llm = LLM(
        target,
        {"name": "draft_model", "model": "target"},
        {"name": "synthetic", "rates": rates},
        3,
        max_model_len=100,
        graph_scope="step",
    )
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=60, seed=i) for i in range(24)])
    steps = sum(o.stats.drafted_per_position[0] for o in outputs)
    for i, rate in enumerate(rates):
        accepted = sum(o.stats.accepted_per_position[i] for o in outputs)
        drafted = sum(o.stats.drafted_per_position[i] for o in outputs)
        assert drafted > 300
        assert abs(accepted - rate * drafted) < 5 * (rate * (1 - rate) * steps) ** 0.5


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ({"name": "synthetic"}, "needs rates or mean_length"),
        ({"name": "synthetic", "rates": [0.5], "mean_length": 2.0}, "needs rates or mean_length"),
        ({"name": "synthetic", "rates": [0.5, 0.6]}, "never rise"),
        ({"name": "synthetic", "rates": [1.5]}, "never rise"),
        ({"name": "synthetic", "rates": [0.5]}, r"has 1 rates for num_speculative_tokens=2"),
        ({"name": "synthetic", "mean_length": 0.5}, r"give a number >= 1"),
        ({"name": "synthetic", "mean_length": 3.5}, "cannot be reached"),
        ({"name": "typical", "epsilon": 1.5}, r"epsilon=1\.5 is not allowed"),
        ({"name": "typical", "delta": -1.0}, r"delta=-1\.0 is not allowed"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_before_a_model_loads(
    verifier: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("/no/such/model", "ngram", verifier, 2)


@pytest.mark.parametrize(
    "fields", [{"allowed_token_ids": [1, 2]}, {"bad_words": ["a"]}, {"min_tokens": 2}], ids=str
)
def test_synthetic_refuses_what_forbids_tokens(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        check_params(
            SamplingParams(**fields), SyntheticVerifier(SyntheticConfig(rates=[0.5])), 1, True
        )
