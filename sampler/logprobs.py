"""Log-probabilities of sampled tokens, and of the most likely ones at their places in the text.

    logprob(v) = logits[v] - logsumexp(logits)
    rank(v)    = 1 + number of tokens with a strictly greater logit

The largest logits of a line are found among the logits themselves, and only they and the sampled
token are turned into log-probabilities: no tensor of the vocabulary's size is made.

A line is cut into blocks. One launch reads each block once: its part of the sum, how many of its
tokens beat the sampled one, and its best tokens in order. Another merges the blocks of a line. A
block is cut into groups in turn: once the best token of each group is known, the next best of the
block takes one look at a single group. Ties go to the lowest id; a NaN counts as -inf.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.async_output import NUM_ENTRIES
from runner.dispatch import use_triton
from specdec.types import MAX_LOGPROBS

GROUP_SIZE = 64  # tokens
NUM_GROUPS = 64  # of a block
BLOCK_SIZE = NUM_GROUPS * GROUP_SIZE
_MAX_PROGRAMS = 4096  # aimed at: where no row wants anything, starting them is all the cost
_NO_KEY = tl.constexpr(-9_200_000_000_000_000_000)  # below the key of any token, -inf included


@dataclass(frozen=True)
class LogprobLines:
    """Which lines of the logits are looked at, and for which tokens.

    Line j of a place is the one that its token j was drawn from.
    """

    tokens: Tensor  # [R, W] int64
    num_tokens: Tensor  # [R] int32: leading tokens of each place that count
    cu_num_logits: Tensor  # [R + 1] int32: lines before each place
    idx_mapping: Tensor  # [R] int32: place -> row of `num_logprobs`, -1 in padding
    num_logprobs: Tensor  # [N] int32: most likely tokens that a row asks for, -1 = nothing at all


@triton.jit
def order_key_device(logits, tokens, inside):
    """Return int64 keys that rise with the logit and, among equals, fall with the token's id."""
    logits = tl.where(logits == logits, logits, float("-inf"))
    logits = tl.where(logits == 0, 0.0, logits)  # -0.0 has other bits and is no smaller
    bits = logits.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)
    return tl.where(inside, keys, _NO_KEY)


@triton.jit
def key_token_device(key):
    """Return the token id of a key."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def key_logit_device(key):
    """Return the logit of a key."""
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _block_logprobs_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    tokens_ptr,  # [R, W] int64
    tokens_stride,
    num_tokens_ptr,  # [R] int32
    cu_num_logits_ptr,  # [R + 1] int32
    idx_mapping_ptr,  # [R] int32
    num_logprobs_ptr,  # [N] int32
    block_keys_ptr,  # [R, W, num_blocks, MAX] int64, out
    block_sum_ptr,  # [R, W, num_blocks, 2] float32, out: largest logit, sum of exp(logit - it)
    block_greater_ptr,  # [R, W, num_blocks] int32, out
    num_blocks,
    vocab_size,
    width,
    MAX: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64)
    place = cell // width
    j = cell % width
    if j >= tl.load(num_tokens_ptr + place):
        return
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row < 0:
        return
    num_best = tl.load(num_logprobs_ptr + row)
    if num_best < 0:
        return
    num_best = tl.minimum(num_best, MAX)
    line = (tl.load(cu_num_logits_ptr + place) + j).to(tl.int64)
    logits_ptr += line * logits_stride
    sampled = tl.load(tokens_ptr + place * tokens_stride + j)
    sampled_logit = tl.load(logits_ptr + sampled).to(tl.float32)
    sampled_logit = tl.where(sampled_logit == sampled_logit, sampled_logit, float("-inf"))
    groups = tl.arange(0, NUM_GROUPS)
    members = tl.arange(0, GROUP_SIZE)
    for block in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
        first = block * (NUM_GROUPS * GROUP_SIZE)
        tokens = first + groups[:, None] * GROUP_SIZE + members[None, :]
        inside = tokens < vocab_size
        logits = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        keys = order_key_device(logits, tokens, inside)
        group_best = tl.max(keys, axis=1)
        best = tl.max(group_best, axis=0)
        largest = key_logit_device(best)
        shift = tl.where(largest > float("-inf"), largest, 0.0)
        weights = tl.where(logits == logits, tl.exp(logits - shift), 0.0)
        greater = tl.where(logits > sampled_logit, 1, 0)
        out = cell * num_blocks + block
        tl.store(block_sum_ptr + 2 * out, largest)
        tl.store(block_sum_ptr + 2 * out + 1, tl.sum(tl.sum(weights, axis=1), axis=0))
        tl.store(block_greater_ptr + out, tl.sum(tl.sum(greater, axis=1), axis=0))
        for i in range(0, num_best):
            best = tl.max(group_best, axis=0)
            tl.store(block_keys_ptr + out * MAX + i, best)
            # A block of fewer tokens than are asked for runs dry: then nothing is loaded.
            group = (key_token_device(best) - first) // GROUP_SIZE
            group = tl.where(best > _NO_KEY, group, 0)
            tokens_1d = first + group * GROUP_SIZE + members
            inside_1d = tokens_1d < vocab_size
            again = tl.load(logits_ptr + tokens_1d, mask=inside_1d, other=float("-inf"))
            left = order_key_device(again.to(tl.float32), tokens_1d, inside_1d)
            next_best = tl.max(tl.where(left < best, left, _NO_KEY), axis=0)
            group_best = tl.where(groups == group, next_best, group_best)


@triton.jit(do_not_specialize=["depth", "ring_stride", "width"])
def _merge_logprobs_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    tokens_ptr,  # [R, W] int64
    tokens_stride,
    num_tokens_ptr,  # [R] int32
    cu_num_logits_ptr,  # [R + 1] int32
    idx_mapping_ptr,  # [R] int32
    num_logprobs_ptr,  # [N] int32
    block_keys_ptr,  # [R, W, num_blocks, MAX] int64
    block_sum_ptr,  # [R, W, num_blocks, 2] float32
    block_greater_ptr,  # [R, W, num_blocks] int32
    step_ptr,  # [1] int32
    ring_ptr,  # [depth, places, width, 3, 1 + MAX] int32, pinned, out
    ring_stride,
    place_stride,
    depth,
    num_blocks,
    width,
    MAX: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    PADDED_MAX: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64)
    place = cell // width
    j = cell % width
    if j >= tl.load(num_tokens_ptr + place):
        return
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row < 0:
        return
    num_best = tl.load(num_logprobs_ptr + row)
    if num_best < 0:
        return
    num_best = tl.minimum(num_best, MAX)
    blocks = tl.arange(0, PADDED_BLOCKS)
    real = blocks < num_blocks
    first = cell * num_blocks
    sums_ptr = block_sum_ptr + 2 * (first + blocks)
    largest = tl.load(sums_ptr, mask=real, other=float("-inf"))
    sums = tl.load(sums_ptr + 1, mask=real, other=0.0)
    greater = tl.load(block_greater_ptr + first + blocks, mask=real, other=0)
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    log_sum = tl.log(tl.sum(sums * tl.exp(largest - shift), axis=0)) + shift

    line = (tl.load(cu_num_logits_ptr + place) + j).to(tl.int64)
    sampled = tl.load(tokens_ptr + place * tokens_stride + j)
    sampled_logit = tl.load(logits_ptr + line * logits_stride + sampled).to(tl.float32)
    sampled_logit = tl.where(sampled_logit == sampled_logit, sampled_logit, float("-inf"))
    # Entry 0 is the sampled token, the best ones follow.
    entries = tl.arange(0, PADDED_MAX)
    ids = tl.where(entries == 0, sampled.to(tl.int32), -1)
    chosen = tl.where(entries == 0, sampled_logit, float("-inf"))
    ranks = tl.where(entries == 0, tl.sum(greater, axis=0) + 1, 0)
    ways = tl.arange(0, PADDED_MAX)
    keys = tl.load(
        block_keys_ptr + (first + blocks[:, None]) * MAX + ways[None, :],
        mask=real[:, None] & (ways[None, :] < num_best),
        other=_NO_KEY,
    )
    rank = num_best * 0 + 1
    last_logit = top
    for i in range(0, num_best):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        keys = tl.where(keys == best, _NO_KEY, keys)
        # A vocabulary smaller than what is asked for leaves entries of id -1.
        entry = tl.where(best > _NO_KEY, i + 1, -1)
        logit = key_logit_device(best)
        rank = tl.where(logit < last_logit, i + 1, rank)
        last_logit = logit
        ids = tl.where(entries == entry, key_token_device(best), ids)
        chosen = tl.where(entries == entry, logit, chosen)
        ranks = tl.where(entries == entry, rank, ranks)
    logprobs = tl.where(chosen > float("-inf"), chosen - log_sum, float("-inf"))
    step = tl.load(step_ptr)
    out = ring_ptr + (step % depth).to(tl.int64) * ring_stride + place * place_stride
    out += j * (3 * (MAX + 1)) + entries
    kept = entries <= MAX
    tl.store(out, ids, mask=kept)
    tl.store(out + (MAX + 1), logprobs.to(tl.int32, bitcast=True), mask=kept)
    tl.store(out + 2 * (MAX + 1), ranks, mask=kept)


def topk_logprobs(logits: Tensor, lines: LogprobLines, step: Tensor, ring: Tensor) -> None:
    """Write the log-probabilities that rows ask for to a step's place of a ring.

    Args:
        logits: [L, V] float.
        lines: which of them, and for which tokens.
        step: [1] int32, names the place of the ring.
        ring: [depth, max_num_reqs, max_width, 3, NUM_ENTRIES] int32, pinned on a GPU, out: ids, the
            bits of float32 log-probabilities, and ranks, of the token itself and then of the most
            likely ones (id -1 behind those that were asked for). Cells of rows that ask for
            nothing, and behind `num_tokens`, are left as they are.
    """
    if not use_triton(logits):
        topk_logprobs_ref(logits, lines, step, ring)
        return
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    num_reqs, width = lines.tokens.shape
    vocab_size, num_cells = logits.shape[1], num_reqs * width
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)

    def empty(dtype: torch.dtype, *last: int) -> Tensor:
        return torch.empty(num_cells, num_blocks, *last, dtype=dtype, device=logits.device)

    block_keys, block_sum = empty(torch.int64, MAX_LOGPROBS), empty(torch.float32, 2)
    block_greater = empty(torch.int32)
    # What a block gives does not depend on how many of them a program takes.
    num_programs = min(num_blocks, triton.cdiv(_MAX_PROGRAMS, num_cells))
    shared = (
        logits,
        logits.stride(0),
        lines.tokens,
        lines.tokens.stride(0),
        lines.num_tokens,
        lines.cu_num_logits,
        lines.idx_mapping,
        lines.num_logprobs,
        block_keys,
        block_sum,
        block_greater,
    )
    _block_logprobs_kernel[(num_cells, num_programs)](
        *shared,
        num_blocks,
        vocab_size,
        width,
        MAX=MAX_LOGPROBS,
        NUM_GROUPS=NUM_GROUPS,
        GROUP_SIZE=GROUP_SIZE,
        num_warps=8,
    )
    _merge_logprobs_kernel[(num_cells,)](
        *shared,
        step,
        ring,
        ring.stride(0),
        ring.stride(1),
        ring.shape[0],
        num_blocks,
        width,
        MAX=MAX_LOGPROBS,
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
        PADDED_MAX=triton.next_power_of_2(NUM_ENTRIES),
    )


def topk_logprobs_ref(logits: Tensor, lines: LogprobLines, step: Tensor, ring: Tensor) -> None:
    """Torch twin of `topk_logprobs`."""
    out = ring[int(step[0]) % len(ring)]
    rows = lines.idx_mapping.long()
    wanted = torch.where(rows >= 0, lines.num_logprobs[rows.clamp(min=0)], -1).tolist()
    starts, counts = lines.cu_num_logits.tolist(), lines.num_tokens.tolist()
    nothing = torch.full((), float("-inf")).view(torch.int32)
    for place, num_best in enumerate(wanted):
        if num_best < 0:
            continue
        for j in range(counts[place]):
            scores = logits[starts[place] + j].float()
            scores = torch.where(scores.isnan(), float("-inf"), scores)
            sampled = lines.tokens[place, j]
            best = _best_ids(scores, min(num_best, MAX_LOGPROBS, len(scores)))
            chosen = scores[torch.cat([sampled[None], best])]
            logprobs = chosen - torch.logsumexp(scores, 0)
            logprobs = torch.where(chosen > float("-inf"), logprobs, float("-inf"))
            # Whatever beats one of the best is among them.
            rivals = (scores[best] > scores[best][:, None]).sum(1)
            n, record = len(chosen), out[place, j]
            record[0], record[1], record[2] = -1, nothing, 0
            record[0, 0], record[0, 1:n] = sampled.int(), best.int()
            record[1, :n] = logprobs.view(torch.int32)
            record[2, 0], record[2, 1:n] = (scores > chosen[0]).sum() + 1, rivals + 1


def _best_ids(scores: Tensor, num_best: int) -> Tensor:
    """Return the ids of the largest scores, in order, ties by the lowest id."""
    if num_best == 0:
        return torch.empty(0, dtype=torch.int64)
    least = scores.topk(num_best).values[-1]
    (candidates,) = (scores >= least).nonzero(as_tuple=True)
    order = scores[candidates].argsort(descending=True, stable=True)
    return candidates[order[:num_best]]
