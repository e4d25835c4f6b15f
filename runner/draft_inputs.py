"""Inputs of a drafter's own forward passes, for drafters that keep KV over the shared block tables.

First pass: every position whose token was committed by the step, so that the drafter's KV is that
of the committed text whatever was accepted. With P the first position of the target's step and q
its length at a place:

    verification       positions P + 1 .. P + q   (P itself was covered a step earlier)
    prefill chunk      positions P .. P + q - 1
    last chunk         positions P .. P + q       (the sampled token joins)

Positions at or after total_len (rejected drafts) are padding: no KV is written for them.
Later passes: one token a place, draft i at position total_len - 1 + i.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner.attention import AttentionMetadata, build_attention_metadata
from runner.buffers import copy_to_device
from runner.kv_cache import PagedKVCache
from specdec.protocols import DraftContext


@dataclass(frozen=True)
class DraftPass:
    """One forward pass of a drafter."""

    input_ids: Tensor  # [T'] int64
    positions: Tensor  # [T'] int64
    attn_metadata: AttentionMetadata
    last_indices: Tensor  # [R] int64: the token whose output predicts the next draft


def first_pass(ctx: DraftContext, kv: PagedKVCache) -> DraftPass:
    """Build the pass over the committed positions of the step."""
    device = ctx.positions.device
    starts_np = (~ctx.is_prefill_np).astype(np.int64)
    lens_np = ctx.query_lens_np + ctx.is_last_chunk_np
    packed = copy_to_device(np.stack([starts_np, lens_np]).astype(np.int64), device)
    lens = packed[1]
    num_tokens = int(lens_np.sum())
    place = torch.repeat_interleave(
        torch.arange(len(lens_np), device=device), lens, output_size=num_tokens
    )
    cu_lens = lens.cumsum(0)
    inside = torch.arange(num_tokens, device=device) - (cu_lens - lens)[place]
    rows = ctx.idx_mapping.long().clamp(min=0)
    first = ctx.positions[ctx.query_start_loc[:-1].long()] + packed[0]
    total_len = torch.where(ctx.idx_mapping >= 0, ctx.state.total_len[rows], 0).long()
    positions = first[place] + inside
    known = positions < total_len[place]
    positions = torch.where(known, positions, 0)
    input_ids = ctx.state.all_token_ids[rows[place], positions].long()
    slots = _slots(ctx, rows[place], positions, known)
    metadata = build_attention_metadata(
        kv,
        ctx.state.block_table,
        ctx.idx_mapping,
        lens_np,
        positions,
        torch.minimum(total_len, first + lens).int(),
        slots,
        ctx.max_seq_len,
    )
    last = (cu_lens - lens) + (total_len - 1 - first).clamp(min=0)
    return DraftPass(input_ids, positions, metadata, torch.minimum(last, cu_lens - 1))


def next_pass(ctx: DraftContext, kv: PagedKVCache, drafts: Tensor, index: int) -> DraftPass:
    """Build the pass that feeds draft `index` (1-based) of every place.

    Args:
        ctx: the step.
        kv: the drafter's cache.
        drafts: [R] int64, the tokens that were just drafted.
        index: 1 for the first draft.
    """
    rows = ctx.idx_mapping.long().clamp(min=0)
    total_len = ctx.state.total_len[rows].long()
    positions = total_len - 1 + index
    # A row needs this pass only for drafts that it can still use; beyond them it has no blocks.
    used = (ctx.idx_mapping >= 0) & (index < ctx.state.draft_limit[rows])
    positions = torch.where(used, positions, 0)
    num_reqs = len(rows)
    max_seq_len = min(ctx.max_seq_len + index, ctx.state.all_token_ids.shape[1])
    metadata = build_attention_metadata(
        kv,
        ctx.state.block_table,
        ctx.idx_mapping,
        np.ones(num_reqs, dtype=np.int64),
        positions,
        torch.where(used, positions + 1, 1).int(),
        _slots(ctx, rows, positions, used),
        max_seq_len,
    )
    return DraftPass(drafts, positions, metadata, torch.arange(num_reqs, device=rows.device))


def _slots(ctx: DraftContext, rows: Tensor, positions: Tensor, writes: Tensor) -> Tensor:
    """Return the slot of each position, -1 where nothing is written."""
    block = ctx.state.block_table[rows, positions // ctx.block_size].long()
    return torch.where(writes, block * ctx.block_size + positions % ctx.block_size, -1)
