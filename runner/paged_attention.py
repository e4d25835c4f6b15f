"""Attention over paged KV for any mix of prefill chunks, verification and decoding.

A program takes one tile of queries of one place and one KV head, and walks over the keys with an
online softmax. The rows of a tile are query tokens x the query heads that share the KV head
(grouped-query packing), so that the K + 1 tokens of a verification read every key once.

Where there are fewer tiles than the device can hold, the keys of a tile are split over programs
(flash-decoding), and a second kernel combines their results by log-sum-exp. How the keys are split
follows from the number of tokens and places and, on the device, from the actual length: not from
`max_seq_len`, which bounds the grid alone, so that a captured pass gives the bits of an eager one.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of the compiler.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from runner.attention_launch import (
    AttentionLaunch,
    AttentionShape,
    block_columns,
    choose_launch,
    count_tiles,
    num_multiprocessors,
)
from runner.attention_metadata import AttentionGroup, AttentionMetadata
from runner.dispatch import use_triton
from runner.pdl import launch_options, let_next_begin, wait_for_predecessor

_LOG2_E = 1.4426950408889634
_FEW_SPLITS = 8  # whose results are combined at a time


@triton.jit(do_not_specialize=["num_reqs", "num_tiles", "num_splits", "max_splits", "window"])
def _paged_attention_kernel(
    out_ptr,  # [T, num_heads, HEAD_SIZE], dtype of the queries
    partial_ptr,  # [T, num_heads, num_splits, HEAD_SIZE] float32, written where SPLIT
    lse_ptr,  # [T, num_heads, num_splits] float32, base 2, -inf = nothing seen; where SPLIT
    query_ptr,  # [T, num_heads, HEAD_SIZE]
    query_stride_t,
    query_stride_h,
    key_ptr,  # [num_slots, num_kv_heads, HEAD_SIZE]
    value_ptr,
    kv_stride_s,
    kv_stride_h,
    block_table_ptr,  # [N, max_num_blocks] int32
    block_table_stride,
    idx_mapping_ptr,  # [R] int32, -1 in padding
    query_start_loc_ptr,  # [R + 1] int32
    seq_lens_ptr,  # [R] int32
    positions_ptr,  # [T] int64
    scale_log2,
    num_reqs,
    num_tiles,
    num_splits,
    max_splits,
    window,
    NUM_KV_HEADS: tl.constexpr,
    PACKED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ONE_TILE: tl.constexpr,  # no place has more tokens than a tile
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,  # products of float32 copies, which are the same numbers
    MIN_SPLIT_STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,  # half of the multiprocessors or more have no program of this kernel
    PDL: tl.constexpr,
):
    # Programs of the next kernel then find room beside these, and may begin even before this kernel
    # has its own inputs: they fetch weights, which no kernel writes, and wait for the end of this
    # kernel before they touch what another one reads or writes. As every kernel of the chain waits
    # in the same way, the end of one means that all before it have ended, too; see `runner.pdl`.
    let_next_begin(EARLY and PDL)
    wait_for_predecessor(PDL)
    # The heads of a key lie side by side in memory: programs that run at once should read them.
    pid = tl.program_id(0)
    kv_head = pid % NUM_KV_HEADS
    tile = (pid // NUM_KV_HEADS) % num_tiles
    split = pid // (NUM_KV_HEADS * num_tiles)
    place = tile
    if not ONE_TILE:
        # Place r begins at tile query_start_loc[r] // TILE_TOKENS + r: a bound that leaves room for
        # every place's last tile, without a prefix sum over the number of tiles.
        r = tl.arange(0, BLOCK_R)
        starts = tl.load(query_start_loc_ptr + r, mask=r < num_reqs, other=0)
        begun = (starts // TILE_TOKENS + r <= tile) & (r < num_reqs)
        place = tl.sum(begun.to(tl.int32), 0) - 1
    token = tl.load(query_start_loc_ptr + place)
    token_end = tl.load(query_start_loc_ptr + place + 1)
    if not ONE_TILE:
        token += (tile - token // TILE_TOKENS - place) * TILE_TOKENS
    if token >= token_end:
        return
    row = tl.load(idx_mapping_ptr + place)
    seq_len = tl.load(seq_lens_ptr + place)
    seq_len = tl.where(row < 0, 0, seq_len)
    table_ptr = block_table_ptr + tl.maximum(row, 0).to(tl.int64) * block_table_stride

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    tokens = token + m // PACKED
    is_row = (m < TILE_TOKENS * PACKED) & (tokens < token_end)
    heads = kv_head * PACKED + m % PACKED
    lines = tokens.to(tl.int64) * (NUM_KV_HEADS * PACKED) + heads  # of the output
    query_pos = tl.load(positions_ptr + tokens, mask=is_row, other=-1).to(tl.int32)

    last_pos = tl.max(query_pos, 0)
    kv_end = tl.minimum(seq_len, last_pos + 1)
    kv_begin = 0
    if HAS_WINDOW:
        # Positions within a place are consecutive, but 0 behind a row's end: count from the last.
        first_pos = last_pos + 1 - tl.minimum(token_end - token, TILE_TOKENS)
        kv_begin = tl.maximum(first_pos + 1 - window, 0)
    if SPLIT:
        num_steps = tl.cdiv(tl.maximum(kv_end - kv_begin, 0), BLOCK_N)
        steps = tl.maximum(tl.cdiv(num_steps, max_splits), MIN_SPLIT_STEPS)
        kv_begin += split * steps * BLOCK_N
        # The last one takes what is left: too low a bound on the length costs time alone.
        is_last = split == num_splits - 1
        kv_end = tl.where(is_last, kv_end, tl.minimum(kv_end, kv_begin + steps * BLOCK_N))
        lines = lines * num_splits + split
        if kv_begin >= kv_end:
            tl.store(lse_ptr + lines, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
            return

    query_offsets = tokens.to(tl.int64) * query_stride_t + heads * query_stride_h
    q_mask = is_row[:, None] & (d[None, :] < HEAD_SIZE)
    q = tl.load(query_ptr + query_offsets[:, None] + d[None, :], mask=q_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    # The pages of a step are looked up a step ahead: keys and values then wait for no other load.
    key_pos = kv_begin + tl.arange(0, BLOCK_N)
    blocks = tl.load(table_ptr + key_pos // BLOCK_SIZE, mask=key_pos < kv_end, other=0)
    for first_key in range(kv_begin, kv_end, BLOCK_N):
        key_pos = first_key + tl.arange(0, BLOCK_N)
        is_key = key_pos < kv_end
        slots = blocks.to(tl.int64) * BLOCK_SIZE + key_pos % BLOCK_SIZE
        next_pos = key_pos + BLOCK_N
        blocks = tl.load(table_ptr + next_pos // BLOCK_SIZE, mask=next_pos < kv_end, other=0)
        kv_offsets = (slots * kv_stride_s + kv_head * kv_stride_h)[:, None] + d[None, :]
        if HEAD_SIZE == BLOCK_D:
            kv_mask = is_key[:, None]
        else:
            kv_mask = is_key[:, None] & (d[None, :] < HEAD_SIZE)
        k = tl.load(key_ptr + kv_offsets, mask=kv_mask, other=0.0)
        v = tl.load(value_ptr + kv_offsets, mask=kv_mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        seen = is_key[None, :] & (key_pos[None, :] <= query_pos[:, None])
        if HAS_WINDOW:
            seen = seen & (query_pos[:, None] - key_pos[None, :] < window)
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # -inf minus -inf is NaN: a row that has seen no key yet is scaled by a finite number.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - finite_max[:, None])
        decay = tl.exp2(row_max - finite_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        weights = weights.to(v.dtype)
        if UPCAST:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max

    let_next_begin(PDL)
    # Normalised in both cases: a single split that is combined then gives the very same bits.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    if SPLIT:
        tl.store(lse_ptr + lines, row_max + tl.log2(row_sum), mask=is_row)
        tl.store(partial_ptr + lines[:, None] * HEAD_SIZE + d[None, :], acc, mask=q_mask)
    else:
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + lines[:, None] * HEAD_SIZE + d[None, :], out, mask=q_mask)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_splits_kernel(
    out_ptr,  # [T * num_heads, HEAD_SIZE]
    partial_ptr,  # [T * num_heads, num_splits, HEAD_SIZE] float32
    lse_ptr,  # [T * num_heads, num_splits] float32, base 2, -inf = nothing seen
    num_splits,
    HEAD_SIZE: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait_for_predecessor(PDL)
    line = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + line * num_splits + s, mask=s < num_splits, other=float("-inf"))
    largest = tl.max(lse, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(lse - largest), 0)
    out = tl.zeros([BLOCK_D], dtype=tl.float32)
    # A few splits at a time: most rows have no more, and the order of the sum is always the same.
    for first in range(0, num_splits, FEW):
        few = first + tl.arange(0, FEW)
        mask = few < num_splits
        few_lse = tl.load(lse_ptr + line * num_splits + few, mask=mask, other=float("-inf"))
        seen = (few_lse > float("-inf"))[:, None] & (d[None, :] < HEAD_SIZE)
        offsets = (line * num_splits + few)[:, None] * HEAD_SIZE + d[None, :]
        parts = tl.load(partial_ptr + offsets, mask=seen, other=0.0)
        out += tl.sum(parts * tl.exp2(few_lse - largest)[:, None], 0)
    out = (out / tl.where(total == 0.0, 1.0, total)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + line * HEAD_SIZE + d, out, mask=d < HEAD_SIZE)


def paged_attention_forward(
    query: Tensor,
    metadata: AttentionMetadata,
    layer: int,
    scaling: float,
    window: int | None,
    launch: AttentionLaunch | None = None,
) -> Tensor:
    """Attend over the pages of each place's request; the pass's own KV is already written.

    Args:
        query: [T, num_heads, head_size], dense in the last dimension.
        metadata: of the pass.
        layer: of the KV cache.
        scaling: factor on the scores.
        window: keys seen by a query, its own included; None = all.
        launch: replaces the one that the shapes choose.

    Returns:
        Output [T, num_heads, head_size], contiguous, dtype of `query`; zeros for padding.
    """
    if not use_triton(query):
        return paged_attention_forward_ref(query, metadata, layer, scaling, window, launch)
    keys = metadata.kv.keys[layer]
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[1]
    assert query.stride(2) == 1, f"query strides {query.stride()}"
    assert query.dtype == keys.dtype, f"queries in {query.dtype}, cache in {keys.dtype}"
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads} KV heads"
    shape = AttentionShape(
        num_tokens=num_tokens,
        num_reqs=len(metadata.idx_mapping),
        max_query_len=metadata.max_query_len,
        num_kv_heads=num_kv_heads,
        num_packed=num_heads // num_kv_heads,
        head_size=head_size,
        itemsize=keys.element_size(),
    )
    launch = launch or choose_launch(shape, num_multiprocessors(query.device))
    num_splits = _num_splits(metadata, shape, launch, window)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    partial = lse = out  # not touched where keys are not split
    if num_splits > 1:
        lines = (num_tokens, num_heads, num_splits)
        partial = torch.empty((*lines, head_size), dtype=torch.float32, device=query.device)
        lse = torch.empty(lines, dtype=torch.float32, device=query.device)
    outputs = _Outputs(out, partial, lse, num_splits)
    _launch_attention(query, metadata, layer, scaling, window, shape, launch, outputs)
    if num_splits > 1:
        _combine_splits_kernel[(num_tokens * num_heads,)](
            out,
            partial,
            lse,
            num_splits,
            HEAD_SIZE=head_size,
            FEW=_FEW_SPLITS,
            # Not by num_splits: the order of a sum depends on the size of the block.
            BLOCK_S=triton.next_power_of_2(launch.max_splits),
            BLOCK_D=block_columns(head_size),
            **launch_options(query),
        )
    return out


@dataclass(frozen=True)
class _Outputs:
    """Where the attention kernel writes."""

    out: Tensor
    partial: Tensor
    lse: Tensor
    num_splits: int


def _num_splits(
    metadata: AttentionMetadata, shape: AttentionShape, launch: AttentionLaunch, window: int | None
) -> int:
    """Return how many programs can find keys to read in one tile, by the bound on the lengths."""
    most_keys = metadata.max_seq_len
    if window is not None:
        most_keys = min(most_keys, window + count_tiles(shape, launch.block_m)[1] - 1)
    most_steps = triton.cdiv(most_keys, launch.block_n)
    return max(1, min(launch.max_splits, triton.cdiv(most_steps, launch.min_split_steps)))


def _launch_attention(
    query: Tensor,
    metadata: AttentionMetadata,
    layer: int,
    scaling: float,
    window: int | None,
    shape: AttentionShape,
    launch: AttentionLaunch,
    outputs: _Outputs,
) -> None:
    """Launch the attention kernel."""
    keys, values = metadata.kv.keys[layer], metadata.kv.values[layer]
    num_splits = outputs.num_splits
    num_tiles, tile_tokens = count_tiles(shape, launch.block_m)
    num_programs = num_tiles * shape.num_kv_heads * num_splits
    _paged_attention_kernel[(num_programs,)](
        outputs.out,
        outputs.partial,
        outputs.lse,
        query,
        query.stride(0),
        query.stride(1),
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        metadata.block_table,
        metadata.block_table.stride(0),
        metadata.idx_mapping,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.positions,
        scaling * _LOG2_E,
        shape.num_reqs,
        num_tiles,
        num_splits,
        launch.max_splits,
        window or 0,
        NUM_KV_HEADS=shape.num_kv_heads,
        PACKED=shape.num_packed,
        HEAD_SIZE=shape.head_size,
        BLOCK_SIZE=metadata.kv.block_size,
        TILE_TOKENS=tile_tokens,
        ONE_TILE=shape.max_query_len <= tile_tokens,
        HAS_WINDOW=window is not None,
        SPLIT=num_splits > 1,
        # The interpreter multiplies the bits of bfloat16 as integers.
        UPCAST=not query.is_cuda and query.dtype == torch.bfloat16,
        MIN_SPLIT_STEPS=launch.min_split_steps,
        BLOCK_R=triton.next_power_of_2(shape.num_reqs),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_D=block_columns(shape.head_size),
        EARLY=2 * num_programs <= num_multiprocessors(query.device),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch_options(query),
    )


def paged_attention_forward_ref(
    query: Tensor,
    metadata: AttentionMetadata,
    layer: int,
    scaling: float,
    window: int | None,
    launch: AttentionLaunch | None = None,
) -> Tensor:
    """Torch twin of `paged_attention_forward`; waits for the device, and has nothing to launch."""
    keys, values = metadata.kv.keys[layer], metadata.kv.values[layer]
    num_kv_heads, head_size = keys.shape[1:]
    num_tokens, num_heads = query.shape[:2]
    packed = num_heads // num_kv_heads
    out = None
    for group in metadata.groups:
        q = query if group.token_idx is None else query[group.token_idx]
        query_len = group.query_len
        # [G, Q, kv, packed, D] -> [G, kv, packed * Q, D]: rows of one problem read every key once.
        if query_len > 1:
            q = q.reshape(-1, query_len, num_kv_heads, packed, head_size).permute(0, 2, 3, 1, 4)
        # As [kv, 1, packed * Q, D] the output of one token comes in order, without a copy.
        num_problems = num_kv_heads if group.read_slots is not None else 1
        q = q.reshape(-1, num_problems, packed * query_len, head_size)
        k, v = _read_pages(keys, group), _read_pages(values, group)
        mask = group.mask(window, packed, q.dtype)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        if query_len > 1:
            o = o.view(-1, num_kv_heads, packed, query_len, head_size).permute(0, 3, 1, 2, 4)
        o = o.reshape(-1, num_heads, head_size)
        if group.token_idx is None:
            return o
        if out is None:
            out = torch.zeros(num_tokens, num_heads, head_size, dtype=o.dtype, device=o.device)
        out[group.token_idx] = o
    assert out is not None, "a pass without tokens"
    return out


def _read_pages(cache: Tensor, group: AttentionGroup) -> Tensor:
    """Return what a group reads of keys or values, [G, num_kv_heads, S, head_size].

    Where it needs no copy it is a view, [num_kv_heads, 1, S, head_size].
    """
    if group.read_slots is None:
        _, num_kv_heads, head_size = cache.shape
        width = num_kv_heads * head_size
        return cache.as_strided(
            (num_kv_heads, 1, group.max_seq_len, head_size),
            (head_size, width, width, 1),
            group.first_slot * width,
        )
    read = cache.index_select(0, group.read_slots)
    return read.view(-1, group.max_seq_len, *cache.shape[1:]).transpose(1, 2)
