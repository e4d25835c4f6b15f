"""Scatter a step's per-place values to state rows, with padding and without a host read."""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton

_MAX_BLOCK_SIZE = 1024


@triton.jit
def _scatter_rows_kernel(
    table_ptr,  # [N, A, B] of any strides, out
    table_stride,
    table_stride_a,
    table_stride_b,
    idx_mapping_ptr,  # [R] int32, -1 in padding
    values_ptr,  # [R, A, B] of any strides
    values_stride,
    values_stride_a,
    values_stride_b,
    num_elements,  # A * B
    num_columns,  # B
    BLOCK_SIZE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row < 0:
        return
    element = tl.program_id(1).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = element < num_elements
    a, b = element // num_columns, element % num_columns
    source = values_ptr + place * values_stride + a * values_stride_a + b * values_stride_b
    target = table_ptr + row * table_stride + a * table_stride_a + b * table_stride_b
    tl.store(target, tl.load(source, mask=inside, other=0), mask=inside)


def scatter_rows(table: Tensor, idx_mapping: Tensor, values: Tensor) -> None:
    """Write `values[place]` to `table[idx_mapping[place]]` for every real place.

    One launch for rows of up to two dimensions, else one for each element of the first of them.

    Args:
        table: [N, ...], in/out; a view of any strides.
        idx_mapping: [R] int32, -1 in padding, where nothing is written; real places come first and
            name different rows.
        values: [R, ...], dtype of `table`; what follows R may be broadcast.
    """
    assert values.dtype == table.dtype, (values.dtype, table.dtype)
    if not use_triton(table):
        scatter_rows_ref(table, idx_mapping, values)
        return
    values = values.expand(len(idx_mapping), *table.shape[1:])
    if values.numel() == 0:
        return
    if table.dim() > 3:  # the kernel strides over three dimensions
        for i in range(table.shape[1]):
            scatter_rows(table[:, i], idx_mapping, values[:, i])
        return
    while table.dim() < 3:
        table, values = table.unsqueeze(1), values.unsqueeze(1)
    num_elements = table.shape[1] * table.shape[2]
    block_size = min(triton.next_power_of_2(num_elements), _MAX_BLOCK_SIZE)
    _scatter_rows_kernel[(len(idx_mapping), triton.cdiv(num_elements, block_size))](
        table,
        *table.stride(),
        idx_mapping,
        values,
        *values.stride(),
        num_elements,
        table.shape[2],
        BLOCK_SIZE=block_size,
    )


def scatter_rows_ref(table: Tensor, idx_mapping: Tensor, values: Tensor) -> None:
    """Torch twin of `scatter_rows`, which reads nothing on the host either.

    Padding places repeat the write of the first place, so that no row is written twice with unlike
    values and nothing depends on how many places are real. A step of padding alone writes nothing.
    """
    values = values.expand(len(idx_mapping), *table.shape[1:])
    real = idx_mapping >= 0
    source = torch.where(real, torch.arange(len(real), device=real.device), 0)
    rows = idx_mapping.long()[source].clamp(min=0)
    shape = (-1,) + (1,) * (table.dim() - 1)
    table[rows] = torch.where(real[:1].view(shape), values[source], table[rows])
