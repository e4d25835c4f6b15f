"""Adopt drafts that the host proposed: before a step verifies, they replace those of its rows.

The host stages them in a table of their own, so that a row keeps what the device proposed where the
host has nothing. What was adopted is taken out of the table: it holds for one step.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from runner.dispatch import use_triton
from runner.input_batch import InputBatch
from runner.states import RequestState
from specdec.protocols import DRAFT_KIND_ONE_HOT


@triton.jit
def _adopt_drafts_kernel(
    idx_mapping_ptr,  # [R] int32
    is_verify_ptr,  # [R] int32
    host_drafts_ptr,  # [N, K] int32, in/out
    host_drafts_stride,
    draft_tokens_ptr,  # [N, K] int64, out
    draft_tokens_stride,
    draft_kind_ptr,  # [N] int8, out
    from_host_ptr,  # [N] int8, out
    num_columns,
    ONE_HOT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row < 0:
        return
    j = tl.arange(0, WIDTH)
    inside = j < num_columns
    pointers = host_drafts_ptr + row * host_drafts_stride + j
    drafts = tl.load(pointers, mask=inside, other=-1)
    # By a sum and no second load: a warp that comes late would read what another has cleared.
    first = tl.sum(tl.where(j == 0, drafts, 0), axis=0)
    adopts = ((first >= 0) & (tl.load(is_verify_ptr + place) > 0)).to(tl.int32)
    out = draft_tokens_ptr + row * draft_tokens_stride + j
    # A count and no flag: the interpreter does not take a scalar bool for a part of a mask.
    tl.store(out, drafts.to(tl.int64), mask=j < num_columns * adopts)
    tl.store(pointers, tl.full((WIDTH,), -1, tl.int32), mask=inside)
    kind = tl.load(draft_kind_ptr + row).to(tl.int32)
    tl.store(draft_kind_ptr + row, tl.where(adopts > 0, ONE_HOT, kind).to(tl.int8))
    tl.store(from_host_ptr + row, adopts.to(tl.int8))


def adopt_drafts(batch: InputBatch, state: RequestState) -> None:
    """Take what the host staged for a step's rows as their drafts.

    A place that runs prompt tokens verifies none: what may be staged for its row was meant for an
    earlier owner, and is dropped.

    Args:
        batch: the step, whose columns were staged.
        state: rows. `draft_tokens`, `draft_kind` and `from_host` are set where the first column of
            `host_drafts` is no -1; that table becomes -1.
    """
    if not use_triton(batch.idx_mapping):
        adopt_drafts_ref(batch, state)
        return
    host_drafts, num_columns = state.host_drafts.tensor, state.num_speculative_tokens
    _adopt_drafts_kernel[(batch.num_reqs,)](
        batch.idx_mapping,
        batch.is_verify,
        host_drafts,
        host_drafts.stride(0),
        state.draft_tokens,
        state.draft_tokens.stride(0),
        state.draft_kind,
        state.from_host,
        num_columns,
        ONE_HOT=DRAFT_KIND_ONE_HOT,
        WIDTH=triton.next_power_of_2(num_columns),
    )


def adopt_drafts_ref(batch: InputBatch, state: RequestState) -> None:
    """Torch twin of `adopt_drafts`."""
    real = batch.idx_mapping >= 0
    row = batch.idx_mapping[real].long()
    host_drafts = state.host_drafts.tensor
    drafts = host_drafts[row].long()
    adopts = (drafts[:, 0] >= 0) & (batch.is_verify[real] > 0)
    state.draft_tokens[row] = torch.where(adopts[:, None], drafts, state.draft_tokens[row])
    kind = state.draft_kind[row]
    one_hot = torch.full_like(kind, DRAFT_KIND_ONE_HOT)
    state.draft_kind[row] = torch.where(adopts, one_hot, kind)
    state.from_host[row] = adopts.to(torch.int8)
    host_drafts[row] = -1
