"""Checkpoints of a training run: safetensors alone, whole or not there at all.

    checkpoints/step-00000500/
        weights.safetensors      the trainee in float32, and `target_ids`, its draft vocabulary
        optimizer.safetensors    the optimizers' moments as <parameter>/<name>
        state.json               counters, from which a run goes on

Weights and moments are gathered through torch's own state dict interface, so that one process, DDP
and FSDP write the same files, and each can go on from another's.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from specdec.errors import WeightsError

_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_IDS = "target_ids"


@dataclass
class Progress:
    """How far a run is; what it goes on from."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch, the next one
    num_tokens: int = 0  # learned from, prompts and answers, no padding
    seconds: float = 0.0  # at work, pauses left out


def full_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[Any, Any]:
    """Gather weights and moments on the CPU, by name; every process has to call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizers, options=options)


def save_checkpoint(
    folder: Path, states: tuple[Any, Any], progress: Progress, target_ids: Tensor | None, keep: int
) -> Path:
    """Write a checkpoint, and remove those that are too old.

    Args:
        folder: of all checkpoints of the run.
        states: what `full_state` gave.
        progress: of the run.
        target_ids: the draft vocabulary.
        keep: newest checkpoints that stay.
    """
    weights, moments = states
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"step-{progress.step:08d}", folder / ".part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    extra = {} if target_ids is None else {_IDS: target_ids.cpu()}
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file({**own, **extra}, part / _WEIGHTS)
    flat = {
        f"{name}/{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for name, values in moments["state"].items()
        for key, value in values.items()
    }
    save_file(flat, part / _OPTIMIZER)
    (part / _STATE).write_text(json.dumps(asdict(progress)) + "\n", encoding="utf-8")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(part, path)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint, if there is any."""
    return max(folder.glob("step-*"), default=None)


def read_progress(path: Path) -> Progress:
    """Read how far a run was.

    Raises:
        WeightsError: the checkpoint is damaged.
    """
    try:
        return Progress(**json.loads((path / _STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"checkpoint {path} cannot be read ({error}); remove it") from error


def read_weights(path: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    """Read the weights by name, and the draft vocabulary.

    Raises:
        WeightsError: the checkpoint is damaged.
    """
    weights = _read(path / _WEIGHTS)
    return weights, weights.pop(_IDS, None)


def restore(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Load weights and moments; every process has to call it.

    Raises:
        WeightsError: the checkpoint is damaged, or one of another drafter.
    """
    weights: Any = read_weights(path)[0]
    moments: dict[str, Any] = {}
    for name, tensor in _read(path / _OPTIMIZER).items():
        parameter, _, key = name.rpartition("/")
        moments.setdefault(parameter, {})[key] = tensor
    current, groups = get_state_dict(model, optimizers)
    if current.keys() != weights.keys():
        raise WeightsError(f"checkpoint {path} is one of another drafter; give another folder")
    options = StateDictOptions(full_state_dict=True)
    state = {"state": moments, "param_groups": groups["param_groups"]}
    set_state_dict(
        model, optimizers, model_state_dict=weights, optim_state_dict=state, options=options
    )


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read ({error}); give another checkpoint") from error
