"""A value and where it stands as one integer, so that one maximum over ranks finds both.

The upper half of a key has the bits of the value, in the order of the values; the lower half has
the index, in reverse, so that among equal values the lowest index is the largest key.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of the compiler.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from runner.pdl import launch_options, let_next_begin, wait_for_predecessor

_LOW_BITS = 2**31 - 1
_BLOCK = 256


@triton.jit(do_not_specialize=["first", "num_tokens"])
def _pack_top_kernel(
    keys_ptr,  # [T] int64, out
    values_ptr,  # [T] float32
    index_ptr,  # [T] int64
    first,
    num_tokens,
    LOW_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait_for_predecessor(PDL)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    value = tl.load(values_ptr + token, mask=mask, other=0.0)
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 is 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & LOW_BITS)
    ordered = tl.where(value != value, LOW_BITS, ordered)  # NaN of either sign
    index = tl.load(index_ptr + token, mask=mask, other=0) + first
    key = (ordered.to(tl.int64) << 32) | (LOW_BITS - index)
    tl.store(keys_ptr + token, key, mask=mask)


def pack_top(values: Tensor, index: Tensor, first: int = 0) -> Tensor:
    """Make keys in one launch.

    Args:
        values: [T] float32, contiguous; NaN is above all.
        index: [T] int64, contiguous.
        first: added to the index; the sum is below 2**31.

    Returns:
        [T] int64.
    """
    if not use_triton(values):
        return pack_top_ref(values, index, first)
    assert values.is_contiguous(), f"strides {values.stride()}"
    assert index.is_contiguous(), f"strides {index.stride()}"
    keys = torch.empty_like(index)
    _pack_top_kernel[(triton.cdiv(len(values), _BLOCK),)](
        keys,
        values,
        index,
        first,
        len(values),
        LOW_BITS=_LOW_BITS,
        BLOCK=_BLOCK,
        **launch_options(values),
    )
    return keys


def pack_top_ref(values: Tensor, index: Tensor, first: int = 0) -> Tensor:
    """Torch twin of `pack_top`."""
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & _LOW_BITS)
    ordered = torch.where(values.isnan(), _LOW_BITS, ordered)  # of either sign
    return (ordered.long() << 32) | (_LOW_BITS - first - index)


def unpack_index(keys: Tensor) -> Tensor:
    """Return the indices [T] int64 of keys [T] int64."""
    return _LOW_BITS - (keys & _LOW_BITS)
