"""What is written where nothing valid is: a read of it shows, or fails loudly as an index."""

import torch
from torch import Tensor

# Far outside every row, column, slot, token id and length, and far enough from the ends of int32
# that a sum of two of them does not wrap around.
POISON = -777_777_777


def fill_poison(tensor: Tensor) -> Tensor:
    """Fill in place with NaN or POISON, or the extreme of what cannot hold it; return it."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    limits = torch.iinfo(tensor.dtype)
    return tensor.fill_(limits.max if limits.min == 0 else max(limits.min, POISON))
