"""Scatter a step's per-place values to state rows, with padding and without a host read."""

import torch
from torch import Tensor


def scatter_rows(table: Tensor, idx_mapping: Tensor, values: Tensor) -> None:
    """Write `values[place]` to `table[idx_mapping[place]]` for every real place.

    Padding places repeat the write of the first place, so that no row is written twice with unlike
    values and nothing depends on how many places are real. A step of padding alone writes nothing.

    Args:
        table: [N, ...], in/out.
        idx_mapping: [R] int32, -1 in padding; real places come first.
        values: [R, ...], dtype of `table`.
    """
    real = idx_mapping >= 0
    source = torch.where(real, torch.arange(len(real), device=real.device), 0)
    rows = idx_mapping.long()[source].clamp(min=0)
    shape = (-1,) + (1,) * (table.dim() - 1)
    table[rows] = torch.where(real[:1].view(shape), values[source], table[rows])
