"""The law of the starts under rejection sampling, against every text, draft and coin of a toy.

The toy's target and drafter are tables by the last token, so that texts, drafts, acceptances and
residuals of a run can be enumerated: what comes out is exact, and so has the prediction to be.
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from experiments.shadow_walk import StartScores, StepOutcome, walk
from tests.shadow_cases import biased_steps

V = 3
LENGTH = 6  # tokens of a text behind a first one, 0
FIRST = 2  # the token at 1 comes with the prompt's last chunk
P = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.05, 0.8, 0.15]])
# Drawn drafts: good after one token, bad after another, never right about some.
Q = np.array([[0.5, 0.2, 0.3], [0.1, 0.9, 0.0], [0.4, 0.2, 0.4]])
ONE_HOT = np.eye(V)[[0, 2, 0]]
LAWS = {"drawn": Q, "one-hot": ONE_HOT}


def real_sums(q: np.ndarray, k: int, num_drafts: Callable[[int], int]) -> np.ndarray:
    """Return expected (steps, accepted drafts at 1..k) of a run, by the rule itself.

    Args:
        q: [V, V], the drafter's laws, by the last token.
        k: drafts a step at most.
        num_drafts: of a step by its start: fewer are proposed.
    """

    def emit(position: int, last: int, left: int, index: int, weight: float) -> np.ndarray:
        """Go on with a token to come at a position, `left` drafts being left of the step's."""
        sums = np.zeros(k + 1)
        if position == LENGTH or weight == 0:
            return sums
        if left == 0:  # behind the last draft: the target's own
            for token in range(V):
                sums += begin(position + 1, token, weight * P[last, token])
            return sums
        law = q[last]
        for draft in np.flatnonzero(law):
            chance = min(1.0, P[last, draft] / law[draft])
            if law[draft] == 1.0:
                chance = P[last, draft]
            own = weight * law[draft]
            sums[index + 1] += own * chance
            sums += emit(position + 1, int(draft), left - 1, index + 1, own * chance)
            residual = np.maximum(P[last] - law, 0)
            residual = residual / residual.sum()
            for token in range(V):
                sums += begin(position + 1, token, own * (1 - chance) * residual[token])
        return sums

    def begin(start: int, last: int, weight: float) -> np.ndarray:
        sums = np.zeros(k + 1)
        if start < LENGTH and weight > 0:
            sums[0] = weight
            sums += emit(start, last, min(num_drafts(start), k), 0, weight)
        return sums

    return sum(begin(FIRST, token, P[0, token]) for token in range(V))  # pyright: ignore


def scores_of(text: tuple[int, ...], q: np.ndarray, k: int, num_drafts: Callable[[int], int]):
    """Return what a scorer gives for a text."""
    starts = range(FIRST, LENGTH)
    accept = np.zeros((len(starts), k))
    for row, start in enumerate(starts):
        for i in range(min(k, LENGTH - start)):
            token, last = text[start + i], text[start + i - 1]
            accept[row, i] = min(1.0, q[last, token] / P[last, token])
    counts = np.array([num_drafts(start) for start in starts])
    return StartScores(FIRST, LENGTH, counts, accept)


def predicted_sums(q: np.ndarray, k: int, num_drafts: Callable[[int], int]) -> np.ndarray:
    """Return the mean of the prediction over all texts, weighed by their probability."""
    sums = np.zeros(k + 1)
    for tail in itertools.product(range(V), repeat=LENGTH - 1):
        text = (0, *tail)
        weight = np.prod([P[a, b] for a, b in itertools.pairwise(text)])
        outcome = walk(scores_of(text, q, k, num_drafts), k)
        sums += weight * np.array([outcome.num_steps, *outcome.accepted])
    return sums


def all_positions(q: np.ndarray, k: int) -> float:
    """Return the expected steps where every position counts as a start alike: a bug."""
    total = 0.0
    for tail in itertools.product(range(V), repeat=LENGTH - 1):
        text = (0, *tail)
        weight = np.prod([P[a, b] for a, b in itertools.pairwise(text)])
        total += weight * biased_steps(scores_of(text, q, k, lambda start: k), k)
    return total


DRAFTS: dict[str, Callable[[int], int]] = {
    "all": lambda start: 9,
    "some": lambda start: start % 3,
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("law", LAWS)
def test_the_expectation_is_that_of_the_rule(law: str, drafts: str, k: int) -> None:
    real = real_sums(LAWS[law], k, DRAFTS[drafts])
    predicted = predicted_sums(LAWS[law], k, DRAFTS[drafts])
    assert np.allclose(predicted, real, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("law", LAWS)
def test_an_average_over_all_positions_is_biased(law: str) -> None:
    real = real_sums(LAWS[law], 3, DRAFTS["all"])[0]
    assert abs(all_positions(LAWS[law], 3) - real) > 0.05 * real


def test_acceptance_that_ignores_the_text_is_biased() -> None:
    """1 - TV is what a position accepts over all texts, and wrong for one that is given."""
    q, k, sums = Q, 1, 0.0
    overlap = np.minimum(P, q).sum(1)
    for tail in itertools.product(range(V), repeat=LENGTH - 1):
        text = (0, *tail)
        weight = np.prod([P[a, b] for a, b in itertools.pairwise(text)])
        scores = scores_of(text, q, k, lambda start: k)
        for row, start in enumerate(range(FIRST, LENGTH)):
            for i in range(min(k, LENGTH - start)):
                scores.accept[row, i] = overlap[text[start + i - 1]]
        sums += weight * walk(scores, k).num_steps
    real = real_sums(q, k, DRAFTS["all"])[0]
    assert abs(sums - real) > 1e-3 * real


def test_steps_start_where_drafts_failed() -> None:
    """Hand-made: 10 positions at which all is right, then 10 at which nothing is."""
    accept = np.repeat([1.0, 0.0], 10)[:, None] * np.ones(4)
    scores = StartScores(5, 25, np.full(20, 4), accept)
    outcome = walk(scores, 4)
    assert outcome.num_steps == 2 + 10
    assert outcome.steps is not None
    assert outcome.steps[:3] == [
        StepOutcome(5, 4, 4, 5),
        StepOutcome(10, 4, 4, 5),
        StepOutcome(15, 4, 0, 1),
    ]
    assert outcome.steps[-1] == StepOutcome(24, 1, 0, 1)  # of its drafts one could be judged
    assert outcome.accepted.tolist() == [2, 2, 2, 2]
    assert biased_steps(scores, 4) < 8
