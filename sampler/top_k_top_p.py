"""Truncate a distribution: first to the top_k most probable tokens, then to mass top_p.

top_p is taken over what top_k left, renormalised; the token that crosses the mass is kept. Tokens
whose logit equals the last kept one are kept too, so that the result does not depend on an order
among equals.
"""

import torch
from torch import Tensor

_HEAD = 512  # on a CPU the cut nearly always lies among these; a full sort is the exact fall-back


def apply_top_k_top_p(logits: Tensor, idx_mapping: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set every logit outside the kept set to -inf, in place.

    Args:
        logits: [L, V] float32, divided by the temperature.
        idx_mapping: [L] int32, line -> row, -1 in padding.
        top_k: [N] int32, V = no limit.
        top_p: [N] float32, 1 = no limit.
    """
    rows = idx_mapping.long().clamp(min=0)
    line_k, line_p = top_k[rows].long(), top_p[rows]
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        limited = ((line_k < vocab_size) | (line_p < 1)).nonzero(as_tuple=True)[0]
        for line in limited.tolist():
            cut = _head_cut(logits[line], int(line_k[line]), float(line_p[line]))
            if cut is None:
                one = slice(line, line + 1)
                cut = _cut(logits[one], line_k[one], line_p[one])[0]
            logits[line].masked_fill_(logits[line] < cut, float("-inf"))
        return
    logits.masked_fill_(logits < _cut(logits, line_k, line_p), float("-inf"))


def _cut(logits: Tensor, line_k: Tensor, line_p: Tensor) -> Tensor:
    """Return the smallest kept logit of each line, [L, 1], by a full sort."""
    ordered = logits.sort(dim=1, descending=True).values
    kth = ordered.gather(1, (line_k - 1)[:, None])
    inside = torch.where(ordered >= kth, ordered, float("-inf"))
    probs = inside.softmax(1)
    # A token is kept while the mass before it is below top_p; the first always is.
    kept = (probs.cumsum(1) - probs) < line_p[:, None]
    kept[:, 0] = True
    kept &= inside > float("-inf")
    last = kept.sum(1, keepdim=True) - 1
    cut = ordered.gather(1, last)
    return torch.where((line_p < 1)[:, None], cut, kth)


def _head_cut(logits: Tensor, k: int, p: float) -> Tensor | None:
    """Return the smallest kept logit of one line from its head, or None where that is too short."""
    head = logits.topk(min(_HEAD, logits.shape[0])).values
    if k < logits.shape[0]:
        if k >= len(head):
            return None
        head = head[head >= head[k - 1]]
        if len(head) == _HEAD:
            return None  # equals of the k-th may lie behind the head
        total = head.logsumexp(0)
    else:
        total = logits.logsumexp(0)
    if p >= 1:
        return head[-1]
    probs = (head - total).exp()
    kept = (probs.cumsum(0) - probs) < p
    if bool(kept[-1]) and len(head) == _HEAD:
        return None
    return head[max(int(kept.sum()), 1) - 1]
