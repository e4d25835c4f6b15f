"""Rules about what a user sees: texts, budgets, ends and statistics."""

from specdec.protocols import DrafterCapabilities
from specdec.testing.play import (
    Arrival,
    Play,
    autoregressive,
    check_texts,
    draw_arrivals,
    play,
    same_arrivals,
)
from specdec.testing.rule import require, require_drafts
from specdec.testing.subject import Subject
from specdec.types import SamplingParams

_WRITES_ALONE = (
    "a drafter may write its own buffers alone: look for writes to the state, to the target's "
    "weights or KV, or behind the ends of draft_tokens"
)


def check_interface(subject: Subject) -> str | None:
    """Check that the drafter has every method, and declares what it is as data."""
    drafter = subject.probe.drafter
    wanted = ["load", "bind", "add_request", "propose", "observe", "state_bytes"]
    if drafter.capabilities.splits_first_pass:
        wanted.append("first_pass")
    missing = [name for name in wanted if not callable(getattr(drafter, name, None))]
    require(
        not missing,
        f"the drafter has no {', '.join(missing)}",
        "derive from drafters.base.DrafterBase, which has defaults",
    )
    require(
        isinstance(drafter.capabilities, DrafterCapabilities),
        f"capabilities is a {type(drafter.capabilities).__name__}",
        "set capabilities = DrafterCapabilities(...), as a class attribute or in load()",
    )
    num_bytes = drafter.state_bytes()
    require(
        isinstance(num_bytes, int) and num_bytes >= 0,
        f"state_bytes() returned {num_bytes!r}",
        "return the bytes of the tensors that bind() made, 0 where there are none",
    )
    return None


def check_lossless(subject: Subject) -> str | None:
    """Check the texts of mixed batches under arrival, abort and preemption."""
    num_preemptions = 0
    for seed, steps_in_flight in ((0, 1), (1, 2)):
        arrivals = draw_arrivals(subject, seed)
        engine = subject.engine(num_kv_blocks=18, max_steps_in_flight=steps_in_flight)
        result = play(engine, arrivals)
        check_texts(subject, result, arrivals, _WRITES_ALONE)
        num_preemptions += result.num_preemptions
    assert num_preemptions > 0, "the schedule preempts nothing"
    return None


def check_lossless_greedy(subject: Subject) -> str | None:
    """Check greedy texts under the greedy verifier."""
    arrivals = same_arrivals(subject, 7, 6, temperature=0.0, max_tokens=24)
    result = play(subject.engine("greedy"), arrivals)
    check_texts(subject, result, arrivals, _WRITES_ALONE)
    return None


def check_limits(subject: Subject) -> str | None:
    """Check the drafter's own context, the end of max_model_len, and requests' budgets."""
    require_drafts(subject)
    k, engine = subject.num_speculative_tokens, subject.engine(max_num_reqs=6)
    longest, context = engine.config.max_model_len, 40
    prompts = [a.prompt for a in same_arrivals(subject, 11, 6)]
    prompts[0] = (prompts[0] * longest)[: longest - 1]
    prompts[1] = (prompts[1] * longest)[: context - 2]
    budgets = [None, None, 0, 1, min(2, k), None]
    arrivals = [
        Arrival(
            0,
            prompt,
            SamplingParams(
                temperature=0.8 * (i % 2),
                seed=i,
                max_tokens=500,
                ignore_eos=True,
                num_speculative_tokens=budget,
            ),
        )
        for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]
    state = engine.runner.state
    state.draft_context = min(state.draft_context, context)
    result = play(engine, arrivals, record=True)
    check_texts(subject, result, arrivals, _WRITES_ALONE)
    for (name, length), proposal in result.proposals.items():
        budget = budgets[int(name)]
        most = min(
            k if budget is None else budget, longest - length - 1, state.draft_context - length
        )
        require(
            len(proposal.drafts) <= max(most, 0),
            f"request {name} had {len(proposal.drafts)} drafts at length {length}, where "
            f"{max(most, 0)} are allowed",
            "write drafts in propose() alone; the runner cuts them to what can be used after it",
        )
    return None


def check_statistics(subject: Subject) -> str | None:
    """Check what is counted against what was proposed."""
    require_drafts(subject)
    arrivals = same_arrivals(subject, 23, 4, temperature=0.0, max_tokens=30)
    arrivals += same_arrivals(subject, 31, 4, temperature=0.8, max_tokens=30)
    result = play(subject.engine(max_num_reqs=8), arrivals, record=True)
    texts = autoregressive(subject, arrivals)
    require(
        result.num_drafts > 0,
        "nothing was drafted in 8 requests of 30 tokens, so that no rule about drafts means "
        "anything",
        "write token ids to self.buffers.draft_tokens[row, :ctx.num_drafts] in propose(); a "
        "drafter that knows certain texts alone is to be given those of the kit's target",
    )
    check_counts(result, texts)
    _check_ids(subject, result)
    return None


def check_counts(result: Play, texts: dict[str, list[int]]) -> None:
    """Hold what was counted of every request to what was proposed for it, and to its whole text.

    Raises:
        RuleBroken: they differ.
    """
    for name, output in result.outputs.items():
        drafted, accepted = _count(result, name, texts[name])
        stats = output.stats
        require(
            (stats.num_drafted, stats.num_accepted) == (drafted, accepted),
            f"request {name} counted {stats.num_drafted} drafts, {stats.num_accepted} of them "
            f"accepted; {drafted} and {accepted} were proposed and matched the text",
            "write drafts in propose() alone, -1 where there is none",
        )
        require(
            stats.num_verify_tokens == stats.num_verify_steps + stats.num_accepted,
            f"request {name}: {stats.num_verify_tokens} tokens in {stats.num_verify_steps} steps "
            f"with {stats.num_accepted} accepted drafts",
            "do not change num_sampled or num_rejected: the contexts are read-only",
        )


def _count(result: Play, name: str, text: list[int]) -> tuple[int, int]:
    """Return how many drafts a request was proposed, and how many of them its text bears out."""
    drafted = accepted = 0
    for (owner, length), proposal in result.proposals.items():
        if owner != name:
            continue
        follows = text[length - len(proposal.arrival.prompt) :]
        matches = [a == b for a, b in zip(proposal.drafts, follows, strict=False)]
        drafted += len(proposal.drafts)
        accepted += [*matches, False].index(False)
    return drafted, accepted


def _check_ids(subject: Subject, result: Play) -> None:
    for proposal in result.proposals.values():
        odd = [token for token in proposal.drafts if token >= subject.vocab_size]
        require(
            not odd,
            f"token ids {odd} were drafted, the target has {subject.vocab_size}",
            "draft ids of the target's vocabulary, -1 where there is none",
        )
