"""What a method trains: a module of the drafter's own, run over whole texts at once."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from experiments.training.config import FitConfig
from experiments.training.frozen_target import FrozenTarget, PaddedBatch, TargetStates
from specdec.errors import ConfigError

MAX_FILE_BYTES = 12_000_000  # of what is saved to be shipped


class Trainee(nn.Module):
    """Base of methods; a subclass builds the modules that its drafter serves with.

    `forward` gives, for J passes, what the frozen output head is to read at every line; the law
    that pass j is judged by lies `offsets[j]` lines further on.

    Args:
        config: of the run.
        target: frozen; nothing of it becomes part of this module.
        target_ids: [V_draft] int64, the draft vocabulary; None: the target's whole one.
    """

    method: ClassVar[str]
    reduces_vocabulary: ClassVar[bool]  # False: the drafter has the target's whole output head
    aux_layers: tuple[int, ...] = ()
    offsets: tuple[int, ...]

    def __init__(self, config: FitConfig, target: FrozenTarget, target_ids: Tensor | None) -> None:
        super().__init__()
        self.target_ids = target_ids
        self._embed: Callable[[Tensor], Tensor] = target.model.model.get_input_embeddings().__call__

    def forward(self, batch: PaddedBatch, states: TargetStates) -> Tensor:
        """Return [J, T, hidden]."""
        raise NotImplementedError

    def save(self, folder: Path, state: dict[str, Tensor], target_name: str) -> None:
        """Write the folder that the drafter loads.

        Args:
            folder: made where it is missing.
            state: this module's state, as it is to be saved.
            target_name: of the target.
        """
        raise NotImplementedError

    @classmethod
    def drafter(cls, folder: Path) -> dict[str, Any]:
        """Return what selects the drafter with a saved folder."""
        return {"name": cls.method, "path": str(folder)}


@dataclass(frozen=True)
class MethodEntry:
    """Where a method's class lies; it is imported when it is asked for."""

    module: str
    cls: str


METHODS = {
    "eagle3": MethodEntry("experiments.training.eagle3", "Eagle3Trainee"),
    "draft_model": MethodEntry("experiments.training.draft_model", "DraftModelTrainee"),
    "medusa": MethodEntry("experiments.training.medusa", "MedusaTrainee"),
    "block_parallel": MethodEntry("experiments.training.block_parallel", "BlockParallelTrainee"),
}


def method_class(name: str) -> type[Trainee]:
    """Return the class of a method.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in METHODS:
        raise ConfigError(f"fit.method={name!r} is not known; known: {', '.join(METHODS)}")
    entry = METHODS[name]
    return getattr(importlib.import_module(entry.module), entry.cls)


def copy_layer(own: nn.Module, source: nn.Module) -> list[str]:
    """Copy a decoder layer's weights where name and shape are the same.

    Where only the inputs of the source are fewer, its weights become the last columns and the
    columns before them zero: a layer that also reads something else starts by ignoring it.

    Returns:
        Names of the parameters that could not be copied.
    """
    theirs = dict(source.named_parameters())
    left = []
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            given = theirs.get(name)
            if given is None:
                left.append(name)
            elif given.shape == parameter.shape:
                parameter.copy_(given)
            elif given.shape[:-1] == parameter.shape[:-1]:
                parameter.zero_()
                parameter[..., -given.shape[-1] :].copy_(given)
            else:
                left.append(name)
    return left


def aux_layers_of(config: FitConfig, num_layers: int) -> tuple[int, ...]:
    """Return the target layers that are read, from 0: the configured ones, or the usual three.

    Raises:
        ConfigError: the target has no such layer.
    """
    if config.aux_layers is not None:
        layers = tuple(config.aux_layers)
    else:
        layers = tuple(max(layer, 0) for layer in (1, num_layers // 2 - 1, num_layers - 4))
    bad = [layer for layer in layers if not 0 <= layer < num_layers]
    if bad or not layers:
        raise ConfigError(
            f"fit.aux_layers={list(layers)} is not allowed; give layers from 0 to {num_layers - 1}"
        )
    return layers
