"""Models that the second of two ranks loads unlike the first, for tests of ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from runner.loader import LoadedTarget
from tests.models import tiny_model, tiny_target


def is_second() -> bool:
    """Return whether this process is the second rank."""
    return os.environ["RANK"] == "1"


def other_norm() -> LoadedTarget:
    """Return a target where one entry of one norm is another one on the second rank."""
    target = tiny_target(tiny_model())
    if is_second():
        norm: Any = target.model.layers[1].input_layernorm
        norm.weight.data[3] += 1e-3
    return target


def other_config() -> LoadedTarget:
    """Return a target whose config says something else on the second rank."""
    return tiny_target(tiny_model(rms_norm_eps=1e-5 if is_second() else 1e-6))


def other_storage() -> LoadedTarget:
    """Return a target whose layers are in 8 bits on the second rank."""
    target = tiny_target(tiny_model())
    if is_second():
        target.model.quantize(torch.arange(8))
    return target


def change_file(folder: Path) -> None:
    """Change one entry of the first tensor of a saved model, on the second rank.

    Args:
        folder: of this rank, with one file of weights.
    """
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if tensors[name].is_floating_point())
    if is_second():
        tensors[name].view(-1)[0] += 1
        save_file(tensors, path, metadata={"format": "pt"})


def unlike_targets(build: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """Return what builds an engine whose target the ranks have not alike, by what differs.

    Args:
        build: an engine, of the target that is given by name.
    """
    return {
        "norm": lambda: build(target=other_norm()),
        "config": lambda: build(target=other_config()),
    }


def unlike_loads(build: Callable[..., Any], saved: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return the same of targets, and of drafters that come from files.

    Args:
        build: an engine, of the drafter or the target that is given by name.
        saved: what selects drafters, by name; their files are this rank's own.
    """
    change_file(Path(saved["draft_model"]["model"]))
    change_file(Path(saved["eagle3"]["path"]))
    return unlike_targets(build) | {
        "draft model": lambda: build(drafter=saved["draft_model"]),
        "head, among others": lambda: build(
            drafter={"name": "mixed", "drafters": [{"name": "ngram"}, saved["eagle3"]]}
        ),
    }
