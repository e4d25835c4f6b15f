"""The rule about `score`: at many starts of one text at once, what steps of their own propose.

Runs are recorded, and their texts are scored as shadow runs do it (docs/shadow.md): rows are starts
of a text over a KV cache with pages of one token, shared by all rows until the drafter forks them.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.attention_metadata import single_request_metadata
from sampler.noise import mix_seed
from specdec.protocols import DRAFT_KIND_NONE, DRAFT_KIND_WITH_Q, DraftContext
from specdec.testing.play import Proposal, play
from specdec.testing.rule import NotApplicable, require, require_drafts
from specdec.testing.rules_history import NO_DRAFTS, alternating, check_proposals
from specdec.testing.subject import Subject
from specdec.testing.watch import rows_of, watch

_NUM_ROWS = 8  # starts a call: most texts take several
_FIX = (
    "let each place propose from its own row and its own feature, as a step that committed one "
    "token; run over the text before fork(), and write KV of drafts behind it; the first k of K "
    "drafts have to be those that are proposed where k are asked for; or declare can_score=False"
)


def check_score(subject: Subject) -> str | None:
    """Check what is scored at the starts of real runs against what these proposed there."""
    require_drafts(subject)
    if not subject.capabilities.can_score:
        raise NotApplicable("declared can_score=False: shadow runs play it along their texts")
    require(
        callable(getattr(subject.probe.drafter, "score", None)),
        "can_score=True is declared, and the drafter has no score()",
        "derive from drafters.base.DrafterBase, which has one, or declare can_score=False",
    )
    starts, pairs = _Starts(subject), []
    for options in ({}, {"draft_length": subject.random_lengths(seed=3)}):
        for steps in _record(subject, options):
            scored = starts.score(steps[-1][0])
            for proposed, num_asked in steps:
                pairs.append((_first(scored[len(proposed.token_ids)], num_asked), proposed))
    expected = "those of propose() in a real run that started a step there"
    check_proposals(pairs, "of score()", expected, _FIX)
    return None if any(proposed.drafts for _, proposed in pairs) else NO_DRAFTS


def _record(subject: Subject, options: dict[str, Any]) -> list[list[tuple[Proposal, int]]]:
    """Run texts; return each one's proposals, the longest last, and how many were asked for."""
    arrivals, asked = alternating(subject, 47, 7), dict[tuple[int, int], int]()
    engine = subject.engine(max_num_reqs=len(arrivals), **options)

    @contextmanager
    def around(name: str, ctx: Any) -> Iterator[Any]:
        yield ctx
        if name == "propose":
            for row in rows_of(ctx):
                asked[row, int(ctx.state.total_len[row])] = ctx.num_drafts

    watch(engine, around)
    steps: dict[str, list[tuple[Proposal, int]]] = {}
    for (name, length), proposal in play(engine, arrivals, record=True).proposals.items():
        num_asked = asked.get((proposal.row, length))
        if num_asked is not None:
            steps.setdefault(name, []).append((proposal, num_asked))
    return list(steps.values())


def _first(proposal: Proposal, num_drafts: int) -> Proposal:
    """Return the beginning of a proposal, as if so many drafts had been asked for."""
    drafts, logits = proposal.drafts[:num_drafts], proposal.logits
    return dataclasses.replace(
        proposal,
        drafts=drafts,
        kind=proposal.kind if drafts else DRAFT_KIND_NONE,
        logits=None if logits is None or not drafts else logits[: len(drafts)],
    )


class _Starts:
    """An engine whose rows are made starts of one text; it runs no step.

    Args:
        subject: whose drafter says `can_score`.
    """

    def __init__(self, subject: Subject) -> None:
        self._k = subject.num_speculative_tokens
        longest = subject.probe.config.max_model_len
        self._own_pages = self._k + 1  # of a row, from its last committed position on
        self._engine = subject.engine(
            max_num_reqs=_NUM_ROWS,
            block_size=1,
            num_kv_blocks=longest + _NUM_ROWS * self._own_pages,
        )
        self._runner: Any = self._engine.runner
        self._target_kv = subject.target.model.make_kv_cache(1, longest)
        self._shared_pages, self._device = longest, subject.device

    @torch.inference_mode()
    def score(self, longest: Proposal) -> dict[int, Proposal]:
        """Score a text at every start; returns what is proposed, by the length at the start.

        Args:
            longest: the proposal for the whole text.
        """
        runner, params = self._runner, longest.arrival.params
        token_ids = torch.tensor(longest.token_ids, device=self._device)
        assert params.seed is not None, "the kit's requests have seeds"
        scored = {}
        with runner.on_device():
            runner.sampler.temperature.fill_(params.temperature)
            runner.sampler.state.seeds.fill_(mix_seed(params.seed, 0))
            for row in range(_NUM_ROWS):
                runner.drafter.add_request(row)
            hidden, aux = self._features(token_ids)
            first = len(longest.arrival.prompt) + 1  # behind the token that the prompt gave
            every = torch.arange(first, len(token_ids) + 1, device=self._device)
            for starts in every.split(_NUM_ROWS):
                self._fill_rows(longest, token_ids, starts)
                ctx = self._context(token_ids, hidden, aux, starts, first)
                self._call(ctx, starts)
                for row, start in enumerate(starts.tolist()):
                    scored[start] = self._read(longest, row, start)
        return scored

    def _features(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the target's hidden states and those of the wanted layers, a line a token."""
        positions = torch.arange(len(token_ids), device=self._device)
        return self._runner.target.forward_with_layers(
            token_ids,
            positions,
            single_request_metadata(self._target_kv, positions, len(token_ids)),
            self._runner.drafter.capabilities.aux_layers,
        )

    def _fill_rows(self, longest: Proposal, token_ids: Tensor, starts: Tensor) -> None:
        """Write the state that a step has left at each start; all rows share their pages."""
        state, n, length = self._runner.state, len(starts), len(token_ids)
        view, arrival = state.view(), longest.arrival
        columns = torch.arange(view.all_token_ids.shape[1], device=self._device)
        known = torch.where(columns[:length] < starts[:, None], token_ids, 0)
        view.all_token_ids[:n] = 0
        view.all_token_ids[:n, :length] = known.int()
        view.prompt_len[:n] = view.prefill_len[:n] = len(arrival.prompt)
        view.total_len[:n] = starts.int()
        view.num_computed_tokens[:n] = starts.int() - 1
        view.last_sampled_tokens[:n, 0] = token_ids[starts - 1]
        view.block_table[:n] = columns.int()
        most = min(len(arrival.prompt) + arrival.params.max_tokens, state.max_model_len)
        left = torch.minimum(most - starts - 1, state.draft_context - starts)
        view.draft_limit[:n] = left.clamp(0, self._k).int()
        state.draft_tokens.fill_(-1)
        state.draft_kind.zero_()
        laws = self._runner.draft_logits
        if laws is not None:  # what is not written stays no law
            laws[torch.isfinite(laws)] = float("nan")

    def _context(
        self, token_ids: Tensor, hidden: Tensor, aux: Tensor | None, starts: Tensor, first: int
    ) -> DraftContext:
        """Build the steps that ended in these starts: each ran one token, or the whole prompt."""
        runner, n, device = self._runner, len(starts), self._device
        has_prompt, wants = int(starts[0]) == first, runner.drafter.capabilities
        query_lens = torch.ones(n, dtype=torch.int32, device=device)
        is_verify = torch.ones_like(query_lens)
        if has_prompt:
            query_lens[0], is_verify[0] = first - 1, 0
        query_start_loc = torch.zeros(n + 1, dtype=torch.int32, device=device)
        query_start_loc[1:] = query_lens.cumsum(0)
        # What the target ran: all before the last committed token of each start.
        ran = slice(0 if has_prompt else int(starts[0]) - 2, int(starts[-1]) - 1)
        state = runner.state.view()
        return DraftContext(
            state=state,
            idx_mapping=torch.arange(n, dtype=torch.int32, device=device),
            query_lens=query_lens,
            samples=torch.ones_like(query_lens),
            is_verify=is_verify,
            query_start_loc=query_start_loc,
            positions=torch.arange(ran.start, ran.stop, device=device),
            input_ids=token_ids[ran],
            seq_lens=(starts - 1).int(),
            hidden_states=hidden[ran] if wants.hidden_states == "last" else None,
            aux_hidden_states=None if aux is None else aux[ran],
            num_sampled=torch.ones_like(query_lens),
            num_rejected=torch.zeros_like(query_lens),
            temperature=runner.sampler.temperature,
            noise=runner.sampler.noise(state.total_len),
            block_size=1,
            max_seq_len=int(starts[-1]),
            max_query_len=int(query_lens.max()),
            num_last_chunks=int(has_prompt),
            num_drafts=self._k,
        )

    def _call(self, ctx: DraftContext, starts: Tensor) -> None:
        """Let the drafter score, and see that it forks."""
        num_forks = 0

        def fork() -> None:
            nonlocal num_forks
            num_forks += 1
            self._fork(starts)

        self._runner.drafter.score(ctx, fork)
        require(
            num_forks == 1 or (num_forks == 0 and self._runner.draft_kv is None),
            f"score() called fork() {num_forks} times",
            "call fork() once, between the pass over the text and the KV of the first draft",
        )

    def _fork(self, starts: Tensor) -> None:
        """Give each row pages of its own, from its last committed position on."""
        table, kv = self._runner.state.block_table.tensor, self._runner.draft_kv
        rows, last = torch.arange(len(starts), device=self._device), starts - 1
        pages = self._shared_pages + rows * self._own_pages
        for memory in () if kv is None else (*kv.keys, *kv.values):
            memory[pages] = memory[last]  # what was written there goes along
        for i in range(self._own_pages):
            fits = last + i < table.shape[1]
            table[rows[fits], last[fits] + i] = (pages[fits] + i).int()

    def _read(self, longest: Proposal, row: int, start: int) -> Proposal:
        """Return what lies in the draft buffers of a row, cut as the runner cuts it."""
        state, logits = self._runner.state, self._runner.draft_logits
        drafts = [*state.draft_tokens[row, : int(state.draft_limit[row])].tolist(), -1]
        valid = tuple(drafts[: drafts.index(-1)])
        kind = max(int(state.draft_kind[row]), 1) if valid else DRAFT_KIND_NONE
        law = None
        if kind == DRAFT_KIND_WITH_Q and logits is not None:
            law = logits[row, : len(valid)].clone().float().cpu()
        return Proposal(longest.arrival, longest.token_ids[:start], valid, kind, law, row)
