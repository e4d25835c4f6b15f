"""Layers shared by ranks: which part of a model is a rank's, and what joins the parts again.

q, k, v, gate, up and the output head are split by rows, o and down by columns, so that a layer
needs two sums over the ranks, one behind o and one behind down. All else is whole on every rank.
Where there are more ranks than KV heads, several ranks hold the same one.

A model of transformers is cut down in place, before `runner.models.fused` joins its weights; from
then on it runs fused alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.models.fused import FusedDecoder, check_decoder
from runner.models.layers import LinearLayer, StreamedLinear, largest, stream_linear
from runner.models.packed_linear import PackedLinear
from runner.tensor_parallel import TensorParallel
from specdec.errors import ConfigError, UnsupportedError

_ROWS, _COLUMNS = 0, 1


@dataclass(frozen=True)
class Split:
    """A rank's part of a linear layer.

    Args:
        linear: whole, or cut down to the part.
        dim: of its weight that is divided: 0 = outputs, 1 = inputs.
        part: what the rank has of it.
        keeps_bias: whether the rank adds the layer's bias, if any: with inputs divided, one does.
    """

    linear: nn.Linear
    dim: int
    part: range
    keeps_bias: bool

    def take_weight(self, whole: Any) -> Any:
        """Return the part of a weight [N, K], or of a slice of a file."""
        rows = slice(self.part.start, self.part.stop)
        return whole[rows] if self.dim == _ROWS else whole[:, rows]

    def take_bias(self, whole: Any) -> Any:
        """Return the part of a bias [N], or of a slice of a file."""
        return whole[self.part.start : self.part.stop] if self.dim == _ROWS else whole[:]


@dataclass(frozen=True)
class RankPart:
    """What a model that was cut down is a part of.

    Args:
        rank: whose part.
        size: ranks.
        splits: by the name of the layer.
        num_parameters: of the whole model.
    """

    rank: int
    size: int
    splits: dict[str, Split]
    num_parameters: int


def plan_splits(model: Any, tensor_parallel: TensorParallel) -> dict[str, Split]:
    """Return this rank's part of every linear layer of a whole model, by the layer's name.

    Raises:
        UnsupportedError: it is not built as the fused model is.
        ConfigError: its heads or widths cannot be divided among the ranks.
    """
    decoder = model.get_decoder()
    try:
        check_decoder(decoder)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"model type {model.config.model_type!r} cannot be shared by ranks, for it is not "
            f"fused: {error}; give tensor_parallel_size=1"
        ) from error
    splits: list[Split] = []
    for layer in decoder.layers:
        _check_size(layer, tensor_parallel.size)
        splits += _plan_attention(layer.self_attn, tensor_parallel)
        splits += _plan_mlp(layer.mlp, tensor_parallel)
    splits.append(_plan_head(model.get_output_embeddings(), tensor_parallel))
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(split.linear)]: split for split in splits}


def _num_heads(attention: Any) -> tuple[int, int]:
    """Return the query heads and the KV heads."""
    projections = attention.q_proj, attention.k_proj
    num_heads, num_kv_heads = (one.out_features // attention.head_dim for one in projections)
    return num_heads, num_kv_heads


def _check_size(layer: Any, size: int) -> None:
    """Refuse a number of ranks that does not divide a layer."""
    num_heads, num_kv_heads = _num_heads(layer.self_attn)
    width = layer.mlp.gate_proj.out_features
    allowed = [
        n
        for n in range(1, num_heads + 1)
        if num_heads % n == width % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)
    ]
    if size not in allowed:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide layers of {num_heads} query heads, "
            f"{num_kv_heads} KV heads and intermediate_size {width}; give one of "
            f"{', '.join(map(str, allowed))}"
        )


def _plan_attention(attention: Any, tensor_parallel: TensorParallel) -> list[Split]:
    rank, size = tensor_parallel.rank, tensor_parallel.size
    head_size = attention.head_dim
    num_heads, num_kv_heads = _num_heads(attention)
    queries = _elements(rank * num_heads // size, num_heads // size, head_size)
    kv = _elements(rank * num_kv_heads // size, max(1, num_kv_heads // size), head_size)
    return [
        Split(attention.q_proj, _ROWS, queries, True),
        Split(attention.k_proj, _ROWS, kv, True),
        Split(attention.v_proj, _ROWS, kv, True),
        Split(attention.o_proj, _COLUMNS, queries, rank == 0),
    ]


def _elements(first_head: int, num_heads: int, head_size: int) -> range:
    return range(first_head * head_size, (first_head + num_heads) * head_size)


def _plan_mlp(mlp: Any, tensor_parallel: TensorParallel) -> list[Split]:
    part = tensor_parallel.part_of(mlp.gate_proj.out_features)
    return [
        Split(mlp.gate_proj, _ROWS, part, True),
        Split(mlp.up_proj, _ROWS, part, True),
        Split(mlp.down_proj, _COLUMNS, part, tensor_parallel.rank == 0),
    ]


def _plan_head(head: Any, tensor_parallel: TensorParallel) -> Split:
    if type(head) is not nn.Linear:
        raise UnsupportedError(f"its output head is a {type(head).__name__}, which is not shared")
    size, num_rows = tensor_parallel.size, head.out_features
    if not tensor_parallel.part_of(num_rows, size - 1):
        raise ConfigError(
            f"tensor_parallel_size={size} leaves a rank none of {num_rows} tokens; give fewer ranks"
        )
    return Split(head, _ROWS, tensor_parallel.part_of(num_rows), True)


def split_model(model: Any, tensor_parallel: TensorParallel) -> RankPart:
    """Cut a model down to this rank's part, in place; what it had beyond is freed.

    Args:
        model: whole; one that was cut down already stays as it is.
        tensor_parallel: the ranks.

    Raises:
        UnsupportedError, ConfigError: as of `plan_splits`; nothing was changed.
    """
    rank, size = tensor_parallel.rank, tensor_parallel.size
    done: RankPart | None = getattr(model, "rank_part", None)
    if done is not None:
        assert (done.rank, done.size) == (rank, size), f"part {done.rank} of {done.size}"
        return done
    splits = plan_splits(model, tensor_parallel)
    num_parameters = model.num_parameters()
    table = model.get_input_embeddings().weight
    for split in splits.values():
        linear, is_tied = split.linear, split.linear.weight is table
        part = split.take_weight(linear.weight.detach())
        # A tied head stays a view of the embedding, which is whole.
        part = part if is_tied else part.clone(memory_format=torch.contiguous_format)
        bias = None
        if linear.bias is not None and split.keeps_bias:
            bias = split.take_bias(linear.bias.detach()).clone()
        fill_linear(linear, part, bias)
    model.rank_part = RankPart(rank, size, splits, num_parameters)
    return model.rank_part


def fill_linear(linear: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Give a linear layer a weight [N, K] of any size, and a bias [N] or none."""
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


def join_ranks(fused: FusedDecoder, tensor_parallel: TensorParallel) -> None:
    """Let the layers of a fused decoder over a rank's part add up what the ranks give."""
    for layer in fused.layers:
        layer.attention.out = RowParallel(layer.attention.out, tensor_parallel)
        layer.mlp.down = RowParallel(layer.mlp.down, tensor_parallel)


class RowParallel:
    """A linear layer whose inputs are divided among ranks: its output is the sum of theirs.

    Args:
        linear: over this rank's inputs.
        tensor_parallel: the ranks.
    """

    def __init__(self, linear: LinearLayer, tensor_parallel: TensorParallel) -> None:
        self.linear, self.tensor_parallel = linear, tensor_parallel
        if isinstance(linear, StreamedLinear):
            linear.wide_parts = True

    def parts(self, x: Tensor) -> Tensor:
        """Return the output as one part [1, T, N], of the whole layer, for x [T, K / size].

        It is added up in the dtype of the parts: float32 of few tokens on a GPU and on a CPU; what
        the library gives for many tokens on a GPU stays as it is, for half the bytes.
        """
        parts = self.linear.parts(x)
        own = parts if len(parts) == 1 else parts.sum(0, keepdim=True)
        return self.tensor_parallel.all_reduce(own.float() if own.is_cpu else own)

    def gated(self, x: Tensor) -> Tensor:
        """Never called: gate and up are split by rows."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [T, N] of the whole layer."""
        return self.parts(x)[0].to(x.dtype)


class VocabularyHead(nn.Module):
    """An output head whose rows are divided among ranks.

    Args:
        own: layer over this rank's rows.
        tensor_parallel: the ranks.
        num_rows: of all.
    """

    def __init__(self, own: nn.Module, tensor_parallel: TensorParallel, num_rows: int) -> None:
        super().__init__()
        self.own, self.num_rows = own, num_rows
        self._stream: Any = stream_linear(own)
        self._tensor_parallel = tensor_parallel
        self._part = tensor_parallel.part_of(num_rows)

    @property
    def bias(self) -> Tensor | None:
        """Return this rank's part of the bias, if any."""
        return getattr(self.own, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of all rows, [L, num_rows], for x [L, hidden]."""
        return self._tensor_parallel.all_gather_columns(self._stream(x), self.num_rows)

    def top1(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the likeliest token [L] int64; no rank sees the others' logits.

        Args:
            x: [L, hidden].
            ids: [num_rows] int64 that stand for the rows, None = their places.
        """
        values, places = largest(self._stream, x)
        chosen = self._tensor_parallel.top1(values, places, self._part.start)
        return chosen if ids is None else ids[chosen]

    def rows(self, ids: Tensor) -> Tensor:
        """Return a copy of the weights of some rows, [n, hidden], from the ranks that have them.

        Args:
            ids: [n] int64, on the head's device; the same on all ranks.
        """
        if isinstance(self.own, PackedLinear):  # its product with the identity is its weight
            unit = torch.eye(self.own.in_features, dtype=torch.bfloat16)
            weight = self.own(unit).T
        else:
            weight: Any = self.own.weight
        places = ids - self._part.start
        is_own = (places >= 0) & (places < len(self._part))
        rows = weight.detach()[places.clamp(0, len(self._part) - 1)]
        rows = torch.where(is_own[:, None], rows, 0).contiguous()
        return self._tensor_parallel.all_reduce(rows)  # one rank's, and zeros: exact
