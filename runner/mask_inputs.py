"""Inputs of a head's pass over masked positions: all drafts behind the first one at once.

Head input i lies at position i and in its slot (see `runner.head_inputs`); the last one whose token
is known is number total_len - 2, and predicts the first draft. The M inputs behind it are masks:

    mask m of a place at position total_len - 1 + m      (0 <= m < M), which predicts draft m + 2

A mask sees the committed text and the masks before it through the paged KV. What it writes there is
written over by the first pass of a later step, once its position is committed, or by later masks.
Masks whose draft the row cannot use are padding: position 0, and no KV is written.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.attention_metadata import AttentionMetadata
from runner.dispatch import use_triton
from runner.kv_cache import PagedKVCache
from specdec.protocols import DraftContext

_BLOCK_TOKENS = 128


@triton.jit(do_not_specialize=["num_reqs"])
def _mask_inputs_kernel(
    idx_mapping_ptr,  # [R] int32
    # state, by row
    total_len_ptr,
    draft_limit_ptr,
    block_table_ptr,
    block_table_stride,
    # outputs
    positions_ptr,  # [R * M] int64
    slot_mapping_ptr,  # [R * M] int64
    query_start_loc_ptr,  # [R + 1] int32
    seq_lens_ptr,  # [R] int32
    num_reqs,
    num_masks,
    block_size,
    BLOCK_TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < num_reqs * num_masks
    place, mask = token // num_masks, token % num_masks
    row = tl.load(idx_mapping_ptr + place, mask=inside, other=-1).to(tl.int64)
    real = row >= 0
    safe_row = tl.maximum(row, 0)
    # Mask m predicts draft m + 2: beyond the drafts that a row can use it may have no blocks.
    usable = tl.load(draft_limit_ptr + safe_row, mask=real, other=0) - 1
    used = real & (mask < usable)
    total_len = tl.load(total_len_ptr + safe_row, mask=real, other=0)
    position = tl.where(used, total_len - 1 + mask, 0)
    block = tl.load(
        block_table_ptr + safe_row * block_table_stride + position // block_size,
        mask=used,
        other=0,
    ).to(tl.int64)
    slot = tl.where(used, block * block_size + position % block_size, -1)
    tl.store(positions_ptr + token, position.to(tl.int64), mask=inside)
    tl.store(slot_mapping_ptr + token, slot, mask=inside)
    count = tl.minimum(usable, num_masks)
    seq_len = tl.where(real & (count > 0), total_len - 1 + count, 0)
    tl.store(seq_lens_ptr + place, seq_len, mask=inside & (mask == 0))
    tl.store(query_start_loc_ptr + token, token * num_masks, mask=token <= num_reqs)


def mask_inputs(ctx: DraftContext, kv: PagedKVCache, num_masks: int) -> AttentionMetadata:
    """Build a pass of M masks a place; one launch.

    Args:
        ctx: the step.
        kv: the head's cache.
        num_masks: M, at least 1.

    Returns:
        The pass over R * M tokens, those of a place side by side. Where the row can use no draft
        behind its first, and in padding, the sequence length is 0 and no KV is written.
    """
    if not use_triton(ctx.idx_mapping):
        return mask_inputs_ref(ctx, kv, num_masks)
    metadata, state = _empty_masks(ctx, kv, num_masks), ctx.state
    num_threads = max(ctx.num_reqs * num_masks, ctx.num_reqs + 1)
    _mask_inputs_kernel[(triton.cdiv(num_threads, _BLOCK_TOKENS),)](
        ctx.idx_mapping,
        state.total_len,
        state.draft_limit,
        state.block_table,
        state.block_table.stride(0),
        metadata.positions,
        metadata.slot_mapping,
        metadata.query_start_loc,
        metadata.seq_lens,
        ctx.num_reqs,
        num_masks,
        ctx.block_size,
        BLOCK_TOKENS=_BLOCK_TOKENS,
    )
    return metadata


def _empty_masks(ctx: DraftContext, kv: PagedKVCache, num_masks: int) -> AttentionMetadata:
    """Allocate the pass."""
    assert num_masks > 0, num_masks
    num_reqs, device = ctx.num_reqs, ctx.idx_mapping.device

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return AttentionMetadata(
        kv=kv,
        block_table=ctx.state.block_table,
        idx_mapping=ctx.idx_mapping,
        query_start_loc=empty(num_reqs + 1, torch.int32),
        seq_lens=empty(num_reqs, torch.int32),
        positions=empty(num_reqs * num_masks, torch.int64),
        slot_mapping=empty(num_reqs * num_masks, torch.int64),
        max_query_len=num_masks,
        max_seq_len=min(ctx.max_seq_len + num_masks, ctx.state.all_token_ids.shape[1]),
    )


def mask_inputs_ref(ctx: DraftContext, kv: PagedKVCache, num_masks: int) -> AttentionMetadata:
    """Torch twin of `mask_inputs`."""
    metadata, state = _empty_masks(ctx, kv, num_masks), ctx.state
    device = ctx.idx_mapping.device
    real, rows = ctx.idx_mapping >= 0, ctx.idx_mapping.long().clamp(min=0)
    count = (state.draft_limit[rows].long() - 1).clamp(0, num_masks) * real
    mask = torch.arange(num_masks, device=device)
    used = mask < count[:, None]
    known = torch.where(real, state.total_len[rows].long() - 1, 0)
    positions = torch.where(used, known[:, None] + mask, 0)
    block = state.block_table[rows[:, None], positions // ctx.block_size].long()
    slots = torch.where(used, block * ctx.block_size + positions % ctx.block_size, -1)
    metadata.positions.copy_(positions.flatten())
    metadata.slot_mapping.copy_(slots.flatten())
    metadata.seq_lens.copy_(torch.where(count > 0, known + count, 0))
    starts = torch.arange(0, (ctx.num_reqs + 1) * num_masks, num_masks, device=device)
    metadata.query_start_loc.copy_(starts)
    return metadata
