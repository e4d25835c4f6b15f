"""What lies between a packed QKV layer and attention, in one kernel.

Adds up the layer's parts, norms the heads where the model does (Qwen3), turns queries and keys by
their positions, and writes keys and values to the cache.

Source: Su et al. 2021 (RoPE), in the layout whose pairs are half a head apart.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of the compiler.
# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from runner.dispatch import use_triton
from runner.kv_cache import write_kv_ref
from runner.models.norm import rms_scale
from runner.pdl import launch_options, let_next_begin, wait_for_predecessor
from specdec.errors import UnsupportedError


@dataclass(frozen=True)
class HeadShape:
    """Heads of an attention layer.

    Args:
        num_heads: of queries.
        num_kv_heads: of keys and of values.
        head_size: elements a head.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def packed_width(self) -> int:
        """Return the outputs of the packed layer: queries, keys, values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm over each head of the queries and of the keys.

    Args:
        query: [head_size].
        key: [head_size].
        eps: of both.
    """

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True)
class TokenTurns:
    """Turns of the tokens of a pass over whole heads; read by the twin alone.

    Args:
        cos: [T, 1, head_size], the same in both halves.
        sin: like `cos`, negative in the first half.
    """

    cos: Tensor
    sin: Tensor


@triton.jit
def _load_halves(ptrs, mask, HALF: tl.constexpr):
    """Load both halves of heads in float32."""
    low = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _store_halves(ptrs, low, high, mask, HALF: tl.constexpr):
    """Store both halves of heads."""
    tl.store(ptrs, low.to(ptrs.dtype.element_ty), mask=mask)
    tl.store(ptrs + HALF, high.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "last_position"])
def _turn_heads_kernel(
    query_ptr,  # [T, NUM_HEADS, D], out
    key_cache_ptr,  # [num_slots, NUM_KV_HEADS, D], out
    value_cache_ptr,
    parts_ptr,  # [PARTS, T, (NUM_HEADS + 2 * NUM_KV_HEADS) * D]
    turns_ptr,  # [P, 2, D / 2]: cosines, then sines
    positions_ptr,  # [T] int64
    slot_mapping_ptr,  # [T] int64, -1 = write no KV
    query_norm_ptr,  # [D], read where NORMS
    key_norm_ptr,
    eps,
    num_tokens,
    last_position,  # P - 1; what is computed for positions behind it is of no use
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,  # of half a head
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    # Queries, then keys, then values.
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dtype = query_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    TURNED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (d < HALF)
    low = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    high = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    for part in tl.static_range(PARTS):  # pyright: ignore
        first = ((part * num_tokens + token) * HEADS + head) * D + d
        part_low, part_high = _load_halves(parts_ptr + first, mask, HALF)
        low += part_low
        high += part_high
    low = low.to(dtype).to(tl.float32)
    high = high.to(dtype).to(tl.float32)
    turned = head < TURNED
    if NORMS:
        is_query = head < NUM_HEADS
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        query_low, query_high = _load_halves(query_norm_ptr + d, d < HALF, HALF)
        key_low, key_high = _load_halves(key_norm_ptr + d, d < HALF, HALF)
        normed_low = (low * scale).to(dtype).to(tl.float32)
        normed_high = (high * scale).to(dtype).to(tl.float32)
        normed_low *= tl.where(is_query, query_low, key_low)
        normed_high *= tl.where(is_query, query_high, key_high)
        low = tl.where(turned, normed_low.to(dtype).to(tl.float32), low)
        high = tl.where(turned, normed_high.to(dtype).to(tl.float32), high)
    position = tl.minimum(tl.load(positions_ptr + token), last_position)
    turn_ptrs = turns_ptr + position * D + d
    cos, sin = _load_halves(turn_ptrs, d < HALF, HALF)
    new_low = tl.where(turned, low * cos - high * sin, low)
    new_high = tl.where(turned, high * cos + low * sin, high)
    _store_halves(
        query_ptr + (token * NUM_HEADS + head) * D + d,
        new_low,
        new_high,
        mask & (head < NUM_HEADS),
        HALF,
    )
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        kv_head = slot * NUM_KV_HEADS + head - NUM_HEADS
        is_key = mask & (head >= NUM_HEADS) & turned
        _store_halves(key_cache_ptr + kv_head * D + d, new_low, new_high, is_key, HALF)
        value_ptrs = value_cache_ptr + (kv_head - NUM_KV_HEADS) * D + d
        _store_halves(value_ptrs, new_low, new_high, mask & (head >= TURNED), HALF)


def turn_heads(
    parts: Tensor,
    shape: HeadShape,
    turns: Tensor | TokenTurns,
    positions: Tensor,
    norms: HeadNorms | None,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> Tensor:
    """Make queries of a packed layer's output, and write its keys and values, in one launch.

    Args:
        parts: [S, T, shape.packed_width], which are added up.
        shape: of the heads.
        turns: of `make_turn_table`, [P, 2, head_size / 2]; or of `share_turns`. Positions from P
            on, which a drafter meets behind its own context, give finite numbers of no use.
        positions: [T] int64.
        norms: of the heads, or None.
        slot_mapping: [T] int64, -1 = write nothing.
        key_cache: [num_slots, num_kv_heads, head_size], contiguous, in/out; its last slot is trash.
        value_cache: like `key_cache`; both of the queries' dtype.

    Returns:
        Queries [T, num_heads, head_size].
    """
    if not use_triton(parts):
        return turn_heads_ref(
            parts, shape, turns, positions, norms, slot_mapping, key_cache, value_cache
        )
    num_parts, num_tokens, width = parts.shape
    assert width == shape.packed_width, f"parts {parts.shape}"
    assert parts.is_contiguous(), f"strides {parts.stride()}"
    assert isinstance(turns, Tensor), "turns were gathered for the twin"
    query = torch.empty(
        (num_tokens, shape.num_heads, shape.head_size), dtype=key_cache.dtype, device=parts.device
    )
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    # Few tokens: a program a few heads, for the latency of one is the time. Many: more heads each.
    block_h = 4 if num_tokens <= 32 else 16
    _turn_heads_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        query,
        key_cache,
        value_cache,
        parts,
        turns,
        positions,
        slot_mapping,
        turns if norms is None else norms.query,
        turns if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        num_tokens,
        len(turns) - 1,
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        D=shape.head_size,
        PARTS=num_parts,
        NORMS=norms is not None,
        BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(shape.head_size // 2),
        num_warps=block_h // 4,
        **launch_options(parts),
    )
    return query


def turn_heads_ref(
    parts: Tensor,
    shape: HeadShape,
    turns: Tensor | TokenTurns,
    positions: Tensor,
    norms: HeadNorms | None,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
) -> Tensor:
    """Torch twin of `turn_heads`; -1 is the last slot, as for any index."""
    if not isinstance(turns, TokenTurns):
        turns = _gather_turns(turns, positions)
    if parts.shape[0] > 1:
        parts = parts.float().sum(0)
    num_heads, num_kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_size
    heads = parts.view(-1, num_heads + 2 * num_kv_heads, size)
    if heads.dtype != key_cache.dtype:
        heads = heads.to(key_cache.dtype)
    # Queries and keys are turned together: fewer operations.
    turned, value = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), 1)
    if norms is not None:
        weights = (norms.query.expand(num_heads, size), norms.key.expand(num_kv_heads, size))
        turned = (turned * rms_scale(turned, norms.eps)).to(heads.dtype) * torch.cat(weights)
    # Rounded product by product, as the modules it stands for do.
    turned = turned.roll(size // 2, -1).mul_(turns.sin).add_(turned * turns.cos)
    query, key = turned.split_with_sizes((num_heads, num_kv_heads), 1)
    write_kv_ref(key_cache, value_cache, slot_mapping, key, value)
    return query


def _gather_turns(table: Tensor, positions: Tensor) -> TokenTurns:
    positions = positions.clamp(max=len(table) - 1)
    cos, sin = table.index_select(0, positions).split(1, dim=1)
    return TokenTurns(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def share_turns(table: Tensor, positions: Tensor, shared: dict[Any, Any]) -> Tensor | TokenTurns:
    """Return what the layers of a pass give `turn_heads` as turns.

    Args:
        table: of `make_turn_table`.
        positions: [T] int64, of the pass.
        shared: what the layers of the pass share, in/out; the twin's turns are gathered once.
    """
    if use_triton(positions):
        return table
    if id(table) not in shared:
        shared[id(table)] = _gather_turns(table, positions)
    return shared[id(table)]


def make_turn_table(rotary: nn.Module, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Ask a model's rotary embedding for the turns of all positions, once.

    Args:
        rotary: module of transformers, on its device.
        num_positions: from 0 on.
        dtype: of the table, to which the module rounds.

    Returns:
        [num_positions, 2, head_size / 2]: cosines, then sines.

    Raises:
        UnsupportedError: it turns pairs that are not half a head apart.
    """
    inv_freq: Any = rotary.inv_freq
    like = torch.empty(0, dtype=dtype, device=inv_freq.device)
    chunks = []
    for positions in torch.arange(num_positions, device=inv_freq.device).split(8192):
        turns = torch.stack(rotary(like, positions[None]), dim=2)[0]
        low, high = turns.chunk(2, dim=-1)
        if not torch.equal(low, high):
            raise UnsupportedError(
                f"{type(rotary).__name__} turns other pairs than halves of a head"
            )
        chunks.append(low)
    return torch.cat(chunks).contiguous()
