"""End a row's drafts where the drafter itself doubts them.

    product_i = confidence_1 * ... * confidence_i

The run ends at the first draft i whose product falls under a threshold. Whether that draft itself
still goes to the verifier must not depend on how it was drawn: a rule that weighs a draft against
the law q that it came from takes it for a fair draw of q. So a draft with q stays and ends the run
(whether it is there was decided by the ones before it), and a one-hot draft, which is right to
leave out whatever it is, goes.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from runner.rows import scatter_rows
from specdec.protocols import DRAFT_KIND_WITH_Q

_WITH_Q = tl.constexpr(DRAFT_KIND_WITH_Q)


def store_confidence(
    confidence: Tensor, idx_mapping: Tensor, index: int, logits: Tensor, drafts: Tensor
) -> None:
    """Write the probability of every place's draft under softmax(logits).

    Args:
        confidence: [N, K] float32, out: column `index` of the places' rows.
        idx_mapping: [R] int32, -1 in padding.
        index: which draft of the run, from 0.
        logits: [R, V] any float dtype, of the law that the draft is drawn from.
        drafts: [R] int64.
    """
    logits = logits.float()
    chosen = logits.gather(1, drafts[:, None]) - logits.logsumexp(1, keepdim=True)
    scatter_rows(confidence[:, index : index + 1], idx_mapping, chosen.exp())


@triton.jit
def _cut_by_confidence_kernel(
    idx_mapping_ptr,  # [R] int32, -1 in padding
    draft_tokens_ptr,  # [N, K] int64, in/out
    draft_tokens_stride,
    draft_kind_ptr,  # [N] int8
    confidence_ptr,  # [N, K] float32
    confidence_stride,
    threshold,
    num_columns,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row >= 0:
        stays = tl.load(draft_kind_ptr + row) == _WITH_Q
        product = tl.full((), 1.0, tl.float32)
        ended = tl.full((), 0, tl.int32)
        for j in range(0, num_columns):
            draft = draft_tokens_ptr + row * draft_tokens_stride + j
            product *= tl.load(confidence_ptr + row * confidence_stride + j)
            falls = (product < threshold).to(tl.int32)
            cut = tl.where(stays, ended, tl.maximum(ended, falls))
            tl.store(draft, tl.where(cut > 0, -1, tl.load(draft)))
            ended = tl.maximum(ended, falls)


def cut_by_confidence(
    idx_mapping: Tensor,
    draft_tokens: Tensor,
    draft_kind: Tensor,
    confidence: Tensor,
    threshold: float,
) -> None:
    """Set drafts behind a row's cut to -1.

    Args:
        idx_mapping: [R] int32, -1 in padding.
        draft_tokens: [N, K] int64, in/out.
        draft_kind: [N] int8, as the drafter left it.
        confidence: [N, K] float32, read as far as there are drafts.
        threshold: the least running product.
    """
    if not use_triton(draft_tokens):
        cut_by_confidence_ref(idx_mapping, draft_tokens, draft_kind, confidence, threshold)
        return
    _cut_by_confidence_kernel[(len(idx_mapping),)](
        idx_mapping,
        draft_tokens,
        draft_tokens.stride(0),
        draft_kind,
        confidence,
        confidence.stride(0),
        threshold,
        draft_tokens.shape[1],
    )


def cut_by_confidence_ref(
    idx_mapping: Tensor,
    draft_tokens: Tensor,
    draft_kind: Tensor,
    confidence: Tensor,
    threshold: float,
) -> None:
    """Torch twin of `cut_by_confidence`."""
    row = idx_mapping[idx_mapping >= 0].long()
    falls = confidence[row].cumprod(1) < threshold
    ended = falls.int().cummax(1).values.bool() if falls.numel() else falls
    before = torch.zeros_like(ended)
    before[:, 1:] = ended[:, :-1]
    cut = torch.where((draft_kind[row] == DRAFT_KIND_WITH_Q)[:, None], before, ended)
    draft_tokens[row] = torch.where(cut, -1, draft_tokens[row])
