"""Inputs of the passes of heads that read the target's hidden states, with KV of their own.

Head input i is the target's hidden state of position i together with the token of position i + 1:
what the target knew, and what was chosen then. It lies at position i and in the slot of position i.
So the last input of a text of total_len tokens is number total_len - 2, and its output predicts the
token of position total_len.

First pass: the step's own T tokens, in the step's own layout. With P the first position of the
target's step and q its length at a place,

    input P + j     known where P + j + 1 < total_len      (0 <= j < q)
    P = num_computed_tokens - q + num_rejected    (the commit has advanced num_computed_tokens)

which holds for prompts (the next prompt token is known, behind the last one stands the token that
was sampled) as for verification (the drafts that were accepted and the token behind them). Unknown
inputs, those of rejected drafts and of tokens behind a row's end, are padding: position 0, and no
KV is written. Later passes: one input a place, draft i at position total_len - 2 + i, with what the
head itself gave in place of a hidden state.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.attention_metadata import AttentionMetadata
from runner.dispatch import use_triton
from runner.draft_inputs import DraftPass
from runner.kv_cache import PagedKVCache
from specdec.protocols import DraftContext

_BLOCK_TOKENS = 256
_BLOCK_PLACES = 128


@triton.jit(do_not_specialize=["num_tokens"])
def _first_head_inputs_kernel(
    # the step, [R] int32, but query_start_loc [R + 1]
    idx_mapping_ptr,
    query_lens_ptr,
    query_start_loc_ptr,
    num_rejected_ptr,
    # state, by row
    all_token_ids_ptr,
    all_token_ids_stride,
    total_len_ptr,
    num_computed_tokens_ptr,
    block_table_ptr,
    block_table_stride,
    # outputs
    input_ids_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    slot_mapping_ptr,  # [T] int64
    seq_lens_ptr,  # [R] int32
    last_indices_ptr,  # [R] int64
    num_tokens,
    block_size,
    BLOCK_TOKENS: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    safe_row = tl.maximum(row, 0)
    query_len = tl.load(query_lens_ptr + place)
    query_start = tl.load(query_start_loc_ptr + place)
    total_len = tl.load(total_len_ptr + safe_row)
    first = tl.load(num_computed_tokens_ptr + safe_row) - query_len
    first += tl.load(num_rejected_ptr + place)
    # A count and no scalar flag: the interpreter does not take a scalar bool for a part of a mask.
    num_known = tl.where(row >= 0, tl.minimum(total_len - 1 - first, query_len), 0)
    seq_len = tl.where(row >= 0, tl.minimum(total_len - 1, first + query_len), 0)
    tl.store(seq_lens_ptr + place, seq_len)
    last = query_start + tl.maximum(num_known - 1, 0)
    # A place without tokens behind all others would point past the end.
    tl.store(last_indices_ptr + place, tl.minimum(last, num_tokens - 1).to(tl.int64))
    for begin in range(0, query_len, BLOCK_TOKENS):
        j = begin + tl.arange(0, BLOCK_TOKENS)
        inside = j < query_len
        known = inside & (j < num_known)
        position = first + j
        token = tl.load(
            all_token_ids_ptr + safe_row * all_token_ids_stride + position + 1, mask=known, other=0
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


def first_head_inputs(ctx: DraftContext, kv: PagedKVCache) -> DraftPass:
    """Build the head's pass over the step's own tokens; one launch.

    Args:
        ctx: the step, committed. `state.all_token_ids` may lie in pinned host memory.
        kv: the head's cache.

    Returns:
        T tokens, token t beside line t of the step's hidden states. `last_indices` is input
        total_len - 2 of each place, whose output predicts the first draft; for a place without
        known inputs it means nothing, but is in range.
    """
    if not use_triton(ctx.idx_mapping):
        return first_head_inputs_ref(ctx, kv)
    step = _empty_first(ctx, kv)
    metadata, state = step.attn_metadata, ctx.state
    _first_head_inputs_kernel[(ctx.num_reqs,)](
        ctx.idx_mapping,
        ctx.query_lens,
        ctx.query_start_loc,
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
        metadata.seq_lens,
        step.last_indices,
        len(step.positions),
        ctx.block_size,
        BLOCK_TOKENS=_BLOCK_TOKENS,
    )
    return step


@triton.jit(do_not_specialize=["num_reqs", "index"])
def _next_head_inputs_kernel(
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
    position = tl.where(used, total_len - 2 + index, 0)
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


def next_head_inputs(ctx: DraftContext, kv: PagedKVCache, drafts: Tensor, index: int) -> DraftPass:
    """Build the head's pass behind draft `index` (1-based) of every place; one launch.

    Args:
        ctx: the step.
        kv: the head's cache.
        drafts: [R] int64, the tokens that were just drafted.
        index: 1 for the first draft.

    Returns:
        One token a place, output i that of place i. Where the row cannot use a draft behind this
        one, and in padding, the sequence length is 0 and no KV is written.
    """
    if not use_triton(ctx.idx_mapping):
        return next_head_inputs_ref(ctx, kv, drafts, index)
    step = _empty_next(ctx, kv, drafts, index)
    metadata, state = step.attn_metadata, ctx.state
    _next_head_inputs_kernel[(triton.cdiv(ctx.num_reqs + 1, _BLOCK_PLACES),)](
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


def _empty_first(ctx: DraftContext, kv: PagedKVCache) -> DraftPass:
    """Allocate the pass over the step's own tokens."""
    query_start_loc, num_tokens = ctx.query_start_loc, len(ctx.positions)
    input_ids = torch.empty(num_tokens, dtype=torch.int64, device=query_start_loc.device)
    return _empty_pass(ctx, kv, query_start_loc, input_ids, (ctx.max_query_len, ctx.max_seq_len))


def _empty_next(ctx: DraftContext, kv: PagedKVCache, drafts: Tensor, index: int) -> DraftPass:
    """Allocate the pass behind draft `index`."""
    num_reqs, longest = ctx.num_reqs, ctx.state.all_token_ids.shape[1]
    query_start_loc = torch.empty(num_reqs + 1, dtype=torch.int32, device=drafts.device)
    bounds = 1, min(ctx.max_seq_len + index, longest)
    return _empty_pass(ctx, kv, query_start_loc, drafts, bounds)


def _empty_pass(
    ctx: DraftContext,
    kv: PagedKVCache,
    query_start_loc: Tensor,
    input_ids: Tensor,
    bounds: tuple[int, int],
) -> DraftPass:
    """Allocate what the kernels fill.

    Args:
        ctx: the step.
        kv: the head's cache.
        query_start_loc: [R + 1] int32 of the pass.
        input_ids: [T'] int64 of the pass.
        bounds: on query lengths and on sequence lengths.
    """
    num_tokens, num_reqs, device = len(input_ids), ctx.num_reqs, input_ids.device
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    metadata = AttentionMetadata(
        kv=kv,
        block_table=ctx.state.block_table,
        idx_mapping=ctx.idx_mapping,
        query_start_loc=query_start_loc,
        seq_lens=torch.empty(num_reqs, dtype=torch.int32, device=device),
        positions=positions,
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=device),
        max_query_len=bounds[0],
        max_seq_len=bounds[1],
    )
    last_indices = torch.empty(num_reqs, dtype=torch.int64, device=device)
    return DraftPass(input_ids, positions, metadata, last_indices)


def first_head_inputs_ref(ctx: DraftContext, kv: PagedKVCache) -> DraftPass:
    """Torch twin of `first_head_inputs`."""
    step = _empty_first(ctx, kv)
    state, device, num_tokens = ctx.state, ctx.idx_mapping.device, len(step.positions)
    real, rows = ctx.idx_mapping >= 0, ctx.idx_mapping.long().clamp(min=0)
    lens, starts = ctx.query_lens.long(), ctx.query_start_loc[:-1].long()
    total_len = state.total_len[rows].long()
    first = state.num_computed_tokens[rows] - lens + ctx.num_rejected
    num_known = torch.where(real, torch.minimum(total_len - 1 - first, lens), 0)
    place = torch.repeat_interleave(
        torch.arange(len(lens), device=device), lens, output_size=num_tokens
    )
    inside = torch.arange(num_tokens, device=device) - starts[place]
    known = inside < num_known[place]
    step.positions.copy_(torch.where(known, first[place] + inside, 0))
    following = torch.where(known, step.positions + 1, 0)
    token_ids = state.all_token_ids[rows[place], following].long()
    step.input_ids.copy_(torch.where(known, token_ids, 0))
    metadata = step.attn_metadata
    metadata.slot_mapping.copy_(_slots(ctx, rows[place], step.positions, known))
    metadata.seq_lens.copy_(torch.where(real, torch.minimum(total_len - 1, first + lens), 0))
    last = starts + (num_known - 1).clamp(min=0)
    step.last_indices.copy_(last.clamp(max=num_tokens - 1))
    return step


def next_head_inputs_ref(
    ctx: DraftContext, kv: PagedKVCache, drafts: Tensor, index: int
) -> DraftPass:
    """Torch twin of `next_head_inputs`."""
    step = _empty_next(ctx, kv, drafts, index)
    rows = ctx.idx_mapping.long().clamp(min=0)
    used = (ctx.idx_mapping >= 0) & (index < ctx.state.draft_limit[rows])
    positions = torch.where(used, ctx.state.total_len[rows].long() - 2 + index, 0)
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
