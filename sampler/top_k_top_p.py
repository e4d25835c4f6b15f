"""Truncate a distribution: first to the top_k most probable tokens, then to mass top_p.

top_p is taken over what top_k left, renormalised; the token that crosses the mass is kept. Tokens
whose logit equals the last kept one are kept too, so that the result does not depend on an order
among equals. A NaN is never kept. So both limits are a cut, and what lies below it goes:

    cut = the smallest logit c with weight(logits above c) < limit
    top_k: weight 1, limit top_k;    top_p: weight exp(logit - max), limit top_p * their sum

The kernel finds the cut without a sort. It bisects the integers that order float32 numbers as the
numbers themselves; the weight above a threshold changes only at logits, so the end of the bisection
is a logit. Masses are float32 sums in a fixed order, at most V / BLOCK_SIZE + log2(BLOCK_SIZE)
additions deep: kernel and twin may differ by tokens before which the mass is within 1e-5 of top_p.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton

_BLOCK_SIZE = 4096
_HEAD = 512  # on a CPU the cut nearly always lies among these; a full sort is the exact fall-back


@triton.jit
def _key_of(logits):
    """Return int32 numbers in the order of float32 numbers: zeros equal, a NaN below everything."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(logits == logits, key, -2147483648)


@triton.jit
def _mass_of(logits, top):
    """Return exp(logit - top), 0 for a NaN."""
    return tl.exp(tl.where(logits == logits, logits - top, float("-inf")))


@triton.jit
def _sum_of_masses(line_ptr, vocab_size, floor, top, BLOCK_SIZE: tl.constexpr):
    """Return the mass of the logits whose key is at least `floor`."""
    total = tl.zeros([BLOCK_SIZE], tl.float32)
    for start in range(0, vocab_size, BLOCK_SIZE):
        tokens = start + tl.arange(0, BLOCK_SIZE)
        inside = tokens < vocab_size
        logits = tl.load(line_ptr + tokens, mask=inside, other=float("-inf"))
        counts = inside & (_key_of(logits) >= floor)
        total += tl.where(counts, _mass_of(logits, top), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _find_cut(
    line_ptr,
    vocab_size,
    floor,  # smallest key that counts, int32
    ceiling,  # largest key, int32
    top,  # the logit of `ceiling`
    limit,
    WEIGHTED: tl.constexpr,  # a logit weighs its mass, else 1
    BLOCK_SIZE: tl.constexpr,
):
    """Return the smallest key above which less than `limit` lies, in floor .. ceiling, int32."""
    # Too much lies above `low`, less than the limit above `high`. Three thresholds a pass quarter
    # what is between: reading the line costs more than comparing it. The lowest int32, the key of a
    # NaN, is never a cut.
    low = tl.maximum(floor.to(tl.int64) - 1, -2147483648)
    high = ceiling.to(tl.int64)
    while high - low > 1:
        first = low + (high - low) // 4
        second = low + (high - low) // 2
        third = low + (high - low) * 3 // 4
        above_first = tl.zeros([BLOCK_SIZE], tl.float32)
        above_second = tl.zeros([BLOCK_SIZE], tl.float32)
        above_third = tl.zeros([BLOCK_SIZE], tl.float32)
        for start in range(0, vocab_size, BLOCK_SIZE):
            tokens = start + tl.arange(0, BLOCK_SIZE)
            inside = tokens < vocab_size
            logits = tl.load(line_ptr + tokens, mask=inside, other=float("-inf"))
            key = _key_of(logits)
            counts = inside & (key >= floor)
            if WEIGHTED:
                weight = tl.where(counts, _mass_of(logits, top), 0.0)
            else:
                weight = tl.where(counts, 1.0, 0.0)
            above_first += tl.where(key > first.to(tl.int32), weight, 0.0)
            above_second += tl.where(key > second.to(tl.int32), weight, 0.0)
            above_third += tl.where(key > third.to(tl.int32), weight, 0.0)
        much_first = tl.sum(above_first, axis=0) >= limit
        much_second = tl.sum(above_second, axis=0) >= limit
        much_third = tl.sum(above_third, axis=0) >= limit
        high = tl.where(much_third, high, third)
        high = tl.where(much_second, high, second)
        high = tl.where(much_first, high, first)
        low = tl.where(much_first, first, low)
        low = tl.where(much_second, second, low)
        low = tl.where(much_third, third, low)
    return tl.maximum(high.to(tl.int32), tl.maximum(floor, -2147483647))


@triton.jit
def _top_k_top_p_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    temperature_ptr,  # [N] float32
    top_k_ptr,  # [N] int32
    top_p_ptr,  # [N] float32
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if row < 0:
        return
    if tl.load(temperature_ptr + row) <= 0:
        return
    k = tl.load(top_k_ptr + row)
    p = tl.load(top_p_ptr + row)
    if (k >= vocab_size) & (p >= 1.0):
        return
    line_ptr = logits_ptr + line * logits_stride
    smallest = tl.full([BLOCK_SIZE], 2147483647, tl.int32)
    largest = tl.full([BLOCK_SIZE], -2147483648, tl.int32)
    top_logits = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK_SIZE):
        tokens = start + tl.arange(0, BLOCK_SIZE)
        inside = tokens < vocab_size
        logits = tl.load(line_ptr + tokens, mask=inside, other=float("-inf"))
        key = _key_of(logits)
        smallest = tl.minimum(smallest, tl.where(inside, key, 2147483647))
        largest = tl.maximum(largest, tl.where(inside, key, -2147483648))
        top_logits = tl.maximum(top_logits, tl.where(logits == logits, logits, float("-inf")))
    cut = tl.min(smallest, axis=0)
    ceiling = tl.max(largest, axis=0)
    top = tl.max(top_logits, axis=0)
    if k < vocab_size:
        limit = k.to(tl.float32)  # counts are exact in float32 up to 2^24
        cut = _find_cut(line_ptr, vocab_size, cut, ceiling, top, limit, False, BLOCK_SIZE)
    if p < 1.0:
        limit = p * _sum_of_masses(line_ptr, vocab_size, cut, top, BLOCK_SIZE)
        cut = _find_cut(line_ptr, vocab_size, cut, ceiling, top, limit, True, BLOCK_SIZE)
    for start in range(0, vocab_size, BLOCK_SIZE):
        tokens = start + tl.arange(0, BLOCK_SIZE)
        inside = tokens < vocab_size
        logits = tl.load(line_ptr + tokens, mask=inside, other=0.0)
        below = inside & (_key_of(logits) < cut)
        tl.store(line_ptr + tokens, tl.full([BLOCK_SIZE], float("-inf"), tl.float32), mask=below)


def apply_top_k_top_p(
    logits: Tensor, idx_mapping: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> None:
    """Set every logit outside the kept set to -inf, in place; greedy lines stay as they are.

    Args:
        logits: [L, V] float32, divided by the temperature.
        idx_mapping: [L] int32, line -> row, -1 in padding.
        temperature: [N] float32; 0 = greedy.
        top_k: [N] int32, V = no limit.
        top_p: [N] float32, 1 = no limit.
    """
    if not use_triton(logits):
        apply_top_k_top_p_ref(logits, idx_mapping, temperature, top_k, top_p)
        return
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    _top_k_top_p_kernel[(num_lines,)](
        logits,
        logits.stride(0),
        idx_mapping,
        temperature,
        top_k,
        top_p,
        vocab_size,
        BLOCK_SIZE=min(_BLOCK_SIZE, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )


def _sorted_cut(logits: Tensor, k: int, p: float) -> Tensor:
    """Return the smallest kept logit of a line [V], by a full sort."""
    ordered = logits.sort(descending=True).values
    kth = ordered[k - 1]
    if p >= 1:
        return kth
    inside = torch.where(ordered >= kth, ordered, float("-inf"))
    probs = inside.softmax(0)
    # A token is kept while the mass before it is below top_p; the first always is.
    kept = ((probs.cumsum(0) - probs) < p) & (inside > float("-inf"))
    return ordered[max(int(kept.sum()), 1) - 1]


def _head_cut(logits: Tensor, k: int, p: float) -> Tensor | None:
    """Return the smallest kept logit of one line from its head, or None where that is too short."""
    head = logits.topk(min(_HEAD, logits.shape[0])).values
    if k < logits.shape[0]:
        if k >= len(head):
            return None
        head = head[head >= head[k - 1]]
        if len(head) == _HEAD:
            return None  # equals of the k-th may lie behind the head
        total = head.logsumexp(0)
    else:
        total = logits.logsumexp(0)
    if p >= 1:
        return head[-1]
    probs = (head - total).exp()
    kept = (probs.cumsum(0) - probs) < p
    if bool(kept[-1]) and len(head) == _HEAD:
        return None
    return head[max(int(kept.sum()), 1) - 1]


def apply_top_k_top_p_ref(
    logits: Tensor, idx_mapping: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> None:
    """Torch twin of `apply_top_k_top_p`, which touches only lines that have a limit."""
    rows = idx_mapping.long().clamp(min=0)
    line_k, line_p = top_k[rows], top_p[rows]
    limited = (line_k < logits.shape[1]) | (line_p < 1)
    limited &= (idx_mapping >= 0) & (temperature[rows] > 0)
    for line in limited.nonzero(as_tuple=True)[0].tolist():
        values, k, p = logits[line], int(line_k[line]), float(line_p[line])
        if bool(values.max().isnan()):
            values.masked_fill_(values.isnan(), float("-inf"))
        cut = _head_cut(values, k, p)
        if cut is None:
            cut = _sorted_cut(values, k, p)
        values.masked_fill_(values < cut, float("-inf"))
