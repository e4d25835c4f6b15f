"""Drafters that fit the conformance kit's own target: heads of random weights, and mixtures.

What the heads hand to the target's output head is near to the features that they read, so that they
draft the target's likely tokens, and far enough from them that drafts depend on the whole text.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from drafters.block_parallel import BlockParallelHead, BlockParallelSizes, save_block_parallel
from drafters.heads.checkpoint import HeadCheckpoint, save_head
from drafters.heads.modules import HeadSpec, make_head
from drafters.medusa import MedusaHead, save_medusa
from drafters.record import RecordConfig, RecordDrafter
from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from specdec.registry import register_drafter
from specdec.testing import tiny_model
from specdec.testing.target import HIDDEN_SIZE, LIKELY_TOKENS, NUM_LAYERS, VOCAB_SIZE
from tests.models import byte_tokenizer
from tests.test_drafters_cross_vocab import PIECES, save_renumbered, shuffled_tokenizer

ITSELF = {"name": "draft_model", "model": "target"}

_FOLDER = tempfile.TemporaryDirectory(prefix="fitting_drafters_")  # gone when the process ends
_LAYERS = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 512,
}


def eagle(target: LoadedTarget) -> dict[str, Any]:
    """Save an EAGLE head with the target's embedding and output head."""
    spec = HeadSpec("eagle", _layer_config(), VOCAB_SIZE, HIDDEN_SIZE, fc_bias=True)
    tensors = _random(make_head(spec), seed=1)
    tensors["fc.weight"] = _passing_on(tensors["fc.weight"], 8.0, 1)
    return {"name": "eagle", "path": _save(HeadCheckpoint(spec, tensors), "eagle")}


def eagle3(target: LoadedTarget, **options: Any) -> dict[str, Any]:
    """Save an EAGLE-3 head that drafts 40 of the target's tokens, by an output head of its own."""
    spec = HeadSpec(
        "eagle3", _layer_config(), 40, HIDDEN_SIZE, num_aux=3, aux_layers=(0, 1, NUM_LAYERS - 1),
        norm_before_residual=True, owns_lm_head=True,
    )  # fmt: skip
    others = [token for token in range(VOCAB_SIZE) if token not in LIKELY_TOKENS]
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(2)).tolist()
    ids = torch.tensor(sorted([*LIKELY_TOKENS, *(others[i] for i in order[:35])]))
    tensors = _random(make_head(spec), seed=2)
    tensors["fc.weight"] = _passing_on(tensors["fc.weight"], 0.3, 1)
    tensors["norm.weight"] = target.model.model.get_decoder().norm.weight.detach().cpu().clone()
    head: Tensor = target.model.model.get_output_embeddings().weight
    tensors["lm_head.weight"] = head.detach().cpu()[ids].clone()
    path = _save(HeadCheckpoint(spec, tensors, ids), "eagle3")
    return {"name": "eagle3", "path": path, **options}


def eagle3_drawing(target: LoadedTarget) -> dict[str, Any]:
    """Save the same head, to draw from its law."""
    return eagle3(target, sampling="gumbel")


def medusa(target: LoadedTarget) -> dict[str, Any]:
    """Save two Medusa heads, one less than the kit asks drafts for; the projection is shared."""
    heads = [MedusaHead(HIDDEN_SIZE, 1, None).requires_grad_(False) for _ in range(2)]
    for seed, head in enumerate(heads):
        head.load_state_dict(_random(head, seed))
    folder = Path(_FOLDER.name, "medusa")
    save_medusa(folder, heads, target.model.model.get_output_embeddings().weight.detach().cpu())
    return {"name": "medusa", "path": str(folder)}


def block_parallel(target: LoadedTarget) -> dict[str, Any]:
    """Save a block-parallel head of two layers."""
    sizes = BlockParallelSizes(
        HIDDEN_SIZE, (1, NUM_LAYERS - 1), num_layers=2, num_heads=4, num_kv_heads=2, head_size=12,
        intermediate_size=48, max_positions=512,
    )  # fmt: skip
    head = BlockParallelHead(sizes).float().requires_grad_(False)
    tensors = _random(head, seed=3)
    tensors["fuse.weight"] = _passing_on(tensors["fuse.weight"], 0.3, 1)
    tensors["merge.weight"] = _passing_on(tensors["merge.weight"], 0.3, 1)
    tensors["mask_feature"][0] = 8.0  # what likely tokens look at
    head.load_state_dict(tensors)
    folder = Path(_FOLDER.name, "block_parallel")
    save_block_parallel(folder, head)
    return {"name": "block_parallel", "path": str(folder)}


def mixed(*drafters: Any, **options: Any) -> dict[str, Any]:
    """Return a mixture."""
    return {"name": "mixed", "drafters": list(drafters), **options}


def ngram_else_eagle(target: LoadedTarget) -> dict[str, Any]:
    """Return prompt lookup, and an EAGLE head where it finds nothing."""
    return mixed("ngram", eagle(target))


def best_of_two(target: LoadedTarget) -> dict[str, Any]:
    """Return the target itself or Medusa heads, whichever was accepted most."""
    return mixed(ITSELF, medusa(target), policy="best", explore_every=3)


def _fresh_folder() -> str:
    return tempfile.mkdtemp(dir=_FOLDER.name)


@dataclass
class RecordAnewConfig(RecordConfig):
    """Each engine records into a folder of its own."""

    folder: str = field(default_factory=_fresh_folder)
    aux_layers: list[int] = field(default_factory=lambda: [1])


@register_drafter("record_anew", RecordAnewConfig)
class RecordAnew(RecordDrafter):
    """Records as `record` does."""


def target_with_tokenizer(device: torch.device) -> LoadedTarget:
    """Return the kit's target over the tokens of a byte-level tokenizer."""
    tokenizer = byte_tokenizer(PIECES)
    model = tiny_model(vocab_size=len(tokenizer)).to(device)
    return LoadedTarget("tiny, with a tokenizer", HFModel(model), tokenizer)


def other_tokenizer(target: LoadedTarget) -> dict[str, Any]:
    """Save the target itself under another tokenizer's ids, which lacks one of its pieces."""
    tokenizer = shuffled_tokenizer(PIECES[:-1])
    model = tiny_model(vocab_size=len(target.tokenizer))
    path = save_renumbered(Path(_FOLDER.name, "other"), model, target.tokenizer, tokenizer)
    return {"name": "draft_model", "model": path, "cross_vocab": True}


def _layer_config() -> LlamaConfig:
    return LlamaConfig(vocab_size=VOCAB_SIZE, num_hidden_layers=1, **_LAYERS)


def _random(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return random weights for a module: norms near 1, outputs about as large as inputs."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        is_norm = "norm" in name
        tensors[name] = 1 + 0.2 * noise if is_norm else noise * tensor.shape[-1] ** -0.5
    return tensors


def _passing_on(weight: Tensor, scale: float, part: int) -> Tensor:
    """Return a scaled projection to [out] that adds the last [out] of its inputs as they are."""
    passed = torch.eye(weight.shape[0])
    return torch.cat([scale * weight[:, : -weight.shape[0]], passed], 1)


def _save(head: HeadCheckpoint, name: str) -> str:
    """Save an EAGLE-style head; returns its folder."""
    folder = str(Path(_FOLDER.name, name))
    save_head(folder, head, target="tiny")
    return folder
