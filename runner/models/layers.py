"""Linear layers of a fused model: one weight, however it is stored and computed.

`StreamedLinear` is a plain weight on any device; which way it is computed follows from the shape
(`runner.models.linear_choices`). On a CPU in bfloat16 `PackedLinear` takes its place.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.models.fp8 import dequantize_rows, quantize_rows
from runner.models.glu import silu_mul
from runner.models.linear import glu_linear, split_linear, top1_linear
from runner.models.linear_choices import choose_linear
from runner.models.linear_launch import LinearLaunch, LinearShape
from runner.models.packed_linear import PackedLinear, can_pack
from specdec.errors import UnsupportedError


class LinearLayer(Protocol):
    """A linear layer as the fused model calls it."""

    def parts(self, x: Tensor) -> Tensor:
        """Return parts [S, T, N] whose sum is the layer's output for x [T, K]."""
        ...

    def gated(self, x: Tensor) -> Tensor:
        """Return SiLU(gate) * up, [T, N / 2], of a layer that holds both."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [T, N]."""
        ...


class StreamedLinear:
    """A linear layer over a plain weight.

    Args:
        weight: [N, K], contiguous.
        bias: [N], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        rows, columns = weight.shape
        self._shape = LinearShape(rows, columns)
        self._glu_shape = LinearShape(rows // 2, columns, glu=True)
        # [N] float32 where the weight is one of `runner.models.fp8`.
        self.scales: Tensor | None = None
        self.wide_parts = False  # in float32 where our kernel makes them, however many there are

    def quantize(self, of_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        """Round the weight to 8 bits; the old one is let go. See `quantize_rows`."""
        self.weight, self.scales = quantize_rows(self.weight, of_ranks)
        self._shape = replace(self._shape, eight_bit=True)
        self._glu_shape = replace(self._glu_shape, eight_bit=True)

    def launch(self, x: Tensor, glu: bool = False) -> LinearLaunch | None:
        """Return how the layer is launched for x [T, K], None for the library."""
        return choose_linear(self._glu_shape if glu else self._shape, len(x), x.dtype, x.device)

    def by_library(self, x: Tensor) -> Tensor:
        """Return the output [T, N] as the library computes it."""
        if self.scales is None:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, dequantize_rows(self.weight, self.scales, x.dtype), self.bias)

    def parts(self, x: Tensor) -> Tensor:
        """Return parts [S, T, N]; see `LinearLayer`."""
        launch = self.launch(x)
        if launch is None:
            return self.by_library(x)[None]
        dtype = torch.float32 if launch.splits > 1 or self.wide_parts else x.dtype
        return split_linear(x, self.weight, self.bias, launch, dtype, self.scales)

    def gated(self, x: Tensor) -> Tensor:
        """Return SiLU(gate) * up; see `LinearLayer`."""
        launch = None
        if self.bias is None:
            launch = self.launch(x, glu=True)
        if launch is None:
            return silu_mul(self.by_library(x))
        return glu_linear(x, self.weight, launch, self.scales)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [T, N]."""
        parts = self.parts(x)
        return parts[0] if len(parts) == 1 else parts.sum(0).to(x.dtype)


class PackedRows(nn.Module):
    """Some rows of a joint layer, in the place of the linear layer that they were.

    Nothing of the fused model runs it; it keeps the model of transformers whole. It computes all
    rows of the joint layer: a model that is to run by its modules has `separate_packed`.

    Args:
        joint: the layer that holds the rows.
        start: the first of them.
        end: behind the last.
    """

    def __init__(self, joint: LinearLayer, start: int, end: int) -> None:
        super().__init__()
        self._joint, self._rows = (joint,), slice(start, end)  # a tuple: no child of this module

    def alone(self) -> nn.Module:
        """Return a layer of these rows that computes no others, where the joint one is packed."""
        joint = self._joint[0]
        return joint.part(self._rows) if isinstance(joint, PackedLinear) else self

    def samples(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what tells these rows from others; see `PackedLinear.samples`."""
        joint = self._joint[0]
        if isinstance(joint, PackedLinear):
            for field, values in joint.samples():
                yield field, values[..., self._rows]  # columns, one a line, and a bias
        elif isinstance(joint, StreamedLinear):
            for field in ("weight", "scales", "bias"):
                values = getattr(joint, field)
                if values is not None:
                    yield field, values[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows of the joint layer's output."""
        outputs = self._joint[0](x.reshape(-1, x.shape[-1]))
        return outputs[:, self._rows].reshape(*x.shape[:-1], -1)


def join_linears(owner: Any, names: Sequence[str]) -> LinearLayer:
    """Join linear layers over one input into one, in place: there is no second copy of a weight.

    Args:
        owner: module that has them; its own stay usable, as views of the joint weight.
        names: of the layers, `nn.Linear` each; all or none have a bias.
    """
    linears: list[nn.Linear] = [getattr(owner, name) for name in names]
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    single = len(linears) == 1
    weight = weights[0].contiguous() if single else torch.cat(weights)
    bias = None
    if biases:
        bias = biases[0].contiguous() if single else torch.cat(biases)
    ends = [0]
    for linear in linears:
        ends.append(ends[-1] + linear.out_features)
    if can_pack(weight):
        packed = PackedLinear(weight, bias)
        for name, start, end in zip(names, ends[:-1], ends[1:], strict=True):
            setattr(owner, name, packed if single else PackedRows(packed, start, end))
        return packed
    for linear, start, end in zip(linears, ends[:-1], ends[1:], strict=True):
        linear.weight = nn.Parameter(weight[start:end], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[start:end], requires_grad=False)
    return StreamedLinear(weight, bias)


def separate_packed(model: nn.Module) -> None:
    """Give the packed parts of joint layers a weight each, in place: they run by themselves now."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedRows):
                setattr(parent, name, child.alone())


def round_linears(
    owner: Any,
    names: Sequence[str],
    joint: LinearLayer,
    of_ranks: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Round the weight of layers that were joined to 8 bits, in place; see `runner.models.fp8`.

    Args:
        owner: module that has them.
        names: of the layers, in the order in which they were joined.
        joint: what `join_linears` returned for them.
        of_ranks: see `quantize_rows`.

    Raises:
        UnsupportedError: the weight is packed for a CPU.
    """
    if not isinstance(joint, StreamedLinear):
        raise UnsupportedError(
            "weights in bfloat16 on a CPU are packed and cannot be 8-bit; give dtype='float32'"
        )
    start = 0
    for name in names:  # views of the old weight: it has to go
        end = start + getattr(owner, name).out_features
        setattr(owner, name, PackedRows(joint, start, end))
        start = end
    joint.quantize(of_ranks)


def top1(linear: Any, x: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the place of a layer's largest output, without writing the outputs where possible.

    Args:
        linear: any layer.
        x: [T, K].
        ids: [N] int64 that stand for the places.

    Returns:
        [T] int64; among equal outputs the first.
    """
    if isinstance(linear, StreamedLinear) and linear.bias is None:
        launch = linear.launch(x)
        if launch is not None and _gives_top(launch):
            return top1_linear(x, linear.weight, launch, ids)
    chosen = linear(x).argmax(1)
    return chosen if ids is None else ids[chosen]


def largest(linear: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's largest output and its place, as `top1` finds it.

    Args:
        linear: any layer.
        x: [T, K].

    Returns:
        Values [T] float32 and places [T] int64.
    """
    if isinstance(linear, StreamedLinear) and linear.bias is None:
        launch = linear.launch(x)
        if launch is not None and _gives_top(launch):
            values = torch.empty(len(x), dtype=torch.float32, device=x.device)
            return values, top1_linear(x, linear.weight, launch, values=values)
    outputs = linear(x)
    places = outputs.argmax(1)
    return outputs.gather(1, places[:, None])[:, 0].float(), places


def _gives_top(launch: LinearLaunch) -> bool:
    """Return whether a launch can also keep the largest outputs alone."""
    return launch.splits == 1 and launch.more_t == 0 and not launch.tiled


def stream_linear(linear: Any) -> Any:
    """Return what computes a linear layer: its weight streamed, or any other module as it is."""
    if type(linear) is nn.Linear and linear.weight.is_contiguous():
        return StreamedLinear(linear.weight, linear.bias)
    return linear
