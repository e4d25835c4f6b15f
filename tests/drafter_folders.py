"""One random drafter of each kind with weights, saved for the tiny target of tests.models."""

from pathlib import Path
from typing import Any

import torch

from drafters.medusa import MedusaHead, save_medusa
from tests.block_parallel_reference import save_random
from tests.models import SIZES

HIDDEN, VOCAB_SIZE = SIZES["hidden_size"], SIZES["vocab_size"]


def random_medusa(num_heads: int, seed: int = 0) -> list[MedusaHead]:
    """Build heads of one block and a projection each."""
    generator = torch.Generator().manual_seed(seed)
    heads = [MedusaHead(HIDDEN, 1, VOCAB_SIZE).requires_grad_(False) for _ in range(num_heads)]
    for head in heads:
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return heads


def save_drafters(folder: Path) -> dict[str, dict[str, Any]]:
    """Save the drafters and return what selects each of them, by name."""
    save_medusa(folder / "medusa", random_medusa(2))
    head = save_random(folder / "block_parallel")
    return {
        "layer_skip": {"name": "layer_skip", "num_layers": 2},
        "medusa": {"name": "medusa", "path": str(folder / "medusa")},
        "block_parallel": {"name": "block_parallel", "path": head},
    }


NAMES = ("layer_skip", "medusa", "block_parallel")
