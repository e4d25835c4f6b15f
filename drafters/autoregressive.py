"""The loop of drafters that are a causal model: a pass over committed tokens, then one a draft.

The first pass of a step runs over the positions that the step committed, which also supplies the KV
of the last draft where all drafts were accepted, and leaves the hidden state that predicts the
first draft of each place; K - 1 single-token passes follow. The model shares the target's block
tables over a KV cache of its own.

Source: Leviathan et al. 2023; Chen et al. 2023.
"""

import torch
from torch import Tensor

from drafters.draft_sampling import SamplingDrafter
from runner.draft_inputs import DraftPass, first_pass_inputs, next_pass_inputs
from runner.kv_cache import PagedKVCache
from runner.models.hf import HFModel
from specdec.protocols import (
    DraftContext,
    KVSpec,
    TargetView,
)


class AutoregressiveDrafter(SamplingDrafter):
    """Base of drafters that run a causal model; `load` of a subclass calls `use_model`."""

    model: HFModel
    target_ids: Tensor | None = None  # [V_draft] int64, where the head has a part of the vocabulary

    def use_model(self, model: HFModel, target: TargetView) -> None:
        """Draft with a model; ids that it and the target do not share are never drafted."""
        self.model = model
        self._clamps_ids = model.vocab_size < target.vocab_size
        self.set_up(
            self.num_logits(target),
            model.hidden_size,
            model.dtype,
            kv=KVSpec(model.num_layers, model.num_kv_heads, model.head_size, model.dtype),
            max_context=model.max_position_embeddings,
        )

    def first_pass(self, ctx: DraftContext) -> None:
        """Run over the positions that the step committed."""
        step = first_pass_inputs(ctx, self._kv)
        hidden = self._forward(step)
        torch.index_select(hidden, 0, step.last_indices, out=self._hidden[: ctx.num_reqs])

    def propose(self, ctx: DraftContext) -> None:
        """Choose K drafts, with a pass between two of them."""
        hidden = self._hidden[: ctx.num_reqs]
        drafts: list[Tensor] = []
        for i in range(ctx.num_drafts):
            drafts.append(self._draft(ctx, hidden, i))
            if i + 1 < ctx.num_drafts:
                hidden = self._forward(next_pass_inputs(ctx, self._kv, drafts[-1], i + 1))
        self.sampler.write(ctx, drafts)

    def _draft(self, ctx: DraftContext, hidden: Tensor, index: int) -> Tensor:
        """Choose draft `index` of each place, [R] int64, from a hidden state of each."""
        if self.sampler.needs_logits or not self.drafts_all_outputs:
            return self.choose(ctx, self.draft_logits(hidden), index)
        return self.model.top1(hidden, self.target_ids)

    @property
    def drafts_all_outputs(self) -> bool:
        """Return whether every output of the model's head may be drafted."""
        return self.sampler.vocab_size == self.model.vocab_size

    def choose(self, ctx: DraftContext, logits: Tensor, index: int) -> Tensor:
        """Choose draft `index` of each place, [R] int64, from its logits."""
        return self.sampler.choose(ctx, logits, index)

    def num_logits(self, target: TargetView) -> int:
        """Return how many columns `draft_logits` has: ids behind them are never drafted."""
        return min(self.model.vocab_size, target.vocab_size)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, num_logits] over the target's ids from hidden states [R, hidden]."""
        return self.model.compute_logits(hidden)[:, : self.sampler.vocab_size]

    def model_ids(self, input_ids: Tensor) -> Tensor:
        """Return what the model reads for ids [T] int64 of the target.

        Ids behind the model's vocabulary (often padded shorter) read as its last.
        """
        return input_ids.clamp(max=self.model.vocab_size - 1) if self._clamps_ids else input_ids

    @property
    def _kv(self) -> PagedKVCache:
        """Return the drafter's own cache."""
        assert self.buffers.kv is not None, "the runner allocates the KV that capabilities ask for"
        return self.buffers.kv

    def _forward(self, step: DraftPass) -> Tensor:
        """Run a pass; returns hidden states [T', hidden]."""
        ids = self.model_ids(step.input_ids)
        return self.model.forward(ids, step.positions, step.attn_metadata)
