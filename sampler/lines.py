"""Which draft each logits line judges, and where in the text it draws, gathered by place.

Line j of a place judges draft j of its row. The last line of a place draws the token after its last
draft and judges none; nor do lines beyond the K columns, and lines of padding.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from runner.input_batch import InputBatch
from runner.states import RequestState


@dataclass(frozen=True)
class LineDrafts:
    """What a step's lines judge."""

    draft_tokens: Tensor  # [L] int64, -1 = none
    draft_kind: Tensor  # [L] int8, 0 in padding
    draw_positions: Tensor  # [L] int64: place in the text of the token that the line draws
    num_drafts: Tensor  # [R] int32: lines of each place that judge a draft


@triton.jit
def _gather_line_drafts_kernel(
    idx_mapping_ptr,  # [R] int32: place -> row, -1 in padding
    cu_num_logits_ptr,  # [R + 1] int32
    positions_ptr,  # [T] int64
    logits_indices_ptr,  # [L] int64: line -> token
    state_tokens_ptr,  # [N, K] int64
    state_tokens_stride,
    state_kind_ptr,  # [N] int8
    draft_tokens_ptr,  # [L] int64, out
    draft_kind_ptr,  # [L] int8, out
    draw_positions_ptr,  # [L] int64, out
    num_drafts_ptr,  # [R] int32, out
    num_columns,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    safe_row = tl.maximum(row, 0)
    start = tl.load(cu_num_logits_ptr + place)
    num_lines = tl.load(cu_num_logits_ptr + place + 1) - start
    # Counts and no scalar flag: the interpreter does not take a scalar bool for a part of a mask.
    num_judging = tl.where(row >= 0, tl.minimum(num_lines - 1, num_columns), 0)
    j = tl.arange(0, WIDTH)
    inside = j < num_lines
    lines = start + j
    drafts = tl.load(
        state_tokens_ptr + safe_row * state_tokens_stride + j, mask=j < num_judging, other=-1
    )
    kind = tl.where(row >= 0, tl.load(state_kind_ptr + safe_row), 0)
    token = tl.load(logits_indices_ptr + lines, mask=inside, other=0)
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    tl.store(draft_tokens_ptr + lines, drafts, mask=inside)
    tl.store(draft_kind_ptr + lines, (kind + j * 0).to(tl.int8), mask=inside)
    tl.store(draw_positions_ptr + lines, position + 1, mask=inside)
    tl.store(num_drafts_ptr + place, tl.sum((drafts >= 0).to(tl.int32), axis=0))


def gather_line_drafts(batch: InputBatch, state: RequestState) -> LineDrafts:
    """Return what the step's lines judge and where they draw.

    Args:
        batch: the step, whose inputs were prepared.
        state: rows with the drafts that the step verified.
    """
    if not use_triton(batch.cu_num_logits):
        return gather_line_drafts_ref(batch, state)
    device = batch.cu_num_logits.device

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    lines = LineDrafts(
        draft_tokens=empty(batch.num_logits, torch.int64),
        draft_kind=empty(batch.num_logits, torch.int8),
        draw_positions=empty(batch.num_logits, torch.int64),
        num_drafts=empty(batch.num_reqs, torch.int32),
    )
    _gather_line_drafts_kernel[(batch.num_reqs,)](
        batch.idx_mapping,
        batch.cu_num_logits,
        batch.positions,
        batch.logits_indices,
        state.draft_tokens,
        state.draft_tokens.stride(0),
        state.draft_kind,
        lines.draft_tokens,
        lines.draft_kind,
        lines.draw_positions,
        lines.num_drafts,
        state.num_speculative_tokens,
        WIDTH=triton.next_power_of_2(max(batch.max_num_logits, 1)),
    )
    return lines


def gather_line_drafts_ref(batch: InputBatch, state: RequestState) -> LineDrafts:
    """Torch twin of `gather_line_drafts`."""
    local, row = batch.expanded_local_pos.long(), batch.expanded_idx_mapping.long()
    real, row = row >= 0, row.clamp(min=0)
    num_columns = state.num_speculative_tokens
    drafts = torch.full_like(row, -1)
    if num_columns > 0:
        judges = real & (local < num_columns)
        judges[:-1] &= local[1:] > 0  # the line before another place's first is its place's last
        judges[-1:] = False
        column = local.clamp(max=num_columns - 1)
        drafts = torch.where(judges, state.draft_tokens[row, column], drafts)
    before = torch.zeros(len(row) + 1, dtype=torch.int32, device=row.device)
    torch.cumsum(drafts >= 0, 0, dtype=torch.int32, out=before[1:])
    return LineDrafts(
        draft_tokens=drafts,
        draft_kind=state.draft_kind[row] * real,
        draw_positions=batch.positions[batch.logits_indices] + 1,
        num_drafts=before[batch.cu_num_logits].diff(),
    )
