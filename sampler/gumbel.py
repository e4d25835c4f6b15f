"""Draw one token a logits line by Gumbel-max, without a softmax.

    token = argmax_v (logits[v] + gumbel(seed, position, v, stream))

which has the law softmax(logits) (Gumbel 1954). Rows of temperature 0 and padding take the argmax.
Logits come processed: divided by the temperature and masked with -inf. Ties go to the lowest id, a
NaN counts as -inf, and every id lies inside the vocabulary.

A line is cut into blocks: one launch finds the best token of each block, another the best block.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from sampler.noise import (
    GUMBEL_MAX,
    noise_gumbel,
    noise_gumbel_device,
    noise_key,
    noise_key_device,
)

BLOCK_SIZE = 1024  # tokens a program


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
def _best_tokens_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    positions_ptr,  # [L] int64
    temperature_ptr,  # [N] float32
    seeds_ptr,  # [N] int64
    block_max_ptr,  # [L, num_blocks] float32, out
    block_arg_ptr,  # [L, num_blocks] int32, out
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
    temperature = tl.load(temperature_ptr + safe_row)
    if tl.where(row >= 0, temperature, 0.0) > 0:
        a, b = noise_key_device(
            tl.load(seeds_ptr + safe_row), tl.load(positions_ptr + line), STREAM
        )
        scores = scores + noise_gumbel_device(a, b, tokens)
    best, token = best_token_device(scores, tokens, inside, vocab_size)
    tl.store(block_max_ptr + line * num_blocks + block, best)
    tl.store(block_arg_ptr + line * num_blocks + block, token)


@triton.jit
def _best_blocks_kernel(
    block_max_ptr,  # [L, num_blocks] float32
    block_arg_ptr,  # [L, num_blocks] int32
    tokens_ptr,  # [L] int64, out
    num_blocks,
    PADDED_BLOCKS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    first = line * num_blocks
    _, token = best_block_device(
        block_max_ptr + first, block_arg_ptr + first, num_blocks, PADDED_BLOCKS
    )
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
    block_max = torch.empty(num_lines, num_blocks, dtype=torch.float32, device=logits.device)
    block_arg = torch.empty(num_lines, num_blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_lines, dtype=torch.int64, device=logits.device)
    _best_tokens_kernel[(num_lines, num_blocks)](
        logits,
        logits.stride(0),
        idx_mapping,
        positions,
        temperature,
        seeds,
        block_max,
        block_arg,
        num_blocks,
        vocab_size,
        STREAM=stream,
        BLOCK_SIZE=BLOCK_SIZE,
    )
    padded = triton.next_power_of_2(num_blocks)
    _best_blocks_kernel[(num_lines,)](
        block_max, block_arg, tokens, num_blocks, PADDED_BLOCKS=padded
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
    tokens = logits.argmax(1)
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
