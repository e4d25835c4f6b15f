"""Paged KV memory of one model: [num_slots, num_kv_heads, head_size] for each layer.

Two slots lie behind the blocks that are handed out, for the torch twins: the *null* slot is never
written and stays zero, so that reads of positions that do not exist find no stale value (a NaN
would survive a masked softmax); the *trash* slot, the last one, takes writes of slot -1. Kernels
mask and use neither.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
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
        self.trash_slot = self.null_slot + 1
        shape = (self.trash_slot + 1, *self._heads)
        # zeros, not empty: on a CPU the pages are mapped only when first written, and the null
        # slot must read as zero.
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

    def write(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Store a layer's keys and values.

        Args:
            layer: index.
            slot_mapping: [T] int64, -1 = write nothing.
            key: [T, num_kv_heads, head_size], dense in the last dimension.
            value: like `key`.
        """
        write_kv(self.keys[layer], self.values[layer], slot_mapping, key, value)


@triton.jit
def _write_kv_kernel(
    key_cache_ptr,  # [num_slots, num_kv_heads, HEAD_SIZE], out
    value_cache_ptr,
    cache_stride,
    slot_mapping_ptr,  # [T] int64, -1 = write nothing
    key_ptr,  # [T, num_kv_heads, HEAD_SIZE]
    key_stride_t,
    key_stride_h,
    value_ptr,
    value_stride_t,
    value_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (h < NUM_KV_HEADS) & (d < HEAD_SIZE)
    key = tl.load(key_ptr + token * key_stride_t + h * key_stride_h + d, mask=mask, other=0.0)
    value = tl.load(
        value_ptr + token * value_stride_t + h * value_stride_h + d, mask=mask, other=0.0
    )
    offsets = slot * cache_stride + h * HEAD_SIZE + d
    tl.store(key_cache_ptr + offsets, key, mask=mask)
    tl.store(value_cache_ptr + offsets, value, mask=mask)


def write_kv(
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, key: Tensor, value: Tensor
) -> None:
    """Store keys and values of a pass in one launch.

    Args:
        key_cache: [num_slots, num_kv_heads, head_size], contiguous, in/out; its last slot is trash.
        value_cache: like `key_cache`.
        slot_mapping: [T] int64, -1 = write nothing.
        key: [T, num_kv_heads, head_size], dense in the last dimension.
        value: like `key`.
    """
    if not use_triton(key_cache):
        write_kv_ref(key_cache, value_cache, slot_mapping, key, value)
        return
    num_tokens, num_kv_heads, head_size = key.shape
    assert key.stride(2) == value.stride(2) == 1, f"strides {key.stride()} and {value.stride()}"
    _write_kv_kernel[(num_tokens,)](
        key_cache,
        value_cache,
        key_cache.stride(0),
        slot_mapping,
        key,
        key.stride(0),
        key.stride(1),
        value,
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_size),
    )


def write_kv_ref(
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, key: Tensor, value: Tensor
) -> None:
    """Torch twin of `write_kv`; -1 is the last slot, as for any index."""
    key_cache.index_put_((slot_mapping,), key)
    value_cache.index_put_((slot_mapping,), value)
