"""Paged attention, registered through transformers' attention interface under `specdec_paged`.

A step's tokens come flattened as one sequence; `AttentionMetadata` says which tokens belong to
which request and where their KV lies. Places with the same query length form a group and are
computed together, so a step that only decodes or only verifies is one call a layer. The query heads
that share a KV head are rows of one attention problem (grouped-query packing), which reads every
key once.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from runner.buffers import copy_to_device
from runner.kv_cache import PagedKVCache
from specdec.errors import UnsupportedError

ATTENTION_NAME = "specdec_paged"


@dataclass
class AttentionGroup:
    """Places of a step that have the same query length Q."""

    token_idx: Tensor | None  # [G * Q] int64 into the step's tokens; None = all, in order
    query_len: int
    read_slots: Tensor  # [G * S] int64: slot of each key position, null where there is none
    positions: Tensor  # [G, Q] int64: position of each query token
    seq_lens: Tensor  # [G] int64
    max_seq_len: int  # S
    sees_all: bool = False  # one place, one query token, S its very length: nothing to mask
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
    """What the attention of one forward pass reads beside queries, keys and values."""

    kv: PagedKVCache
    write_slots: Tensor  # [T] int64, trash where no KV is wanted
    groups: list[AttentionGroup]


def build_attention_metadata(
    kv: PagedKVCache,
    block_table: Tensor,
    idx_mapping: Tensor,
    query_lens_np: np.ndarray,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    max_seq_len: int,
) -> AttentionMetadata:
    """Build the metadata of a pass from device tensors and the host's query lengths.

    Args:
        kv: cache of the model that runs.
        block_table: [N, max_num_blocks] int32.
        idx_mapping: [R] int32, -1 in padding.
        query_lens_np: [R] host array.
        positions: [T] int64.
        seq_lens: [R] int32, context length including this pass.
        slot_mapping: [T] int64, -1 = write no KV.
        max_seq_len: bound on `seq_lens`, known on the host.
    """
    device = positions.device
    write_slots = torch.where(slot_mapping >= 0, slot_mapping, kv.trash_slot)
    rows = idx_mapping.long().clamp(min=0)
    seq_lens = seq_lens.long()
    starts_np = np.concatenate([[0], np.cumsum(query_lens_np)])
    groups = []
    for query_len in np.unique(query_lens_np):
        q = int(query_len)
        if q == 0:
            continue
        (places_np,) = np.nonzero(query_lens_np == query_len)
        tokens, group_rows, group_lens = None, rows, seq_lens
        if len(places_np) < len(query_lens_np):
            tokens_np = (starts_np[places_np][:, None] + np.arange(q)).reshape(-1)
            places = copy_to_device(places_np, device)
            tokens = copy_to_device(tokens_np, device)
            group_rows, group_lens = rows[places], seq_lens[places]
        # On a CPU the true lengths are at hand; on a GPU reading them would wait for the device.
        longest = max(int(group_lens.max()), 1) if device.type == "cpu" else max_seq_len
        groups.append(
            AttentionGroup(
                token_idx=tokens,
                query_len=q,
                read_slots=_read_slots(kv, block_table, group_rows, group_lens, longest),
                positions=(positions if tokens is None else positions[tokens]).view(-1, q),
                seq_lens=group_lens,
                max_seq_len=longest,
                sees_all=device.type == "cpu" and q == 1 and len(places_np) == 1,
            )
        )
    return AttentionMetadata(kv, write_slots, groups)


def _read_slots(
    kv: PagedKVCache, block_table: Tensor, rows: Tensor, seq_lens: Tensor, max_seq_len: int
) -> Tensor:
    """Return the slot of every key position of every place, [G * S] int64, null past its end."""
    num_blocks = -(-max_seq_len // kv.block_size)
    blocks = block_table[:, :num_blocks].index_select(0, rows).long() * kv.block_size
    key_pos = torch.arange(num_blocks * kv.block_size, device=rows.device)
    slots = blocks.repeat_interleave(kv.block_size, 1) + key_pos % kv.block_size
    slots = torch.where(key_pos < seq_lens[:, None], slots, kv.null_slot)
    return slots[:, :max_seq_len].reshape(-1)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attn_metadata: AttentionMetadata | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write a layer's KV and attend over the pages of each request.

    Args:
        module: the attention module; `layer_idx` selects the cache's layer.
        query: [1, num_heads, T, head_size].
        key: [1, num_kv_heads, T, head_size].
        value: like `key`.
        attention_mask: must be None: masks come from the metadata.
        scaling: factor on the scores, None = 1 / sqrt(head_size).
        sliding_window: keys seen by a query, None = all.
        attn_metadata: of this pass; handed through the model's forward.

    Returns:
        Output [1, T, num_heads, head_size], and no attention weights.
    """
    assert attn_metadata is not None, "specdec_paged needs attn_metadata; run it by the runner"
    refused = [
        name for name in ("s_aux", "softcap", "position_bias") if kwargs.get(name) is not None
    ]
    if refused:
        raise UnsupportedError(f"attention option {refused[0]} of this model is not supported")
    kv = attn_metadata.kv
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    kv.write(layer, attn_metadata.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    keys, values = kv.keys[layer], kv.values[layer]
    num_kv_heads, head_size = keys.shape[1:]
    num_heads, num_tokens = query.shape[1], query.shape[2]
    packed = num_heads // num_kv_heads
    flat = query[0].transpose(0, 1)  # [T, heads, D]
    out = None
    for group in attn_metadata.groups:
        q = flat if group.token_idx is None else flat[group.token_idx]
        # [G, Q, kv, packed, D] -> [G, kv, packed * Q, D]
        q = q.reshape(-1, group.query_len, num_kv_heads, packed, head_size)
        q = q.permute(0, 2, 3, 1, 4).reshape(len(q), num_kv_heads, -1, head_size)
        shape = (len(q), group.max_seq_len, num_kv_heads, head_size)
        k = keys.index_select(0, group.read_slots).view(shape).transpose(1, 2)
        v = values.index_select(0, group.read_slots).view(shape).transpose(1, 2)
        mask = group.mask(sliding_window, packed, q.dtype)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        o = o.view(len(q), num_kv_heads, packed, group.query_len, head_size)
        o = o.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_size)
        if group.token_idx is None:
            return o[None], None
        if out is None:
            out = torch.zeros(num_tokens, num_heads, head_size, dtype=o.dtype, device=o.device)
        out[group.token_idx] = o
    assert out is not None, "a pass without tokens"
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
