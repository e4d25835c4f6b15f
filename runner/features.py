"""What a step of the target leaves for the drafter, and the fixed tensors that stand for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.async_output import StepTensors
from runner.models.hf import HFModel
from specdec.protocols import DrafterCapabilities


@dataclass(frozen=True)
class Features:
    """What the target computed for each token of a step."""

    hidden_states: Tensor | None = None  # [T, hidden], after the last norm
    aux_hidden_states: Tensor | None = None  # [T, A * hidden], where layers are wanted

    def copy_(self, source: "Features") -> None:
        """Copy those of another step that are held here."""
        for own, other in (
            (self.hidden_states, source.hidden_states),
            (self.aux_hidden_states, source.aux_hidden_states),
        ):
            if own is not None:
                assert other is not None, "the target was run without what its drafter wants"
                own.copy_(other)


class FixedInputs:
    """What a drafter's graph reads of a target that ran outside of it, at fixed addresses.

    Args:
        max_reqs: requests of the largest fixed shape.
        query_len: tokens that each of them runs.
        target: the model that computes the features.
        wants: which of them the drafter reads.
    """

    def __init__(
        self, max_reqs: int, query_len: int, target: HFModel, wants: DrafterCapabilities
    ) -> None:
        device, width = target.device, target.hidden_size
        # Each allocated alone: kernels are compiled for the alignment of their arguments.
        counts = [torch.zeros(max_reqs, dtype=torch.int32, device=device) for _ in range(3)]
        no_tokens = torch.empty(max_reqs, 0, dtype=torch.int64, device=device)
        self._outcome = StepTensors(no_tokens, counts[0], counts[1], no_tokens, counts[2])

        def zeros(columns: int) -> Tensor:
            shape = (max_reqs * query_len, columns)
            return torch.zeros(shape, dtype=target.dtype, device=device)

        aux = len(wants.aux_layers)
        self._hidden = zeros(width) if wants.hidden_states == "last" else None
        self._aux = zeros(aux * width) if aux else None

    def outcome(self, num_reqs: int) -> StepTensors:
        """Return what stands for the outcome of a step of so many places."""
        fixed, n = self._outcome, num_reqs
        return StepTensors(
            fixed.sampled_tokens[:n],
            fixed.num_sampled[:n],
            fixed.num_rejected[:n],
            fixed.num_judged[:n],
            fixed.num_drafts[:n],
        )

    def features(self, num_tokens: int) -> Features:
        """Return what stands for the features of so many tokens."""
        hidden, aux = self._hidden, self._aux
        return Features(
            None if hidden is None else hidden[:num_tokens],
            None if aux is None else aux[:num_tokens],
        )
