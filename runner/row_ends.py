"""End rows on the device: a row that committed a token that ends its text commits nothing more.

    max_total_len = total_len,  draft_limit = 0      where the run holds one of the row's end tokens

The run itself is left whole: the host cuts it where the text ended, with one trim function for all
(`specdec.ending`), and so counts what it would count without this. Everything else follows from
`max_total_len`, as for a row that ran into it: positions behind it write no KV, it gets no drafts,
num_sampled is 0 and num_rejected the whole query, so `num_computed_tokens` stays.

Only engines that put several steps into a launch run this. A row may have end tokens that are not
in the table (it holds the first `MAX_END_TOKENS`): it runs on, and the host trims it, as it trims a
row that met a stop string.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from collections.abc import Collection

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.buffers import StagedWriteTensor
from runner.dispatch import use_triton
from runner.states import RequestState

MAX_END_TOKENS = 16


@triton.jit
def _end_rows_kernel(
    idx_mapping_ptr,  # [R] int32: place -> row, -1 in padding
    sampled_tokens_ptr,  # [R, W] int64
    sampled_tokens_stride,
    num_sampled_ptr,  # [R] int32
    end_token_ids_ptr,  # [N, E] int32, -1 = none
    end_token_ids_stride,
    total_len_ptr,  # [N] int32
    max_total_len_ptr,  # [N] int32, in/out
    draft_limit_ptr,  # [N] int32, in/out
    WIDTH: tl.constexpr,
    NUM_ENDS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row >= 0:
        j = tl.arange(0, WIDTH)
        num_sampled = tl.load(num_sampled_ptr + place)
        pointers = sampled_tokens_ptr + place * sampled_tokens_stride + j
        tokens = tl.load(pointers, mask=j < num_sampled, other=-2)
        ends = tl.load(end_token_ids_ptr + row * end_token_ids_stride + tl.arange(0, NUM_ENDS)).to(
            tl.int64
        )
        hits = (tokens[:, None] == ends[None, :]).to(tl.int32)
        if tl.sum(tl.sum(hits, axis=1), axis=0) > 0:
            tl.store(max_total_len_ptr + row, tl.load(total_len_ptr + row))
            tl.store(draft_limit_ptr + row, 0)


def end_rows(
    idx_mapping: Tensor,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    end_token_ids: Tensor,
    state: RequestState,
) -> None:
    """End the rows whose run, just committed, holds one of their end tokens.

    Args:
        idx_mapping: [R] int32, place -> row, -1 in padding.
        sampled_tokens: [R, W] int64, of which the first `num_sampled` were committed.
        num_sampled: [R] int32.
        end_token_ids: [N, MAX_END_TOKENS] int32, -1 = none.
        state: `total_len` is read, `max_total_len` and `draft_limit` are set.
    """
    if not use_triton(num_sampled):
        end_rows_ref(idx_mapping, sampled_tokens, num_sampled, end_token_ids, state)
        return
    _end_rows_kernel[(len(idx_mapping),)](
        idx_mapping,
        sampled_tokens,
        sampled_tokens.stride(0),
        num_sampled,
        end_token_ids,
        end_token_ids.stride(0),
        state.total_len.tensor,
        state.max_total_len.tensor,
        state.draft_limit,
        WIDTH=triton.next_power_of_2(sampled_tokens.shape[1]),
        NUM_ENDS=MAX_END_TOKENS,
    )


class RowEnds:
    """The tokens that end each row's text, written by the CPU through staged writes.

    Args:
        max_num_reqs: N.
        device: where the table lives.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        shape = max_num_reqs, MAX_END_TOKENS
        self.end_token_ids = StagedWriteTensor(shape, torch.int32, device, fill=-1)

    def add_request(self, row: int, end_token_ids: Collection[int]) -> None:
        """Stage the tokens that end the text of a row's new owner."""
        values = np.full(MAX_END_TOKENS, -1, dtype=np.int32)
        # Other numbers are no tokens, may be those that stand for none, or do not fit the table.
        known = sorted(i for i in end_token_ids if 0 <= i < 2**31)[:MAX_END_TOKENS]
        values[: len(known)] = known
        self.end_token_ids.stage_write(row, 0, values)


def end_rows_ref(
    idx_mapping: Tensor,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    end_token_ids: Tensor,
    state: RequestState,
) -> None:
    """Torch twin of `end_rows`."""
    real = idx_mapping >= 0
    row = idx_mapping[real].long()
    j = torch.arange(sampled_tokens.shape[1], device=sampled_tokens.device)
    tokens = torch.where(j < num_sampled[real, None], sampled_tokens[real], -2)
    ends = (tokens[:, :, None] == end_token_ids[row][:, None, :]).flatten(1).any(1)
    row = row[ends]
    state.max_total_len.tensor[row] = state.total_len.tensor[row]
    state.draft_limit[row] = 0
