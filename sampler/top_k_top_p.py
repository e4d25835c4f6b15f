"""Truncate a distribution: first to the top_k most probable tokens, then to mass top_p.

top_p is taken over what top_k left, renormalised; the token that crosses the mass is kept. Tokens
whose logit equals the last kept one are kept too, so that the result does not depend on an order
among equals. A NaN is never kept. So both limits are a cut, and what lies below it goes:

    cut = the smallest logit c with weight(logits above c) < limit
    top_k: weight 1, limit top_k;    top_p: weight exp(logit - max), limit top_p * their sum

The kernels find the cut without a sort, in three launches. The first reads all logits once, and
keeps of every few tokens (a *patch*) the largest logit and the mass. From these the second finds a
logit that the cut cannot be below: k patches reach it, or the tokens below it have too little mass.
Only patches that reach it matter from there on, mostly a few of thousands; among their tokens it
bisects the integers that order float32 numbers as the numbers themselves, until one logit is left
between the bounds. The third launch writes. Where nothing can be left out (a flat distribution, a k
beyond the number of patches) all patches matter, and the cut is found in the same way.

Masses are float32 sums in a fixed order: kernel and twin may differ by tokens before which the mass
is within 1e-5 of top_p.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton

_BLOCK_SIZE = 4096  # tokens of a program that scans or writes
_SOLVED_AT_ONCE = 2048  # tokens that the program of a line compares at a time
_MIN_PATCH = 32  # tokens whose logits fill a line of the cache
_MAX_PATCHES = 4096
_HEAD = 512  # on a CPU the cut nearly always lies among these; a full sort is the exact fall-back

# Three counts of tokens share an int64.
_MAX_VOCAB = 2**20
_SECOND_COUNT = tl.constexpr(2**20)
_THIRD_COUNT = tl.constexpr(2**40)
_KEY_OF_NAN = tl.constexpr(-2147483648)
_KEY_OF_MINUS_INF = tl.constexpr(-2139095041)


@triton.jit
def _key_of(logits):
    """Return int32 numbers in the order of float32 numbers: zeros equal, a NaN below everything."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(logits == logits, key, _KEY_OF_NAN)


@triton.jit
def _logit_of(key):
    """Return the float32 number of a key, which is no NaN's."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _mass_of(logits, top):
    """Return exp(logit - top), 0 for a NaN, and for minus infinity whatever `top` is."""
    counts = logits > float("-inf")  # false for a NaN
    return tl.where(counts, tl.exp(tl.where(counts, logits, top) - top), 0.0)


@triton.jit
def _read_limits(line, idx_mapping_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size):
    """Return (k, p) of a line; without a limit, for a greedy line and for padding, k is 0."""
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    safe_row = tl.maximum(row, 0)
    k = tl.load(top_k_ptr + safe_row)
    p = tl.load(top_p_ptr + safe_row)
    temperature = tl.load(temperature_ptr + safe_row)
    limited = (row >= 0) & (temperature > 0) & ((k < vocab_size) | (p < 1.0))
    return tl.where(limited, k, 0), p


@triton.jit
def _scan_kernel(
    logits_ptr,  # [L, V] float32
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    temperature_ptr,  # [N] float32
    top_k_ptr,  # [N] int32
    top_p_ptr,  # [N] float32
    largest_ptr,  # [L, P] float32, out: largest logit of a patch, a NaN left out
    mass_ptr,  # [L, P] float32, out: sum of exp(logit - largest)
    vocab_size,
    num_patches,
    PATCH: tl.constexpr,
    PATCHES: tl.constexpr,  # of a program
):
    line = tl.program_id(0).to(tl.int64)
    k, p = _read_limits(line, idx_mapping_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if k == 0:
        return
    patch = tl.program_id(1) * PATCHES + tl.arange(0, PATCHES)
    tokens = patch[:, None] * PATCH + tl.arange(0, PATCH)[None, :]
    logits = tl.load(
        logits_ptr + line * logits_stride + tokens, mask=tokens < vocab_size, other=float("-inf")
    )
    largest = tl.max(tl.where(logits == logits, logits, float("-inf")), axis=1)
    inside = patch < num_patches
    tl.store(largest_ptr + line * num_patches + patch, largest, mask=inside)
    if p < 1.0:
        mass = tl.sum(_mass_of(logits, largest[:, None]), axis=1)
        tl.store(mass_ptr + line * num_patches + patch, mass, mask=inside)


@triton.jit
def _find_floor(key, peak, mass, top, ceiling, limit, WEIGHTED: tl.constexpr, PATCH: tl.constexpr):
    """Return a key that the cut is not below, int32, from the largest key [P] of each patch.

    At least `limit` must lie at or above it: patches; or, WEIGHTED, mass, where a patch that
    reaches it gives its `peak` [P], or its `mass` [P] less what others below it can have at most.
    """
    low = tl.full([], _KEY_OF_MINUS_INF, tl.int64)
    high = ceiling.to(tl.int64)
    num_reaching = tl.sum((key >= _KEY_OF_MINUS_INF).to(tl.int32), axis=0)
    # It need not be the best one: when few patches reach it, all their tokens are soon compared,
    # and bounds 16384 keys apart are 0.2 % of a logit apart.
    while (high - low > 16384) & (num_reaching > 128):
        middle = low + (high - low) // 2
        reaches = key >= middle.to(tl.int32)
        if WEIGHTED:
            below = (PATCH - 1) * tl.exp(_logit_of(middle.to(tl.int32)) - top)
            enough = tl.sum(tl.where(reaches, tl.maximum(peak, mass - below), 0.0), axis=0) >= limit
        else:
            enough = tl.sum(reaches.to(tl.int32), axis=0) >= limit
        num_reaching = tl.where(enough, tl.sum(reaches.to(tl.int32), axis=0), num_reaching)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def _load_active(
    line_ptr, active_ptr, start, num_active, vocab_size, PATCH: tl.constexpr, PATCHES: tl.constexpr
):
    """Load the logits [PATCHES, PATCH] of the listed patches from `start` on; -inf elsewhere."""
    place = start + tl.arange(0, PATCHES)
    patch = tl.load(active_ptr + place, mask=place < num_active, other=0)
    tokens = patch[:, None] * PATCH + tl.arange(0, PATCH)[None, :]
    mask = (place < num_active)[:, None] & (tokens < vocab_size)
    # What is masked has no mass, and is counted only above thresholds that lie below all numbers,
    # above which there is enough anyway.
    return tl.load(line_ptr + tokens, mask=mask, other=float("-inf"))


@triton.jit
def _sum_of_masses(
    line_ptr,
    active_ptr,
    num_active,
    vocab_size,
    floor,
    top,
    PATCH: tl.constexpr,
    PATCHES: tl.constexpr,
):
    """Return the mass of the logits whose key is at least `floor`."""
    total = tl.zeros([PATCHES, PATCH], tl.float32)
    for start in range(0, num_active, PATCHES):
        logits = _load_active(line_ptr, active_ptr, start, num_active, vocab_size, PATCH, PATCHES)
        total += tl.where(_key_of(logits) >= floor, _mass_of(logits, top), 0.0)
    return tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit
def _find_cut(
    line_ptr,
    active_ptr,  # patches that reach `floor`
    num_active,
    vocab_size,
    floor,  # key that the cut is not below, int32
    ceiling,  # largest key, int32
    top,  # the logit of `ceiling`
    limit,
    WEIGHTED: tl.constexpr,  # a logit weighs its mass, else 1
    PATCH: tl.constexpr,
    PATCHES: tl.constexpr,
):
    """Return a key, int32: what is at or above it is what is at or above the cut."""
    # At least the limit lies above `low`, less than it above `high`. Three thresholds a pass
    # quarter what is between. It ends where at most one logit is: that one is the cut.
    low = floor.to(tl.int64) - 1
    high = ceiling.to(tl.int64)
    count_low = tl.full([], 1 << 30, tl.int64)
    count_high = tl.full([], 0, tl.int64)
    while (high - low > 1) & (count_low - count_high > 1):
        first = low + (high - low) // 4
        second = low + (high - low) // 2
        third = low + (high - low) * 3 // 4
        counts = tl.zeros([PATCHES, PATCH], tl.int64)
        above_first = tl.zeros([PATCHES, PATCH], tl.float32)
        above_second = tl.zeros([PATCHES, PATCH], tl.float32)
        above_third = tl.zeros([PATCHES, PATCH], tl.float32)
        for start in range(0, num_active, PATCHES):
            logits = _load_active(
                line_ptr, active_ptr, start, num_active, vocab_size, PATCH, PATCHES
            )
            key = _key_of(logits)
            is_first = key > first.to(tl.int32)
            is_second = key > second.to(tl.int32)
            is_third = key > third.to(tl.int32)
            counts += tl.where(is_first, 1, 0).to(tl.int64)
            counts += tl.where(is_second, _SECOND_COUNT, 0).to(tl.int64)
            counts += tl.where(is_third, _THIRD_COUNT, 0).to(tl.int64)
            if WEIGHTED:
                mass = _mass_of(logits, top)
                above_first += tl.where(is_first, mass, 0.0)
                above_second += tl.where(is_second, mass, 0.0)
                above_third += tl.where(is_third, mass, 0.0)
        count = tl.sum(tl.sum(counts, axis=1), axis=0)
        count_first = count & (_SECOND_COUNT - 1)
        count_second = (count >> 20) & (_SECOND_COUNT - 1)
        count_third = count >> 40
        if WEIGHTED:
            much_first = tl.sum(tl.sum(above_first, axis=1), axis=0) >= limit
            much_second = tl.sum(tl.sum(above_second, axis=1), axis=0) >= limit
            much_third = tl.sum(tl.sum(above_third, axis=1), axis=0) >= limit
        else:
            much_first = count_first >= limit
            much_second = count_second >= limit
            much_third = count_third >= limit
        count_high = tl.where(much_third, count_high, count_third)
        count_high = tl.where(much_second, count_high, count_second)
        count_high = tl.where(much_first, count_high, count_first)
        high = tl.where(much_third, high, third)
        high = tl.where(much_second, high, second)
        high = tl.where(much_first, high, first)
        count_low = tl.where(much_first, count_first, count_low)
        count_low = tl.where(much_second, count_second, count_low)
        count_low = tl.where(much_third, count_third, count_low)
        low = tl.where(much_first, first, low)
        low = tl.where(much_second, second, low)
        low = tl.where(much_third, third, low)
    return (low + 1).to(tl.int32)


@triton.jit
def _solve_kernel(
    logits_ptr,  # [L, V] float32
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    temperature_ptr,  # [N] float32
    top_k_ptr,  # [N] int32
    top_p_ptr,  # [N] float32
    largest_ptr,  # [L, P] float32
    mass_ptr,  # [L, P] float32
    active_ptr,  # [L, P] int32, scratch
    cut_ptr,  # [L] int32, out: smallest key that is kept
    vocab_size,
    num_patches,
    PATCH: tl.constexpr,
    PATCHES: tl.constexpr,  # of a pass
    WIDTH: tl.constexpr,  # patches of a line, as a power of two
):
    line = tl.program_id(0).to(tl.int64)
    k, p = _read_limits(line, idx_mapping_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if k == 0:
        return
    line_ptr = logits_ptr + line * logits_stride
    active_ptr += line * num_patches
    patch = tl.arange(0, WIDTH)
    inside = patch < num_patches
    largest = tl.load(largest_ptr + line * num_patches + patch, mask=inside, other=float("-inf"))
    key = tl.where(inside, _key_of(largest), _KEY_OF_NAN)
    top, ceiling = tl.max(largest, axis=0), tl.max(key, axis=0)
    total = 0.0
    if k < vocab_size:
        floor = _find_floor(key, largest, largest, top, ceiling, k, False, PATCH)
    else:
        peak = _mass_of(largest, top)
        mass = peak * tl.load(mass_ptr + line * num_patches + patch, mask=inside, other=0.0)
        total = tl.sum(mass, axis=0)
        # More than the limit by what the order of a sum may change.
        enough = p * total * 1.00001
        floor = _find_floor(key, peak, mass, top, ceiling, enough, True, PATCH)
    reaches = key >= floor
    num_active = tl.sum(reaches.to(tl.int32), axis=0)
    place = tl.cumsum(reaches.to(tl.int32), axis=0) - 1
    tl.store(active_ptr + place, patch, mask=reaches)
    tl.debug_barrier()  # the program reads below what its other threads wrote
    cut = floor
    if k < vocab_size:
        cut = _find_cut(
            line_ptr,
            active_ptr,
            num_active,
            vocab_size,
            floor,
            ceiling,
            top,
            k,
            False,
            PATCH,
            PATCHES,
        )
        if p < 1.0:
            total = _sum_of_masses(
                line_ptr, active_ptr, num_active, vocab_size, cut, top, PATCH, PATCHES
            )
    if p < 1.0:
        cut = _find_cut(
            line_ptr,
            active_ptr,
            num_active,
            vocab_size,
            cut,
            ceiling,
            top,
            p * total,
            True,
            PATCH,
            PATCHES,
        )
    tl.store(cut_ptr + line, cut)


@triton.jit
def _write_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    temperature_ptr,  # [N] float32
    top_k_ptr,  # [N] int32
    top_p_ptr,  # [N] float32
    largest_ptr,  # [L, P] float32
    cut_ptr,  # [L] int32
    vocab_size,
    num_patches,
    PATCH: tl.constexpr,
    PATCHES: tl.constexpr,  # of a program
):
    line = tl.program_id(0).to(tl.int64)
    k, _ = _read_limits(line, idx_mapping_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab_size)
    if k == 0:
        return
    cut = tl.load(cut_ptr + line)
    patch = tl.program_id(1) * PATCHES + tl.arange(0, PATCHES)
    tokens = patch[:, None] * PATCH + tl.arange(0, PATCH)[None, :]
    inside = tokens < vocab_size
    largest = tl.load(
        largest_ptr + line * num_patches + patch, mask=patch < num_patches, other=float("-inf")
    )
    # A patch below the cut is written without being read.
    reaches = (_key_of(largest) >= cut)[:, None]
    ptrs = logits_ptr + line * logits_stride + tokens
    logits = tl.load(ptrs, mask=inside & reaches, other=float("-inf"))
    below = inside & (_key_of(logits) < cut)
    tl.store(ptrs, tl.full([PATCHES, PATCH], float("-inf"), tl.float32), mask=below)


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
    assert vocab_size < _MAX_VOCAB, f"{vocab_size} tokens"
    patch = max(_MIN_PATCH, triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_PATCHES)))
    num_patches = triton.cdiv(vocab_size, patch)
    by_patch = (num_lines, num_patches)
    largest = torch.empty(by_patch, dtype=torch.float32, device=logits.device)
    mass = torch.empty(by_patch, dtype=torch.float32, device=logits.device)
    active = torch.empty(by_patch, dtype=torch.int32, device=logits.device)
    cut = torch.empty(num_lines, dtype=torch.int32, device=logits.device)
    lines = (logits, logits.stride(0), idx_mapping, temperature, top_k, top_p)
    sizes = {"vocab_size": vocab_size, "num_patches": num_patches, "PATCH": patch, "num_warps": 8}
    width = triton.next_power_of_2(num_patches)
    block = min(_BLOCK_SIZE // patch, width)
    grid = (num_lines, triton.cdiv(num_patches, block))
    _scan_kernel[grid](*lines, largest, mass, **sizes, PATCHES=block)
    at_once = min(_SOLVED_AT_ONCE // patch, width)
    _solve_kernel[(num_lines,)](
        *lines, largest, mass, active, cut, **sizes, PATCHES=at_once, WIDTH=width
    )
    _write_kernel[grid](*lines, largest, cut, **sizes, PATCHES=block)


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
