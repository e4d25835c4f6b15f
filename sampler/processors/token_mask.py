"""Set tokens to -inf by a bitmask of each row: bit v % 32 of word v // 32 keeps token v."""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton

_BLOCK_SIZE = 8192


def num_mask_words(vocab_size: int) -> int:
    """Return the int32 words of a row's mask."""
    return -(-vocab_size // 32)


def pack_token_ids(token_ids: list[int], vocab_size: int) -> np.ndarray:
    """Return the mask that keeps some tokens, [ceil(V / 32)] int32."""
    bits = np.zeros(32 * num_mask_words(vocab_size), dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


@triton.jit
def has_bit_device(words_ptr, tokens, inside):
    """Return bit `tokens` of a row's mask, 0 or 1; 0 outside."""
    words = tl.load(words_ptr + tokens // 32, mask=inside, other=0)
    return (words >> (tokens % 32)) & 1


def has_bits_ref(words: Tensor, vocab_size: int) -> Tensor:
    """Torch twin of `has_bit_device` for whole masks: [.., ceil(V / 32)] -> [.., V] bool."""
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


@triton.jit
def _token_mask_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    is_masked_ptr,  # [N] int32
    mask_ptr,  # [N, ceil(V / 32)] int32
    mask_stride,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if row < 0:
        return
    if tl.load(is_masked_ptr + row) == 0:
        return
    tokens = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = tokens < vocab_size
    kept = has_bit_device(mask_ptr + row * mask_stride, tokens, inside)
    banned = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    tl.store(logits_ptr + line * logits_stride + tokens, banned, mask=inside & (kept == 0))


def apply_token_mask(logits: Tensor, idx_mapping: Tensor, is_masked: Tensor, mask: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place.

    Args:
        logits: [L, V] float32.
        idx_mapping: [L] int32, line -> row, -1 in padding.
        is_masked: [N] int32; lines of rows with 0 stay as they are.
        mask: [N, ceil(V / 32)] int32.
    """
    if not use_triton(logits):
        apply_token_mask_ref(logits, idx_mapping, is_masked, mask)
        return
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    block_size = min(_BLOCK_SIZE, triton.next_power_of_2(vocab_size))
    _token_mask_kernel[(num_lines, triton.cdiv(vocab_size, block_size))](
        logits,
        logits.stride(0),
        idx_mapping,
        is_masked,
        mask,
        mask.stride(0),
        vocab_size,
        BLOCK_SIZE=block_size,
        num_warps=8,
    )


def apply_token_mask_ref(
    logits: Tensor, idx_mapping: Tensor, is_masked: Tensor, mask: Tensor
) -> None:
    """Torch twin of `apply_token_mask`."""
    rows = idx_mapping.long()
    (lines,) = ((rows >= 0) & (is_masked[rows.clamp(min=0)] != 0)).nonzero(as_tuple=True)
    for line in lines.tolist():
        kept = has_bits_ref(mask[rows[line]], logits.shape[1])
        logits[line].masked_fill_(~kept, float("-inf"))
