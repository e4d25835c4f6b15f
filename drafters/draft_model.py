"""A small autoregressive model with the target's vocabulary drafts K tokens, one pass each.

The first pass of a step runs over the positions that the step committed, which also supplies the KV
of the last draft where all drafts were accepted, and leaves the hidden state that predicts the
first draft of each place; K - 1 single-token passes follow. The model shares the target's block
tables over a KV cache of its own.

Source: Leviathan et al. 2023; Chen et al. 2023.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from runner.confidence import store_confidence
from runner.draft_inputs import DraftPass, first_pass_inputs, next_pass_inputs
from runner.kv_cache import PagedKVCache
from runner.loader import check_same_vocabulary, load_model, load_tokenizer
from runner.models.hf import HFModel
from runner.rows import scatter_rows
from sampler.top_k_top_p import apply_top_k_top_p
from specdec.errors import ConfigError
from specdec.protocols import (
    DRAFT_KIND_ONE_HOT,
    DRAFT_KIND_WITH_Q,
    DraftBuffers,
    DraftContext,
    DrafterCapabilities,
    KVSpec,
    StateView,
    TargetView,
)
from specdec.registry import register_drafter


@dataclass
class DraftModelConfig(DrafterConfig):
    """Parameters of a draft model.

    Args:
        model: name, hub id or folder of a causal model; "target" drafts with the target itself.
        sampling: "argmax" proposes the likeliest token (a one-hot draft); "gumbel" samples, and
            hands the verifier the distribution q that it really drew from. Rows of temperature 0
            get the likeliest token either way.
        temperature: of "gumbel"; None takes the row's.
        top_k: of "gumbel": draw among so many; 0 or -1 takes all.
        top_p: of "gumbel": draw among the most probable tokens of this mass, in (0, 1].
    """

    name: str = "draft_model"
    model: str = ""
    sampling: Literal["argmax", "gumbel"] = "argmax"
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Check the choices."""
        if not self.model:
            raise ConfigError(
                "drafter draft_model needs model=<hub id, folder, or 'target'>, got none"
            )
        if self.sampling not in ("argmax", "gumbel"):
            raise ConfigError(
                f"drafter draft_model: sampling={self.sampling!r} is not allowed; "
                f"give 'argmax' or 'gumbel'"
            )
        if self.temperature is not None and not 1e-5 <= self.temperature < float("inf"):
            raise ConfigError(
                f"drafter draft_model: temperature={self.temperature} is not allowed; give a "
                f"number >= 1e-5, or none for the request's own (sampling='argmax' draws nothing)"
            )
        if not 0 < self.top_p <= 1 or self.top_k < -1:
            raise ConfigError(
                f"drafter draft_model: top_k={self.top_k} and top_p={self.top_p} are not allowed; "
                f"give top_k >= -1 and top_p in (0, 1]"
            )
        own = self.temperature is not None or self.top_k > 0 or self.top_p < 1
        if own and self.sampling == "argmax":
            raise ConfigError(
                "drafter draft_model: temperature, top_k and top_p have no effect with "
                "sampling='argmax'; set sampling='gumbel' or leave them out"
            )


@register_drafter("draft_model", DraftModelConfig)
class DraftModelDrafter(DrafterBase):
    """Any causal language model over the target's vocabulary."""

    config: DraftModelConfig

    def load(self, target: TargetView) -> None:
        """Load the model and check that its tokenizer is the target's."""
        if self.config.model == "target":
            self.model: HFModel = target.model
        else:
            self.model = load_model(self.config.model, target.dtype, target.device)
            if target.tokenizer is not None:
                own = load_tokenizer(self.config.model)
                check_same_vocabulary(target.tokenizer, own, self.config.model)
        self._vocab_size = min(self.model.vocab_size, target.vocab_size)
        self._clamps_ids = self.model.vocab_size < target.vocab_size
        self._samples = self.config.sampling == "gumbel"
        self.capabilities = DrafterCapabilities(
            kv=KVSpec(
                self.model.num_layers,
                self.model.num_kv_heads,
                self.model.head_size,
                self.model.dtype,
            ),
            offers_q=self._samples,
            max_context=self.model.max_position_embeddings,
            splits_first_pass=True,
            reads_token_table=False,
            offers_confidence=True,
        )

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Keep the views; an id of the target that the draft does not have is never drafted."""
        super().bind(state, buffers)
        if buffers.draft_logits is not None:
            buffers.draft_logits[..., self._vocab_size :] = float("-inf")
        num_rows, device = len(state.total_len), state.total_len.device
        config, limit = self.config, self._vocab_size
        self._limits: tuple[Tensor, Tensor] | None = None  # top_k and top_p by row, all alike
        if 0 < config.top_k < limit or config.top_p < 1:
            top_k = min(config.top_k, limit) if config.top_k > 0 else limit
            self._limits = (
                torch.full((num_rows,), top_k, dtype=torch.int32, device=device),
                torch.full((num_rows,), config.top_p, dtype=torch.float32, device=device),
            )
        # [N, hidden], by place: what the first pass leaves for the first draft. Zeros, not empty:
        # a captured step reads more places than a smaller one has filled.
        self._hidden = torch.zeros(
            num_rows, self.model.hidden_size, dtype=self.model.dtype, device=device
        )

    def first_pass(self, ctx: DraftContext) -> None:
        """Run over the positions that the step committed."""
        step = first_pass_inputs(ctx, self._kv)
        hidden = self._forward(step)
        torch.index_select(hidden, 0, step.last_indices, out=self._hidden[: ctx.num_reqs])

    def propose(self, ctx: DraftContext) -> None:
        """Draw K drafts, with a pass between two of them."""
        num_drafts = ctx.num_drafts
        hidden = self._hidden[: ctx.num_reqs]
        drafts = []
        for i in range(num_drafts):
            logits = self.model.compute_logits(hidden)[:, : self._vocab_size]
            drafts.append(self._draw(ctx, logits, i))
            if i + 1 < num_drafts:
                hidden = self._forward(next_pass_inputs(ctx, self._kv, drafts[-1], i + 1))
        table = self.buffers.draft_tokens[:, :num_drafts]
        scatter_rows(table, ctx.idx_mapping, torch.stack(drafts, 1))
        if self._samples:
            temperature = ctx.temperature[ctx.idx_mapping.long().clamp(min=0)]
            kind = torch.where(temperature > 0, DRAFT_KIND_WITH_Q, DRAFT_KIND_ONE_HOT)
            scatter_rows(self.buffers.draft_kind, ctx.idx_mapping, kind.to(torch.int8))

    def state_bytes(self) -> int:
        """Return the bytes of the hidden states that wait between the two calls, and of limits."""
        return self._hidden.nbytes + sum(limit.nbytes for limit in self._limits or ())

    @property
    def _kv(self) -> PagedKVCache:
        """Return the drafter's own cache."""
        assert self.buffers.kv is not None, "the runner allocates the KV that capabilities ask for"
        return self.buffers.kv

    def _forward(self, step: DraftPass) -> Tensor:
        """Run a pass; ids behind the draft's vocabulary (often padded shorter) read as its last."""
        input_ids = step.input_ids
        if self._clamps_ids:
            input_ids = input_ids.clamp(max=self.model.vocab_size - 1)
        return self.model.forward(input_ids, step.positions, step.attn_metadata)

    def _draw(self, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        """Return draft `index` (from 0) of each place, [R] int64; logits are [R, V_draft]."""
        if self._samples:
            return self._sample(ctx, logits, index)
        drafts = logits.argmax(1)
        self._tell_confidence(ctx, logits, drafts, index)
        return drafts

    def _tell_confidence(
        self, ctx: DraftContext, logits: Tensor, drafts: Tensor, index: int
    ) -> None:
        """Store how probable drafts were under the law of `logits`, where that is wanted."""
        confidence = self.buffers.draft_confidence
        if confidence is not None:
            store_confidence(confidence, ctx.idx_mapping, index, logits, drafts)

    def _sample(self, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        """Draw draft `index` (from 0) of each place, and store the law q that it is drawn from.

        Args:
            ctx: the step.
            logits: [R, V_draft].
            index: which draft of the run.

        Returns:
            Tokens [R] int64; the argmax for rows of temperature 0.
        """
        assert self.buffers.draft_logits is not None
        rows = ctx.idx_mapping.long().clamp(min=0)
        own = self.config.temperature
        temperature = ctx.temperature[rows][:, None]
        divisor = torch.where(temperature > 0, temperature if own is None else own, 1.0)
        scaled = logits.float() / divisor
        if self._limits is not None:
            apply_top_k_top_p(scaled, ctx.idx_mapping, ctx.temperature, *self._limits)
        table = self.buffers.draft_logits[:, index, : self._vocab_size]
        scatter_rows(table, ctx.idx_mapping, scaled)
        positions = ctx.state.total_len[rows].long() + index
        drafts = ctx.noise.draw(scaled, ctx.idx_mapping, positions)
        self._tell_confidence(ctx, scaled, drafts, index)
        return drafts
