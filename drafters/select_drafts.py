"""Choose, for each place of a step, the drafts of one of several drafters.

Of the children that propose anything (their first draft is not -1) the one with the highest score
is taken, the earlier one of equals; its tokens, kind and confidence become the row's.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from runner.rows import scatter_rows_ref
from specdec.protocols import DRAFT_KIND_NONE, DraftBuffers


@dataclass(frozen=True)
class ChildDrafts:
    """What C children proposed, at fixed addresses."""

    tokens: Tensor  # [C, N, K] int64, -1 = no draft here
    kind: Tensor  # [C, N] int8
    confidence: Tensor | None  # [C, N, K] float32, where the row's is asked for


@triton.jit
def _select_drafts_kernel(
    idx_mapping_ptr,  # [R] int32, -1 in padding
    scores_ptr,  # [R, C] float32
    scores_stride,
    tokens_ptr,  # [C, N, K] int64, contiguous
    kind_ptr,  # [C, N] int8, contiguous
    confidence_ptr,  # [C, N, K] float32, contiguous
    draft_tokens_ptr,  # [N, K] int64, out
    draft_tokens_stride,
    draft_kind_ptr,  # [N] int8, out
    draft_confidence_ptr,  # [N, K] float32, out
    draft_confidence_stride,
    chosen_ptr,  # [N] int32, out
    num_rows,
    num_children,
    num_columns,
    HAS_CONFIDENCE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row < 0:
        return
    best = tl.full((), -1, tl.int32)
    best_score = tl.full((), 0.0, tl.float32)
    for child in range(num_children):
        line = child * num_rows + row
        first = tl.load(tokens_ptr + line * num_columns)
        score = tl.load(scores_ptr + place * scores_stride + child)
        wins = (first >= 0) & ((best < 0) | (score > best_score))
        best = tl.where(wins, child, best)
        best_score = tl.where(wins, score, best_score)
    tl.store(chosen_ptr + row, best)
    line = tl.maximum(best, 0).to(tl.int64) * num_rows + row
    kind = tl.load(kind_ptr + line).to(tl.int32)
    tl.store(draft_kind_ptr + row, tl.where(best >= 0, kind, 0).to(tl.int8))
    j = tl.arange(0, WIDTH)
    inside = j < num_columns
    # A child without a first draft may hold others: they count for nothing.
    tokens = tl.load(tokens_ptr + line * num_columns + j, mask=inside, other=-1)
    tokens = tl.where(best >= 0, tokens, -1)
    tl.store(draft_tokens_ptr + row * draft_tokens_stride + j, tokens, mask=inside)
    if HAS_CONFIDENCE:
        confidence = tl.load(confidence_ptr + line * num_columns + j, mask=inside, other=0.0)
        out = draft_confidence_ptr + row * draft_confidence_stride + j
        tl.store(out, confidence, mask=inside)


def select_drafts(
    idx_mapping: Tensor,
    scores: Tensor,
    children: ChildDrafts,
    buffers: DraftBuffers,
    chosen: Tensor,
) -> None:
    """Write one child's drafts to each row of a step; one launch.

    Args:
        idx_mapping: [R] int32, -1 in padding, where nothing is written.
        scores: [R, C] float32, by place.
        children: what was proposed.
        buffers: `draft_tokens`, `draft_kind` and, where there is one, `draft_confidence` are
            written.
        chosen: [N] int32, out: which child, -1 where none proposes.
    """
    if not use_triton(idx_mapping):
        select_drafts_ref(idx_mapping, scores, children, buffers, chosen)
        return
    num_children, num_rows, num_columns = children.tokens.shape
    confidence, draft_confidence = children.confidence, buffers.draft_confidence
    has_confidence = confidence is not None and draft_confidence is not None
    assert children.tokens.is_contiguous()
    assert scores.stride(1) == 1, scores.stride()
    _select_drafts_kernel[(len(idx_mapping),)](
        idx_mapping,
        scores,
        scores.stride(0),
        children.tokens,
        children.kind,
        confidence if has_confidence else scores,
        buffers.draft_tokens,
        buffers.draft_tokens.stride(0),
        buffers.draft_kind,
        draft_confidence if has_confidence else scores,
        draft_confidence.stride(0) if draft_confidence is not None else 0,
        chosen,
        num_rows,
        num_children,
        num_columns,
        HAS_CONFIDENCE=has_confidence,
        WIDTH=triton.next_power_of_2(num_columns),
    )


def select_drafts_ref(
    idx_mapping: Tensor,
    scores: Tensor,
    children: ChildDrafts,
    buffers: DraftBuffers,
    chosen: Tensor,
) -> None:
    """Torch twin of `select_drafts`."""
    rows = idx_mapping.long().clamp(min=0)
    proposes = (children.tokens[:, rows, 0] >= 0).T  # [R, C]
    # The first of equals: argmax does not promise it.
    masked = torch.where(proposes, scores, float("-inf"))
    child = torch.arange(scores.shape[1], device=scores.device)
    is_best = proposes & (masked == masked.max(1, keepdim=True).values)
    best = torch.where(is_best, child, scores.shape[1]).min(1).values
    known = best < scores.shape[1]
    best = torch.where(known, best, 0)
    tokens = torch.where(known[:, None], children.tokens[best, rows], -1)
    kind = torch.where(known, children.kind[best, rows], DRAFT_KIND_NONE)
    scatter_rows_ref(buffers.draft_tokens, idx_mapping, tokens)
    scatter_rows_ref(buffers.draft_kind, idx_mapping, kind)
    scatter_rows_ref(chosen, idx_mapping, torch.where(known, best, -1).int())
    if children.confidence is not None and buffers.draft_confidence is not None:
        scatter_rows_ref(buffers.draft_confidence, idx_mapping, children.confidence[best, rows])
