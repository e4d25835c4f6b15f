"""Draw one token a logits line by Gumbel-max, without a softmax.

    token = argmax_v (logits[v] + gumbel(seed, position, v, stream))

which has the law softmax(logits) (Gumbel 1954). Rows of temperature 0 and padding take the argmax.
Logits come processed: divided by the temperature and masked with -inf. Ties go to the lowest id, a
NaN counts as -inf, and every id lies inside the vocabulary.

A line is cut into blocks and searched by branch and bound. One launch bounds the best score that a
block can reach. As -log(1 - u) >= u, and as the bits of a float, read as an integer, are its
logarithm to within 0.0861 (log2(1 + m) >= m for m in [0, 1]), the noise of a token is at most

    gumbel <= -log(u) <= ln 2 * (127 - bits(u) / 2^23)

which takes no logarithm where the noise takes two. Another launch scores whole blocks exactly, from
the highest bound down, until no block left can hold the best token: mostly one block a line.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from sampler.noise import (
    GUMBEL_MAX,
    noise_bits_device,
    noise_gumbel,
    noise_gumbel_device,
    noise_key,
    noise_key_device,
)

BLOCK_SIZE = 2048  # tokens a program
# ln 2 / 2^23: turns the bits of a float into its natural logarithm, nearly.
LOG_OF_BITS = tl.constexpr(8.262958e-08)
# Noise is -log(h / 2^32) for its 32 bits h, and is rounded, hence the margin.
NOISE_BOUND = tl.constexpr((127 + 32) * 0.6931471805599453 + 1e-3)
# Sums of scores and noise are rounded, too: as a share of a large score, that is more.
ROUNDING = tl.constexpr(5e-7)


@triton.jit
def best_token_device(scores, tokens, inside, vocab_size):
    """Return the best score of a block, and its lowest token id."""
    scores = tl.where(inside & (scores == scores), scores, float("-inf"))
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(inside & (scores == best), tokens, vocab_size - 1), axis=0)


@triton.jit
def best_block_device(max_ptr, arg_ptr, num_blocks, PADDED_BLOCKS: tl.constexpr):
    """Return the best score over the blocks of a line, and its lowest token id."""
    blocks = tl.arange(0, PADDED_BLOCKS)
    scores = tl.load(max_ptr + blocks, mask=blocks < num_blocks, other=float("-inf"))
    best = tl.max(scores, axis=0)
    # The blocks are in the order of the ids.
    block = tl.min(tl.where(scores == best, blocks, num_blocks - 1), axis=0)
    return best, tl.load(arg_ptr + tl.minimum(block, num_blocks - 1))


@triton.jit
def score_bounds_device(scores, a, b, tokens):
    """Return what `scores + noise_gumbel_device(a, b, tokens)` cannot exceed, short of a constant.

    `add_noise_bound_device` adds that, to the largest of a block.
    """
    bits = noise_bits_device(a, b, tokens).to(tl.float32).to(tl.int32, bitcast=True)
    return scores - bits.to(tl.float32) * LOG_OF_BITS


@triton.jit
def add_noise_bound_device(largest):
    """Return the bound of a block from the largest of its `score_bounds_device`."""
    bound = largest + NOISE_BOUND
    return tl.where(bound > float("-inf"), bound + tl.abs(bound) * ROUNDING, bound)


@triton.jit
def _score_bounds_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    positions_ptr,  # [L] int64
    temperature_ptr,  # [N] float32
    seeds_ptr,  # [N] int64
    bounds_ptr,  # [L, num_blocks] float32, out
    num_blocks,
    vocab_size,
    STREAM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    safe_row = tl.maximum(row, 0)
    tokens = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = tokens < vocab_size
    pointers = logits_ptr + line * logits_stride + tokens
    scores = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    temperature = tl.load(temperature_ptr + safe_row)
    if tl.where(row >= 0, temperature, 0.0) > 0:
        a, b = noise_key_device(
            tl.load(seeds_ptr + safe_row), tl.load(positions_ptr + line), STREAM
        )
        bound = add_noise_bound_device(tl.max(score_bounds_device(scores, a, b, tokens), axis=0))
    else:
        bound = tl.max(scores, axis=0)
    tl.store(bounds_ptr + line * num_blocks + block, bound)


@triton.jit
def next_block_device(bounds, blocks, num_blocks, best):
    """Return the block to search next, -1 where none can hold more than `best`."""
    top = tl.max(bounds, axis=0)
    block = tl.min(tl.where(bounds == top, blocks, num_blocks - 1), axis=0)
    # A bound may round down to a score: a block that can tie is searched for a lower id.
    return tl.where((top >= best) & (top > float("-inf")), block, -1)


@triton.jit
def better_token_device(best, token, other_best, other_token):
    """Return the better of two scores, and its token; ties go to the lowest id."""
    lower = (other_best == best) & (other_token < token)
    wins = (other_best > best) | lower
    return tl.where(wins, other_best, best), tl.where(wins, other_token, token)


@triton.jit
def _best_tokens_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    positions_ptr,  # [L] int64
    temperature_ptr,  # [N] float32
    seeds_ptr,  # [N] int64
    bounds_ptr,  # [L, num_blocks] float32
    tokens_ptr,  # [L] int64, out
    num_blocks,
    vocab_size,
    STREAM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, PADDED_BLOCKS)
    bounds_ptr += line * num_blocks
    bounds = tl.load(bounds_ptr + blocks, mask=blocks < num_blocks, other=float("-inf"))
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    safe_row = tl.maximum(row, 0)
    temperature = tl.where(row >= 0, tl.load(temperature_ptr + safe_row), 0.0)
    a, b = noise_key_device(tl.load(seeds_ptr + safe_row), tl.load(positions_ptr + line), STREAM)
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    block = next_block_device(bounds, blocks, num_blocks, best)
    while block >= 0:
        tokens = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        inside = tokens < vocab_size
        pointers = logits_ptr + line * logits_stride + tokens
        scores = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
        if temperature > 0:
            scores += noise_gumbel_device(a, b, tokens)
        block_best, block_token = best_token_device(scores, tokens, inside, vocab_size)
        best, token = better_token_device(best, token, block_best, block_token)
        bounds = tl.where(blocks == block, float("-inf"), bounds)
        block = next_block_device(bounds, blocks, num_blocks, best)
        # Without noise a bound is a score, and blocks that tie come in the order of the ids.
        block = tl.where((temperature <= 0) & (best > float("-inf")), -1, block)
    tl.store(tokens_ptr + line, token.to(tl.int64))


def gumbel_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    stream: int,
) -> Tensor:
    """Draw a token for each line; ties go to the lowest id.

    Args:
        logits: [L, V] float, processed.
        idx_mapping: [L] int32, line -> row of `temperature` and `seeds`, -1 in padding.
        positions: [L] int64, place in the text of the token that is drawn.
        temperature: [N] float32; 0 takes the argmax.
        seeds: [N] int64.
        stream: noise stream, see `sampler.noise`.

    Returns:
        tokens [L] int64 (a token of padding lines means nothing).
    """
    if not use_triton(logits):
        return gumbel_sample_ref(logits, idx_mapping, positions, temperature, seeds, stream)
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    bounds = torch.empty(num_lines, num_blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_lines, dtype=torch.int64, device=logits.device)
    shared = (logits, logits.stride(0), idx_mapping, positions, temperature, seeds, bounds)
    _score_bounds_kernel[(num_lines, num_blocks)](
        *shared,
        num_blocks,
        vocab_size,
        STREAM=stream,
        BLOCK_SIZE=BLOCK_SIZE,
    )
    _best_tokens_kernel[(num_lines,)](
        *shared,
        tokens,
        num_blocks,
        vocab_size,
        STREAM=stream,
        BLOCK_SIZE=BLOCK_SIZE,
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=8,  # few programs, each of which scores one block as fast as it can
    )
    return tokens


def gumbel_sample_ref(
    logits: Tensor,
    idx_mapping: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    stream: int,
) -> Tensor:
    """Torch twin of `gumbel_sample`, which hashes only tokens that can still win.

    Noise is bounded by GUMBEL_MAX, so a token is out once its logit plus that bound is below the
    score of the likeliest token: this prunes exactly.
    """
    tokens = logits.float().argmax(1)  # bfloat16's own argmax takes four times as long
    likeliest = logits.gather(1, tokens[:, None]).squeeze(1)
    if bool(likeliest.isnan().any()):  # an argmax takes a NaN for the largest
        logits = logits.masked_fill(logits.isnan(), float("-inf"))
        tokens = logits.argmax(1)
        likeliest = logits.gather(1, tokens[:, None]).squeeze(1)
    rows = idx_mapping.long().clamp(min=0)
    noisy = (temperature[rows] > 0) & (idx_mapping >= 0)
    noisy_lines = noisy.nonzero(as_tuple=True)[0].tolist()
    if not noisy_lines:
        return tokens
    first, second = noise_key(seeds[rows], positions, stream)
    reached = likeliest + noise_gumbel((first, second), tokens.to(torch.int32))
    for line in noisy_lines:
        scores = logits[line]
        (candidates,) = (scores >= reached[line] - GUMBEL_MAX).nonzero(as_tuple=True)
        key = (first[line], second[line])
        noise = noise_gumbel(key, candidates.to(torch.int32))
        tokens[line] = candidates[(scores[candidates] + noise).argmax()]
    return tokens
