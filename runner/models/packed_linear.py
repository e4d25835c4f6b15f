"""Linear layers whose bf16 weights are packed once for oneDNN, on a CPU.

At the few rows of a decoding step, the plain bf16 linear rearranges its weight on every call and
reads memory at about half the rate of the packed one (benchmarks/README.md has the figures). The
packed weight replaces the plain one, except where the weight is shared with the embedding.
"""

import functools
import logging
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """A linear layer for inference over a oneDNN-packed bf16 weight.

    Args:
        weight: [N, K].
        bias: [N], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def parts(self, x: Tensor) -> Tensor:
        """Return the output as the one part [1, T, N] of a fused model's layer."""
        return self.forward(x)[None]

    def part(self, rows: slice) -> "PackedLinear":
        """Return a layer of some of the outputs, packed anew: the very same weights."""
        bias = None if self._bias is None else self._bias[rows]
        return PackedLinear(self._packed.to_dense()[rows].contiguous(), bias)

    @torch.inference_mode()
    def samples(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what tells this weight from another: some of its columns, and the bias, if any.

        A product with a unit vector is a column, to the bit, whatever the order of the packed
        weight.
        """
        places = torch.linspace(0, self.in_features - 1, 4).long()
        unit = F.one_hot(places, self.in_features).to(torch.bfloat16)
        none = "none", [], ""
        yield "weight", torch.ops.mkldnn._linear_pointwise(unit, self._packed, None, *none)
        if self._bias is not None:
            yield "bias", self._bias

    def gated(self, x: Tensor) -> Tensor:
        """Return SiLU(gate) * up of a layer that holds both."""
        gate, up = self.forward(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def pack_linears(model: nn.Module) -> int:
    """Replace every bf16 `nn.Linear` of a CPU model by its packed form.

    Returns:
        The number of layers replaced; 0, with the reason logged, where oneDNN cannot pack.
    """
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and can_pack(child.weight)
    ]
    for parent, name, child in linears:
        setattr(parent, name, PackedLinear(child.weight, child.bias))
    return len(linears)


def can_pack(weight: Tensor) -> bool:
    """Return whether a weight is one that oneDNN packs here."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _packing_works()


@functools.cache
def _packing_works() -> bool:
    """Try; where oneDNN cannot pack, the reason is logged once."""
    weight = torch.zeros(16, 32, dtype=torch.bfloat16)
    try:
        packed = PackedLinear(weight, None)(torch.zeros(1, 32, dtype=weight.dtype))
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.warning("linear layers stay unpacked: %s", str(error).splitlines()[0])
        return False
    return packed.shape == (1, 16)
