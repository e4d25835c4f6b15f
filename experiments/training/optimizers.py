"""Optimizers by name. Both update every parameter by about `lr` a step, so that rates compare."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from experiments.training.config import FitConfig
from specdec.errors import ConfigError

_BETAS = 0.9, 0.95


def adamw(config: FitConfig, parameters: list[nn.Parameter]) -> list[Optimizer]:
    """Return AdamW over all parameters."""
    fused = parameters[0].device.type == "cuda"
    return [
        AdamW(parameters, lr=config.lr, betas=_BETAS, weight_decay=config.weight_decay, fused=fused)
    ]


def muon(config: FitConfig, parameters: list[nn.Parameter]) -> list[Optimizer]:
    """Return Muon over the matrices, and AdamW over the rest.

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (arXiv 2502.16982), whose scale makes an
    update as large as AdamW's.
    """
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    own = Muon(
        matrices,
        lr=config.lr,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [own, *(adamw(config, others) if others else [])]


OPTIMIZERS: dict[str, Callable[[FitConfig, list[nn.Parameter]], list[Optimizer]]] = {
    "adamw": adamw,
    "muon": muon,
}


def make_optimizers(config: FitConfig, module: torch.nn.Module) -> list[Optimizer]:
    """Return what updates a module, in `config.optimizer`'s way.

    Raises:
        ConfigError: there is none of the name.
    """
    if config.optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"fit.optimizer={config.optimizer!r} is not allowed; give one of "
            f"{', '.join(OPTIMIZERS)}"
        )
    return OPTIMIZERS[config.optimizer](config, list(module.parameters()))
