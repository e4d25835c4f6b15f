"""Linear layers whose bf16 weights are packed once for oneDNN, on a CPU.

At the few rows of a decoding step, the plain bf16 linear rearranges its weight on every call and
reads memory at about half the rate of the packed one (benchmarks/README.md has the figures). The
packed weight replaces the plain one, except where the weight is shared with the embedding.
"""

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference over a oneDNN-packed bf16 weight.

    Args:
        linear: the layer to take weight and bias from.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def pack_linears(model: nn.Module) -> int:
    """Replace every bf16 `nn.Linear` of a CPU model by its packed form.

    Returns:
        The number of layers replaced; 0, with the reason logged, where oneDNN cannot pack.
    """
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if not linears or not _can_pack(linears[0][2]):
        return 0
    for parent, name, child in linears:
        setattr(parent, name, PackedLinear(child))
    return len(linears)


def _can_pack(linear: nn.Linear) -> bool:
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    try:
        packed = PackedLinear(linear)(torch.zeros(1, linear.in_features, dtype=weight.dtype))
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.warning("linear layers stay unpacked: %s", str(error).splitlines()[0])
        return False
    return packed.shape == (1, linear.out_features)
