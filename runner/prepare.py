"""Build the inputs of a step from state, on the device.

Only the device knows how many drafts of the last step were rejected, so positions, sequence lengths
and input tokens are gathered there, by `idx_mapping`:

    position of token j of a place   p = num_computed_tokens[row] + j
    input token                      all_token_ids[row, p]            where p < prefill_len
                                     last_sampled_tokens[row]         where p = total_len - 1
                                     draft_tokens[row, p - total_len] where p >= total_len (-1 -> 0)
    slot                             block_table[row, p // block_size] * block_size + p % block_size

Positions at or after the row's end (`max_total_len`) write no KV: a step in flight may run one past
the last token of a row.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from runner.input_batch import InputBatch
from runner.states import RequestState

_BLOCK_TOKENS = 256


@triton.jit
def _prepare_inputs_kernel(
    # inputs of the step, [R] int32
    idx_mapping_ptr,
    query_lens_ptr,
    num_logits_ptr,
    # state, by row
    all_token_ids_ptr,
    all_token_ids_stride,
    prefill_len_ptr,
    total_len_ptr,
    max_total_len_ptr,
    num_computed_tokens_ptr,
    last_sampled_tokens_ptr,
    draft_tokens_ptr,
    draft_tokens_stride,
    block_table_ptr,
    block_table_stride,
    # outputs
    query_start_loc_ptr,
    cu_num_logits_ptr,
    seq_lens_ptr,
    positions_ptr,
    input_ids_ptr,
    slot_mapping_ptr,
    logits_indices_ptr,
    expanded_idx_mapping_ptr,
    expanded_local_pos_ptr,
    step_ptr,  # [1] int32, in/out: steps so far
    num_reqs,
    block_size,
    num_draft_columns,
    MAX_REQS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    place = tl.program_id(0)
    # Each program sums the lengths before it: R is small, and one launch beats two.
    places = tl.arange(0, MAX_REQS)
    before = places < place
    query_start = tl.sum(tl.load(query_lens_ptr + places, mask=before, other=0))
    logits_start = tl.sum(tl.load(num_logits_ptr + places, mask=before, other=0))
    tl.store(query_start_loc_ptr + place, query_start)
    tl.store(cu_num_logits_ptr + place, logits_start)
    if place == num_reqs:
        tl.store(step_ptr, tl.load(step_ptr) + 1)
    if place < num_reqs:
        row = tl.load(idx_mapping_ptr + place).to(tl.int64)
        query_len = tl.load(query_lens_ptr + place)
        num_logits = tl.load(num_logits_ptr + place)
        real = row >= 0
        safe_row = tl.maximum(row, 0)
        num_computed = tl.load(num_computed_tokens_ptr + safe_row)
        prefill_len = tl.load(prefill_len_ptr + safe_row)
        total_len = tl.load(total_len_ptr + safe_row)
        max_total_len = tl.load(max_total_len_ptr + safe_row)
        last_sampled = tl.load(last_sampled_tokens_ptr + safe_row)
        seq_len = tl.where(real, tl.minimum(num_computed + query_len, max_total_len), 0)
        tl.store(seq_lens_ptr + place, seq_len)
        # Tokens before the row's end, none in padding. A count and no scalar flag: the interpreter
        # does not take a scalar bool for a part of a mask.
        num_writing = tl.where(real, max_total_len - num_computed, 0)
        for start in range(0, query_len, BLOCK_TOKENS):
            j = start + tl.arange(0, BLOCK_TOKENS)
            inside = j < query_len
            pos = num_computed + j
            writes = inside & (j < num_writing)
            committed = tl.load(
                all_token_ids_ptr + safe_row * all_token_ids_stride + pos,
                mask=writes & (pos < prefill_len),
                other=0,
            ).to(tl.int64)
            column = pos - total_len
            draft = tl.load(
                draft_tokens_ptr + safe_row * draft_tokens_stride + column,
                mask=writes & (pos >= prefill_len) & (column >= 0) & (column < num_draft_columns),
                other=0,
            )
            token = tl.where(pos == total_len - 1, last_sampled, tl.maximum(draft, 0))
            token = tl.where(pos < prefill_len, committed, token)
            token = tl.where(writes, token, 0)
            block = tl.load(
                block_table_ptr + safe_row * block_table_stride + pos // block_size,
                mask=writes,
                other=0,
            ).to(tl.int64)
            slot = tl.where(writes, block * block_size + pos % block_size, -1)
            out = query_start + j
            tl.store(positions_ptr + out, tl.where(writes, pos, 0).to(tl.int64), mask=inside)
            tl.store(input_ids_ptr + out, token, mask=inside)
            tl.store(slot_mapping_ptr + out, slot, mask=inside)
        for start in range(0, num_logits, BLOCK_TOKENS):
            i = start + tl.arange(0, BLOCK_TOKENS)
            line = logits_start + i
            token_of_line = query_start + query_len - num_logits + i
            mask = i < num_logits
            tl.store(logits_indices_ptr + line, token_of_line.to(tl.int64), mask=mask)
            tl.store(expanded_idx_mapping_ptr + line, (row + i * 0).to(tl.int32), mask=mask)
            tl.store(expanded_local_pos_ptr + line, i, mask=mask)


def prepare_inputs(batch: InputBatch, state: RequestState, block_size: int, step: Tensor) -> None:
    """Fill every device-built field of `batch` from the rows of `state`, and count the step.

    Args:
        batch: views to fill; `idx_mapping`, `query_lens` and `num_logits_per_req` are read.
        state: rows; staged writes must have been applied.
        block_size: tokens a KV block.
        step: [1] int32, in/out: steps so far; it names the place of the step's outcome.
    """
    if not use_triton(batch.positions):
        prepare_inputs_ref(batch, state, block_size, step)
        return
    _prepare_inputs_kernel[(batch.num_reqs + 1,)](
        batch.idx_mapping,
        batch.query_lens,
        batch.num_logits_per_req,
        state.all_token_ids.tensor,
        state.all_token_ids.tensor.stride(0),
        state.prefill_len.tensor,
        state.total_len.tensor,
        state.max_total_len.tensor,
        state.num_computed_tokens.tensor,
        state.last_sampled_tokens,
        state.draft_tokens,
        state.draft_tokens.stride(0),
        state.block_table.tensor,
        state.block_table.tensor.stride(0),
        batch.query_start_loc,
        batch.cu_num_logits,
        batch.seq_lens,
        batch.positions,
        batch.input_ids,
        batch.slot_mapping,
        batch.logits_indices,
        batch.expanded_idx_mapping,
        batch.expanded_local_pos,
        step,
        batch.num_reqs,
        block_size,
        state.num_speculative_tokens,
        MAX_REQS=triton.next_power_of_2(batch.num_reqs + 1),
        BLOCK_TOKENS=_BLOCK_TOKENS,
    )


def prepare_inputs_ref(
    batch: InputBatch, state: RequestState, block_size: int, step: Tensor
) -> None:
    """Torch twin of `prepare_inputs`."""
    step += 1
    batch.query_start_loc[0] = 0
    batch.cu_num_logits[0] = 0
    torch.cumsum(batch.query_lens, 0, out=batch.query_start_loc[1:])
    torch.cumsum(batch.num_logits_per_req, 0, out=batch.cu_num_logits[1:])

    place, j = _expand(batch.query_lens, batch.query_start_loc, batch.num_tokens)
    row = batch.idx_mapping.long()
    real, row = row >= 0, row.clamp(min=0)
    num_computed = state.num_computed_tokens.tensor[row]
    max_total_len = state.max_total_len.tensor[row]
    ends = torch.minimum(num_computed + batch.query_lens, max_total_len)
    batch.seq_lens.copy_(torch.where(real, ends, 0))

    row_of_token = row[place]
    pos = num_computed[place].long() + j
    writes = real[place] & (pos < max_total_len[place])
    pos = torch.where(writes, pos, 0)
    prefill_len = state.prefill_len.tensor[row_of_token]
    total_len = state.total_len.tensor[row_of_token]
    committed = state.all_token_ids.tensor[row_of_token, pos].long()
    column = pos - total_len
    if state.num_speculative_tokens > 0:
        safe = column.clamp(0, state.num_speculative_tokens - 1)
        drafts = state.draft_tokens[row_of_token, safe].clamp(min=0)
        drafts = torch.where((column >= 0) & (column < state.num_speculative_tokens), drafts, 0)
    else:
        drafts = torch.zeros_like(pos)
    last_sampled = state.last_sampled_tokens[row_of_token, 0]
    token = torch.where(pos == total_len - 1, last_sampled, drafts)
    token = torch.where(pos < prefill_len, committed, token)
    batch.positions.copy_(pos)
    batch.input_ids.copy_(torch.where(writes, token, 0))
    block = state.block_table.tensor[row_of_token, pos // block_size].long()
    batch.slot_mapping.copy_(torch.where(writes, block * block_size + pos % block_size, -1))

    place, i = _expand(batch.num_logits_per_req, batch.cu_num_logits, batch.num_logits)
    first_line = batch.query_start_loc[1:] - batch.num_logits_per_req
    batch.logits_indices.copy_(first_line[place].long() + i)
    batch.expanded_idx_mapping.copy_(batch.idx_mapping[place])
    batch.expanded_local_pos.copy_(i)


def _expand(lengths: Tensor, starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return, for each of `total` ragged elements, its place and its index inside the place."""
    places = torch.arange(len(lengths), device=lengths.device)
    place = torch.repeat_interleave(places, lengths.long(), output_size=total)
    inside = torch.arange(total, device=lengths.device) - starts[place].long()
    return place, inside
