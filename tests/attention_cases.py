"""Requests in a paged cache with NaN in every cell that must not be read, and a plain oracle."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.attention_metadata import AttentionMetadata
from runner.kv_cache import PagedKVCache
from tests.poison import POISON

LAYER = 1  # of two: the other one must stay as it was
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    # One rounding of the output, and of the weights before they meet the values, to 8 bits.
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-7},
    torch.float16: {"rtol": 2.0**-10, "atol": 2.0**-10},
}


@dataclass(frozen=True)
class AttentionSizes:
    """A pass: query and context lengths of its real places, and the model's shape."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]  # tokens cached before the pass
    num_kv_heads: int = 2
    packed: int = 2  # query heads a KV head
    head_size: int = 16
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    num_padding: int = 0  # places behind the real ones, of the longest query length
    past_end: int = 0  # tokens of the first place that lie behind its row's end
    seed: int = 0


class AttentionCase:
    """The tensors of a pass; `write` stores its own KV, then attention may run.

    Args:
        sizes: of the pass.
        device: of the tensors.
    """

    def __init__(self, sizes: AttentionSizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.generator = torch.Generator().manual_seed(sizes.seed)
        self.rng = np.random.default_rng(sizes.seed)
        ends = [sizes.past_end] + [0] * (len(sizes.query_lens) - 1)
        self.real_lens = [q - e for q, e in zip(sizes.query_lens, ends, strict=True)]
        pairs = zip(sizes.context_lens, self.real_lens, strict=True)
        # A place without tokens keeps its context: it must simply take part in nothing.
        self.seq_lens = [c + q for c, q in pairs]
        heads = (sizes.num_kv_heads, sizes.head_size)
        self.keys = [self.random(n, *heads) for n in self.seq_lens]
        self.values = [self.random(n, *heads) for n in self.seq_lens]
        self._build_cache()
        self._build_pass()

    def random(self, *size: int) -> Tensor:
        """Return normal numbers in the case's dtype, on its device."""
        return torch.randn(size, generator=self.generator).to(self.sizes.dtype).to(self.device)

    def _build_cache(self) -> None:
        sizes, num_real = self.sizes, len(self.seq_lens)
        needed = [-(-n // sizes.block_size) for n in self.seq_lens]
        num_rows, num_blocks = num_real + 3, sum(needed) + 2
        self.rows = self.rng.permutation(num_rows)[:num_real]
        free = self.rng.permutation(num_blocks)
        table = np.full((num_rows, max(needed) + 2), POISON, dtype=np.int32)
        for row, count in zip(self.rows, needed, strict=True):
            table[row, :count], free = free[:count], free[count:]
        self.block_table = torch.from_numpy(table).to(self.device)
        self.kv = PagedKVCache(
            2,
            num_blocks,
            sizes.block_size,
            sizes.num_kv_heads,
            sizes.head_size,
            sizes.dtype,
            self.device,
        )
        for tensor in (*self.kv.keys, *self.kv.values):
            tensor.fill_(float("nan"))
            tensor[self.kv.null_slot] = 0
        for place, context_len in enumerate(sizes.context_lens):
            slots = self.slots(place)[:context_len]
            self.kv.keys[LAYER][slots] = self.keys[place][:context_len]
            self.kv.values[LAYER][slots] = self.values[place][:context_len]

    def slots(self, place: int) -> Tensor:
        """Return the slot of every position of a place, [seq_len] int64."""
        position = torch.arange(self.seq_lens[place], device=self.device)
        size = self.sizes.block_size
        blocks = self.block_table[int(self.rows[place]), position // size].long()
        return blocks * size + position % size

    def _build_pass(self) -> None:
        sizes = self.sizes
        longest = max(sizes.query_lens)
        lens = [*sizes.query_lens, *[longest] * sizes.num_padding]
        num_real, num_padded = sum(sizes.query_lens), longest * sizes.num_padding
        positions = torch.zeros(num_real + num_padded, dtype=torch.int64)
        slots = torch.full_like(positions, -1).to(self.device)
        heads = (sizes.num_kv_heads, sizes.head_size)
        # Views, as parts of one projection are: their strides are not the dense ones.
        new = self.random(num_real + num_padded, 2, *heads)
        self.new_keys, self.new_values = new[:, 0], new[:, 1]
        self.starts = np.concatenate([[0], np.cumsum(lens)]).tolist()
        for place, count in enumerate(self.real_lens):
            context_len, begin = sizes.context_lens[place], self.starts[place]
            part = slice(begin, begin + count)
            positions[part] = torch.arange(context_len, context_len + count)
            slots[part] = self.slots(place)[context_len:]
            self.new_keys[part] = self.keys[place][context_len:]
            self.new_values[part] = self.values[place][context_len:]
        query = self.random(sizes.num_kv_heads * sizes.packed, len(positions), sizes.head_size)
        # Three times as large: few keys then make up most of an output, so that each one matters.
        self.query = (3 * query).transpose(0, 1)
        padding = [0] * sizes.num_padding
        self.metadata = AttentionMetadata(
            kv=self.kv,
            block_table=self.block_table,
            idx_mapping=self._int32([*self.rows.tolist(), *[-1] * sizes.num_padding]),
            query_start_loc=self._int32(self.starts),
            seq_lens=self._int32([*self.seq_lens, *padding]),
            positions=positions.to(self.device),
            slot_mapping=slots,
            max_query_len=longest,
            max_seq_len=max(self.seq_lens),
        )

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @property
    def scaling(self) -> float:
        """Return the usual factor on the scores."""
        return 1 / math.sqrt(self.sizes.head_size)

    def write(self) -> None:
        """Store the KV of the pass."""
        self.kv.write(LAYER, self.metadata.slot_mapping, self.new_keys, self.new_values)

    def with_(self, **fields: Any) -> AttentionMetadata:
        """Return the metadata with other fields."""
        return replace(self.metadata, **fields)

    def expected(self, place: int) -> Tensor:
        """Attend over a request alone in float64, one head at a time: [tokens, num_heads, D]."""
        sizes, begin = self.sizes, self.starts[place]
        query = self.query[begin : begin + self.real_lens[place]]
        query_pos = torch.arange(len(query), device=self.device) + sizes.context_lens[place]
        behind = query_pos[:, None] - torch.arange(self.seq_lens[place], device=self.device)
        hidden = behind < 0
        if sizes.window is not None:
            hidden |= behind >= sizes.window
        output = torch.empty(query.shape, dtype=torch.float64, device=self.device)
        for head in range(query.shape[1]):
            keys = self.keys[place][:, head // sizes.packed].double()
            values = self.values[place][:, head // sizes.packed].double()
            scores = query[:, head].double() @ keys.T * self.scaling
            output[:, head] = scores.masked_fill(hidden, -math.inf).softmax(1) @ values
        return output

    def check(self, output: Tensor) -> None:
        """Compare an output with the oracle, place by place.

        Raises:
            AssertionError: it differs, or is not finite, or padding gave anything but zeros.
        """
        assert output.dtype == self.sizes.dtype
        assert output.isfinite().all(), "a cell that must not be read leaked"
        for place, count in enumerate(self.real_lens):
            begin = self.starts[place]
            expected = self.expected(place).to(output.dtype)
            tolerance = TOLERANCES[self.sizes.dtype]
            torch.testing.assert_close(output[begin : begin + count], expected, **tolerance)
        padding = output[self.starts[len(self.real_lens)] :]
        assert (padding == 0).all(), "padding is not zero"
