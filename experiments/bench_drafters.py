"""Drafters of random weights that fit the target of `bench=step`: what a step costs with each.

Heads have the target's width and read three of its layers; the EAGLE-3 head drafts 8192 tokens.
What random heads draft is refused, which changes nothing about what is computed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from drafters.block_parallel import BlockParallelHead, BlockParallelSizes, save_block_parallel
from drafters.heads.checkpoint import HeadCheckpoint, save_head
from drafters.heads.modules import HeadSpec, make_head
from drafters.medusa import MedusaHead, save_medusa
from runner.models.hf import HFModel

_DRAFT_VOCAB = 8192


def bench_drafters(
    target: HFModel, folder: Path, num_drafts: int, draft_model: Callable[[Path], None]
) -> dict[str, Any]:
    """Return what to give an engine for each name; weights are saved in a folder.

    Args:
        target: gives width, vocabulary and dtype.
        folder: an empty one.
        num_drafts: K, which Medusa has a head for each of.
        draft_model: saves the draft model in a folder.
    """
    draft_model(folder / "model")
    model = {"name": "draft_model", "model": str(folder / "model")}
    eagle3 = {"name": "eagle3", "path": _eagle3(target, folder / "eagle3")}
    return {
        "none": "none",
        "ngram": "ngram",
        "suffix": "suffix",
        "draft_model": model,
        "layer_skip": {"name": "layer_skip", "num_layers": 4},
        "medusa": {"name": "medusa", "path": _medusa(target, folder / "medusa", num_drafts)},
        "eagle": {"name": "eagle", "path": _eagle(target, folder / "eagle")},
        "eagle3": eagle3,
        "eagle3_gumbel": {**eagle3, "sampling": "gumbel"},
        "block_parallel": {
            "name": "block_parallel",
            "path": _block_parallel(target, folder / "block_parallel"),
        },
        "mixed": {"name": "mixed", "drafters": ["ngram", eagle3]},
    }


DRAFTERS = (
    *("none", "ngram", "suffix", "draft_model", "layer_skip", "medusa", "eagle", "eagle3"),
    *("eagle3_gumbel", "block_parallel", "mixed"),
)


def _layer(target: HFModel) -> LlamaConfig:
    """Return a decoder layer of the target's sizes."""
    config = target.config
    return LlamaConfig(
        vocab_size=target.vocab_size,
        num_hidden_layers=1,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
    )


def _random(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a module's tensors, filled with small random numbers from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(tensor.shape, generator=generator) * 0.02).to(dtype)
        for name, tensor in module.state_dict().items()
    }


def _layers_read(target: HFModel) -> tuple[int, int, int]:
    last = target.num_layers - 1
    return 1, last // 2, last - 3


def _eagle(target: HFModel, folder: Path) -> str:
    spec = HeadSpec("eagle", _layer(target), target.vocab_size, target.hidden_size)
    save_head(str(folder), HeadCheckpoint(spec, _random(make_head(spec), target.dtype)), "target")
    return str(folder)


def _eagle3(target: HFModel, folder: Path) -> str:
    size = min(_DRAFT_VOCAB, target.vocab_size // 2)
    spec = HeadSpec(
        "eagle3",
        _layer(target),
        size,
        target.hidden_size,
        num_aux=3,
        aux_layers=_layers_read(target),
        norm_before_residual=True,
        owns_lm_head=True,
    )
    tensors = _random(make_head(spec), target.dtype)
    ids = torch.arange(size) * (target.vocab_size // size)
    save_head(str(folder), HeadCheckpoint(spec, tensors, ids), "target")
    return str(folder)


def _medusa(target: HFModel, folder: Path, num_drafts: int) -> str:
    heads = [MedusaHead(target.hidden_size, 1, None) for _ in range(num_drafts)]
    for head in heads:
        head.to(target.dtype).load_state_dict(_random(head, target.dtype))
    save_medusa(folder, heads, target.head.weight.detach().cpu())
    return str(folder)


def _block_parallel(target: HFModel, folder: Path) -> str:
    config = target.config
    sizes = BlockParallelSizes(
        target.hidden_size,
        _layers_read(target),
        num_layers=1,
        num_heads=config.num_attention_heads,
        num_kv_heads=target.num_kv_heads,
        head_size=target.head_size,
        intermediate_size=config.intermediate_size,
        max_positions=config.max_position_embeddings,
    )
    head = BlockParallelHead(sizes).to(target.dtype)
    head.load_state_dict(_random(head, target.dtype))
    save_block_parallel(folder, head)
    return str(folder)
