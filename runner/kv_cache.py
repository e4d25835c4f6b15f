"""Paged KV memory of one model: [num_slots, num_kv_heads, head_size] for each layer.

Two blocks lie behind the `num_blocks` that are handed out. The *null* block is never written and
stays zero: reads of positions that do not exist go there, so that no stale value (a NaN would
survive a masked softmax) reaches a result. The *trash* block takes writes of slot -1.
"""

import torch
from torch import Tensor

from specdec.errors import CapacityError


class PagedKVCache:
    """KV cache of one model over block tables that several models may share.

    Args:
        num_layers: decoder layers.
        num_blocks: blocks that the allocator hands out.
        block_size: tokens a block.
        num_kv_heads: KV heads.
        head_size: elements a head.
        dtype: of the model.
        device: where it lives.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self._num_layers = num_layers
        self._heads = (num_kv_heads, head_size)
        self._dtype, self._device = dtype, device
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Allocate the tensors for another number of blocks; what was cached is gone."""
        self.num_blocks = num_blocks
        self.null_slot = num_blocks * self.block_size
        self.trash_slot = (num_blocks + 1) * self.block_size
        shape = ((num_blocks + 2) * self.block_size, *self._heads)
        # zeros, not empty: on a CPU the pages are mapped only when first written, and the null
        # block must read as zero.
        self.keys = self.values = []  # the old tensors go before the new ones come
        try:
            self.keys = [self._zeros(shape) for _ in range(self._num_layers)]
            self.values = [self._zeros(shape) for _ in range(self._num_layers)]
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            needed = num_blocks * self.bytes_per_block / 2**30
            raise CapacityError(
                f"{num_blocks} KV blocks take {needed:.1f} GiB, which the device does not have; "
                f"lower num_kv_blocks, max_num_reqs or max_model_len"
            ) from error

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    @property
    def bytes_per_block(self) -> int:
        """Return the memory of one block over all layers."""
        elements = 2 * self._num_layers * self.block_size * self._heads[0] * self._heads[1]
        return elements * self._dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Return the bytes reserved."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def write(self, layer: int, write_slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, num_kv_heads, head_size] at `write_slots` [T] int64 (no -1)."""
        self.keys[layer].index_copy_(0, write_slots, key)
        self.values[layer].index_copy_(0, write_slots, value)
