"""Rules about steps that ask for fewer than K drafts, and about drafts that end early."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specdec.engine import Engine
from specdec.protocols import DRAFT_KIND_WITH_Q
from specdec.testing.play import Play, autoregressive, check_texts, play
from specdec.testing.rule import NotApplicable, require, require_drafts
from specdec.testing.rules_history import alternating, check_against_scratch
from specdec.testing.rules_texts import check_counts
from specdec.testing.subject import Subject
from specdec.testing.watch import same, watch

_THRESHOLD = 0.2  # ends some runs of the kit's own drafters, and not all
_TOLERANCE = 1e-4  # of a probability


def check_num_drafts(subject: Subject) -> str | None:
    """Check steps that ask for K drafts, for one and for none, in no order."""
    require_drafts(subject)
    k, asked = subject.num_speculative_tokens, dict[tuple[int, int], int]()
    arrivals = alternating(subject, 79, 5)
    engine = subject.engine(draft_length=subject.random_lengths(seed=1), max_num_reqs=len(arrivals))
    state = engine.runner.state

    @contextmanager
    def around(name: str, ctx: Any) -> Iterator[Any]:
        if name != "propose":
            yield ctx
            return
        before = state.draft_tokens.clone()
        yield ctx
        behind = slice(ctx.num_drafts, None)
        require(
            same(state.draft_tokens[:, behind], before[:, behind]),
            f"propose() wrote draft_tokens behind column {ctx.num_drafts} in a step that asked for "
            f"so many of {k} drafts",
            "fill draft_tokens[row, :ctx.num_drafts]: ctx.num_drafts may be less than K",
        )
        for row in ctx.idx_mapping.tolist():
            if row >= 0:
                asked[row, int(ctx.state.total_len[row])] = ctx.num_drafts

    watch(engine, around)
    result = play(engine, arrivals, record=True)
    assert {1, k} <= set(asked.values()), "the policy chose too few lengths"
    fix = (
        "propose() is not called in a step that asks for no drafts: what has to be kept of every "
        "step belongs in first_pass() (splits_first_pass=True) or observe()"
    )
    check_texts(subject, result, arrivals, fix)
    check_counts(result, autoregressive(subject, arrivals))
    if subject.capabilities.uses_history:
        return "texts and counts alone: declared uses_history=True"
    # A drafter may draft otherwise where it is asked for less: runs of K are held to one another.
    full = {
        key: proposal
        for key, proposal in result.proposals.items()
        if asked.get((proposal.row, len(proposal.token_ids))) == k
    }
    where = "behind steps that asked for fewer drafts"
    check_against_scratch(subject, Play(proposals=full), "sampled_match", where, fix)
    return None


def check_confidence(subject: Subject) -> str | None:
    """Check that every draft has its probability, and texts and counts where drafts end by it."""
    require_drafts(subject)
    if not subject.capabilities.offers_confidence:
        raise NotApplicable("declared offers_confidence=False: it does not tell")
    engine = subject.engine(**subject.with_confidence(_THRESHOLD))
    confidence, compared = engine.runner.draft_confidence, 0
    assert confidence is not None

    @contextmanager
    def around(name: str, ctx: Any) -> Iterator[Any]:
        nonlocal compared
        if name == "propose":
            confidence.fill_(float("nan"))  # what is not written stays that way
        yield ctx
        if name == "propose":
            compared += _check_confidence(engine, ctx)

    watch(engine, around)
    arrivals = alternating(subject, 89, 6)
    result = play(engine, arrivals, record=True)
    fix = "a cut draft is -1 as any other that is missing: expect fewer drafts in observe()"
    check_texts(subject, result, arrivals, fix)
    check_counts(result, autoregressive(subject, arrivals))
    assert compared > 0 or not subject.capabilities.offers_q, "no draft had a law"
    return None


def _check_confidence(engine: Engine, ctx: Any) -> int:
    """Check the rows that a call proposed for; returns how many drafts were held to their law."""
    runner, num_with_law = engine.runner, 0
    drafts, logits = runner.state.draft_tokens, runner.draft_logits
    assert runner.draft_confidence is not None
    sampled = ctx.samples.tolist()
    for place, row in enumerate(ctx.idx_mapping.tolist()):
        if row < 0 or not sampled[place]:
            continue
        with_law = int(runner.state.draft_kind[row]) == DRAFT_KIND_WITH_Q
        values = runner.draft_confidence[row].tolist()
        for i, token in enumerate(drafts[row, : ctx.num_drafts].tolist()):
            if token < 0:
                break
            require(
                0 <= values[i] <= 1 + _TOLERANCE,
                f"draft {i} has a confidence of {values[i]} (nan: it was not written in this step)",
                "write draft_confidence[row, i] for each draft, a probability in [0, 1] "
                "(runner.confidence.store_confidence), or declare offers_confidence=False",
            )
            if not with_law:
                continue
            assert logits is not None
            num_with_law += 1
            expected = float(logits[row, i].softmax(0)[token])
            require(
                abs(values[i] - expected) <= _TOLERANCE,
                f"draft {i} has a confidence of {values[i]:.4g}, its draft_logits give it "
                f"{expected:.4g}",
                "store the probability of the drafted token under the very law that it was drawn "
                "from, divided by the temperature and truncated alike",
            )
    return num_with_law
