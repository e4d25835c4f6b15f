"""A small autoregressive model with the target's vocabulary drafts K tokens, one pass each.

The first pass of a step runs over the positions that the step committed, which also supplies the KV
of the last draft where all drafts were accepted; K - 1 single-token passes follow. The model shares
the target's block tables over a KV cache of its own.

Source: Leviathan et al. 2023; Chen et al. 2023.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from runner.draft_inputs import DraftPass, first_pass, next_pass
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
        )

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Keep the views; an id of the target that the draft does not have is never drafted."""
        super().bind(state, buffers)
        if buffers.draft_logits is not None:
            buffers.draft_logits[..., self._vocab_size :] = float("-inf")

    def propose(self, ctx: DraftContext) -> None:
        """Run the first pass, then one pass a draft."""
        kv = self.buffers.kv
        assert kv is not None, "the runner allocates the KV that capabilities ask for"
        num_drafts = self.buffers.num_speculative_tokens
        step = first_pass(ctx, kv)
        hidden = self._forward(step)
        if (ctx.is_prefill_np & ~ctx.is_last_chunk_np).all():
            return  # no place samples, so none can use a draft; the KV is all that was wanted
        rows = ctx.idx_mapping.long().clamp(min=0)
        total_len = ctx.state.total_len[rows].long()
        drafts = []
        for i in range(num_drafts):
            logits = self.model.compute_logits(hidden[step.last_indices])
            token = self._draw(ctx, logits[:, : self._vocab_size].float(), rows, total_len + i, i)
            drafts.append(token)
            if i + 1 < num_drafts:
                step = next_pass(ctx, kv, token, i + 1)
                hidden = self._forward(step)
        run = torch.stack(drafts, 1)
        scatter_rows(self.buffers.draft_tokens, ctx.idx_mapping, run)
        kind = torch.full_like(self.buffers.draft_kind[rows], DRAFT_KIND_ONE_HOT)
        if self._samples:
            kind = torch.where(ctx.temperature[rows] > 0, DRAFT_KIND_WITH_Q, kind)
        scatter_rows(self.buffers.draft_kind, ctx.idx_mapping, kind.to(torch.int8))

    def _forward(self, step: DraftPass) -> Tensor:
        """Run a pass; ids behind the draft's vocabulary (often padded shorter) read as its last."""
        input_ids = step.input_ids.clamp(max=self.model.vocab_size - 1)
        return self.model.forward(input_ids, step.positions, step.attn_metadata)

    def _draw(
        self, ctx: DraftContext, logits: Tensor, rows: Tensor, positions: Tensor, index: int
    ) -> Tensor:
        """Return the next draft of each place, [R] int64, and store q where it is sampled."""
        if not self._samples:
            return logits.argmax(1)
        temperature = ctx.temperature[rows][:, None]
        scaled = logits / torch.where(temperature > 0, temperature, 1.0)
        assert self.buffers.draft_logits is not None
        table = self.buffers.draft_logits[:, index, : self._vocab_size]
        scatter_rows(table, ctx.idx_mapping, scaled)
        ids = torch.arange(self._vocab_size, device=logits.device)
        noise = ctx.noise.gumbel(rows, positions, ids)
        return torch.where(temperature > 0, scaled + noise, logits).argmax(1)
