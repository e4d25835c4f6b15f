"""What the attention of a pass reads beside queries, keys and values.

Everything lies on the device; the two integers are bounds. The torch twin computes places of equal
query length together: its groups and masks are derived from the device tensors once a pass, and
shared by the layers.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.kv_cache import PagedKVCache


@dataclass
class AttentionGroup:
    """Places of a pass that have the same query length Q; read by the torch twin alone."""

    token_idx: Tensor | None  # [G * Q] int64 into the pass's tokens; None = all, in order
    query_len: int
    read_slots: Tensor | None  # [G * S] int64: slot of each key position, null where there is none
    positions: Tensor  # [G, Q] int64: position of each query token
    seq_lens: Tensor  # [G] int64
    max_seq_len: int  # S
    sees_all: bool = False  # one place, one query token, S its very length: nothing to mask
    first_slot: int = -1  # of the one place whose slots follow one another; read_slots is None
    _masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, num_packed: int, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask [G, 1, num_packed * Q, S], or None where every key is seen.

        Args:
            window: sliding window of the layer, None for full attention.
            num_packed: query heads packed into rows (rows are head-major).
            dtype: of the queries; the masked value is its lowest number.
        """
        key = (window, num_packed, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, num_packed, dtype)
        return self._masks[key]

    def _build_mask(self, window: int | None, num_packed: int, dtype: torch.dtype) -> Tensor | None:
        if self.sees_all and (window is None or window >= self.max_seq_len):
            return None
        key_pos = torch.arange(self.max_seq_len, device=self.positions.device)
        query_pos = self.positions[:, :, None]
        seen = (key_pos <= query_pos) & (key_pos < self.seq_lens[:, None, None])
        if window is not None:
            seen &= query_pos - key_pos < window
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        # A finite value: a padded query sees no key, and -inf everywhere would make it NaN.
        mask.masked_fill_(~seen, torch.finfo(dtype).min)
        return mask.repeat(1, num_packed, 1)[:, None]


@dataclass
class AttentionMetadata:
    """Which tokens of a pass belong together, and where their KV lies; one for all layers.

    Within a place the positions of its tokens are consecutive. Tokens behind a row's end have
    position 0 and slot -1: what is computed for them is finite and of no use. Places without a row
    or of length 0 give zeros.
    """

    kv: PagedKVCache  # of the model that runs
    block_table: Tensor  # [N, max_num_blocks] int32
    idx_mapping: Tensor  # [R] int32: place -> row of block_table, -1 in padding
    query_start_loc: Tensor  # [R + 1] int32; the last one is T
    seq_lens: Tensor  # [R] int32, context length including this pass, 0 in padding
    positions: Tensor  # [T] int64: a query sees keys at positions <= its own and < seq_len
    slot_mapping: Tensor  # [T] int64, -1 = write no KV
    max_query_len: int  # bound on query lengths
    max_seq_len: int  # bound on seq_lens
    backend: str = "paged"  # key of runner.attention.ATTENTION_BACKENDS
    shared: dict[Any, Any] = field(default_factory=dict)  # what its layers compute once, on a CPU

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """Return the pass in groups of equal query length; waits for the device."""
        starts_np = self.query_start_loc.cpu().numpy()
        query_lens_np = np.diff(starts_np)
        if len(query_lens_np) == 1:
            return [self._only_group()]
        device, rows = self.positions.device, self.idx_mapping.long()
        seq_lens = torch.where(rows >= 0, self.seq_lens.long(), 0)
        rows = rows.clamp(min=0)
        groups = []
        for query_len in np.unique(query_lens_np):
            q = int(query_len)
            if q == 0:
                continue
            (places_np,) = np.nonzero(query_lens_np == query_len)
            tokens, group_rows, group_lens = None, rows, seq_lens
            if len(places_np) < len(query_lens_np):
                places = torch.from_numpy(places_np).to(device)
                tokens_np = (starts_np[places_np][:, None] + np.arange(q)).reshape(-1)
                tokens = torch.from_numpy(tokens_np).to(device)
                group_rows, group_lens = rows[places], seq_lens[places]
            positions = (self.positions if tokens is None else self.positions[tokens]).view(-1, q)
            longest = max(int(group_lens.max()), 1)
            slots = self._read_slots(group_rows, group_lens, longest)
            groups.append(AttentionGroup(tokens, q, slots, positions, group_lens, longest))
        return groups

    def _only_group(self) -> AttentionGroup:
        """Return the group of a pass of one place: no copy of its keys, where none is needed."""
        row, query_len = int(self.idx_mapping), len(self.positions)
        seq_lens = self.seq_lens.long() if row >= 0 else torch.zeros_like(self.seq_lens.long())
        longest = max(int(seq_lens), 1)
        sees_all = query_len == 1 and int(self.positions) >= longest - 1
        slots, first_slot = None, -1
        if int(seq_lens):
            blocks = self.block_table[row, : -(-longest // self.kv.block_size)].tolist()
            if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
                first_slot = blocks[0] * self.kv.block_size
        if first_slot < 0:
            rows = self.idx_mapping.long().clamp(min=0)
            slots = self._read_slots(rows, seq_lens, longest)
        positions = self.positions.view(1, query_len)
        return AttentionGroup(
            None, query_len, slots, positions, seq_lens, longest, sees_all, first_slot
        )

    def _read_slots(self, rows: Tensor, seq_lens: Tensor, max_seq_len: int) -> Tensor:
        """Return the slot of every key position of every place, [G * S], null past its end."""
        size = self.kv.block_size
        num_blocks = -(-max_seq_len // size)
        blocks = self.block_table[:, :num_blocks].index_select(0, rows).long() * size
        key_pos = torch.arange(num_blocks * size, device=rows.device)
        slots = blocks.repeat_interleave(size, 1) + key_pos % size
        slots = torch.where(key_pos < seq_lens[:, None], slots, self.kv.null_slot)
        return slots[:, :max_seq_len].reshape(-1)


def single_request_metadata(kv: PagedKVCache, positions: Tensor, seq_len: int) -> AttentionMetadata:
    """Build the metadata of one text that fills a cache from its slot 0 on.

    Args:
        kv: a cache whose block 0 holds the whole text.
        positions: [T] int64, of the pass.
        seq_len: context length including the pass.
    """
    device, num_tokens = positions.device, len(positions)
    assert seq_len <= kv.block_size, f"{seq_len} tokens do not fit a block of {kv.block_size}"
    return AttentionMetadata(
        kv=kv,
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        idx_mapping=torch.zeros(1, dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.full((1,), seq_len, dtype=torch.int32, device=device),
        positions=positions,
        slot_mapping=positions,
        max_query_len=num_tokens,
        max_seq_len=seq_len,
    )
