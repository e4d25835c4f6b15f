"""A block-parallel head written out in plain torch, over whole texts, and random ones to load."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.block_parallel import BlockParallelHead, BlockParallelSizes, save_block_parallel

SIZES = BlockParallelSizes(
    hidden_size=64,
    aux_layers=(2, 0),
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=12,  # not hidden_size / num_heads
    intermediate_size=80,
    rms_norm_eps=1e-6,
    rope_theta=500.0,
    max_positions=512,
)


def random_head(sizes: BlockParallelSizes = SIZES, seed: int = 0) -> BlockParallelHead:
    """Build a head of random weights."""
    generator = torch.Generator().manual_seed(seed)
    head = BlockParallelHead(sizes).float().requires_grad_(False)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name
        parameter.copy_(1 + 0.2 * noise if is_norm else noise * (2 / parameter.shape[-1]) ** 0.5)
    return head


def save_random(folder: Path, sizes: BlockParallelSizes = SIZES) -> str:
    """Save a random head and return its folder."""
    save_block_parallel(folder, random_head(sizes))
    return str(folder)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn heads [T, heads, D] by their positions 0..T-1."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def keep_output(outputs: dict[int, Tensor], index: int, _: Any, __: Any, output: Tensor) -> None:
    """Keep what a layer returned; a forward hook."""
    outputs[index] = output


class PlainHead:
    """The head's arithmetic, from its tensors and a transformers target.

    Args:
        target: the target model, under transformers' own attention.
        head: whose tensors are read.
    """

    def __init__(self, target: Any, head: BlockParallelHead) -> None:
        self.target, self.sizes = target, head.sizes
        self.tensors = head.state_dict()

    def features(self, tokens: list[int]) -> Tensor:
        """Return the outputs of the target's layers, [T, A * hidden]."""
        outputs: dict[int, Tensor] = {}
        handles = []
        for i, layer in enumerate(self.target.get_decoder().layers):
            keep = partial(keep_output, outputs, i)
            handles.append(layer.register_forward_hook(keep))
        self.target(torch.tensor([tokens]), use_cache=False)
        for handle in handles:
            handle.remove()
        return torch.cat([outputs[layer][0] for layer in self.sizes.aux_layers], 1)

    def merged(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Return what goes into the first layer."""
        eps = self.sizes.rms_norm_eps
        left = rms_norm(embeddings, self.tensors["embedding_norm.weight"], eps)
        right = rms_norm(features, self.tensors["feature_norm.weight"], eps)
        return torch.cat([left, right], 1) @ self.tensors["merge.weight"].T

    def layer(self, x: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run a decoder layer over a whole text; returns its output, keys and values."""
        sizes, eps = self.sizes, self.sizes.rms_norm_eps

        def weight(name: str) -> Tensor:
            return self.tensors[f"body.layers.{index}.{name}.weight"]

        h = rms_norm(x, weight("input_layernorm"), eps)
        q, k, v = (
            (h @ weight(f"self_attn.{name}_proj").T).view(len(x), -1, sizes.head_size)
            for name in "qkv"
        )
        q, k = rotate(q, sizes.rope_theta), rotate(k, sizes.rope_theta)
        ahead = torch.ones(len(x), len(x)).triu(1).bool()
        heads = []
        for head in range(sizes.num_heads):
            group = head * sizes.num_kv_heads // sizes.num_heads
            scores = q[:, head] @ k[:, group].T / sizes.head_size**0.5
            heads.append(scores.masked_fill(ahead, -torch.inf).softmax(1) @ v[:, group])
        x = x + torch.cat(heads, 1) @ weight("self_attn.o_proj").T
        h = rms_norm(x, weight("post_attention_layernorm"), eps)
        gate = h @ weight("mlp.gate_proj").T
        h = gate * gate.sigmoid() * (h @ weight("mlp.up_proj").T)
        return x + h @ weight("mlp.down_proj").T, k, v

    @torch.inference_mode()
    def run(self, tokens: list[int], num_masks: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run a text and masks behind it.

        Returns:
            Logits [num_masks + 1, V] of the drafts, and each layer's keys and values, whose first
            len(tokens) - 1 positions are those of the text.
        """
        embeddings = self.target.get_input_embeddings().weight[tokens[1:]]
        known = self.features(tokens)[:-1] @ self.tensors["fuse.weight"].T
        x = self.merged(embeddings, known)
        mask = self.merged(self.tensors["mask_embedding"][None], self.tensors["mask_feature"][None])
        x = torch.cat([x, *[mask] * num_masks])
        keys, values = [], []
        for index in range(self.sizes.num_layers):
            x, k, v = self.layer(x, index)
            keys.append(k)
            values.append(v)
        x = rms_norm(x, self.tensors["body.norm.weight"], self.sizes.rms_norm_eps)
        head = self.target.get_output_embeddings().weight
        return x[len(tokens) - 2 :] @ head.T, keys, values
