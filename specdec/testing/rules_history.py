"""Rules about what drafts may depend on: the committed text, and no way that led to it.

What a run proposed for a text is held to what the drafter proposes for the same text when it never
saw it grow: in a row that no one had before, in one pass, without a rejected draft.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.engine import Engine
from specdec.testing.play import (
    Arrival,
    Play,
    Proposal,
    check_texts,
    play,
    resume,
    same_arrivals,
    take_proposals,
)
from specdec.testing.rule import NotApplicable, RuleBroken, require, require_drafts
from specdec.testing.subject import Subject

# Float32 in unlike batch shapes: logits differ by 1e-5 or so, and a draft between two tokens as
# close as that may flip. A drafter that breaks a rule differs far more often.
_MOST_FLIPS = 0.02
_TOLERANCE = 1e-3  # of laws and KV, relative to their largest element
_MOST_RESUMED = 120
NO_DRAFTS = "it drafted nothing in these texts"
_FIX_KINDS = "draft_kind is that of another row: index ctx.temperature by row (ctx.idx_mapping)"
_TEXTS_ALONE = "texts alone: declared uses_history=True"


def check_committed_text(subject: Subject) -> str | None:
    """Check drafts after rejections at random against those of the same text from scratch."""
    _refuse_history(subject)
    arrivals = alternating(subject, 41, 5)
    result = play(subject.engine("random"), arrivals, record=True)
    fix = (
        "read num_rejected: keep nothing that a rejected draft left, and recompute what was kept "
        "for the positions that the step committed, in first_pass() or at the start of propose()"
    )
    check_against_scratch(subject, result, "random", "after rejected drafts", fix)
    return None if result.num_drafts else NO_DRAFTS


def check_chunks(subject: Subject) -> str | None:
    """Check that texts and drafts do not depend on the size of prefill chunks."""
    size = max(7, subject.num_speculative_tokens + 2)
    arrivals = alternating(subject, 43, 4)
    result = play(subject.engine(max_num_batched_tokens=size), arrivals, record=True)
    fix = (
        "a prompt may come in chunks: query_lens, positions and samples say what ran; keep nothing "
        "that takes a step for a whole prompt"
    )
    return _check_run(subject, result, arrivals, f"where prompts ran in chunks of {size}", fix)


def check_row_reuse(subject: Subject) -> str | None:
    """Check that a new owner of a row sees nothing of the earlier ones."""
    arrivals = alternating(subject, 47, 7)
    result = play(subject.engine(max_num_reqs=2), arrivals, record=True)
    fix = (
        "forget in add_request(row) what was kept for the row, or compute it from the row's own "
        "tokens"
    )
    require(
        result.num_early == 0,
        f"{result.num_early} drafts lay in rows whose prompt was still running",
        "write draft_tokens in propose() alone, through ctx.idx_mapping",
    )
    return _check_run(subject, result, arrivals, "in a row that had an owner before", fix)


def check_preemption(subject: Subject) -> str | None:
    """Check requests that are preempted while they have drafts, and resumed elsewhere."""
    arrivals = alternating(subject, 53, 6)
    engine = subject.engine(num_kv_blocks=20, max_num_reqs=5)
    result = play(engine, arrivals, record=True)
    assert result.num_preemptions > 0, "the schedule preempts nothing"
    fix = (
        "a preempted request comes back as a new owner of any row, with all its tokens as a "
        "prompt: expect add_request(row) and a prefill, and nothing of before"
    )
    return _check_run(subject, result, arrivals, "after a preemption", fix)


def check_draft_kv(subject: Subject) -> str | None:
    """Check the drafter's own KV while runs are of random lengths and accepted at random."""
    require_drafts(subject)
    if subject.capabilities.kv is None:
        raise NotApplicable("declared kv=None")
    k = subject.num_speculative_tokens
    arrivals = same_arrivals(subject, 59, 3, temperature=0.7, max_tokens=60 * (k + 1))
    longest = 24 + 60 * (k + 1)
    options = {"max_model_len": min(longest, 480), "num_kv_blocks": 400}
    lengths = subject.random_lengths(seed=2)
    engine = subject.engine("random", draft_length=lengths, **options)
    seen, compared = Play(), 0

    def compare(step: int) -> None:
        nonlocal compared
        if step not in (8, 25, 50):
            return
        seen.proposals.clear()
        take_proposals(engine, arrivals, seen)
        compared += _check_kv(subject, engine, list(seen.proposals.values()), step, options)

    play(engine, arrivals, after_step=compare)
    assert compared > 0, "no request ran long enough"
    return None


def _check_kv(
    subject: Subject, engine: Engine, running: list[Proposal], step: int, options: dict[str, Any]
) -> int:
    """Compare the KV of running texts with that of a fresh pass; returns how many there were."""
    if not running:
        return 0
    fresh = _scratch_engine(subject, running, "random", **options)
    again = resume(fresh, running)
    for (name, _), new in again.proposals.items():
        old = running[int(name)]
        # The last token's own entry may be left to the next step.
        num_positions = len(old.token_ids) - 1
        ours = _entries(engine, old.row, num_positions)
        theirs = _entries(fresh, new.row, num_positions)
        error = (ours - theirs).abs().amax((0, 2, 3))
        allowed = _TOLERANCE * float(theirs.abs().max())
        wrong = (~(error <= allowed)).nonzero()[:, 0].tolist()
        require(
            not wrong,
            f"after {step} steps of random lengths and acceptance the draft KV of {len(wrong)} of "
            f"{num_positions} positions is not that of the committed text, the first at position "
            f"{wrong[0] if wrong else 0}",
            "run the first pass over every position that the step committed, also where it asks "
            "for no drafts (runner.draft_inputs.first_pass_inputs): KV of rejected drafts has to "
            "be written over",
        )
    return len(running)


def _entries(engine: Engine, row: int, num_positions: int) -> Tensor:
    """Return the draft KV of a row's first positions, [2 * layers, positions, heads, head_size]."""
    kv, size = engine.runner.draft_kv, engine.config.block_size
    assert kv is not None
    positions = torch.arange(num_positions)
    blocks = engine.runner.state.block_table.tensor[row].cpu()[positions // size].long()
    slots = (blocks * size + positions % size).to(kv.keys[0].device)
    return torch.stack([t[slots].float().cpu() for t in (*kv.keys, *kv.values)])


def alternating(subject: Subject, seed: int, num_requests: int) -> list[Arrival]:
    """Return greedy and sampled requests in turn."""
    half = (num_requests + 1) // 2
    greedy = same_arrivals(subject, seed, half, temperature=0.0, max_tokens=22)
    sampled = same_arrivals(subject, seed + 1000, num_requests - half, temperature=0.8)
    for arrival in sampled:
        arrival.params.max_tokens = 22
    mixed = [a for pair in zip(greedy, sampled, strict=False) for a in pair]
    return mixed + greedy[len(sampled) :]


def _refuse_history(subject: Subject) -> None:
    require_drafts(subject)
    if subject.capabilities.uses_history:
        raise NotApplicable("declared uses_history=True: drafts depend on more than the text")


def _check_run(
    subject: Subject, result: Play, arrivals: Sequence[Arrival], where: str, fix: str
) -> str | None:
    """Hold a run's texts to the autoregressive ones, and its drafts to those from scratch."""
    check_texts(subject, result, arrivals, fix)
    if subject.never_drafts:
        return "texts alone: declared never_drafts=True"
    if subject.capabilities.uses_history:
        return _TEXTS_ALONE
    check_against_scratch(subject, result, "sampled_match", where, fix)
    return None if result.num_drafts else NO_DRAFTS


def _scratch_engine(
    subject: Subject, proposals: Sequence[Proposal], verifier: str, **options: Any
) -> Engine:
    """Build an engine that computes what follows some texts in a single step."""
    num_tokens = sum(len(p.token_ids) for p in proposals)
    sizes = {
        "max_num_reqs": len(proposals),
        "max_num_batched_tokens": max(num_tokens, 2 * (subject.num_speculative_tokens + 1)),
        "num_kv_blocks": num_tokens + len(proposals) * 64,
    }
    return subject.engine(verifier, **{**options, **sizes})


def check_against_scratch(
    subject: Subject, result: Play, verifier: str, where: str, fix: str
) -> None:
    """Compare what was proposed with what is proposed for the same texts from scratch.

    Raises:
        RuleBroken: more drafts differ than rounding can explain, or a law does.
    """
    every = list(result.proposals.values())
    stride = -(-len(every) // _MOST_RESUMED)
    chosen = every[::stride]
    again = resume(_scratch_engine(subject, chosen, verifier), chosen)
    pairs = []
    for i, old in enumerate(chosen):
        new = again.proposals.get((str(i), len(old.token_ids)))
        if new is not None and new.token_ids == old.token_ids:
            pairs.append((old, new))  # else it ended, or its last token was drawn at a near-tie
    assert len(pairs) > len(chosen) // 2, f"only {len(pairs)} of {len(chosen)} texts came again"
    expected = "those of the committed text computed from scratch"
    check_proposals(pairs, where, expected, fix, _FIX_KINDS)


def check_proposals(
    pairs: Sequence[tuple[Proposal, Proposal]],
    where: str,
    expected: str,
    fix: str,
    fix_kinds: str | None = None,
) -> None:
    """Compare drafts, kinds and laws of proposals for the same texts.

    Args:
        pairs: what is judged, and what it should be.
        where: the judged ones were made.
        expected: what the others are, in words.
        fix: what most likely mends it.
        fix_kinds: likewise, where nothing but the kinds differs; None takes `fix`.

    Raises:
        RuleBroken: more drafts differ than rounding can explain, or a law does.
    """
    flips, first, kinds_alone = 0, "", True
    for old, new in pairs:
        if (old.drafts, old.kind) != (new.drafts, new.kind):
            flips += 1
            kinds_alone &= old.drafts == new.drafts
            first = first or (
                f"at length {len(old.token_ids)} {list(old.drafts)} of kind {old.kind} instead of "
                f"{list(new.drafts)} of kind {new.kind}"
            )
        elif old.logits is not None and new.logits is not None:
            _check_law(old.logits, new.logits, where, expected, fix)
    if flips > max(1, _MOST_FLIPS * len(pairs)):
        raise RuleBroken(
            f"{flips} of {len(pairs)} proposals {where} are not {expected}, the first {first}",
            fix_kinds or fix if kinds_alone else fix,
        )


def _check_law(old: Tensor, new: Tensor, where: str, expected: str, fix: str) -> None:
    """Compare draft logits of one proposal, up to a constant of each line."""
    laws = old.softmax(-1), new.softmax(-1)
    error = float((laws[0] - laws[1]).abs().max())
    require(
        error <= 10 * _TOLERANCE,
        f"draft_logits {where} are not {expected}: a probability differs by {error:.2g}",
        fix,
    )
