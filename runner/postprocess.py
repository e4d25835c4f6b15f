"""Commit sampled tokens to state and set how many drafts each row can still use.

num_rejected = num_logits - num_sampled for a verification (positions without a draft included),
               0 for a prefill chunk
num_computed_tokens += query_len - num_rejected
total_len           += num_sampled, whose tokens are appended to all_token_ids
draft_limit          = min(draft_budget, max_total_len - total_len - 1,
                           draft_context - total_len), at least 0
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
from specdec.protocols import DRAFT_KIND_NONE


@triton.jit
def _post_update_kernel(
    idx_mapping_ptr,  # [R] int32
    query_lens_ptr,  # [R] int32
    num_logits_ptr,  # [R] int32
    samples_ptr,  # [R] int32
    is_verify_ptr,  # [R] int32
    sampled_tokens_ptr,  # [R, W] int64
    sampled_tokens_stride,
    num_sampled_ptr,  # [R] int32, in/out
    num_rejected_ptr,  # [R] int32, out
    all_token_ids_ptr,
    all_token_ids_stride,
    total_len_ptr,
    max_total_len_ptr,
    num_computed_tokens_ptr,
    draft_budget_ptr,
    last_sampled_tokens_ptr,
    draft_limit_ptr,
    draft_context,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row < 0:
        tl.store(num_sampled_ptr + place, 0)
        tl.store(num_rejected_ptr + place, 0)
        return
    total_len = tl.load(total_len_ptr + row)
    max_total_len = tl.load(max_total_len_ptr + row)
    query_len = tl.load(query_lens_ptr + place)
    is_verify = tl.load(is_verify_ptr + place)
    room = tl.maximum(max_total_len - total_len, 0)
    num_sampled = tl.minimum(tl.load(num_sampled_ptr + place), room)
    num_sampled = num_sampled * tl.load(samples_ptr + place)
    num_rejected = (tl.load(num_logits_ptr + place) - num_sampled) * is_verify
    j = tl.arange(0, WIDTH)
    kept = j < num_sampled
    tokens = tl.load(sampled_tokens_ptr + place * sampled_tokens_stride + j, mask=kept, other=0)
    tl.store(
        all_token_ids_ptr + row * all_token_ids_stride + total_len + j,
        tokens.to(tl.int32),
        mask=kept,
    )
    if num_sampled > 0:
        last = tl.sum(tl.where(j == num_sampled - 1, tokens, 0))
        tl.store(last_sampled_tokens_ptr + row, last)
    total_len += num_sampled
    tl.store(total_len_ptr + row, total_len)
    computed = tl.load(num_computed_tokens_ptr + row) + query_len - num_rejected
    tl.store(num_computed_tokens_ptr + row, computed)
    limit = tl.minimum(tl.load(draft_budget_ptr + row), max_total_len - total_len - 1)
    limit = tl.minimum(limit, draft_context - total_len)
    limit = tl.where(tl.load(samples_ptr + place) > 0, tl.maximum(limit, 0), 0)
    tl.store(draft_limit_ptr + row, limit)
    tl.store(num_sampled_ptr + place, num_sampled)
    tl.store(num_rejected_ptr + place, num_rejected)


def post_update(
    batch: InputBatch,
    state: RequestState,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
) -> None:
    """Commit a step's tokens and advance the rows.

    Args:
        batch: the step.
        state: rows to advance.
        sampled_tokens: [R, W] int64, the first `num_sampled` of each place are committed.
        num_sampled: [R] int32, in/out: set to 0 for a chunk before the last and for padding, and
            cut at the row's end.
        num_rejected: [R] int32, out: verified positions that were not accepted, -1 positions
            included.
    """
    if not use_triton(num_sampled):
        post_update_ref(batch, state, sampled_tokens, num_sampled, num_rejected)
        return
    _post_update_kernel[(batch.num_reqs,)](
        batch.idx_mapping,
        batch.query_lens,
        batch.num_logits_per_req,
        batch.samples,
        batch.is_verify,
        sampled_tokens,
        sampled_tokens.stride(0),
        num_sampled,
        num_rejected,
        state.all_token_ids.tensor,
        state.all_token_ids.tensor.stride(0),
        state.total_len.tensor,
        state.max_total_len.tensor,
        state.num_computed_tokens.tensor,
        state.draft_budget.tensor,
        state.last_sampled_tokens,
        state.draft_limit,
        state.draft_context,
        WIDTH=triton.next_power_of_2(sampled_tokens.shape[1]),
    )


def post_update_ref(
    batch: InputBatch,
    state: RequestState,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
) -> None:
    """Torch twin of `post_update`."""
    real = batch.idx_mapping >= 0
    # Padding must not write, and only real places may be scattered to (rows are then unique).
    row = batch.idx_mapping[real].long()
    total_len = state.total_len.tensor[row]
    max_total_len = state.max_total_len.tensor[row]
    room = (max_total_len - total_len).clamp(min=0)
    sampled = torch.minimum(num_sampled[real], room) * batch.samples[real]
    rejected = (batch.num_logits_per_req[real] - sampled) * batch.is_verify[real]
    tokens = sampled_tokens[real]
    j = torch.arange(tokens.shape[1], device=tokens.device)
    place, column = (j < sampled[:, None]).nonzero(as_tuple=True)
    columns = total_len[place].long() + column
    state.all_token_ids.tensor[row[place], columns] = tokens[place, column].int()
    last = tokens.gather(1, (sampled.long() - 1).clamp(min=0)[:, None])
    kept = torch.where(sampled[:, None] > 0, last, state.last_sampled_tokens[row])
    state.last_sampled_tokens[row] = kept
    total_len = total_len + sampled
    state.total_len.tensor[row] = total_len
    state.num_computed_tokens.tensor[row] += batch.query_lens[real] - rejected
    limit = torch.minimum(state.draft_budget.tensor[row], max_total_len - total_len - 1)
    limit = torch.minimum(limit, state.draft_context - total_len)
    state.draft_limit[row] = limit.clamp(min=0) * batch.samples[real]
    num_sampled.zero_()
    num_rejected.zero_()
    num_sampled[real] = sampled
    num_rejected[real] = rejected


@triton.jit(do_not_specialize=["most_drafts"])
def _limit_drafts_kernel(
    idx_mapping_ptr,  # [R] int32
    draft_tokens_ptr,  # [N, K] int64, in/out
    draft_tokens_stride,
    draft_kind_ptr,  # [N] int8, in/out
    draft_limit_ptr,  # [N] int32
    num_drafts_ptr,  # [R] int32, out
    num_columns,
    most_drafts,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row < 0:
        tl.store(num_drafts_ptr + place, 0)
        return
    j = tl.arange(0, WIDTH)
    inside = j < num_columns
    pointers = draft_tokens_ptr + row * draft_tokens_stride + j
    drafts = tl.load(pointers, mask=inside, other=-1)
    limit = tl.minimum(tl.load(draft_limit_ptr + row), most_drafts)
    holes = (drafts < 0) | (j >= limit)
    first_hole = tl.min(tl.where(holes, j, WIDTH))
    num_drafts = tl.minimum(first_hole, num_columns)
    tl.store(pointers, tl.where(j < num_drafts, drafts, -1), mask=inside)
    tl.store(num_drafts_ptr + place, num_drafts)
    kind = tl.load(draft_kind_ptr + row).to(tl.int32)
    kind = tl.where(num_drafts == 0, 0, tl.where(kind == 0, 1, kind))
    tl.store(draft_kind_ptr + row, kind.to(tl.int8))


def limit_drafts(
    batch: InputBatch, state: RequestState, num_drafts: Tensor, most_drafts: int
) -> None:
    """Cut what a drafter proposed to a valid run, and count it.

    A -1 ends the run (nothing after it can be accepted), as do the row's `draft_limit` and the
    number of drafts that the step was to propose. A row with drafts and kind 0 becomes one-hot, a
    row without drafts kind 0.

    Args:
        batch: the step.
        state: rows whose `draft_tokens` and `draft_kind` are cut.
        num_drafts: [R] int32, out: valid drafts of each place.
        most_drafts: the step was to propose, at most K.
    """
    if not use_triton(num_drafts):
        limit_drafts_ref(batch, state, num_drafts, most_drafts)
        return
    _limit_drafts_kernel[(batch.num_reqs,)](
        batch.idx_mapping,
        state.draft_tokens,
        state.draft_tokens.stride(0),
        state.draft_kind,
        state.draft_limit,
        num_drafts,
        state.num_speculative_tokens,
        most_drafts,
        WIDTH=triton.next_power_of_2(max(state.num_speculative_tokens, 1)),
    )


def limit_drafts_ref(
    batch: InputBatch, state: RequestState, num_drafts: Tensor, most_drafts: int
) -> None:
    """Torch twin of `limit_drafts`."""
    real = batch.idx_mapping >= 0
    row = batch.idx_mapping[real].long()
    drafts = state.draft_tokens[row]
    j = torch.arange(drafts.shape[1], device=drafts.device)
    limit = state.draft_limit[row].clamp(max=most_drafts)
    usable = (drafts >= 0) & (j < limit[:, None])
    valid = usable.int().cumprod(1).bool()
    counts = valid.sum(1, dtype=torch.int32)
    state.draft_tokens[row] = torch.where(valid, drafts, -1)
    kind = state.draft_kind[row].clamp(min=1)
    state.draft_kind[row] = torch.where(counts > 0, kind, torch.zeros_like(kind))
    num_drafts.zero_()
    num_drafts[real] = counts


@triton.jit
def _clear_drafts_kernel(
    idx_mapping_ptr,  # [R] int32
    draft_tokens_ptr,  # [N, K] int64, out
    draft_tokens_stride,
    draft_kind_ptr,  # [N] int8, out
    num_columns,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row >= 0:
        j = tl.arange(0, WIDTH)
        none = tl.full((WIDTH,), -1, tl.int64)
        tl.store(draft_tokens_ptr + row * draft_tokens_stride + j, none, mask=j < num_columns)
        tl.store(draft_kind_ptr + row, tl.full((), 0, tl.int8))


def clear_drafts(idx_mapping: Tensor, draft_tokens: Tensor, draft_kind: Tensor) -> None:
    """Set the step's rows to "no draft", before the drafter proposes.

    Args:
        idx_mapping: [R] int32, -1 in padding.
        draft_tokens: [N, K] int64, out: -1.
        draft_kind: [N] int8, out: 0.
    """
    if not use_triton(draft_tokens):
        clear_drafts_ref(idx_mapping, draft_tokens, draft_kind)
        return
    num_columns = draft_tokens.shape[1]
    _clear_drafts_kernel[(len(idx_mapping),)](
        idx_mapping,
        draft_tokens,
        draft_tokens.stride(0),
        draft_kind,
        num_columns,
        WIDTH=triton.next_power_of_2(num_columns),
    )


def clear_drafts_ref(idx_mapping: Tensor, draft_tokens: Tensor, draft_kind: Tensor) -> None:
    """Torch twin of `clear_drafts`."""
    row = idx_mapping[idx_mapping >= 0].long()
    draft_tokens[row] = -1
    draft_kind[row] = DRAFT_KIND_NONE
