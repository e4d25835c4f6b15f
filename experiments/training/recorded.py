"""Texts whose hidden states were recorded while serving, in place of a dataset and a target's pass.

The drafter `record` writes them, a file for each request. Where a prompt ends is not in it, so the
whole text is learned from.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from experiments.training.dataset import TokenBatch, plan_batches
from experiments.training.frozen_target import PaddedBatch, TargetStates
from specdec.errors import ConfigError, WeightsError

_MIN_TOKENS = 3  # a shorter text has no law behind a first draft


class RecordedTexts:
    """The texts of a folder; states are read when they are asked for.

    Args:
        folder: of the drafter `record`.
        max_len: longer texts are cut behind so many tokens.

    Raises:
        ConfigError: the folder holds no text.
        WeightsError: a file is damaged.
    """

    def __init__(self, folder: Path | str, max_len: int) -> None:
        self._paths: list[Path] = []
        self._layers: set[str] = set()
        lengths = []
        for path in sorted(Path(folder).glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    length = file.get_slice("token_ids").get_shape()[0]
                    layers = (file.metadata() or {}).get("aux_layers", "")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} cannot be read ({error}); record it anew") from error
            if length >= _MIN_TOKENS:
                self._paths.append(path)
                self._layers.add(layers)
                lengths.append(min(length, max_len))
        if not lengths:
            raise ConfigError(
                f"fit.states={str(folder)!r} holds no text of {_MIN_TOKENS} tokens or more; give "
                f"the folder of the drafter record"
            )
        self.lengths = np.array(lengths)  # [S] int64

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._paths)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all texts."""
        return int(self.lengths.sum())

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """Return [vocab_size] int64: how often the texts hold each token."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for index in range(len(self)):
            counts += np.bincount(self._tokens(index).numpy(), minlength=vocab_size)
        return counts

    def plan(
        self, max_tokens: int, seed: int, epoch: int = 0, padded: bool = False
    ) -> list[np.ndarray]:
        """Return the batches of an epoch as indices of texts; see `plan_batches`."""
        return plan_batches(self.lengths, max_tokens, seed, epoch, padded)

    def batch(self, indices: Sequence[int] | np.ndarray) -> TokenBatch:
        """Put the tokens of some texts end to end."""
        parts = [self._tokens(int(index)).long() for index in indices]
        starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
        zeros = torch.zeros(len(parts), dtype=torch.int64)
        return TokenBatch(torch.cat(parts), starts, zeros, zeros.float(), zeros)

    def states(
        self, indices: Sequence[int] | np.ndarray, batch: PaddedBatch, aux_layers: Sequence[int]
    ) -> TargetStates:
        """Read the states of a batch.

        Args:
            indices: of its texts.
            batch: of these texts, on its device.
            aux_layers: layers whose outputs a head reads.

        Raises:
            ConfigError: other layers were recorded.
        """
        wanted = " ".join(map(str, aux_layers))
        if aux_layers and self._layers != {wanted}:
            found = ", ".join(f"[{layers}]" for layers in sorted(self._layers))
            raise ConfigError(
                f"the recorded states are those of layers {found}, the head reads [{wanted}]; "
                f"record these, or set fit.aux_layers"
            )
        files = [load_file(self._paths[int(index)]) for index in indices]
        names = ["hidden_states", "aux_hidden_states"][: 2 if aux_layers else 1]
        parts: list[Tensor] = []
        for name in names:
            size = files[0][name].shape[1]
            lines = files[0][name].new_zeros(*batch.token_ids.shape, size)
            for i, (file, index) in enumerate(zip(files, indices, strict=True)):
                length = int(self.lengths[int(index)])
                lines[i, :length] = file[name][:length]
            parts.append(lines.flatten(0, 1).to(batch.token_ids.device))
        return TargetStates(parts[0], parts[1] if aux_layers else None)

    def _tokens(self, index: int) -> Tensor:
        """Return a text's tokens, [n] int32."""
        with safe_open(self._paths[index], "pt") as file:
            return file.get_tensor("token_ids")[: int(self.lengths[index])]
