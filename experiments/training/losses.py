"""The loss of a drafter against the target's law, with the output head and all logits inside.

With p the target's law over its *whole* vocabulary at a position, of which the draft vocabulary D
keeps a part, and q the drafter's law over D:

    ce      -log q(y), y the text's next token; a position where y is not in D adds nothing
    kl      -sum over D of p log q: the divergence of q from p up to p's entropy; a position whose
            tokens D does not have weighs as much as the mass that it has
    tv      1 - sum over D of min(p, q): the probability that a draft from q is rejected

The output head is frozen and its input is all that is learned, so the gradient with respect to that
input is computed together with the loss, a chunk of positions at a time: at no time are there
logits of more than a chunk, whatever the number of passes, and the target's law is computed once
for all passes. On a GPU what is done to a chunk's logits is compiled into few kernels
(`torch.compile`): in eager mode it passes over them some fifteen times.

Source: Leviathan et al. 2023 (acceptance is 1 - TV); Li et al. 2025 (soft targets); Hsu et al. 2024
(Liger, the fusion of head and loss).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

from specdec.errors import ConfigError

LossRows = tuple[Tensor, Tensor]  # loss [C], gradient with respect to the logits [C, V_draft]


class Law(NamedTuple):
    """The target's law at the positions of a chunk."""

    probs: Tensor  # [C, V_draft] float32, of the whole vocabulary's softmax
    mass: Tensor  # [C, 1] float32, its sum
    labels: Tensor  # [C] int64, column of the text's next token; -1 = not in the draft vocabulary
    best: Tensor  # [C] int64, column of the law's best token, likewise


class Draft(NamedTuple):
    """The drafter's law at the same positions."""

    log_probs: Tensor  # [C, V_draft] float32
    probs: Tensor  # [C, V_draft] float32


class Judged(NamedTuple):
    """What a chunk of drafts is worth."""

    loss: Tensor  # [C] float32
    accepted: Tensor  # [C] float32, the sum of min(p, q)
    agreed: Tensor  # [C] float32, 1 where the best tokens are the same
    grad: Tensor  # [C, V_draft], of the loss with respect to the logits


def cross_entropy(draft: Draft, law: Law) -> LossRows:
    """Return the hard loss; it is 0 where the label is not in the vocabulary."""
    known = (law.labels >= 0).float()
    labels = law.labels.clamp(min=0)[:, None]
    loss = -draft.log_probs.gather(1, labels)[:, 0] * known
    grad = draft.probs.scatter_add(1, labels, torch.full_like(draft.probs[:, :1], -1.0))
    return loss, grad.mul_(known[:, None])


def soft_cross_entropy(draft: Draft, law: Law) -> LossRows:
    """Return the soft loss against the target's law."""
    loss = -(law.probs * draft.log_probs).sum(1)
    return loss, (draft.probs * law.mass).sub_(law.probs)


def total_variation(draft: Draft, law: Law) -> LossRows:
    """Return the probability of a rejection."""
    below = (draft.probs < law.probs).float()  # where more of q would be accepted
    loss = 1 - torch.minimum(draft.probs, law.probs).sum(1)
    gain = (below * draft.probs).sum(1, keepdim=True)
    return loss, draft.probs * (gain - below)


LOSSES: dict[str, Callable[[Draft, Law], LossRows]] = {
    "ce": cross_entropy,
    "kl": soft_cross_entropy,
    "tv": total_variation,
}


class OutputHead:
    """The target's frozen output head, and the part of it that the drafter has.

    Args:
        weight: [V, hidden].
        target_ids: [V_draft] int64, the target's id of each draft id; None: the whole vocabulary.
    """

    def __init__(self, weight: Tensor, target_ids: Tensor | None = None) -> None:
        self.weight, self.target_ids = weight, target_ids
        ids = torch.arange(len(weight), device=weight.device) if target_ids is None else target_ids
        # [V_draft, hidden]
        self.rows = weight if target_ids is None else weight[ids].contiguous()
        # [V] int64: the draft id of each of the target's, -1 = not drafted
        self.column = torch.full((len(weight),), -1, dtype=torch.int64, device=weight.device)
        self.column[ids] = torch.arange(len(ids), device=weight.device)


@dataclass(frozen=True)
class LossSpec:
    """What is minimised.

    Args:
        kind: key of LOSSES.
        offsets: pass j at line s is judged by the target's law at line s + offsets[j].
        weights: of the passes; only their ratios count.
        chunk_rows: positions at a time.
    """

    kind: str
    offsets: Sequence[int]
    weights: Sequence[float]
    chunk_rows: int = 4096

    def __post_init__(self) -> None:
        """Check the choices."""
        if self.kind not in LOSSES:
            raise ConfigError(f"loss={self.kind!r} is not allowed; give one of {', '.join(LOSSES)}")
        assert len(self.offsets) == len(self.weights), (self.offsets, self.weights)


@dataclass(frozen=True)
class LossTargets:
    """What a batch is judged by.

    Args:
        states: [T, hidden], the target's states after its last norm.
        next_ids: [T] int64, the token behind each line.
        lines: [R] int64, lines of T whose law counts.
        places: [R] int64, of these lines in their own sequences.
    """

    states: Tensor
    next_ids: Tensor
    lines: Tensor
    places: Tensor


class PassFigures(NamedTuple):
    """What is known of each pass, [J] float64 each, on the device."""

    loss: Tensor  # mean over positions
    accepted: Tensor  # mean of sum(min(p, q)): acceptance of a draft drawn from q
    agreed: Tensor  # share of positions where draft and target have the same argmax
    num_positions: Tensor


def fused_loss(
    hidden: Tensor, head: OutputHead, targets: LossTargets, spec: LossSpec
) -> tuple[Tensor, PassFigures]:
    """Return the mean loss over passes and positions, and what is known of each pass.

    Args:
        hidden: [J, T, hidden], what the output head is to read, of J passes.
        head: of the target.
        targets: of the batch.
        spec: what is minimised.

    Returns:
        A scalar that `backward` may be called on, and figures without gradients.
    """
    loss, *figures = _FusedLoss.apply(hidden, head, targets, spec)
    return loss, PassFigures(*figures)


class _FusedLoss(torch.autograd.Function):
    """Computes the gradient in the forward; the backward scales it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: OutputHead, targets: LossTargets, spec: LossSpec
    ) -> tuple[Tensor, ...]:
        """See `fused_loss`."""
        num_passes = len(hidden)
        assert num_passes == len(spec.offsets), (hidden.shape, spec.offsets)
        wants_grad = ctx.needs_input_grad[0]
        grad = torch.zeros_like(hidden) if wants_grad else None
        # Nothing of the host's goes to the device here: it would wait for what runs there.
        counts = torch.stack([(targets.places >= offset).sum() for offset in spec.offsets])
        total = sum(spec.weights)
        scales = [
            weight / total / count
            for weight, count in zip(spec.weights, counts.clamp(min=1).double(), strict=True)
        ]
        sums = torch.zeros(3, num_passes, dtype=torch.float64, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        law_of, judge = (_law_of, _judge)
        if hidden.is_cuda:
            law_of, judge = (_law_compiled, _judge_compiled)
        # Every cast is meant as it is written.
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, len(targets.lines), spec.chunk_rows):
                chunk = slice(begin, begin + spec.chunk_rows)
                lines, places = targets.lines[chunk], targets.places[chunk]
                states = targets.states.index_select(0, lines).to(head.weight.dtype)
                probs, mass, best = law_of(linear(states, head.weight), head.target_ids)
                labels = head.column[targets.next_ids[lines]]
                law = Law(probs, mass, labels, head.column[best])
                for j, offset in enumerate(spec.offsets):
                    valid = places >= offset
                    source = (lines - offset).clamp(min=0)
                    states = hidden[j].index_select(0, source).to(head.rows.dtype)
                    judged = judge(spec.kind, linear(states, head.rows), law)
                    sums[:, j] += torch.stack(judged[:3]).mul_(valid).sum(1)
                    scale = (scales[j] * valid).float()
                    loss += (judged.loss * scale).sum()
                    if grad is not None:
                        own = (judged.grad @ head.rows).float() * scale[:, None]
                        grad[j].index_add_(0, source, own.to(grad.dtype))
        ctx.grad = grad
        means = sums / counts.clamp(min=1)
        figures = (means[0], means[1], means[2], counts)
        ctx.mark_non_differentiable(*figures)
        return loss.float(), *figures

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Scale what the forward computed."""
        return ctx.grad * grad_outputs[0].to(ctx.grad.dtype), None, None, None


def _law_of(logits: Tensor, target_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's law over the draft vocabulary, its sum, and the best token, [C] int64."""
    # log_softmax is one kernel with one output; a log-sum-exp passes over its logits six times.
    log_probs = log_softmax(logits.float(), 1)
    if target_ids is not None:
        log_probs = log_probs.index_select(1, target_ids)
    probs = log_probs.exp()
    return probs, probs.sum(1, keepdim=True), logits.argmax(1)


def _judge(kind: str, logits: Tensor, law: Law) -> Judged:
    """Return what the drafter's logits [C, V_draft] are worth, and their gradient."""
    log_probs = log_softmax(logits.float(), 1)
    draft = Draft(log_probs, log_probs.exp())
    loss, grad = LOSSES[kind](draft, law)
    accepted = torch.minimum(draft.probs, law.probs).sum(1)
    agreed = (draft.log_probs.argmax(1) == law.best).float()
    return Judged(loss, accepted, agreed, grad.to(logits.dtype))


_law_compiled = torch.compile(_law_of, dynamic=True)
_judge_compiled = torch.compile(_judge, dynamic=True)
