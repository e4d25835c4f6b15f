"""What ranks tell one another of the models that they loaded: config, and checksums of weights.

Of a model whose layers ranks share, the parts differ by design and are left out; what every rank
holds whole (embedding, norms, an output head that is tied to the embedding) is compared.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from runner.head_files import plain_config
from runner.loader import LoadedTarget, read_config
from runner.models.fingerprint import weight_checksums
from runner.models.hf import HFModel
from specdec.parallel.rank_check import compare_loaded


def compare_configs(group: dist.ProcessGroup | None, target: str | LoadedTarget) -> None:
    """Check that the ranks' targets have the same config; those of other shapes may not even load.

    Args:
        group: of gloo; None where there is one rank: then nothing is read.
        target: one that is loaded, or the name of one.

    Raises:
        RankError: they have not.
        WeightsError: this rank cannot read it.
    """
    if group is None:
        return
    config = target.model.config if isinstance(target, LoadedTarget) else read_config(target)
    values = sorted(plain_config(config).items())
    entries = {name: json.dumps(value, sort_keys=True, default=repr) for name, value in values}
    compare_loaded(group, "the target's config", entries, tells=True)


def compare_targets(group: dist.ProcessGroup | None, model: HFModel) -> None:
    """Check that the ranks hold the same target: how it is stored, and the weights of all.

    Args:
        group: of gloo; None where there is one rank: then nothing is read.
        model: whole, or a rank's part.

    Raises:
        RankError: they do not.
    """
    if group is None:
        return
    layers = {
        "fused": model.fused is not None,
        "packed": model.is_packed,
        "8-bit": model.weight_effect is not None,
    }
    compare_loaded(group, "how the target's layers are stored", layers, tells=True)
    part: Any = getattr(model.model, "rank_part", None)
    divided = () if part is None else part.splits
    compare_loaded(group, "the target's weights", weight_checksums(model.model, divided))


def compare_drafters(group: dist.ProcessGroup | None, drafter: Any, target: HFModel) -> None:
    """Check that the ranks' drafters have the same weights, beside those that are the target's.

    Args:
        group: of gloo; None where there is one rank: then nothing is read.
        drafter: whose modules are its own attributes, or those of drafters that it keeps.
        target: that it was loaded for.

    Raises:
        RankError: they have not.
    """
    if group is None:
        return
    found = {}
    for name, module in _modules("drafter", drafter, set()):
        own = weight_checksums(module, shared=target.model)
        found |= {f"{name}.{field}": value for field, value in own.items()}
    compare_loaded(group, "the drafter's weights", found)


def _modules(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a drafter keeps in its attributes, or in those of its own drafters.

    Args:
        name: of `value`.
        value: a drafter, or what it keeps.
        seen: ids of those that were looked at.
    """
    if isinstance(value, nn.Module):
        yield name, value
    elif isinstance(value, HFModel):
        yield name, value.model
    elif hasattr(value, "capabilities") and id(value) not in seen:
        seen.add(id(value))
        for field, kept in vars(value).items():
            if not isinstance(kept, list | tuple):
                yield from _modules(f"{name}.{field}", kept, seen)
                continue
            for index, child in enumerate(kept):
                yield from _modules(f"{name}.{field}.{index}", child, seen)
