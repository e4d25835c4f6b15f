"""Medusa heads: head k learns the target's law k + 1 places behind what its hidden state chose.

Source: Cai et al. 2024 (Medusa).
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from drafters.medusa import MedusaHead, save_medusa
from experiments.training.config import FitConfig
from experiments.training.frozen_target import FrozenTarget, PaddedBatch, TargetStates
from experiments.training.trainee import Trainee


class MedusaTrainee(Trainee):
    """As many heads as passes; their projection is the target's.

    Args:
        config: of the run.
        target: frozen.
        target_ids: None.
    """

    method = "medusa"
    reduces_vocabulary = False

    def __init__(self, config: FitConfig, target: FrozenTarget, target_ids: Tensor | None) -> None:
        super().__init__(config, target, target_ids)
        size = target.model.hidden_size
        self.heads = nn.ModuleList(MedusaHead(size, 1, None) for _ in range(config.unroll))
        self.offsets = tuple(range(1, config.unroll + 1))
        if config.warm_start:  # as the target's own head: the residual alone
            for parameter in self.heads.parameters():
                nn.init.zeros_(parameter)

    def forward(self, batch: PaddedBatch, states: TargetStates) -> Tensor:
        """Return [J, T, hidden], one for each head."""
        return torch.stack([head(states.last) for head in self.heads])

    def save(self, folder: Path, state: dict[str, Tensor], target_name: str) -> None:
        """Write the heads."""
        heads = []
        for i in range(len(self.heads)):
            head = MedusaHead(self.heads[i].blocks[0].in_features, 1, None)  # pyright: ignore
            prefix = f"heads.{i}."
            own = {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
            head.load_state_dict(own, assign=True)
            heads.append(head)
        save_medusa(folder, heads, shares_lm_head=True)
