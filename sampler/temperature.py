"""Divide logits by their row's temperature, into float32.

processed = logits / temperature    where the row's temperature is above 0
processed = logits                  in greedy rows and in padding

Rows whose logits are still to be changed before they are divided may be left out at first: they are
copied as they are, and divided in place once that is done. So other lines are read only once.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton

_BLOCK_SIZE = 1024
_DEFERRED_BLOCK_SIZE = 4096  # most lines are left at once: the fewer programs, the better


@triton.jit
def _scale_logits_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    temperature_ptr,  # [N] float32
    deferred_ptr,  # [N] int32, read where DEFERS
    scaled_ptr,  # [L, V] float32, out
    vocab_size,
    DEFERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    temperature = tl.load(temperature_ptr + tl.maximum(row, 0))
    temperature = tl.where(row >= 0, temperature, 0.0)
    if DEFERS:
        is_deferred = tl.load(deferred_ptr + tl.maximum(row, 0)) != 0
        temperature = tl.where(is_deferred, 0.0, temperature)
    # Dividing by 1 changes no bit, whereas a copy of its own would be a second path to test.
    divisor = tl.where(temperature > 0, temperature, 1.0)
    tokens = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = tokens < vocab_size
    logits = tl.load(logits_ptr + line * logits_stride + tokens, mask=inside, other=0.0)
    # Rounded to nearest, as torch does: the plain division is off by up to 2 units in the last
    # place, and tokens that tie in one must tie in the other.
    scaled = tl.div_rn(logits.to(tl.float32), divisor)
    tl.store(scaled_ptr + line * vocab_size + tokens, scaled, mask=inside)


@triton.jit
def _scale_deferred_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    temperature_ptr,  # [N] float32
    deferred_ptr,  # [N] int32
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if row < 0:
        return
    if tl.load(deferred_ptr + row) == 0:
        return
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        return
    tokens = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = tokens < vocab_size
    pointers = logits_ptr + line * logits_stride + tokens
    logits = tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, tl.div_rn(logits, temperature), mask=inside)


def scale_logits(
    logits: Tensor, idx_mapping: Tensor, temperature: Tensor, deferred: Tensor | None = None
) -> Tensor:
    """Return the logits divided by each line's temperature, [L, V] float32, in fresh memory.

    Args:
        logits: [L, V] any float dtype.
        idx_mapping: [L] int32, line -> row, -1 in padding.
        temperature: [N] float32; 0 = greedy, whose lines keep their raw logits.
        deferred: [N] int32, rows with another number than 0 keep them, too, for `scale_deferred`;
            None = no row.
    """
    if not use_triton(logits):
        return scale_logits_ref(logits, idx_mapping, temperature, deferred)
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    scaled = torch.empty(num_lines, vocab_size, dtype=torch.float32, device=logits.device)
    _scale_logits_kernel[(num_lines, triton.cdiv(vocab_size, _BLOCK_SIZE))](
        logits,
        logits.stride(0),
        idx_mapping,
        temperature,
        temperature if deferred is None else deferred,
        scaled,
        vocab_size,
        DEFERS=deferred is not None,
        BLOCK_SIZE=_BLOCK_SIZE,
    )
    return scaled


def scale_deferred(
    logits: Tensor, idx_mapping: Tensor, temperature: Tensor, deferred: Tensor
) -> None:
    """Divide what `scale_logits` left out by each line's temperature, in place.

    Args:
        logits: [L, V] float32.
        idx_mapping: [L] int32, line -> row, -1 in padding.
        temperature: [N] float32; 0 = greedy.
        deferred: [N] int32, 0 = already divided.
    """
    if not use_triton(logits):
        scale_deferred_ref(logits, idx_mapping, temperature, deferred)
        return
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    block_size = min(_DEFERRED_BLOCK_SIZE, triton.next_power_of_2(vocab_size))
    _scale_deferred_kernel[(num_lines, triton.cdiv(vocab_size, block_size))](
        logits,
        logits.stride(0),
        idx_mapping,
        temperature,
        deferred,
        vocab_size,
        BLOCK_SIZE=block_size,
        num_warps=8,
    )


def scale_logits_ref(
    logits: Tensor, idx_mapping: Tensor, temperature: Tensor, deferred: Tensor | None = None
) -> Tensor:
    """Torch twin of `scale_logits`."""
    rows = idx_mapping.long().clamp(min=0)
    scales = (idx_mapping >= 0) & (temperature[rows] > 0)
    if deferred is not None:
        scales &= deferred[rows] == 0
    scaled = logits.to(torch.float32, copy=True)
    return scaled.div_(torch.where(scales, temperature[rows], 1.0)[:, None])


def scale_deferred_ref(
    logits: Tensor, idx_mapping: Tensor, temperature: Tensor, deferred: Tensor
) -> None:
    """Torch twin of `scale_deferred`."""
    rows = idx_mapping.long().clamp(min=0)
    wanted = (idx_mapping >= 0) & (deferred[rows] != 0) & (temperature[rows] > 0)
    for line in wanted.nonzero(as_tuple=True)[0].tolist():
        logits[line] /= temperature[rows[line]]
