"""The gate of an MLP: SiLU of one half of a packed layer's output times the other half.

Source: Shazeer 2020 (GLU variants), with SiLU.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of the compiler.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from runner.pdl import launch_options, let_next_begin, wait_for_predecessor

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(
    out_ptr,  # [T, N]
    packed_ptr,  # [T, 2 * N]: gate, then up
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    gate = tl.load(packed_ptr + token * 2 * N + n, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(packed_ptr + token * 2 * N + N + n, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * N + n, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(packed: Tensor) -> Tensor:
    """Gate in one launch.

    Args:
        packed: [T, 2 * N], contiguous: gate, then up.

    Returns:
        SiLU(gate) * up, [T, N].
    """
    if not use_triton(packed):
        return silu_mul_ref(packed)
    assert packed.is_contiguous(), f"strides {packed.stride()}"
    num_tokens, width = len(packed), packed.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=packed.dtype, device=packed.device)
    grid = (num_tokens, triton.cdiv(width, _BLOCK))
    _silu_mul_kernel[grid](out, packed, N=width, BLOCK=_BLOCK, **launch_options(packed))
    return out


def silu_mul_ref(packed: Tensor) -> Tensor:
    """Torch twin of `silu_mul`."""
    gate, up = packed.chunk(2, dim=1)
    return F.silu(gate).mul_(up)
