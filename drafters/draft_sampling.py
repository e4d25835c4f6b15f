"""How drafts are chosen from logits, for every drafter that has logits: by argmax, or by drawing.

A drawn draft comes with the law q that it was drawn from, which the verifier needs to judge it.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from runner.confidence import store_confidence
from runner.rows import scatter_rows
from sampler.top_k_top_p import apply_top_k_top_p
from specdec.errors import ConfigError
from specdec.protocols import (
    DRAFT_KIND_ONE_HOT,
    DRAFT_KIND_WITH_Q,
    DraftBuffers,
    DraftContext,
    DrafterCapabilities,
    StateView,
)


@dataclass
class DraftSamplingConfig(DrafterConfig):
    """Parameters of how drafts are chosen.

    Args:
        sampling: "argmax" proposes the likeliest token (a one-hot draft); "gumbel" samples, and
            hands the verifier the distribution q that it really drew from. Rows of temperature 0
            get the likeliest token either way.
        temperature: of "gumbel"; None takes the row's.
        top_k: of "gumbel": draw among so many; 0 or -1 takes all.
        top_p: of "gumbel": draw among the most probable tokens of this mass, in (0, 1].
    """

    sampling: Literal["argmax", "gumbel"] = "argmax"
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Check the choices."""
        who = f"drafter {self.name}"
        if self.sampling not in ("argmax", "gumbel"):
            raise ConfigError(
                f"{who}: sampling={self.sampling!r} is not allowed; give 'argmax' or 'gumbel'"
            )
        if self.temperature is not None and not 1e-5 <= self.temperature < float("inf"):
            raise ConfigError(
                f"{who}: temperature={self.temperature} is not allowed; give a "
                f"number >= 1e-5, or none for the request's own (sampling='argmax' draws nothing)"
            )
        if not 0 < self.top_p <= 1 or self.top_k < -1:
            raise ConfigError(
                f"{who}: top_k={self.top_k} and top_p={self.top_p} are not allowed; "
                f"give top_k >= -1 and top_p in (0, 1]"
            )
        own = self.temperature is not None or self.top_k > 0 or self.top_p < 1
        if own and self.sampling == "argmax":
            raise ConfigError(
                f"{who}: temperature, top_k and top_p have no effect with "
                "sampling='argmax'; set sampling='gumbel' or leave them out"
            )


class DraftSampler:
    """Chooses drafts and writes them, with their law and their probability where these are wanted.

    Args:
        config: how.
        vocab_size: columns of the logits: ids from here on are never drafted.
    """

    def __init__(self, config: DraftSamplingConfig, vocab_size: int) -> None:
        self.config, self.vocab_size = config, vocab_size
        self.draws = config.sampling == "gumbel"

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Keep the buffers; an id of the target that the drafter does not have gets no mass."""
        self._buffers = buffers
        if buffers.draft_logits is not None:
            buffers.draft_logits[..., self.vocab_size :] = float("-inf")
        num_rows, device = len(state.total_len), state.total_len.device
        config, limit = self.config, self.vocab_size
        self._limits: tuple[Tensor, Tensor] | None = None  # top_k and top_p by row, all alike
        if 0 < config.top_k < limit or config.top_p < 1:
            top_k = min(config.top_k, limit) if config.top_k > 0 else limit
            self._limits = (
                torch.full((num_rows,), top_k, dtype=torch.int32, device=device),
                torch.full((num_rows,), config.top_p, dtype=torch.float32, device=device),
            )

    @property
    def needs_logits(self) -> bool:
        """Return whether a choice needs more of the logits than which is the largest."""
        return self.draws or self._buffers.draft_confidence is not None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the limits by row."""
        return sum(limit.nbytes for limit in self._limits or ())

    def choose(self, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        """Choose draft `index` (from 0) of each place, and store what belongs to it.

        Args:
            ctx: the step.
            logits: [R, vocab_size].
            index: which draft of the run.

        Returns:
            Tokens [R] int64.
        """
        if self.draws:
            logits = self._law(ctx, logits, index)
            rows = ctx.idx_mapping.long().clamp(min=0)
            positions = ctx.state.total_len[rows].long() + index
            drafts = ctx.noise.draw(logits, ctx.idx_mapping, positions)
        else:
            drafts = logits.argmax(1)
        confidence = self._buffers.draft_confidence
        if confidence is not None:
            store_confidence(confidence, ctx.idx_mapping, index, logits, drafts)
        return drafts

    def choose_among(
        self, ctx: DraftContext, logits: Tensor, index: int, target_ids: Tensor | None
    ) -> Tensor:
        """Choose draft `index` of each place where only a part of the vocabulary has logits.

        Args:
            ctx: the step.
            logits: [R, V_draft].
            index: which draft of the run.
            target_ids: [V_draft] int64, the target's id of each column; None: they are the same.

        Returns:
            Tokens [R] int64, the target's ids.
        """
        if target_ids is None:
            return self.choose(ctx, logits, index)
        if not self.draws:
            return target_ids[self.choose(ctx, logits, index)]
        # Noise and law are over the target's ids: those without logits have no mass.
        wide = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return self.choose(ctx, wide.index_copy_(1, target_ids, logits), index)

    def _law(self, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        """Store and return the law of draft `index`: logits [R, vocab_size] float32."""
        assert self._buffers.draft_logits is not None
        rows = ctx.idx_mapping.long().clamp(min=0)
        own = self.config.temperature
        temperature = ctx.temperature[rows][:, None]
        divisor = torch.where(temperature > 0, temperature if own is None else own, 1.0)
        scaled = logits.float() / divisor
        if self._limits is not None:
            apply_top_k_top_p(scaled, ctx.idx_mapping, ctx.temperature, *self._limits)
        table = self._buffers.draft_logits[:, index, : self.vocab_size]
        scatter_rows(table, ctx.idx_mapping, scaled)
        return scaled

    def write(self, ctx: DraftContext, drafts: list[Tensor]) -> None:
        """Write the runs of all places.

        Args:
            ctx: the step.
            drafts: at most `ctx.num_drafts` of [R] int64; behind them there is no draft.
        """
        missing = ctx.num_drafts - len(drafts)
        run = [*drafts, *[torch.full_like(drafts[0], -1)] * missing]
        table = self._buffers.draft_tokens[:, : ctx.num_drafts]
        scatter_rows(table, ctx.idx_mapping, torch.stack(run, 1))
        if self.draws:
            temperature = ctx.temperature[ctx.idx_mapping.long().clamp(min=0)]
            kind = torch.where(temperature > 0, DRAFT_KIND_WITH_Q, DRAFT_KIND_ONE_HOT)
            scatter_rows(self._buffers.draft_kind, ctx.idx_mapping, kind.to(torch.int8))


class SamplingDrafter(DrafterBase):
    """Base of drafters with logits whose `first_pass` leaves a hidden state for each place.

    A subclass calls `set_up` when it is loaded, and writes `self._hidden[: ctx.num_reqs]`.
    """

    config: Any  # a subclass's own kind of DraftSamplingConfig
    sampler: DraftSampler

    def set_up(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, **capabilities: Any
    ) -> None:
        """Say what drafts are chosen among, and what is handed from `first_pass` to `propose`.

        Args:
            vocab_size: columns of the logits.
            hidden_size: of the hidden states.
            dtype: of the hidden states.
            capabilities: beside those that all such drafters have.
        """
        self.sampler = DraftSampler(self.config, vocab_size)
        self._hidden_size, self._hidden_dtype = hidden_size, dtype
        self.capabilities = DrafterCapabilities(
            offers_q=self.sampler.draws,
            splits_first_pass=True,
            reads_token_table=False,
            offers_confidence=True,
            can_score=True,
            **capabilities,
        )

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Keep the views; allocate what passes from the first pass to the first draft."""
        super().bind(state, buffers)
        self.sampler.bind(state, buffers)
        # [N, hidden], by place. Zeros, not empty: a captured step reads more places than a smaller
        # one has filled.
        shape, device = (len(state.total_len), self._hidden_size), state.total_len.device
        self._hidden = torch.zeros(shape, dtype=self._hidden_dtype, device=device)

    def state_bytes(self) -> int:
        """Return the bytes of the hidden states that wait between the two calls, and of limits."""
        return self._hidden.nbytes + self.sampler.num_bytes
