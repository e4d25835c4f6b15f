"""Under rejection sampling the prediction is what a real engine gives, within 0.05."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.shadow_walk import StartScores, TextOutcome, outcome_of_steps, walk
from specdec import SamplingParams
from specdec.intervals import Estimate, estimate, ratio
from tests.models import bigram_model, random_prompts, tiny_target
from tests.shadow_cases import Played, biased_steps, play, score
from tests.statistics import dense_gumbel_sample

V = 8
K = 4
NUM_TEXTS = 160
HALF_WIDTH = 0.05
PARAMS = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=48)


@dataclass
class World:
    """A target, what it wrote, and a drafter of drawn drafts."""

    target: Any
    drafter: dict[str, Any]
    texts: Played

    @functools.cached_property
    def scores(self) -> list[StartScores]:
        """Score the drafter on every text."""
        return score(
            self.target, self.drafter, "rejection", K, PARAMS, self.texts.texts, num_rows=48
        )

    @functools.cached_property
    def played(self) -> Played:
        """Run the engine with the drafter."""
        return play_all(self.target, self.drafter, K)


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits by the last token of a target and a drafter, [V, V].

    The target stays in either half of the vocabulary for a while; the drafter is nearly right in
    one of them and nearly opposite in the other.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, V, V, generator=generator)
    half = torch.arange(V) < V // 2
    target = noise[0] + 1.9 * (half[:, None] == half)
    return target, torch.where(half[:, None], target, -0.5 * target) + 0.3 * noise[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    law, draft_law = tables()
    folder: Path = tmp_path_factory.mktemp("drafter")
    bigram_model(draft_law).save_pretrained(folder)
    target = tiny_target(bigram_model(law))
    drafter = {"name": "draft_model", "model": str(folder), "sampling": "gumbel"}
    return World(target, drafter, play_all(target, "none", 0))


@pytest.fixture(autouse=True, scope="module")
def dense_noise() -> Iterator[None]:
    """Hash all of the few tokens at once; test_rejection_law shows that this changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)
        yield


def play_all(target: Any, drafter: Any, k: int, num_texts: int = NUM_TEXTS) -> Played:
    prompts = random_prompts([4] * num_texts, seed=7, vocab_size=V)
    return play(target, drafter, "rejection", k, PARAMS, prompts, max_num_reqs=40)


def mean_length(outcomes: list[TextOutcome]) -> Estimate:
    sums = np.array([(own.num_committed, own.num_steps) for own in outcomes], dtype=np.float64)
    return estimate(sums, lambda s: ratio(s[:, 0], s[:, 1]))


def test_the_accepted_length_is_that_of_an_engine(world: World) -> None:
    predicted = mean_length([walk(own, K) for own in world.scores])
    assert world.played.texts != world.texts.texts, "the rule writes texts of its own"
    real = mean_length([outcome_of_steps(steps, K) for steps in world.played.steps])
    assert (predicted.high - predicted.low) / 2 <= HALF_WIDTH
    assert abs(predicted.value - real.value) <= HALF_WIDTH
    walked = [walk(own, K) for own in world.scores]
    num_steps = sum(own.num_steps for own in walked)
    accepted = np.stack([own.accepted for own in walked]).sum(0) / num_steps
    steps = [step for steps in world.played.steps for step in steps]
    shares = [np.mean([step.num_accepted >= i for step in steps]) for i in range(1, K + 1)]
    assert np.abs(accepted - shares).max() <= HALF_WIDTH


def test_fewer_drafts_come_from_the_same_scores(world: World) -> None:
    predicted = mean_length([walk(own, 1) for own in world.scores])
    steps = play_all(world.target, world.drafter, 1, NUM_TEXTS // 2).steps
    real = mean_length([outcome_of_steps(own, 1) for own in steps])
    assert abs(predicted.value - real.value) <= HALF_WIDTH


def test_wrong_laws_and_wrong_weights_are_farther_off(world: World) -> None:
    """Drafts taken as they were drawn, and starts taken as alike, would not pass."""
    real = mean_length([outcome_of_steps(steps, K) for steps in world.played.steps])
    tokens = sum(own.length - own.first for own in world.scores)
    alike = tokens / sum(biased_steps(own, K) for own in world.scores)
    half = world.texts.texts[: NUM_TEXTS // 4]
    matched = score(world.target, world.drafter, "sampled_match", K, PARAMS, half, num_rows=48)
    drawn = mean_length([walk(own, K) for own in matched])
    assert abs(alike - real.value) > HALF_WIDTH
    assert abs(drawn.value - real.value) > HALF_WIDTH
