"""Host-to-device copies without a wait, and state tensors that the CPU writes by staging.

`StagedWriteTensor` keeps its base on the device. The CPU stages ragged writes; `apply_write` packs
them, ships them without blocking and applies all of them in one kernel launch. The device may
advance the same tensor between two applications (`num_computed_tokens` is initialised by the CPU
and advanced by the GPU): only staged cells are touched, so no write is lost.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton

_BLOCK_SIZE = 1024


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to `device` without waiting for it.

    The source of the transfer is a fresh pinned temporary, never the caller's array: the caller may
    overwrite the array at once. The pinned block is given back by the allocator only after the copy
    has run.
    """
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    pinned = torch.from_numpy(array).pin_memory()
    assert pinned.is_pinned(), "a host-to-device source must be pinned"
    return pinned.to(device, non_blocking=True)


@triton.jit
def _apply_writes_kernel(
    base_ptr,  # [num_rows, row_stride], any integer or float dtype, in/out
    base_stride,
    meta_ptr,  # [2, num_writes] int64: row, start
    cu_lens_ptr,  # [num_writes + 1] int64: prefix sums of the lengths
    values_ptr,  # [sum of lengths], dtype of the base
    num_writes,
    BLOCK_SIZE: tl.constexpr,
):
    write = tl.program_id(0).to(tl.int64)
    row = tl.load(meta_ptr + write)
    start = tl.load(meta_ptr + num_writes + write)
    begin = tl.load(cu_lens_ptr + write)
    length = tl.load(cu_lens_ptr + write + 1) - begin
    offsets = tl.program_id(1).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < length
    values = tl.load(values_ptr + begin + offsets, mask=mask, other=0)
    tl.store(base_ptr + row * base_stride + start + offsets, values, mask=mask)


def apply_writes(base: Tensor, meta: Tensor, cu_lens: Tensor, values: Tensor, max_len: int) -> None:
    """Write `values[cu_lens[i]:cu_lens[i+1]]` to `base[row_i, start_i:]` for every write i.

    Args:
        base: [num_rows, row_len], in/out.
        meta: [2, num_writes] int64: row and start of each write.
        cu_lens: [num_writes + 1] int64.
        values: [cu_lens[-1]], dtype of `base`.
        max_len: longest write, known on the host.
    """
    num_writes = meta.shape[1]
    if not use_triton(base):
        apply_writes_ref(base, meta, cu_lens, values, max_len)
        return
    grid = (num_writes, triton.cdiv(max_len, _BLOCK_SIZE))
    _apply_writes_kernel[grid](
        base, base.stride(0), meta, cu_lens, values, num_writes, BLOCK_SIZE=_BLOCK_SIZE
    )


def apply_writes_ref(
    base: Tensor, meta: Tensor, cu_lens: Tensor, values: Tensor, max_len: int
) -> None:
    """Torch twin of `apply_writes`."""
    lengths = cu_lens[1:] - cu_lens[:-1]
    write = torch.repeat_interleave(torch.arange(len(lengths), device=base.device), lengths)
    inside = torch.arange(len(values), device=base.device) - cu_lens[:-1][write]
    base[meta[0][write], meta[1][write] + inside] = values


class StagedWriteTensor:
    """A device tensor that the CPU changes only by staged writes.

    Args:
        size: number of rows, or (rows, row length).
        dtype: of the elements.
        device: where the base lives.
        fill: initial value of every element.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        fill: float = 0,
    ) -> None:
        self.tensor = torch.full((size,) if isinstance(size, int) else size, fill, dtype=dtype)
        self.tensor = self.tensor.to(device)
        self._base = self.tensor.view(self.tensor.shape[0], -1)
        self._np_dtype = torch.zeros(0, dtype=dtype).numpy().dtype
        self._staged: dict[int, list[tuple[int, np.ndarray]]] = {}

    def stage_write(self, row: int, start: int, values: "int | float | list | np.ndarray") -> None:
        """Stage `values` for `row`, from column `start` on; a later write wins where two overlap.

        Raises:
            IndexError: the write does not fit inside the row.
        """
        array = np.atleast_1d(np.asarray(values, dtype=self._np_dtype)).copy()
        rows, row_len = self._base.shape
        if not (0 <= row < rows and start >= 0 and start + len(array) <= row_len):
            raise IndexError(
                f"write of {len(array)} values at row {row}, column {start} leaves a tensor of "
                f"{rows} rows x {row_len} columns"
            )
        if len(array) == 0:
            return
        kept = []
        for old_start, old in self._staged.get(row, []):
            left = old[: max(0, start - old_start)]
            right_from = start + len(array)
            right = old[max(0, right_from - old_start) :]
            if len(left):
                kept.append((old_start, left))
            if len(right):
                kept.append((max(old_start, right_from), right))
        self._staged[row] = [*kept, (start, array)]

    @property
    def num_staged(self) -> int:
        """Return how many writes wait for `apply_write`."""
        return sum(len(writes) for writes in self._staged.values())

    def apply_write(self) -> None:
        """Ship everything staged and apply it in one launch; nothing staged, nothing launched."""
        if not self._staged:
            return
        writes = [(row, start, v) for row, pairs in self._staged.items() for start, v in pairs]
        self._staged = {}
        lengths = np.array([len(v) for _, _, v in writes], dtype=np.int64)
        index = np.concatenate(
            [
                np.array([row for row, _, _ in writes], dtype=np.int64),
                np.array([start for _, start, _ in writes], dtype=np.int64),
                np.zeros(1, dtype=np.int64),
                np.cumsum(lengths),
            ]
        )
        device = self.tensor.device
        packed = copy_to_device(index, device)
        values = copy_to_device(np.concatenate([v for _, _, v in writes]), device)
        meta = packed[: 2 * len(writes)].view(2, len(writes))
        apply_writes(self._base, meta, packed[2 * len(writes) :], values, int(lengths.max()))
