"""The target's states of whole sequences, kept on the device from one epoch to the next.

Running the target is the largest part of a training step (`experiments.training.cost`), and it says
the same in every epoch. A token costs 2 * (1 + A) * hidden bytes in bf16, A the number of layers
that a head reads: 10 M tokens of a 135M target are 46 GB for an EAGLE-3 head, 12 GB for a draft
model.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from experiments.training.dataset import TokenDataset
from experiments.training.frozen_target import FrozenTarget, PaddedBatch, TargetStates
from specdec.errors import ConfigError


class StatesCache:
    """Asks the target about a sequence once.

    Args:
        target: frozen.
        dataset: whose sequences are learned from.
        aux_layers: layers whose outputs are kept, from 0.
        limit_gb: memory that may be taken, 1e9 bytes each.

    Raises:
        ConfigError: the states of all sequences are larger.
    """

    def __init__(
        self,
        target: FrozenTarget,
        dataset: TokenDataset,
        aux_layers: Sequence[int],
        limit_gb: float,
    ) -> None:
        self._target, self._aux_layers = target, tuple(aux_layers)
        self._hidden_size = target.model.hidden_size
        width = (1 + len(self._aux_layers)) * self._hidden_size
        dtype = target.model.dtype
        size = dataset.num_tokens * width * dtype.itemsize / 1e9
        if size > limit_gb:
            raise ConfigError(
                f"fit.cache_gb={limit_gb:g} is too little: the states of {dataset.num_tokens} "
                f"tokens are {size:.1f} GB; give that, less data, or 0 to compute them every epoch"
            )
        self._lines = torch.empty(dataset.num_tokens, width, dtype=dtype, device=target.device)
        self._begins = np.cumsum([0, *dataset.lengths[:-1]])
        self._known = np.zeros(len(dataset), dtype=bool)

    def states(self, indices: Sequence[int] | np.ndarray, batch: PaddedBatch) -> TargetStates:
        """Return the states of a batch; what stands behind the end of a sequence is arbitrary.

        Args:
            indices: of its sequences.
            batch: of these sequences, on the target's device.
        """
        chosen = np.asarray(indices)
        begins = torch.from_numpy(self._begins[chosen])
        length = batch.token_ids.shape[1]
        device = self._lines.device
        if device.type == "cuda":
            begins = begins.pin_memory()
        begins = begins.to(device, non_blocking=True)
        # Past the end of a sequence lie other ones, and past the last one nothing.
        places = begins[:, None] + torch.arange(length, device=device)
        places = places.flatten().clamp(max=len(self._lines) - 1)
        if not self._known[chosen].all():
            self._keep(batch, places, chosen)
        lines = self._lines.index_select(0, places)
        last, aux = lines.split((self._hidden_size, lines.shape[1] - self._hidden_size), 1)
        return TargetStates(last, aux if self._aux_layers else None)

    def _keep(self, batch: PaddedBatch, places: Tensor, chosen: np.ndarray) -> None:
        """Run the target, and keep the states of each sequence's own lines."""
        found = self._target.states(batch, self._aux_layers)
        lines = found.last if found.aux is None else torch.cat([found.last, found.aux], 1)
        own = batch.is_token.flatten().nonzero()[:, 0]
        self._lines[places[own]] = lines[own]
        self._known[chosen] = True
