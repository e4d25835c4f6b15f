"""From acceptance at every start of a recorded text to what a real run of K drafts would give.

A text y of L tokens was written by the target. A verification step that *starts* at s (the row
holds s tokens then) proposes drafts for the positions s, s + 1, ...; with a of them kept it commits
a + 1 tokens, and the next step starts at s + a + 1. Steps start where drafts failed, so an average
over all positions is biased: it gives positions inside good runs, at which no step would start, the
weight of those at which steps do start.

Rules whose text does not depend on the drafter (`greedy`, `sampled_match`, `coupled`)
    A draft is kept exactly where it equals the text's own token, and what is proposed at s follows
    from y[:s]. So one walk over the starts gives the steps of the real run, one by one.

`rejection` at a temperature
    Let the step start at s and its first i drafts be kept: they are y[s : s + i]. Draft i + 1 is
    drawn from a law q, kept with probability min(1, p / q), and replaced from the residual
    max(p - q, 0) otherwise, p the target's law. Both ways together the position emits x with

        min(p(x), q(x))  through a draft that is kept,      p(x) - min(p(x), q(x))  otherwise,

    p(x) in all: the rule is lossless, whatever came before. The probability of a text together with
    what was kept in it is the product of these factors, and that of the text alone the product of
    the p(x). Their quotient is the law of what is kept *given the text*: at a position with a draft
    the token x that stands there was a kept draft with probability

        r(s, i + 1) = min(1, q(x) / p(x)),       q the drafter's law behind y[: s + i],

    independently of everything else, of the text behind it, too. For a one-hot draft d, where
    q(x) = 1 if x = d and else 0, this is 1 if x = d and else 0: given the text nothing is random. A
    position without a draft starts a step behind it. Given the text the starts are therefore a
    Markov chain, of which one only moves forward:

        P(at least a kept | start s) = r(s, 1) ... r(s, a)
        pi(first) = 1,      pi(s + a + 1) += pi(s) P(exactly a kept | start s)

    and the expected number of steps is the sum of pi, while the number of committed tokens is the
    text's own. The expectations over texts are those of a real run, which makes the quotient of
    their sums over prompts a consistent estimate of the mean accepted length: unbiased in numerator
    and denominator, and of less variance than a run, whose luck with drafts is averaged out. Laws q
    are to be those behind the text's own tokens, as if they had been drawn: where the text goes
    another way than the drafts, r is 0 and no step comes by.

Both are one computation on r, which is 0 or 1 under the first kind of rule. Ends are those of the
engine: a draft behind the text's end is neither judged nor kept, and the last step counts what it
committed (`specdec.outcomes`).

Source: Leviathan et al. 2023, theorem 1 (what a position emits).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StartScores:
    """What a drafter would propose at each start of a text, judged by that text.

    Args:
        first: the first start: behind the token that the prompt's last chunk sampled.
        length: tokens of the text, prompt included. There are S = length - first starts.
        num_drafts: [S] valid drafts at each start.
        accept: [S, K] probability that a draft is kept, given the text and that those before it
            were; what lies behind the valid drafts and behind the text's end is not read.
    """

    first: int
    length: int
    num_drafts: Counts
    accept: Array


class StepOutcome(NamedTuple):
    """What a trace has of a verification, in the names of `specdec.trace`."""

    context_len: int
    num_drafted: int
    num_accepted: int
    num_committed: int


@dataclass(frozen=True)
class TextOutcome:
    """Expected sums over the steps of one text; the formulas are those of `specdec.metrics`.

    Args:
        num_steps: verifications.
        num_committed: their tokens.
        drafted: [K] verifications with a valid draft at each position.
        reached: [K] of them, those whose drafts before it were all kept.
        accepted: [K] of them, those that kept it, too.
        steps: one by one, where nothing is random.
    """

    num_steps: float
    num_committed: int
    drafted: Array
    reached: Array
    accepted: Array
    steps: list[StepOutcome] | None = field(default=None, repr=False)


def walk(scores: StartScores, k: int) -> TextOutcome:
    """Return what a run with K = k drafts a step gives on a text.

    Args:
        scores: for k drafts or more.
        k: at least 1.
    """
    num_starts = scores.length - scores.first
    left = scores.length - scores.first - np.arange(num_starts)  # tokens that a start can commit
    valid = np.minimum(scores.num_drafts, k)
    position = np.arange(1, k + 1)
    judged = position <= np.minimum(valid, left)[:, None]
    keep = np.where(judged, scores.accept[:, :k], 0.0)
    kept = np.ones((num_starts, k + 1))  # [S, k + 1]: at least so many drafts
    np.cumprod(keep, axis=1, out=kept[:, 1:])
    visits = start_weights(kept)
    weights = visits[:, None]
    # A step that ends the text judges no draft behind what it committed.
    ends = np.take_along_axis(kept, np.minimum(left - 1, k)[:, None], 1)
    ends = np.where(left[:, None] - 1 <= k, ends, 0.0)
    behind = (position <= valid[:, None]) & (position > left[:, None])
    drafted = np.where(behind, 1 - ends, judged)
    certain = bool(((keep == 0) | (keep == 1)).all())
    return TextOutcome(
        num_steps=float(visits.sum()),
        num_committed=num_starts,
        drafted=(weights * drafted).sum(0),
        reached=(weights * judged * kept[:, :-1]).sum(0),
        accepted=(weights * kept[:, 1:]).sum(0),
        steps=_steps(scores.first, left, valid, kept, visits) if certain else None,
    )


def start_weights(kept: Array) -> Array:
    """Return [S], the probability that a step starts at each position.

    Args:
        kept: [S, k + 1], the probability that a step which starts there keeps at least so many
            drafts; the first column is 1.
    """
    num_starts, width = kept.shape
    exactly = kept.copy()
    exactly[:, :-1] -= kept[:, 1:]
    # One start behind the end for each way to reach it.
    visits = np.zeros(num_starts + width)
    visits[0] = 1.0
    for start in range(num_starts):
        if visits[start]:
            visits[start + 1 : start + 1 + width] += visits[start] * exactly[start]
    return visits[:num_starts]


def _steps(
    first: int, left: Counts, valid: Counts, kept: Array, visits: Array
) -> list[StepOutcome]:
    """Return the steps of a walk in which nothing is random."""
    steps = []
    for start in np.flatnonzero(visits):
        num_accepted = int(kept[start, 1:].sum())
        room, num_drafted = int(left[start]), int(valid[start])
        num_committed = min(num_accepted + 1, room)
        if num_committed == room:
            num_drafted = min(num_drafted, num_committed)
        steps.append(StepOutcome(first + int(start), num_drafted, num_accepted, num_committed))
    return steps


def outcome_of_steps(steps: list[StepOutcome], k: int) -> TextOutcome:
    """Sum up the steps of a real run of K = k."""
    drafted = np.array([step.num_drafted for step in steps], dtype=np.int64)[:, None]
    accepted = np.array([step.num_accepted for step in steps], dtype=np.int64)[:, None]
    position = np.arange(1, k + 1)
    has_draft = drafted >= position
    return TextOutcome(
        num_steps=float(len(steps)),
        num_committed=sum(step.num_committed for step in steps),
        drafted=has_draft.sum(0).astype(np.float64),
        reached=(has_draft & (accepted >= position - 1)).sum(0).astype(np.float64),
        accepted=(accepted >= position).sum(0).astype(np.float64),
        steps=steps,
    )
