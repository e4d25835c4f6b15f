"""EAGLE-style heads: one decoder layer over pairs of a feature and the token behind it.

The layer is that of transformers, rotary embedding and norms included, over our paged attention.
Embedding and output head are the target's where a checkpoint brings none of its own.

Source: Li et al. 2024 (EAGLE, EAGLE-2), Li et al. 2025 (EAGLE-3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from runner.attention import ATTENTION_NAME, AttentionMetadata
from runner.models.fused import FusedAttention, FusedMLP, Norm, as_norm, check_attention, check_mlp
from runner.models.layers import join_linears, top1
from runner.models.norm import add_rms_norm, rms_norm
from runner.models.rope import make_turn_table

# Whose decoder layer a head may have: layer, rotary embedding, norm.
LAYER_FAMILIES: dict[str, tuple[type[nn.Module], type[nn.Module], type[nn.Module]]] = {
    "llama": (llama.LlamaDecoderLayer, llama.LlamaRotaryEmbedding, llama.LlamaRMSNorm),
    "qwen3": (qwen3.Qwen3DecoderLayer, qwen3.Qwen3RotaryEmbedding, qwen3.Qwen3RMSNorm),
}


@dataclass(frozen=True)
class HeadSpec:
    """What a head is built from.

    Args:
        method: "eagle" (1 and 2) or "eagle3".
        layer_config: transformers config of the one decoder layer; its vocabulary is the target's.
        draft_vocab_size: rows of the output head.
        target_hidden_size: of the features.
        num_aux: layers of the target whose outputs are fused ("eagle3").
        aux_layers: which, counted from 0; None = the usual ones for the target's depth.
        fc_bias: the fusion layer has a bias.
        norm_before_residual: the residual of the layer is the normed feature ("eagle3").
        norm_before_fc: what is fused goes through a norm first, side by side ("eagle3").
        fc_norm: likewise, the output of each layer through a norm of its own ("eagle3").
        norm_output: what is fed back is the normed state ("eagle3").
        owns_embedding: the head has its own; else it reads the target's.
        owns_lm_head: likewise for the output head; a reduced vocabulary then has the target's rows.
    """

    method: Literal["eagle", "eagle3"]
    layer_config: Any
    draft_vocab_size: int
    target_hidden_size: int
    num_aux: int = 0
    aux_layers: tuple[int, ...] | None = None
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    owns_embedding: bool = False
    owns_lm_head: bool = False


class ChainHead(nn.Module):
    """What both kinds of heads share.

    Args:
        spec: of the head.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec, config = spec, spec.layer_config
        config._attn_implementation = ATTENTION_NAME
        layer, rotary, _ = LAYER_FAMILIES[config.model_type]
        self.layer: Any = layer(config, 0)
        # Built on the CPU even where the weights are to come later: its frequencies stay float32.
        with torch.device("cpu"):
            self.rotary = rotary(config)
        self.embed_tokens = self.lm_head = None
        if spec.owns_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if spec.owns_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, spec.draft_vocab_size, bias=False)
        self._shared: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
        self._fused: FusedHead | None = None

    def fuse_kernels(self, embedding: Tensor) -> None:
        """Run passes by the kernels of a fused target from now on; there are no gradients then.

        Args:
            embedding: [V, hidden], which stands in where the head has none of its own.

        Raises:
            UnsupportedError: the layer is none that these kernels compute.
        """
        own = self.embed_tokens
        self._fused = FusedHead(self, embedding if own is None else own.weight.detach())

    def share(
        self, embed: Callable[[Tensor], Tensor], compute_logits: Callable[[Tensor], Tensor]
    ) -> None:
        """Take the target's embedding and output head, for what the head has not of its own."""
        self._shared = embed, compute_logits

    def fuse(self, features: Tensor) -> Tensor:
        """Turn the target's features [T, ...] into the head's [T, hidden]."""
        return features

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        features: Tensor,
        metadata: AttentionMetadata,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        """Run one pass.

        Args:
            input_ids: [T] int64, the token behind each position.
            positions: [T] int64.
            features: [T, hidden], fused ones, or what an earlier pass returned.
            metadata: of the pass.
            token_indices: [R] int64, the tokens whose states are wanted; None = all. KV is written
                for all T. What follows attention is computed for the wanted ones alone, but in an
                EAGLE head that runs unfused.

        Returns:
            [T, hidden], [R, hidden] with `token_indices`: what `compute_logits` takes, and what
            stands for the features of the positions behind.
        """
        raise NotImplementedError

    def output_states(self, hidden: Tensor) -> Tensor:
        """Return what the output head reads, [R, hidden], of what a pass returned."""
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, draft_vocab_size] of what a pass returned, [R, hidden]."""
        hidden = self.output_states(hidden)
        if self._fused is not None and self._fused.lm_head is not None:
            return self._fused.lm_head(hidden)
        if self.lm_head is not None:
            return self.lm_head(hidden)
        assert self._shared is not None, "a head without an output head needs the target's"
        return self._shared[1](hidden)

    def top1(self, hidden: Tensor, ids: Tensor | None) -> Tensor:
        """Return the likeliest token of what a pass returned, [R, hidden].

        Args:
            hidden: as for `compute_logits`.
            ids: [draft_vocab_size] int64, the target's id of each row of the output head.

        Returns:
            [R] int64.
        """
        if self._fused is not None and self._fused.lm_head is not None:
            return top1(self._fused.lm_head, self.output_states(hidden), ids)
        chosen = self.compute_logits(hidden).argmax(1)
        return chosen if ids is None else ids[chosen]

    def _embed(self, input_ids: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(input_ids)
        assert self._shared is not None, "a head without an embedding needs the target's"
        return self._shared[0](input_ids)


class EagleHead(ChainHead):
    """The head of EAGLE and EAGLE-2: fuses embedding and feature, and predicts the next feature.

    Args:
        spec: of the head.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        size = spec.layer_config.hidden_size
        self.fc = nn.Linear(size + spec.target_hidden_size, size, bias=spec.fc_bias)
        # The layer reads what was fused as it is.
        self.layer.input_layernorm = nn.Identity()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        features: Tensor,
        metadata: AttentionMetadata,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        """Run one pass; see `ChainHead.forward`."""
        fused, joint = self._fused, torch.cat((self._embed(input_ids), features), dim=-1)
        if fused is not None:
            hidden = fused.fc(joint)
            parts = fused.attention(hidden, positions, metadata, token_indices)
            return fused.finish(parts, _take(hidden, token_indices), None)
        hidden = self.fc(joint)[None]
        turns = self.rotary(hidden, positions[None])
        hidden = self.layer(hidden, position_embeddings=turns, attn_metadata=metadata)[0]
        return _take(hidden, token_indices)


class Eagle3Head(ChainHead):
    """The head of EAGLE-3: fuses outputs of several target layers; its attention reads the token.

    Args:
        spec: of the head.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        config, attention = spec.layer_config, self.layer.self_attn
        size, width = config.hidden_size, spec.num_aux * spec.target_hidden_size
        norm = LAYER_FAMILIES[config.model_type][2]
        self.input_norm = norm(width, config.rms_norm_eps) if spec.norm_before_fc else None
        self.fc_norm = None
        if spec.fc_norm:
            norms = [
                norm(spec.target_hidden_size, config.rms_norm_eps) for _ in range(spec.num_aux)
            ]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(width, size, bias=spec.fc_bias)
        self.layer.hidden_norm = norm(size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):  # they see the token beside the feature
            plain = getattr(attention, name)
            wide = nn.Linear(2 * size, plain.out_features, bias=plain.bias is not None)
            setattr(attention, name, wide)
        self.norm = norm(size, config.rms_norm_eps)

    def fuse_kernels(self, embedding: Tensor) -> None:
        """Run passes by the kernels of a fused target; see `ChainHead.fuse_kernels`."""
        norms = (self.layer.input_layernorm, self.layer.hidden_norm, self.norm)
        self._norms = [as_norm(norm) for norm in norms]
        super().fuse_kernels(embedding)

    def fuse(self, features: Tensor) -> Tensor:
        """Fuse outputs of the target's layers, [T, num_aux * target_hidden_size]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            outputs = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(output) for norm, output in zip(self.fc_norm, outputs, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features) if self._fused is None else self._fused.fc(features)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        features: Tensor,
        metadata: AttentionMetadata,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        """Run one pass; see `ChainHead.forward`."""
        if self._fused is not None:
            return self._forward_fused(
                self._fused, input_ids, positions, features, metadata, token_indices
            )
        layer, features = self.layer, features[None]
        embedded = layer.input_layernorm(self._embed(input_ids))[None]
        normed = layer.hidden_norm(features)
        residual = normed if self.spec.norm_before_residual else features
        hidden, _ = layer.self_attn(
            hidden_states=torch.cat((embedded, normed), dim=-1),
            position_embeddings=self.rotary(normed, positions[None]),
            attention_mask=None,
            attn_metadata=metadata,
        )
        hidden = _take((residual + hidden)[0], token_indices)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.spec.norm_output else hidden

    def _forward_fused(
        self,
        fused: "FusedHead",
        input_ids: Tensor,
        positions: Tensor,
        features: Tensor,
        metadata: AttentionMetadata,
        token_indices: Tensor | None,
    ) -> Tensor:
        """Run one pass by few kernels; see `ChainHead.forward`."""
        size = features.shape[1]
        joint = features.new_empty((len(features), 2 * size))
        first, second, last = self._norms
        embedded, normed = joint[:, :size], joint[:, size:]
        add_rms_norm(fused.embedding, None, first.weight, first.eps, embedded, None, input_ids)
        add_rms_norm(features[None], None, second.weight, second.eps, normed)
        parts = fused.attention(joint, positions, metadata, token_indices)
        residual = _take(normed if self.spec.norm_before_residual else features, token_indices)
        return fused.finish(parts, residual, last if self.spec.norm_output else None)

    def output_states(self, hidden: Tensor) -> Tensor:
        """Return what the output head reads; usually the state before this norm is fed back."""
        if self.spec.norm_output:
            return hidden
        if self._fused is None:
            return self.norm(hidden)
        return rms_norm(hidden, self._norms[2].weight, self._norms[2].eps)


class FusedHead:
    """A head's parts as the kernels of a fused target compute them, over the head's weights.

    Args:
        head: with its weights, on its device.
        embedding: [V, hidden] that it reads.

    Raises:
        UnsupportedError: its layer does not match; nothing was changed.
    """

    def __init__(self, head: ChainHead, embedding: Tensor) -> None:
        layer, config = head.layer, head.spec.layer_config
        check_attention(layer.self_attn)
        check_mlp(layer.mlp)
        middle = as_norm(layer.post_attention_layernorm)
        turns = make_turn_table(head.rotary, config.max_position_embeddings, embedding.dtype)
        self.embedding, self.middle_norm = embedding, middle
        self.attention, self.mlp = FusedAttention(layer.self_attn, turns), FusedMLP(layer.mlp)
        own: Any = head
        self.fc = join_linears(own, ("fc",))
        self.lm_head = None if head.lm_head is None else join_linears(own, ("lm_head",))

    def finish(self, parts: Tensor, residual: Tensor, norm: Norm | None) -> Tensor:
        """Run what follows attention: residual, norm, MLP, residual.

        Args:
            parts: [S, T, hidden] of attention.
            residual: [T, hidden].
            norm: of what is returned, None for none.

        Returns:
            [T, hidden].
        """
        middle = self.middle_norm
        normed = torch.empty_like(parts[0], dtype=residual.dtype)
        stream = torch.empty_like(normed)
        add_rms_norm(parts, residual, middle.weight, middle.eps, normed, stream)
        last = norm or middle  # where none is wanted, the norm is computed for nothing
        add_rms_norm(self.mlp(normed), stream, last.weight, last.eps, normed, stream)
        return stream if norm is None else normed


def _take(states: Tensor, token_indices: Tensor | None) -> Tensor:
    """Return the states [R, hidden] of some tokens, of [T, hidden]; all of them for None."""
    return states if token_indices is None else states.index_select(0, token_indices)


def make_head(spec: HeadSpec) -> ChainHead:
    """Build a head, with weights that mean nothing yet."""
    return (Eagle3Head if spec.method == "eagle3" else EagleHead)(spec)
