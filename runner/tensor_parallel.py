"""What the ranks that share a model's layers tell one another inside a pass.

Every rank calls the same functions with tensors of the same shapes; what comes back is equal on
all of them, to the bit. Nothing here reads a tensor on the host, so that a pass over nccl may be
captured in a CUDA graph.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.top_keys import pack_top, unpack_index

# Its name from torch 2.13 on, where the old one warns.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among those that share the layers.

    Args:
        rank: place, from 0 on.
        size: ranks.
        group: process group of these ranks, in the order of their places.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def part_of(self, total: int, rank: int | None = None) -> range:
        """Return what a rank has of `total` things in order: all alike, the last ranks the fewer.

        Args:
            total: things.
            rank: whose part, None = this one's.
        """
        width = -(-total // self.size)
        start = min((self.rank if rank is None else rank) * width, total)
        return range(start, min(start + width, total))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors, in place; returns `x`."""
        dist.all_reduce(x, group=self.group)
        return x

    def all_max(self, x: Tensor) -> Tensor:
        """Take the largest of the ranks' numbers, in place; returns `x`."""
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def all_gather_columns(self, x: Tensor, num_columns: int | None = None) -> Tensor:
        """Put the ranks' columns side by side, in the order of ranks.

        Args:
            x: [L, n], this rank's.
            num_columns: of all ranks together, divided as `part_of` does; None = all have n.

        Returns:
            [L, num_columns].
        """
        total = x.shape[1] * self.size if num_columns is None else num_columns
        width = -(-total // self.size)
        if x.shape[1] < width:
            x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
        parts = x.new_empty((self.size * len(x), width))
        _gather(parts, x.contiguous(), group=self.group)
        return (
            parts.view(self.size, len(x), width)
            .transpose(0, 1)
            .reshape(len(x), self.size * width)[:, :total]
        )

    def top1(self, value: Tensor, index: Tensor, first: int = 0) -> Tensor:
        """Return the index of the ranks' largest value; among equal ones the lowest index.

        Args:
            value: [T] float32, this rank's largest.
            index: [T] int64, where it stands.
            first: added to this rank's index; the sum is below 2**31.

        Returns:
            [T] int64.
        """
        keys = pack_top(value, index, first)
        dist.all_reduce(keys, op=dist.ReduceOp.MAX, group=self.group)
        return unpack_index(keys)
