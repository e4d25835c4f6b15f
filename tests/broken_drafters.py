"""Drafters that break one rule each, beside the sound ones that they are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from drafters.draft_model import DraftModelConfig, DraftModelDrafter
from runner.draft_inputs import DraftPass
from runner.rows import scatter_rows
from sampler.gumbel import gumbel_sample
from sampler.noise import STREAM_TARGET
from specdec.protocols import (
    DRAFT_KIND_ONE_HOT,
    DRAFT_KIND_WITH_Q,
    DraftBuffers,
    DraftContext,
    DrafterCapabilities,
    HostRequest,
    HostRow,
    StateView,
    TargetView,
)
from specdec.registry import register_drafter
from specdec.testing.target import LIKELY_TOKENS


def rows_of(ctx: DraftContext) -> Tensor:
    """Return the row of each place, 0 in padding."""
    return ctx.idx_mapping.long().clamp(min=0)


# --- a drafter without state: the last token, again and again -----------------------------------


@register_drafter("sound_repeat", DrafterConfig)
class SoundRepeat(DrafterBase):
    """Repeats the last token, then the one after the first likely token."""

    def propose(self, ctx: DraftContext) -> None:
        """Repeat it."""
        self.write(ctx, self.drafts(ctx))

    def drafts(self, ctx: DraftContext) -> Tensor:
        """Return [R, num_drafts]."""
        return ctx.state.last_sampled_tokens[rows_of(ctx)].expand(-1, ctx.num_drafts)

    def write(self, ctx: DraftContext, drafts: Tensor) -> None:
        """Write drafts of all places."""
        table = self.buffers.draft_tokens[:, : ctx.num_drafts]
        scatter_rows(table, ctx.idx_mapping, drafts)


@register_drafter("broken_reads_host", DrafterConfig)
class ReadsHost(SoundRepeat):
    """Looks at a value on the host."""

    def propose(self, ctx: DraftContext) -> None:
        """Propose where something was sampled."""
        if int(ctx.num_sampled.sum()) >= 0:
            super().propose(ctx)


@register_drafter("broken_data_shape", DrafterConfig)
class DataShape(SoundRepeat):
    """Selects the real places by a mask, so that shapes depend on what is there."""

    def propose(self, ctx: DraftContext) -> None:
        """Propose for the real places."""
        rows = ctx.idx_mapping[ctx.idx_mapping >= 0].long()
        drafts = self.state.last_sampled_tokens[rows].expand(-1, ctx.num_drafts)
        self.buffers.draft_tokens[rows, : ctx.num_drafts] = drafts


@register_drafter("broken_columns", DrafterConfig)
class WritesColumns(SoundRepeat):
    """Fills all K columns, however many drafts are wanted."""

    def write(self, ctx: DraftContext, drafts: Tensor) -> None:
        """Write K columns."""
        whole = drafts[:, :1].expand(-1, self.buffers.num_speculative_tokens)
        scatter_rows(self.buffers.draft_tokens, ctx.idx_mapping, whole)


@register_drafter("broken_behind_the_end", DrafterConfig)
class WritesBehindTheEnd(SoundRepeat):
    """Writes one element behind its buffer."""

    def write(self, ctx: DraftContext, drafts: Tensor) -> None:
        """Write, and one more."""
        super().write(ctx, drafts)
        table = self.buffers.draft_tokens
        table.as_strided((1,), (1,), table.storage_offset() + table.numel()).zero_()


@register_drafter("broken_other_rows", DrafterConfig)
class WritesOtherRows(SoundRepeat):
    """Writes to rows by place instead of by row."""

    def write(self, ctx: DraftContext, drafts: Tensor) -> None:
        """Write to the first rows."""
        self.buffers.draft_tokens[: ctx.num_reqs, : ctx.num_drafts] = drafts


@register_drafter("broken_state", DrafterConfig)
class WritesState(SoundRepeat):
    """Changes the state that it may only read."""

    def drafts(self, ctx: DraftContext) -> Tensor:
        """Count up from the last token, in place."""
        ctx.state.last_sampled_tokens.add_(1).remainder_(97)
        return super().drafts(ctx)


@register_drafter("broken_global_noise", DrafterConfig)
class GlobalNoise(SoundRepeat):
    """Draws from torch's global generator."""

    def drafts(self, ctx: DraftContext) -> Tensor:
        """Draw."""
        likely = torch.where(torch.rand(ctx.num_reqs, 1) < 0.5, LIKELY_TOKENS[0], LIKELY_TOKENS[1])
        return likely.expand(-1, ctx.num_drafts)


@register_drafter("broken_row_memory", DrafterConfig)
class RowMemory(SoundRepeat):
    """Repeats the first token that it ever saw sampled in the row, whoever owned it then."""

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Make the memory."""
        super().bind(state, buffers)
        self._first = torch.full((len(state.total_len), 1), -1)

    def drafts(self, ctx: DraftContext) -> Tensor:
        """Keep the first, and repeat it."""
        rows, last = rows_of(ctx), super().drafts(ctx)
        first = torch.where(self._first[rows] >= 0, self._first[rows], last[:, :1])
        scatter_rows(self._first, ctx.idx_mapping, first)
        return first.expand(-1, ctx.num_drafts)


@register_drafter("sound_counter", DrafterConfig)
class SoundCounter(SoundRepeat):
    """Counts the tokens of a row, chunk by chunk, from num_computed_tokens."""

    def drafts(self, ctx: DraftContext) -> Tensor:
        """Choose a likely token by the parity of the count."""
        odd = self.count(ctx)[:, None] % 2 == 1
        return torch.where(odd, LIKELY_TOKENS[0], LIKELY_TOKENS[1]).expand(-1, ctx.num_drafts)

    def count(self, ctx: DraftContext) -> Tensor:
        """Return [R], tokens whose KV is there."""
        return ctx.state.num_computed_tokens[rows_of(ctx)]


@register_drafter("broken_chunks", DrafterConfig)
class TakesChunkForPrompt(SoundCounter):
    """Takes the tokens of the step for the whole prompt."""

    def count(self, ctx: DraftContext) -> Tensor:
        """Return the length of the last chunk, where there is one."""
        return torch.where(ctx.is_verify > 0, super().count(ctx), ctx.query_lens)


@register_drafter("broken_counts_proposals", DrafterConfig)
class CountsProposals(SoundCounter):
    """Counts on from what it knew when it last proposed, as if it were asked in every step."""

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Make the counts."""
        super().bind(state, buffers)
        self._counts = torch.zeros(len(state.total_len), dtype=torch.int32)

    def count(self, ctx: DraftContext) -> Tensor:
        """Add what this step committed; a prompt is counted as it is."""
        grown = self._counts[rows_of(ctx)] + ctx.num_sampled
        counts = torch.where(ctx.is_verify > 0, grown, super().count(ctx))
        scatter_rows(self._counts, ctx.idx_mapping, counts)
        return counts


# --- a drafter on the host ----------------------------------------------------------------------


@register_drafter("sound_host", DrafterConfig)
class SoundHost(DrafterBase):
    """Repeats the last token, on the host."""

    capabilities = DrafterCapabilities(on_cpu=True)

    def propose(self, ctx: DraftContext) -> None:
        """Leave the rows as they are."""

    def propose_on_host(self, rows: Sequence[HostRow]) -> list[list[int]]:
        """Repeat it."""
        return [[row.request.token_ids[-1]] * row.num_drafts for row in rows]

    def end_request(self, request: HostRequest) -> None:
        """Keep nothing."""


@register_drafter("broken_host_many", DrafterConfig)
class HostMany(SoundHost):
    """Returns K drafts, however many can be used."""

    def propose_on_host(self, rows: Sequence[HostRow]) -> list[list[int]]:
        """Repeat the last token K times."""
        k = self.buffers.num_speculative_tokens
        return [[row.request.token_ids[-1]] * k for row in rows]


@register_drafter("broken_host_text", DrafterConfig)
class HostText(SoundHost):
    """Lays its drafts down in the request's own text."""

    def propose_on_host(self, rows: Sequence[HostRow]) -> list[list[int]]:
        """Grow the text."""
        runs = super().propose_on_host(rows)
        for row, run in zip(rows, runs, strict=True):
            token_ids: Any = row.request.token_ids
            token_ids += run
        return runs


# --- a drafter that draws -----------------------------------------------------------------------


@register_drafter("sound_law", DrafterConfig)
class SoundLaw(DrafterBase):
    """Draws from a fixed law over the likely tokens, but is one-hot at every third length."""

    capabilities = DrafterCapabilities(offers_q=True, can_score=True)

    def load(self, target: TargetView) -> None:
        """Make the law."""
        self._logits = torch.full((target.vocab_size,), -2.0, device=target.device)
        self._logits[list(LIKELY_TOKENS)] = 1.5
        self._logits[LIKELY_TOKENS[2]] = 3.0

    def propose(self, ctx: DraftContext) -> None:
        """Draw, or count on."""
        rows, k = rows_of(ctx), ctx.num_drafts
        total_len = ctx.state.total_len[rows].long()
        logits = self._logits.expand(ctx.num_reqs, -1)
        one_hot = (total_len % 3 == 0) | (ctx.temperature[rows] == 0)
        drafts = []
        for i in range(k):
            drawn = self.draw(ctx, logits, total_len + i)
            drafts.append(torch.where(one_hot, LIKELY_TOKENS[2], drawn))
        scatter_rows(self.buffers.draft_tokens[:, :k], ctx.idx_mapping, torch.stack(drafts, 1))
        kind = torch.where(one_hot, DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q).to(torch.int8)
        self.write_law(ctx, logits, kind)

    def draw(self, ctx: DraftContext, logits: Tensor, positions: Tensor) -> Tensor:
        """Draw a token for each place."""
        return ctx.noise.draw(logits, ctx.idx_mapping, positions)

    def write_law(self, ctx: DraftContext, logits: Tensor, kind: Tensor) -> None:
        """Write law and kind, the law where there is one alone."""
        assert self.buffers.draft_logits is not None
        mapping = torch.where(kind == DRAFT_KIND_WITH_Q, ctx.idx_mapping, -1)
        order = torch.argsort((mapping < 0).int(), stable=True)  # real places come first
        for i in range(ctx.num_drafts):
            scatter_rows(self.buffers.draft_logits[:, i], mapping[order], logits[order])
        scatter_rows(self.buffers.draft_kind, ctx.idx_mapping, kind)


@register_drafter("broken_stale_kind", DrafterConfig)
class StaleKind(SoundLaw):
    """Leaves the kind of the step before where it is one-hot now."""

    def write_law(self, ctx: DraftContext, logits: Tensor, kind: Tensor) -> None:
        """Write the law, and a kind that does not go back."""
        super().write_law(ctx, logits, kind)
        stale = torch.full_like(kind, DRAFT_KIND_WITH_Q)
        scatter_rows(self.buffers.draft_kind, ctx.idx_mapping, stale)


@register_drafter("sound_kinds", DrafterConfig)
class SoundKinds(SoundLaw):
    """Tells the kind by the temperature alone."""

    def write_law(self, ctx: DraftContext, logits: Tensor, kind: Tensor) -> None:
        """Write the law, and a kind for each place."""
        greedy = self.temperature(ctx) == 0
        kind = torch.where(greedy, DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q).to(torch.int8)
        super().write_law(ctx, logits, kind)

    def temperature(self, ctx: DraftContext) -> Tensor:
        """Return the temperature of each place."""
        return ctx.temperature[rows_of(ctx)]


@register_drafter("broken_kind_places", DrafterConfig)
class KindOfPlaces(SoundKinds):
    """Takes the temperature of place i from row i."""

    def temperature(self, ctx: DraftContext) -> Tensor:
        """Return that of rows 0, 1, ..."""
        return ctx.temperature[: ctx.num_reqs]


@register_drafter("broken_law", DrafterConfig)
class OtherLaw(SoundLaw):
    """Hands over a flatter law than the one that it drew from."""

    def write_law(self, ctx: DraftContext, logits: Tensor, kind: Tensor) -> None:
        """Flatten it."""
        super().write_law(ctx, 0.3 * logits, kind)


@register_drafter("sound_confidence", DrafterConfig)
class SoundConfidence(SoundLaw):
    """Tells how probable its drafts are."""

    capabilities = DrafterCapabilities(offers_q=True, offers_confidence=True)

    def write_law(self, ctx: DraftContext, logits: Tensor, kind: Tensor) -> None:
        """Write the probability of every draft, too."""
        super().write_law(ctx, logits, kind)
        if self.buffers.draft_confidence is not None:
            rows = rows_of(ctx)
            drafts = self.buffers.draft_tokens[rows, : ctx.num_drafts]
            self.write_confidence(ctx, logits.softmax(1).gather(1, drafts.clamp(min=0)), logits)

    def write_confidence(self, ctx: DraftContext, values: Tensor, logits: Tensor) -> None:
        """Write [R, num_drafts] values."""
        assert self.buffers.draft_confidence is not None
        table = self.buffers.draft_confidence[:, : ctx.num_drafts]
        scatter_rows(table, ctx.idx_mapping, values)


@register_drafter("broken_confidence_likeliest", DrafterConfig)
class ConfidenceOfLikeliest(SoundConfidence):
    """Tells how probable the likeliest token is, whatever was drawn."""

    def write_confidence(self, ctx: DraftContext, values: Tensor, logits: Tensor) -> None:
        """Write the largest probability."""
        best = logits.softmax(1).amax(1, keepdim=True).expand_as(values)
        super().write_confidence(ctx, best, logits)


@register_drafter("broken_confidence_first", DrafterConfig)
class ConfidenceOfFirst(SoundConfidence):
    """Writes the probability of the first draft alone."""

    def write_confidence(self, ctx: DraftContext, values: Tensor, logits: Tensor) -> None:
        """Write one column."""
        assert self.buffers.draft_confidence is not None
        scatter_rows(self.buffers.draft_confidence[:, :1], ctx.idx_mapping, values[:, :1])


@register_drafter("broken_confidence_places", DrafterConfig)
class ConfidenceByPlace(SoundConfidence):
    """Writes probabilities by place instead of by row."""

    def write_confidence(self, ctx: DraftContext, values: Tensor, logits: Tensor) -> None:
        """Write to the first rows."""
        assert self.buffers.draft_confidence is not None
        self.buffers.draft_confidence[: len(values), : ctx.num_drafts] = values


@register_drafter("broken_target_stream", DrafterConfig)
class TargetStream(SoundLaw):
    """Draws with the noise that the target draws with; a test hands it the seeds."""

    seeds: Tensor

    def draw(self, ctx: DraftContext, logits: Tensor, positions: Tensor) -> Tensor:
        """Draw from the wrong stream."""
        temperature = torch.ones(len(self.seeds))
        return gumbel_sample(
            logits, ctx.idx_mapping, positions, temperature, self.seeds, STREAM_TARGET
        )


@register_drafter("broken_own_noise", DrafterConfig)
class OwnNoise(SoundLaw):
    """Draws with noise of its own, whatever the request's seed is."""

    def draw(self, ctx: DraftContext, logits: Tensor, positions: Tensor) -> Tensor:
        """Draw by position alone."""
        seeds, temperature = torch.zeros(64, dtype=torch.int64), torch.ones(64)
        return gumbel_sample(logits, ctx.idx_mapping, positions, temperature, seeds, 1)


# --- a drafter of the target's features ---------------------------------------------------------


@register_drafter("sound_features", DrafterConfig)
class SoundFeatures(DrafterBase):
    """Asks the target's head what follows the feature of the last committed position."""

    capabilities = DrafterCapabilities(hidden_states="last", splits_first_pass=True, can_score=True)

    def load(self, target: TargetView) -> None:
        """Share the head."""
        self._head, self._width = target.model.compute_logits, target.hidden_size

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Make room for what the first pass leaves."""
        super().bind(state, buffers)
        self._hidden = torch.zeros(len(state.total_len), self._width)

    def first_pass(self, ctx: DraftContext) -> None:
        """Keep the feature of each place."""
        assert ctx.hidden_states is not None
        torch.index_select(ctx.hidden_states, 0, self.last(ctx), out=self._hidden[: ctx.num_reqs])

    def last(self, ctx: DraftContext) -> Tensor:
        """Return the token of the step whose feature predicts what was sampled last."""
        behind = ctx.query_start_loc[1:] - 1 - ctx.num_rejected
        return behind.clamp(min=0).long()

    def propose(self, ctx: DraftContext) -> None:
        """Propose the likeliest token, again and again."""
        drafts = self._head(self._hidden[: ctx.num_reqs]).topk(ctx.num_drafts).indices
        table = self.buffers.draft_tokens[:, : ctx.num_drafts]
        scatter_rows(table, ctx.idx_mapping, drafts)


@register_drafter("broken_rejected_feature", DrafterConfig)
class RejectedFeature(SoundFeatures):
    """Takes the feature of the step's last position, rejected or not."""

    def last(self, ctx: DraftContext) -> Tensor:
        """Forget num_rejected."""
        return (ctx.query_start_loc[1:] - 1).long()


# --- a drafter with KV --------------------------------------------------------------------------


@dataclass
class TargetTwinConfig(DraftModelConfig):
    """The target drafts for itself."""

    name: str = "sound_kv"
    model: str = "target"


@register_drafter("sound_kv", TargetTwinConfig)
class SoundKV(DraftModelDrafter):
    """Recomputes its KV for every position that a step committed."""

    def _forward(self, step: DraftPass) -> Tensor:
        first = step.attn_metadata.max_query_len > 1
        return super()._forward(self.narrowed(step) if first else step)

    def narrowed(self, step: DraftPass) -> DraftPass:
        """Return the first pass."""
        return step


@register_drafter("broken_stale_kv", TargetTwinConfig)
class StaleKV(SoundKV):
    """Writes KV of the last committed position alone: what drafts left stays."""

    def first_pass(self, ctx: DraftContext) -> None:
        """Note whether prompts run."""
        self._verifies: Any = bool((ctx.is_verify > 0).all())
        super().first_pass(ctx)

    def narrowed(self, step: DraftPass) -> DraftPass:
        """Drop the writes of all positions but the last of each place."""
        if self._verifies:
            slots = step.attn_metadata.slot_mapping
            kept = torch.zeros_like(slots, dtype=torch.bool)
            kept[step.last_indices] = True
            slots.copy_(torch.where(kept, slots, -1))
        return step
