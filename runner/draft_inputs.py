"""Inputs of a drafter's own forward passes, for drafters that keep KV over the shared block tables.

First pass: every position whose token was committed by the step, so that the drafter's KV is that
of the committed text whatever was accepted. With P the first position of the target's step and q
its length at a place:

    verification       positions P + 1 .. P + q   (P itself was covered a step earlier)
    prefill chunk      positions P .. P + q - 1
    last chunk         positions P .. P + q       (the sampled token joins)

    P = num_computed_tokens - q + num_rejected    (the commit has advanced num_computed_tokens)

Positions at or after total_len (rejected drafts) are padding: position 0, and no KV is written.
Later passes: one token a place, draft i at position total_len - 1 + i.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.attention_metadata import AttentionMetadata
from runner.dispatch import use_triton
from runner.kv_cache import PagedKVCache
from specdec.protocols import DraftContext

_BLOCK_TOKENS = 256
_BLOCK_PLACES = 128


@dataclass(frozen=True)
class DraftPass:
    """One forward pass of a drafter: T' tokens."""

    input_ids: Tensor  # [T'] int64
    positions: Tensor  # [T'] int64
    attn_metadata: AttentionMetadata
    last_indices: Tensor  # [R] int64: the token whose output predicts the place's next draft


@triton.jit
def _first_pass_kernel(
    # the step, [R] int32
    idx_mapping_ptr,
    query_lens_ptr,
    samples_ptr,
    is_verify_ptr,
    num_rejected_ptr,
    # state, by row
    all_token_ids_ptr,
    all_token_ids_stride,
    total_len_ptr,
    num_computed_tokens_ptr,
    block_table_ptr,
    block_table_stride,
    # outputs
    input_ids_ptr,  # [T'] int64
    positions_ptr,  # [T'] int64
    slot_mapping_ptr,  # [T'] int64
    query_start_loc_ptr,  # [R + 1] int32
    seq_lens_ptr,  # [R] int32
    last_indices_ptr,  # [R] int64
    num_reqs,
    num_tokens,
    block_size,
    MAX_REQS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    place = tl.program_id(0)
    # Each program sums the lengths before it: R is small, and one launch beats two.
    places = tl.arange(0, MAX_REQS)
    before = places < place
    rows = tl.load(idx_mapping_ptr + places, mask=before, other=-1)
    verifies = tl.load(is_verify_ptr + places, mask=before, other=1)
    sampling = tl.load(samples_ptr + places, mask=before, other=0)
    lens = tl.load(query_lens_ptr + places, mask=before, other=0)
    lens += ((rows >= 0) & (verifies == 0) & (sampling != 0)).to(tl.int32)
    query_start = tl.sum(lens, axis=0)
    tl.store(query_start_loc_ptr + place, query_start)
    if place < num_reqs:
        row = tl.load(idx_mapping_ptr + place).to(tl.int64)
        safe_row = tl.maximum(row, 0)
        query_len = tl.load(query_lens_ptr + place)
        is_verify = tl.load(is_verify_ptr + place)
        joins = (row >= 0) & (is_verify == 0) & (tl.load(samples_ptr + place) != 0)
        length = query_len + joins.to(tl.int32)
        total_len = tl.load(total_len_ptr + safe_row)
        start = tl.load(num_computed_tokens_ptr + safe_row) - query_len
        first = start + tl.load(num_rejected_ptr + place) + is_verify
        # Committed tokens from `first` on. A count and no scalar flag: the interpreter does not
        # take a scalar bool for a part of a mask.
        num_known = tl.where(row >= 0, total_len - first, 0)
        seq_len = tl.where(row >= 0, tl.minimum(total_len, first + length), 0)
        tl.store(seq_lens_ptr + place, seq_len)
        last = query_start + tl.maximum(tl.minimum(num_known, length) - 1, 0)
        # A place without tokens behind all others would point past the end.
        tl.store(last_indices_ptr + place, tl.minimum(last, num_tokens - 1).to(tl.int64))
        for begin in range(0, length, BLOCK_TOKENS):
            j = begin + tl.arange(0, BLOCK_TOKENS)
            inside = j < length
            known = inside & (j < num_known)
            position = first + j
            token = tl.load(
                all_token_ids_ptr + safe_row * all_token_ids_stride + position, mask=known, other=0
            )
            block = tl.load(
                block_table_ptr + safe_row * block_table_stride + position // block_size,
                mask=known,
                other=0,
            ).to(tl.int64)
            slot = tl.where(known, block * block_size + position % block_size, -1)
            out = query_start + j
            tl.store(input_ids_ptr + out, token.to(tl.int64), mask=inside)
            position = tl.where(known, position, 0)
            tl.store(positions_ptr + out, position.to(tl.int64), mask=inside)
            tl.store(slot_mapping_ptr + out, slot, mask=inside)


def first_pass_inputs(ctx: DraftContext, kv: PagedKVCache) -> DraftPass:
    """Build the pass over the committed positions of the step; one launch.

    Args:
        ctx: the step, committed. `state.all_token_ids` may lie in pinned host memory.
        kv: the drafter's cache.

    Returns:
        T' = T + ctx.num_last_chunks tokens. Padding places keep their length and have a sequence
        length of 0; the last index of a place without tokens means nothing, but is in range.
    """
    if not use_triton(ctx.idx_mapping):
        return first_pass_inputs_ref(ctx, kv)
    step = _empty_pass(ctx, kv, len(ctx.positions) + ctx.num_last_chunks)
    metadata = step.attn_metadata
    state = ctx.state
    _first_pass_kernel[(ctx.num_reqs + 1,)](
        ctx.idx_mapping,
        ctx.query_lens,
        ctx.samples,
        ctx.is_verify,
        ctx.num_rejected,
        state.all_token_ids,
        state.all_token_ids.stride(0),
        state.total_len,
        state.num_computed_tokens,
        state.block_table,
        state.block_table.stride(0),
        step.input_ids,
        step.positions,
        metadata.slot_mapping,
        metadata.query_start_loc,
        metadata.seq_lens,
        step.last_indices,
        ctx.num_reqs,
        len(step.positions),
        ctx.block_size,
        MAX_REQS=triton.next_power_of_2(ctx.num_reqs + 1),
        BLOCK_TOKENS=_BLOCK_TOKENS,
    )
    return step


@triton.jit
def _next_pass_kernel(
    idx_mapping_ptr,  # [R] int32
    # state, by row
    total_len_ptr,
    draft_limit_ptr,
    block_table_ptr,
    block_table_stride,
    # outputs
    positions_ptr,  # [R] int64
    slot_mapping_ptr,  # [R] int64
    query_start_loc_ptr,  # [R + 1] int32
    seq_lens_ptr,  # [R] int32
    last_indices_ptr,  # [R] int64
    num_reqs,
    index,
    block_size,
    BLOCK_PLACES: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES)
    inside = place < num_reqs
    row = tl.load(idx_mapping_ptr + place, mask=inside, other=-1).to(tl.int64)
    real = row >= 0
    safe_row = tl.maximum(row, 0)
    # A row needs this pass only for drafts that it can still use; beyond them it has no blocks.
    used = real & (tl.load(draft_limit_ptr + safe_row, mask=real, other=0) > index)
    total_len = tl.load(total_len_ptr + safe_row, mask=used, other=0)
    position = tl.where(used, total_len - 1 + index, 0)
    block = tl.load(
        block_table_ptr + safe_row * block_table_stride + position // block_size,
        mask=used,
        other=0,
    ).to(tl.int64)
    slot = tl.where(used, block * block_size + position % block_size, -1)
    tl.store(positions_ptr + place, position.to(tl.int64), mask=inside)
    tl.store(slot_mapping_ptr + place, slot, mask=inside)
    tl.store(seq_lens_ptr + place, tl.where(used, position + 1, 0), mask=inside)
    tl.store(query_start_loc_ptr + place, place, mask=place <= num_reqs)
    tl.store(last_indices_ptr + place, place.to(tl.int64), mask=inside)


def next_pass_inputs(ctx: DraftContext, kv: PagedKVCache, drafts: Tensor, index: int) -> DraftPass:
    """Build the pass that feeds draft `index` (1-based) of every place; one launch.

    Args:
        ctx: the step.
        kv: the drafter's cache.
        drafts: [R] int64, the tokens that were just drafted.
        index: 1 for the first draft.

    Returns:
        One token a place, output i that of place i. Where the row cannot use a draft behind this
        one, and in padding, the sequence length is 0 and no KV is written.
    """
    if not use_triton(ctx.idx_mapping):
        return next_pass_inputs_ref(ctx, kv, drafts, index)
    step = _empty_pass(ctx, kv, ctx.num_reqs, drafts, index)
    metadata = step.attn_metadata
    state = ctx.state
    _next_pass_kernel[(triton.cdiv(ctx.num_reqs + 1, _BLOCK_PLACES),)](
        ctx.idx_mapping,
        state.total_len,
        state.draft_limit,
        state.block_table,
        state.block_table.stride(0),
        step.positions,
        metadata.slot_mapping,
        metadata.query_start_loc,
        metadata.seq_lens,
        step.last_indices,
        ctx.num_reqs,
        index,
        ctx.block_size,
        BLOCK_PLACES=_BLOCK_PLACES,
    )
    return step


def _empty_pass(
    ctx: DraftContext,
    kv: PagedKVCache,
    num_tokens: int,
    drafts: Tensor | None = None,
    index: int = 0,
) -> DraftPass:
    """Allocate a pass over `num_tokens` tokens: the first one, or that of draft `index`."""
    device = ctx.idx_mapping.device
    num_reqs = ctx.num_reqs

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    positions = empty(num_tokens, torch.int64)
    metadata = AttentionMetadata(
        kv=kv,
        block_table=ctx.state.block_table,
        idx_mapping=ctx.idx_mapping,
        query_start_loc=empty(num_reqs + 1, torch.int32),
        seq_lens=empty(num_reqs, torch.int32),
        positions=positions,
        slot_mapping=empty(num_tokens, torch.int64),
        max_query_len=1 if index else ctx.max_query_len + (ctx.num_last_chunks > 0),
        max_seq_len=min(ctx.max_seq_len + index, ctx.state.all_token_ids.shape[1]),
    )
    input_ids = empty(num_tokens, torch.int64) if drafts is None else drafts
    return DraftPass(input_ids, positions, metadata, empty(num_reqs, torch.int64))


def first_pass_inputs_ref(ctx: DraftContext, kv: PagedKVCache) -> DraftPass:
    """Torch twin of `first_pass_inputs`."""
    step = _empty_pass(ctx, kv, len(ctx.positions) + ctx.num_last_chunks)
    state, device = ctx.state, ctx.idx_mapping.device
    real, rows = ctx.idx_mapping >= 0, ctx.idx_mapping.long().clamp(min=0)
    query_lens = ctx.query_lens.long()
    lens = query_lens + (real & (ctx.is_verify == 0) & (ctx.samples != 0))
    starts = lens.cumsum(0) - lens
    first = state.num_computed_tokens[rows] - query_lens + ctx.num_rejected + ctx.is_verify
    total_len = state.total_len[rows].long()
    num_known = torch.where(real, total_len - first, 0)
    place = torch.repeat_interleave(
        torch.arange(len(lens), device=device), lens, output_size=len(step.positions)
    )
    inside = torch.arange(len(place), device=device) - starts[place]
    known = inside < num_known[place]
    step.positions.copy_(torch.where(known, first[place] + inside, 0))
    token_ids = state.all_token_ids[rows[place], step.positions].long()
    step.input_ids.copy_(torch.where(known, token_ids, 0))
    metadata = step.attn_metadata
    metadata.slot_mapping.copy_(_slots(ctx, rows[place], step.positions, known))
    metadata.query_start_loc[:-1].copy_(starts)
    metadata.query_start_loc[-1:].copy_(lens.sum())
    metadata.seq_lens.copy_(torch.where(real, torch.minimum(total_len, first + lens), 0))
    last = starts + (torch.minimum(num_known, lens) - 1).clamp(min=0)
    step.last_indices.copy_(last.clamp(max=len(place) - 1))
    return step


def next_pass_inputs_ref(
    ctx: DraftContext, kv: PagedKVCache, drafts: Tensor, index: int
) -> DraftPass:
    """Torch twin of `next_pass_inputs`."""
    step = _empty_pass(ctx, kv, ctx.num_reqs, drafts, index)
    rows = ctx.idx_mapping.long().clamp(min=0)
    used = (ctx.idx_mapping >= 0) & (index < ctx.state.draft_limit[rows])
    positions = torch.where(used, ctx.state.total_len[rows].long() - 1 + index, 0)
    step.positions.copy_(positions)
    metadata = step.attn_metadata
    metadata.slot_mapping.copy_(_slots(ctx, rows, positions, used))
    metadata.seq_lens.copy_(torch.where(used, positions + 1, 0))
    torch.arange(ctx.num_reqs + 1, out=metadata.query_start_loc)
    torch.arange(ctx.num_reqs, out=step.last_indices)
    return step


def _slots(ctx: DraftContext, rows: Tensor, positions: Tensor, writes: Tensor) -> Tensor:
    """Return the slot of each position, -1 where nothing is written."""
    block = ctx.state.block_table[rows, positions // ctx.block_size].long()
    return torch.where(writes, block * ctx.block_size + positions % ctx.block_size, -1)
