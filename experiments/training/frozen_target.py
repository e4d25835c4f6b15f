"""The frozen target of a training run: what it says of a batch, computed in the same process.

The target runs through the very modules and dtype that serve; only what its attention reads is
another (`experiments.training.attention`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.training.attention import TrainingKV, TrainingPass, flat_positions
from experiments.training.dataset import TokenBatch
from experiments.training.losses import LossTargets
from runner.loader import LoadedTarget, load_target, resolve_device, resolve_dtype
from runner.models.hf import HFModel
from specdec.errors import ConfigError

_MULTIPLE = 16  # lengths of padded batches: fewer shapes for the allocator and for kernels


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences of a batch, padded to one length: T = B * L lines."""

    token_ids: Tensor  # [B, L] int64
    is_token: Tensor  # [B, L] bool, False where a shorter sequence is padded
    # Lines whose law counts, and their places in their sequences: the token behind such a line is
    # one that is learned from.
    lines: Tensor  # [R] int64
    places: Tensor  # [R] int64

    @property
    def num_tokens(self) -> int:
        """Return T, padding included."""
        return self.token_ids.numel()

    @property
    def positions(self) -> Tensor:
        """Return [T] int64."""
        num_sequences, length = self.token_ids.shape
        return flat_positions(num_sequences, length, self.token_ids.device)

    def behind(self, distance: int) -> Tensor:
        """Return [T] int64: the token so many places behind each line, 0 past the end."""
        moved = torch.zeros_like(self.token_ids)
        if distance < moved.shape[1]:
            moved[:, : moved.shape[1] - distance] = self.token_ids[:, distance:]
        return moved.flatten()

    def to(self, device: torch.device) -> "PaddedBatch":
        """Return the batch on a device; the host does not wait for what runs there."""
        parts = dict(vars(self))
        if device.type == "cuda":
            parts = {name: part.pin_memory() for name, part in parts.items()}
        return PaddedBatch(**{k: part.to(device, non_blocking=True) for k, part in parts.items()})


def pad_batch(batch: TokenBatch, learn_prompts: bool = False) -> PaddedBatch:
    """Pad a batch, on the CPU.

    Args:
        batch: sequences end to end.
        learn_prompts: learn from prompts, too.
    """
    lengths = batch.starts.diff()
    longest = -(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE
    token_ids, place = torch.zeros(len(lengths), longest, dtype=torch.int64), torch.arange(longest)
    is_token = place < lengths[:, None]
    token_ids[is_token] = batch.token_ids
    first = torch.zeros_like(lengths) if learn_prompts else (batch.num_prompt - 1).clamp(min=0)
    counts = (place >= first[:, None]) & (place < lengths[:, None] - 1)
    lines = counts.flatten().nonzero()[:, 0]
    return PaddedBatch(token_ids, is_token, lines, lines % longest)


@dataclass(frozen=True)
class TargetStates:
    """What the target computed for each line; without gradients."""

    last: Tensor  # [T, hidden], after its last norm
    aux: Tensor | None  # [T, A * hidden], outputs of the layers that were asked for


class FrozenTarget:
    """A loaded target, asked about batches.

    Args:
        target: as it serves.

    Raises:
        ConfigError: its layers were packed or rounded for serving and have no gradients.
    """

    def __init__(self, target: LoadedTarget) -> None:
        self.loaded = target
        self.model: HFModel = target.model
        if self.model.weight_effect is not None:
            raise ConfigError(
                "a target of 8-bit weights cannot be trained on; load it with weight_dtype='auto'"
            )
        if self.model.is_packed:
            raise ConfigError(
                f"a target in {self.model.dtype} on a CPU is packed for serving and cannot be "
                f"trained on; set fit.dtype=float32"
            )

    @property
    def device(self) -> torch.device:
        """Return where the target lies."""
        return self.model.device

    @property
    def head_weight(self) -> Tensor:
        """Return the output head's weight, [V, hidden]."""
        return self.model.head.weight.detach()

    @torch.no_grad()
    def states(self, batch: PaddedBatch, aux_layers: Sequence[int]) -> TargetStates:
        """Run the target over a batch.

        Args:
            batch: on the target's device.
            aux_layers: layers whose outputs are kept, from 0.
        """
        positions = batch.positions
        kv = TrainingKV(len(batch.token_ids), keeps=False)
        step: object = TrainingPass(kv, positions)
        last, aux = self.model.forward_with_layers(
            batch.token_ids.flatten(),
            positions,
            step,  # pyright: ignore[reportArgumentType]
            aux_layers,
        )
        # Copies: what was made in inference mode cannot be saved for a backward.
        return TargetStates(last.clone(), None if aux is None else aux.clone())


def loss_targets(batch: PaddedBatch, states: TargetStates) -> LossTargets:
    """Return what drafters are judged by on a batch."""
    return LossTargets(states.last, batch.behind(1), batch.lines, batch.places)


def load_frozen(name: str, dtype: str, device: str) -> FrozenTarget:
    """Load a target to train on; dtype "auto" is bf16 on a GPU and fp32 on a CPU.

    Raises:
        ConfigError, WeightsError, UnsupportedError: it cannot be had, or not be trained on.
    """
    where = resolve_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if where.type == "cuda" else "float32"
    return FrozenTarget(load_target(name, resolve_dtype(dtype, where), where))
