"""Schedules of unlike requests, played on an engine, and what the drafter proposed meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from specdec.engine import Engine
from specdec.protocols import DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q, HostRow
from specdec.request import Request
from specdec.testing.rule import RuleBroken
from specdec.testing.subject import Subject
from specdec.types import RequestOutput, SamplingParams

_MOST_STEPS = 3000


@dataclass(frozen=True)
class Arrival:
    """A request of a schedule."""

    step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    abort_after: int | None = None  # steps


@dataclass(frozen=True)
class Proposal:
    """What lay in the draft buffers of a request at one length of its text."""

    arrival: Arrival
    token_ids: tuple[int, ...]  # committed
    drafts: tuple[int, ...]  # valid ones alone
    kind: int
    logits: Tensor | None  # [drafts, V], where the kind says that there is a law
    row: int


@dataclass
class Play:
    """What a schedule gave."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    # By request and length of its text.
    proposals: dict[tuple[str, int], Proposal] = field(default_factory=dict)
    num_early: int = 0  # drafts seen in rows that had not sampled yet

    @property
    def texts(self) -> dict[str, list[int]]:
        """Return the token ids of the requests that were not aborted."""
        done = self.outputs.items()
        return {name: out.token_ids for name, out in done if out.finish_reason != "abort"}

    @property
    def num_preemptions(self) -> int:
        """Return how often a request was preempted."""
        return sum(out.stats.num_preemptions for out in self.outputs.values())

    @property
    def num_drafts(self) -> int:
        """Return how many valid drafts were seen."""
        return sum(len(proposal.drafts) for proposal in self.proposals.values())


def draw_arrivals(subject: Subject, seed: int, num_requests: int = 9) -> list[Arrival]:
    """Draw a schedule: greedy and sampled requests, some with a budget, some aborted."""
    rng, k = np.random.default_rng(seed), subject.num_speculative_tokens
    arrivals, step = [], 0
    for i in range(num_requests):
        step += int(rng.integers(0, 4))
        params = SamplingParams(
            temperature=0.8 if i % 2 else 0.0,
            top_p=float(rng.choice([1.0, 0.9])),
            seed=100 * seed + i,
            max_tokens=int(rng.integers(4, 25)),
            ignore_eos=True,
            num_speculative_tokens=None if rng.random() < 0.75 else int(rng.integers(0, k + 1)),
        )
        prompt = rng.integers(0, subject.vocab_size, int(rng.integers(1, 31)))
        abort = int(rng.integers(2, 8)) if rng.random() < 0.2 else None
        arrivals.append(Arrival(step, tuple(prompt.tolist()), params, abort))
    return arrivals


def same_arrivals(subject: Subject, seed: int, num_requests: int, **fields: Any) -> list[Arrival]:
    """Return requests that all arrive at once and run to their ends, with these parameters."""
    rng = np.random.default_rng(seed)
    prompts = [
        rng.integers(0, subject.vocab_size, int(rng.integers(1, 24))) for _ in range(num_requests)
    ]
    return [
        Arrival(0, tuple(prompt.tolist()), SamplingParams(seed=seed + i, ignore_eos=True, **fields))
        for i, prompt in enumerate(prompts)
    ]


def play(
    engine: Engine,
    arrivals: Sequence[Arrival],
    record: bool = False,
    after_step: Callable[[int], Any] | None = None,
) -> Play:
    """Run a schedule to its end.

    Args:
        engine: fresh.
        arrivals: in order of their steps.
        record: keep what was proposed; it reads the device after each step.
        after_step: called with the index of each step.
    """
    result = Play()
    if record:
        take_host_proposals(engine, arrivals, result)
    waiting, aborts, step = list(enumerate(arrivals)), dict[str, int](), 0
    while waiting or engine.has_requests:
        while waiting and waiting[0][1].step <= step:
            index, arrival = waiting.pop(0)
            engine.add_request(str(index), list(arrival.prompt), arrival.params)
            if arrival.abort_after is not None:
                aborts[str(index)] = step + arrival.abort_after
        for name in [name for name, when in aborts.items() if when <= step]:
            del aborts[name]
            if name in engine.unfinished_ids:
                engine.abort(name)
        for increment in engine.step():
            if increment.output is not None:
                result.outputs[increment.request_id] = increment.output
        if record:
            take_proposals(engine, arrivals, result)
        if after_step is not None:
            after_step(step)
        step += 1
        if step > _MOST_STEPS:
            raise RuleBroken(
                f"the schedule does not end within {_MOST_STEPS} steps", "see what observe() raises"
            )
    return result


def take_proposals(engine: Engine, arrivals: Sequence[Arrival], into: Play) -> None:
    """Read the draft buffers of every running request."""
    state = engine.runner.state
    total_len, prefill_len = state.total_len.tensor.tolist(), state.prefill_len.tensor.tolist()
    drafts, kinds = state.read_draft_tokens(), state.draft_kind.tolist()
    for request in engine.scheduler.running:
        row = request.row
        assert row is not None
        valid = tuple(token for token in drafts[row].tolist() if token >= 0)
        if total_len[row] <= prefill_len[row]:
            into.num_early += len(valid)
            continue
        length, logits = total_len[row], None
        if kinds[row] == DRAFT_KIND_WITH_Q and engine.runner.draft_logits is not None:
            logits = engine.runner.draft_logits[row, : len(valid)].clone().float().cpu()
        tokens = tuple(state.all_token_ids.tensor[row, :length].tolist())
        arrival = arrivals[int(request.request_id)]
        proposal = Proposal(arrival, tokens, valid, kinds[row], logits, row)
        into.proposals[request.request_id, length] = proposal


def take_host_proposals(engine: Engine, arrivals: Sequence[Arrival], into: Play) -> None:
    """Keep what a drafter on the host proposes: it stands for what the device left in the row."""
    if not engine.drafter.capabilities.on_cpu:
        return
    drafter: Any = engine.drafter
    inner = drafter.propose_on_host

    def propose_on_host(rows: Sequence[HostRow]) -> Sequence[Sequence[int]]:
        runs = inner(rows)
        for row, run in zip(rows, runs, strict=True):
            drafts = [*run[: row.num_drafts], -1]
            valid = tuple(drafts[: drafts.index(-1)])
            if valid:
                name, tokens = row.request.request_id, tuple(row.request.token_ids)
                into.proposals[name, len(tokens)] = Proposal(
                    arrivals[int(name)], tokens, valid, DRAFT_KIND_ONE_HOT, None, row.row
                )
        return runs

    drafter.propose_on_host = propose_on_host


def autoregressive(subject: Subject, arrivals: Sequence[Arrival]) -> dict[str, list[int]]:
    """Return the whole text of every request, decoded without drafts."""
    key = tuple((a.prompt, repr(a.params)) for a in arrivals)
    if key not in subject.texts:
        whole = [Arrival(0, a.prompt, a.params) for a in arrivals]
        subject.texts[key] = play(subject.engine(drafter="none"), whole).texts
    return subject.texts[key]


def check_texts(subject: Subject, result: Play, arrivals: Sequence[Arrival], fix: str) -> None:
    """Hold every text to the autoregressive one, an aborted one to the beginning of it.

    Raises:
        RuleBroken: one differs.
    """
    expected = autoregressive(subject, arrivals)
    for name, output in result.outputs.items():
        wanted = expected[name]
        if output.finish_reason == "abort":
            wanted = wanted[: len(output.token_ids)]
        if output.token_ids != wanted:
            pairs = enumerate(zip(output.token_ids, wanted, strict=False))
            shorter = min(len(output.token_ids), len(wanted))
            first = next((i for i, (ours, theirs) in pairs if ours != theirs), shorter)
            raise RuleBroken(
                f"request {name} wrote another text than without drafts, from new token {first} on",
                fix,
            )


def resume(engine: Engine, proposals: Sequence[Proposal]) -> Play:
    """Compute in one step what is proposed for texts that the drafter never saw grow.

    Each text is given to a row of its own as if it resumed after a preemption: all of it but the
    last token is run as a prompt, and the last one is drawn again by the same noise.

    Args:
        engine: fresh, with a row for each text and a step that holds them all.
        proposals: whose texts are taken.
    """
    arrivals = [p.arrival for p in proposals]
    for i, proposal in enumerate(proposals):
        prompt = list(proposal.arrival.prompt)
        engine.add_request(str(i), prompt, proposal.arrival.params)
        request: Request = engine.scheduler.waiting[-1]
        request.token_ids += proposal.token_ids[len(prompt) : -1]
    result = Play()
    take_host_proposals(engine, arrivals, result)
    engine.step()
    take_proposals(engine, arrivals, result)
    if engine.drafter.capabilities.on_cpu:
        engine.step()  # it is asked before the step that judges
    return result
