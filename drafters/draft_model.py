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
from runner.draft_inputs import DraftPass, first_pass_inputs, next_pass_inputs
from runner.kv_cache import PagedKVCache
from runner.loader import check_same_vocabulary, load_model, load_tokenizer
from runner.models.hf import HFModel
from runner.rows import scatter_rows
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
        sampling: "argmax" proposes the likeliest token (a one-hot draft); "gumbel" samples at the
            row's temperature and hands the verifier the distribution q.
    """

    name: str = "draft_model"
    model: str = ""
    sampling: Literal["argmax", "gumbel"] = "argmax"

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
        )

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Keep the views; an id of the target that the draft does not have is never drafted."""
        super().bind(state, buffers)
        if buffers.draft_logits is not None:
            buffers.draft_logits[..., self._vocab_size :] = float("-inf")
        # [N, hidden], by place: what the first pass leaves for the first draft. Zeros, not empty:
        # a captured step reads more places than a smaller one has filled.
        self._hidden = torch.zeros(
            len(state.total_len),
            self.model.hidden_size,
            dtype=self.model.dtype,
            device=state.total_len.device,
        )

    def first_pass(self, ctx: DraftContext) -> None:
        """Run over the positions that the step committed."""
        step = first_pass_inputs(ctx, self._kv)
        hidden = self._forward(step)
        torch.index_select(hidden, 0, step.last_indices, out=self._hidden[: ctx.num_reqs])

    def propose(self, ctx: DraftContext) -> None:
        """Draw K drafts, with a pass between two of them."""
        num_drafts = self.buffers.num_speculative_tokens
        hidden = self._hidden[: ctx.num_reqs]
        drafts = []
        for i in range(num_drafts):
            logits = self.model.compute_logits(hidden)[:, : self._vocab_size]
            drafts.append(self._sample(ctx, logits, i) if self._samples else logits.argmax(1))
            if i + 1 < num_drafts:
                hidden = self._forward(next_pass_inputs(ctx, self._kv, drafts[-1], i + 1))
        scatter_rows(self.buffers.draft_tokens, ctx.idx_mapping, torch.stack(drafts, 1))
        if self._samples:
            temperature = ctx.temperature[ctx.idx_mapping.long().clamp(min=0)]
            kind = torch.where(temperature > 0, DRAFT_KIND_WITH_Q, DRAFT_KIND_ONE_HOT)
            scatter_rows(self.buffers.draft_kind, ctx.idx_mapping, kind.to(torch.int8))

    def state_bytes(self) -> int:
        """Return the bytes of the hidden states that wait between the two calls."""
        return self._hidden.numel() * self._hidden.element_size()

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

    def _sample(self, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        """Draw draft `index` (from 0) of each place at the row's temperature, and store its q.

        Args:
            ctx: the step.
            logits: [R, V_draft].
            index: which draft of the run.

        Returns:
            Tokens [R] int64; the argmax for rows of temperature 0.
        """
        assert self.buffers.draft_logits is not None
        rows = ctx.idx_mapping.long().clamp(min=0)
        temperature = ctx.temperature[rows][:, None]
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)
        table = self.buffers.draft_logits[:, index, : self._vocab_size]
        scatter_rows(table, ctx.idx_mapping, scaled)
        return ctx.noise.draw(scaled, ctx.idx_mapping, ctx.state.total_len[rows].long() + index)
