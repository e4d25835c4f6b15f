"""Host-to-device copies without a wait, and state tensors that the CPU writes by staging.

`StagedWriteTensor` keeps its base on the device. The CPU stages ragged writes; applying packs them,
ships them without blocking and writes all of them in one kernel launch. The device may advance the
same tensor between two applications (`num_computed_tokens` is initialised by the CPU and advanced
by the GPU): only staged cells are touched, so no write is lost. `StagedTables` applies the writes
of many tensors in one launch.

A packet of writes is int64 words: for each write (table, first cell, first value, number of cells),
all counted in 4-byte units, then the values. The kernel reads it where it lies: in a ring of pinned
buffers for the tables of a step, which needs no copy at all.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton

_BLOCK_SIZE = 1024
_HEADER = 4  # int64 words a write


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
    addresses_ptr,  # [num_tables] int64: where each table begins
    header_ptr,  # [num_writes, 4] int64: table, first cell, first value, number of cells
    values_ptr,  # int32 words
    BLOCK_SIZE: tl.constexpr,
):
    write = tl.program_id(0).to(tl.int64) * 4
    table = tl.load(header_ptr + write)
    cell = tl.load(header_ptr + write + 1)
    value = tl.load(header_ptr + write + 2)
    length = tl.load(header_ptr + write + 3)
    base = tl.load(addresses_ptr + table).to(tl.pointer_type(tl.int32))
    offsets = tl.program_id(1).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < length
    words = tl.load(values_ptr + value + offsets, mask=mask, other=0)
    tl.store(base + cell + offsets, words, mask=mask)


def apply_writes(
    tables: Sequence[Tensor], addresses: Tensor, header: Tensor, values: Tensor, max_len: int
) -> None:
    """Apply every write of a packet in one launch.

    Args:
        tables: each a flat int32 view of a table's memory, in/out.
        addresses: [num_tables] int64, where each of them begins.
        header: [num_writes, 4] int64: table, first cell, first value, number of cells. Writes of a
            packet do not overlap.
        values: int32 words; like `header` on the device, or pinned and read in place.
        max_len: most cells of a write, known on the host.
    """
    if not use_triton(addresses):
        apply_writes_ref(tables, addresses, header, values, max_len)
        return
    grid = (len(header), triton.cdiv(max_len, _BLOCK_SIZE))
    _apply_writes_kernel[grid](addresses, header, values, BLOCK_SIZE=_BLOCK_SIZE)


def apply_writes_ref(
    tables: Sequence[Tensor], addresses: Tensor, header: Tensor, values: Tensor, max_len: int
) -> None:
    """Torch twin of `apply_writes`."""
    for table, cell, value, length in header.tolist():
        tables[table][cell : cell + length] = values[value : value + length]


class StagedWriteTensor:
    """A device tensor that the CPU changes only by staged writes.

    Args:
        size: number of rows, or (rows, row length).
        dtype: of the elements; 4 or 8 bytes.
        device: where the base lives.
        fill: initial value of every element.
        pinned: keep the base in pinned host memory instead, where kernels read and write it in
            place (a CPU has nothing to pin: it is an ordinary tensor there).
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        fill: float = 0,
        pinned: bool = False,
    ) -> None:
        assert dtype.itemsize in (4, 8), f"writes are counted in words of 4 bytes, not of {dtype}"
        shape = (size,) if isinstance(size, int) else size
        on_host = device.type == "cpu" or pinned
        self.tensor = torch.full(
            shape,
            fill,
            dtype=dtype,
            device="cpu" if on_host else device,
            pin_memory=pinned and device.type == "cuda",
        )
        self._device = device
        self._shape = (shape[0], 1) if len(shape) == 1 else shape
        self._words_per_cell = dtype.itemsize // 4
        self._np_dtype = torch.zeros(0, dtype=dtype).numpy().dtype
        self._staged: dict[int, list[tuple[int, np.ndarray]]] = {}
        self._alone: StagedTables | None = None

    def stage_write(self, row: int, start: int, values: "int | float | list | np.ndarray") -> None:
        """Stage `values` for `row`, from column `start` on; a later write wins where two overlap.

        Raises:
            IndexError: the write does not fit inside the row.
        """
        array = np.array(values, dtype=self._np_dtype, ndmin=1)
        rows, row_len = self._shape
        if not (0 <= row < rows and start >= 0 and start + len(array) <= row_len):
            raise IndexError(
                f"write of {len(array)} values at row {row}, column {start} leaves a tensor of "
                f"{rows} rows x {row_len} columns"
            )
        if len(array) == 0:
            return
        kept = []
        for old_start, old in self._staged.get(row, ()):
            left = old[: max(0, start - old_start)]
            right_from = start + len(array)
            right = old[max(0, right_from - old_start) :]
            if len(left):
                kept.append((old_start, left))
            if len(right):
                kept.append((max(old_start, right_from), right))
        kept.append((start, array))
        self._staged[row] = kept

    @property
    def has_staged(self) -> bool:
        """Return whether any write waits to be applied."""
        return bool(self._staged)

    @property
    def num_staged(self) -> int:
        """Return how many writes wait to be applied."""
        return sum(len(writes) for writes in self._staged.values())

    def take_staged(self) -> list[tuple[int, np.ndarray]]:
        """Return (first 4-byte cell, values as int32) of every staged write, and forget them."""
        row_len, width = self._shape[1], self._words_per_cell
        taken = [
            ((row * row_len + start) * width, values.view(np.int32))
            for row, writes in self._staged.items()
            for start, values in writes
        ]
        self._staged = {}
        return taken

    def apply_write(self) -> None:
        """Ship everything staged and apply it in one launch; nothing staged, nothing launched."""
        if self._alone is None:
            self._alone = StagedTables([self], self._device)
        self._alone.apply()


class StagedTables:
    """Tensors whose staged writes are shipped and applied together, in one launch.

    Args:
        tables: the tensors; at most one group should apply the writes of a tensor.
        device: where the kernel runs.
        ring_depth: places of the ring of pinned buffers; 0 ships by a copy each time.
    """

    def __init__(
        self, tables: Sequence[StagedWriteTensor], device: torch.device, ring_depth: int = 0
    ) -> None:
        self._tables = list(tables)
        self._device = device
        self._words = [table.tensor.view(-1).view(torch.int32) for table in tables]
        # Kernels reach pinned host memory at the address that the host has for it.
        addresses = np.array([words.data_ptr() for words in self._words], dtype=np.int64)
        self._addresses = copy_to_device(addresses, device)
        self._ring: list[Tensor | None] = [None] * ring_depth

    @property
    def ring(self) -> list[Tensor]:
        """Return the ring's buffers that exist."""
        return [buffer for buffer in self._ring if buffer is not None]

    def apply(self, place: int | None = None) -> bool:
        """Apply everything staged; returns whether there was anything to launch.

        Args:
            place: of the ring; the caller answers for it that the kernel which read it last has
                run. None ships the packet by a copy.
        """
        writes = [
            (index, cell, words)
            for index, table in enumerate(self._tables)
            if table.has_staged
            for cell, words in table.take_staged()
        ]
        if not writes:
            return False
        num_header = _HEADER * len(writes)
        lengths = [len(words) for _, _, words in writes]
        packet = self._packet(place, num_header + (sum(lengths) + 1) // 2)
        words_np = packet.numpy()[num_header:].view(np.int32)
        header, begin = [], 0
        for (index, cell, words), length in zip(writes, lengths, strict=True):
            header += (index, cell, begin, length)
            words_np[begin : begin + length] = words
            begin += length
        packet.numpy()[:num_header] = header
        if place is None:
            packet = copy_to_device(packet.numpy(), self._device)
        header_words = packet[:num_header].view(len(writes), _HEADER)
        values = packet[num_header:].view(torch.int32)
        apply_writes(self._words, self._addresses, header_words, values, max(lengths))
        return True

    def _packet(self, place: int | None, num_words: int) -> Tensor:
        """Return host memory for `num_words` int64: the ring's place, or a fresh temporary."""
        if place is None:
            return torch.empty(num_words, dtype=torch.int64)
        buffer = self._ring[place]
        if buffer is None or len(buffer) < num_words:
            on_gpu = self._device.type == "cuda"
            buffer = torch.empty(max(2 * num_words, 1024), dtype=torch.int64, pin_memory=on_gpu)
            assert not on_gpu or buffer.is_pinned(), "a host-to-device source must be pinned"
            self._ring[place] = buffer
        return buffer[:num_words]
