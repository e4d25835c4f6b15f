"""Divide logits by their row's temperature, into float32.

processed = logits / temperature    where the row's temperature is above 0
processed = logits                  in greedy rows and in padding
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton

_BLOCK_SIZE = 1024


@triton.jit
def _scale_logits_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    temperature_ptr,  # [N] float32
    scaled_ptr,  # [L, V] float32, out
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    temperature = tl.load(temperature_ptr + tl.maximum(row, 0))
    temperature = tl.where(row >= 0, temperature, 0.0)
    # Dividing by 1 changes no bit, whereas a copy of its own would be a second path to test.
    divisor = tl.where(temperature > 0, temperature, 1.0)
    tokens = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = tokens < vocab_size
    logits = tl.load(logits_ptr + line * logits_stride + tokens, mask=inside, other=0.0)
    # Rounded to nearest, as torch does: the plain division is off by up to 2 units in the last
    # place, and tokens that tie in one must tie in the other.
    scaled = tl.div_rn(logits.to(tl.float32), divisor)
    tl.store(scaled_ptr + line * vocab_size + tokens, scaled, mask=inside)


def scale_logits(logits: Tensor, idx_mapping: Tensor, temperature: Tensor) -> Tensor:
    """Return the logits divided by each line's temperature, [L, V] float32, in fresh memory.

    Args:
        logits: [L, V] any float dtype.
        idx_mapping: [L] int32, line -> row, -1 in padding.
        temperature: [N] float32; 0 = greedy, whose lines keep their raw logits.
    """
    if not use_triton(logits):
        return scale_logits_ref(logits, idx_mapping, temperature)
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    scaled = torch.empty(num_lines, vocab_size, dtype=torch.float32, device=logits.device)
    _scale_logits_kernel[(num_lines, triton.cdiv(vocab_size, _BLOCK_SIZE))](
        logits,
        logits.stride(0),
        idx_mapping,
        temperature,
        scaled,
        vocab_size,
        BLOCK_SIZE=_BLOCK_SIZE,
    )
    return scaled


def scale_logits_ref(logits: Tensor, idx_mapping: Tensor, temperature: Tensor) -> Tensor:
    """Torch twin of `scale_logits`."""
    line_temperature = temperature[idx_mapping.long().clamp(min=0)]
    scales = (idx_mapping >= 0) & (line_temperature > 0)
    scaled = logits.to(torch.float32, copy=True)
    return scaled.div_(torch.where(scales, line_temperature, 1.0)[:, None])
