"""The fusion pass: a decoder of transformers run by few kernels over the same weights.

A decoder is matched by structure: layers of norm, attention over q, k, v, o projections with rotary
positions, norm, and a gated MLP, each with a residual around it. What matches is run by the loop
below: q, k, v and gate, up joined into one layer each, norms that add up what stands before them,
rotary positions and cache writes in one kernel. What does not match runs as it is, and says why.

Weights are joined in place: the modules of transformers keep working, as views of the joint ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mistral.modeling_mistral import MistralAttention

from runner.attention import ATTENTION_BACKENDS
from runner.attention_metadata import AttentionMetadata
from runner.kv_cache import PagedKVCache
from runner.models.layers import LinearLayer, join_linears, round_linears
from runner.models.norm import add_rms_norm
from runner.models.rope import HeadNorms, HeadShape, make_turn_table, share_turns, turn_heads
from runner.tensor_parallel import TensorParallel
from specdec.errors import UnsupportedError

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}


@dataclass(frozen=True)
class Norm:
    """RMSNorm.

    Args:
        weight: [hidden].
        eps: of the mean square.
    """

    weight: Tensor
    eps: float


class FusedAttention:
    """Attention of a layer, between two norms.

    Args:
        attention: module of transformers that `check_layer` found to match.
        turns: of `make_turn_table`.
    """

    def __init__(self, attention: Any, turns: Tensor) -> None:
        head_size = attention.head_dim
        self.shape = HeadShape(
            attention.q_proj.out_features // head_size,
            attention.k_proj.out_features // head_size,
            head_size,
        )
        self.turns, self.layer_idx = turns, attention.layer_idx
        self.scaling: float = attention.scaling
        self.window = _window(attention)
        self.norms = None
        if hasattr(attention, "q_norm"):
            query, key = as_norm(attention.q_norm), as_norm(attention.k_norm)
            self.norms = HeadNorms(query.weight, key.weight, query.eps)
        self.qkv: LinearLayer = join_linears(attention, _PROJECTIONS[:3])
        self.out: LinearLayer = join_linears(attention, _PROJECTIONS[3:])

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        token_indices: Tensor | None = None,
    ) -> Tensor:
        """Return parts [S, T, hidden] of the output, [S, R, hidden] with `token_indices`.

        Args:
            x: [T, columns of the projections].
            positions: [T] int64.
            metadata: of the pass.
            token_indices: [R] int64, the tokens whose outputs are wanted; None = all.
        """
        num_tokens, kv, layer = len(x), metadata.kv, self.layer_idx
        is_paged = isinstance(kv, PagedKVCache)
        if is_paged:
            slots, keys, values = metadata.slot_mapping, kv.keys[layer], kv.values[layer]
        else:  # one that keeps KV in its own way, such as that of training
            slots = torch.arange(num_tokens, device=x.device)
            shape = (num_tokens, self.shape.num_kv_heads, self.shape.head_size)
            keys, values = x.new_empty(shape), x.new_empty(shape)
        turns = share_turns(self.turns, positions, metadata.shared)
        query = turn_heads(
            self.qkv.parts(x), self.shape, turns, positions, self.norms, slots, keys, values
        )
        if not is_paged:
            kv.write(layer, metadata.slot_mapping, keys, values)
        attend = ATTENTION_BACKENDS[metadata.backend]
        output = attend(query, metadata, layer, self.scaling, self.window)
        output = output.reshape(num_tokens, -1)
        return self.out.parts(
            output if token_indices is None else output.index_select(0, token_indices)
        )


class FusedMLP:
    """Gated MLP of a layer.

    Args:
        mlp: module of transformers that `check_layer` found to match.
    """

    def __init__(self, mlp: Any) -> None:
        self.gate_up: LinearLayer = join_linears(mlp, ("gate_proj", "up_proj"))
        self.down: LinearLayer = join_linears(mlp, ("down_proj",))

    def __call__(self, x: Tensor) -> Tensor:
        """Return parts [S, T, hidden] of the output for x [T, hidden]."""
        return self.down.parts(self.gate_up.gated(x))


class FusedLayer:
    """A decoder layer.

    Args:
        layer: module of transformers that `check_layer` found to match.
        turns: of `make_turn_table`.
    """

    def __init__(self, layer: Any, turns: Tensor) -> None:
        self.attention = FusedAttention(layer.self_attn, turns)
        self.mlp = FusedMLP(layer.mlp)
        self.input_norm = as_norm(layer.input_layernorm)
        self.middle_norm = as_norm(layer.post_attention_layernorm)


class FusedDecoder:
    """A decoder as a loop over fused layers.

    Args:
        embedding: [V, hidden].
        layers: in order.
        norm: behind the last.
    """

    def __init__(self, embedding: Tensor, layers: Sequence[FusedLayer], norm: Norm) -> None:
        self.embedding, self.layers, self.norm = embedding, list(layers), norm

    def first_layers(self, num_layers: int) -> "FusedDecoder":
        """Return the decoder that stops after some layers; nothing is copied."""
        return FusedDecoder(self.embedding, self.layers[:num_layers], self.norm)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        kept_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass.

        Args:
            input_ids: [T] int64.
            positions: [T] int64.
            metadata: of the pass.
            kept_layers: A indices of layers whose outputs are kept.

        Returns:
            Hidden states after the last norm, [T, hidden], and the kept outputs side by side,
            [T, A * hidden], or None where none is wanted.
        """
        shape = (len(input_ids), self.embedding.shape[1])
        normed, stream = self.embedding.new_empty(shape), self.embedding.new_empty(shape)
        kept = None
        if kept_layers:
            kept = self.embedding.new_empty((shape[0], len(kept_layers) * shape[1]))
        first = self.layers[0].input_norm if self.layers else self.norm
        table = self.embedding
        add_rms_norm(table, None, first.weight, first.eps, normed, stream, input_ids)
        residual = stream
        for i, layer in enumerate(self.layers):
            middle, last = layer.middle_norm, i + 1 == len(self.layers)
            parts = layer.attention(normed, positions, metadata)
            add_rms_norm(parts, residual, middle.weight, middle.eps, normed, stream)
            parts = layer.mlp(normed)
            follows = self.norm if last else self.layers[i + 1].input_norm
            residual = stream
            if kept is not None and i in kept_layers:
                # Written where it is kept, and read from there by the next layer.
                residual = _column(kept, kept_layers.index(i), shape[1])
            add_rms_norm(parts, stream, follows.weight, follows.eps, normed, residual)
        if kept is not None:
            self._copy_repeated(kept, kept_layers, shape[1])
        return normed, kept

    def quantize(self, decoder: Any) -> None:
        """Round the weights of all layers to 8 bits, in place; see `runner.models.fp8`.

        Args:
            decoder: that was fused.

        Raises:
            UnsupportedError: they are packed for a CPU.
        """
        for layer, module in zip(self.layers, decoder.layers, strict=True):
            attention, mlp = module.self_attn, module.mlp
            round_linears(attention, _PROJECTIONS[:3], layer.attention.qkv)
            round_linears(attention, _PROJECTIONS[3:], *_alone(layer.attention.out))
            round_linears(mlp, ("gate_proj", "up_proj"), layer.mlp.gate_up)
            round_linears(mlp, ("down_proj",), *_alone(layer.mlp.down))

    @staticmethod
    def _copy_repeated(kept: Tensor, kept_layers: Sequence[int], width: int) -> None:
        """Fill the columns of layers that are kept more than once."""
        for column, layer in enumerate(kept_layers):
            first = kept_layers.index(layer)
            if first < column:
                _column(kept, column, width).copy_(_column(kept, first, width))


def _window(attention: Any) -> int | None:
    """Return how many keys a query of an attention module sees, None for all."""
    # Mistral's reads the configuration. A Llama's may name a window, too, which nothing reads.
    owner = attention.config if isinstance(attention, MistralAttention) else attention
    return getattr(owner, "sliding_window", None)


def _alone(layer: Any) -> tuple[LinearLayer, Callable[[Tensor], Tensor] | None]:
    """Return a rank's own layer of one that ranks share, and what gives the largest of theirs."""
    shared: TensorParallel | None = getattr(layer, "tensor_parallel", None)
    return (layer, None) if shared is None else (layer.linear, shared.all_max)


def _column(kept: Tensor, index: int, width: int) -> Tensor:
    return kept[:, index * width : (index + 1) * width]


def fuse_decoder(decoder: Any, num_positions: int) -> FusedDecoder:
    """Fuse a decoder of transformers, in place.

    Args:
        decoder: with its weights, on its device.
        num_positions: that a text may have.

    Raises:
        UnsupportedError: it does not match; nothing was changed.
    """
    check_decoder(decoder)
    weight = decoder.embed_tokens.weight.detach()
    turns = make_turn_table(decoder.rotary_emb, num_positions, weight.dtype)
    layers = [FusedLayer(layer, turns) for layer in decoder.layers]
    return FusedDecoder(weight, layers, as_norm(decoder.norm))


def check_decoder(decoder: Any) -> None:
    """Check that a decoder is what `FusedDecoder` runs.

    Raises:
        UnsupportedError: says what is not.
    """
    _check_parts(decoder, _DECODER_PARTS, "the decoder")
    if type(decoder.embed_tokens) is not nn.Embedding:
        raise UnsupportedError(f"its embedding is a {type(decoder.embed_tokens).__name__}")
    if len(decoder.layers) == 0:
        raise UnsupportedError("it has no layers")
    _check_factors(decoder)
    as_norm(decoder.norm)
    for layer in decoder.layers:
        check_layer(layer)


def check_layer(layer: Any) -> None:
    """Check that a decoder layer is what `FusedLayer` runs.

    Raises:
        UnsupportedError: says what is not.
    """
    _check_parts(layer, _LAYER_PARTS, "a layer")
    _check_factors(layer)
    as_norm(layer.input_layernorm)
    as_norm(layer.post_attention_layernorm)
    check_attention(layer.self_attn)
    check_mlp(layer.mlp)


def check_attention(attention: Any) -> None:
    """Check that a module is what `FusedAttention` runs.

    Raises:
        UnsupportedError: says what is not.
    """
    has_norms = any(hasattr(attention, name) for name in _HEAD_NORMS)
    norms = set(_HEAD_NORMS) if has_norms else set()
    _check_parts(attention, set(_PROJECTIONS) | norms, "attention")
    _check_linears(attention, _PROJECTIONS)
    biases = {getattr(attention, name).bias is None for name in _PROJECTIONS[:3]}
    if len(biases) > 1:
        raise UnsupportedError("some of q, k and v have a bias and some have none")
    head_size = getattr(attention, "head_dim", 0)
    scaling = getattr(attention, "scaling", None)
    if not head_size or head_size % 2 or not isinstance(scaling, float):
        raise UnsupportedError("its attention says no head_dim or scaling")
    if not getattr(attention, "use_rope", True):
        raise UnsupportedError("a layer turns no positions")
    for name in sorted(norms):
        if len(as_norm(getattr(attention, name)).weight) != head_size:
            raise UnsupportedError(f"{name} is not over one head")


def check_mlp(mlp: Any) -> None:
    """Check that a module is what `FusedMLP` runs.

    Raises:
        UnsupportedError: says what is not.
    """
    _check_parts(mlp, _MLP_PARTS, "the MLP")
    _check_linears(mlp, ("gate_proj", "up_proj", "down_proj"))
    if (mlp.gate_proj.bias is None) != (mlp.up_proj.bias is None):
        raise UnsupportedError("one of gate and up has a bias")
    x = torch.linspace(-4, 4, 9)
    if not torch.allclose(mlp.act_fn(x), nn.functional.silu(x)):
        raise UnsupportedError(f"the activation of its MLP is {type(mlp.act_fn).__name__}")


def as_norm(module: Any) -> Norm:
    """Return what an RMSNorm module holds.

    Raises:
        UnsupportedError: it is another norm.
    """
    eps = getattr(module, "variance_epsilon", None)
    weight = getattr(module, "weight", None)
    names = [name for name, _ in module.named_parameters()]
    if eps is None or weight is None or names != ["weight"]:
        raise UnsupportedError(f"{type(module).__name__} is no RMSNorm with a weight")
    return Norm(weight.detach(), float(eps))


def _check_parts(module: Any, wanted: set[str], what: str) -> None:
    found = {name for name, _ in module.named_children()}
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if found != wanted or own:
        odd = sorted((found ^ wanted) | own)
        raise UnsupportedError(f"{what} has or lacks {', '.join(odd)}")


def _check_factors(module: Any) -> None:
    """Refuse what scales embeddings or residuals: close to 1, the narrow dtypes would not show."""
    for name, value in vars(module).items():
        if name.endswith("_multiplier") and value != 1:
            raise UnsupportedError(f"{type(module).__name__} has {name}={value}")


def _check_linears(module: Any, names: Sequence[str]) -> None:
    for name in names:
        if type(getattr(module, name)) is not nn.Linear:
            raise UnsupportedError(f"{name} is a {type(getattr(module, name)).__name__}")
