"""Checksums of a model's weights, by which ranks see whether they hold the same.

Bits are compared, not sums: what a device adds up depends on its order. Of a large weight some
entries are read, spread evenly over all of it, so that another checkpoint shows; the host never
sees more than these.
"""

import zlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from runner.models.layers import PackedRows
from runner.models.packed_linear import PackedLinear

_MAX_SAMPLES = 1 << 16  # of a weight; a smaller one is read as a whole


def checksum(weight: Tensor) -> int:
    """Return a CRC-32 of a weight's shape, dtype and some of its entries, on the host.

    Args:
        weight: any shape, dtype and device.
    """
    flat = weight.detach().reshape(-1)
    step = -(-flat.numel() // _MAX_SAMPLES) if flat.numel() else 1
    step += step > 1 and step % 2 == 0  # widths are even: an odd step meets every column
    samples = flat[::step].contiguous().view(torch.uint8).cpu().numpy()
    return zlib.crc32(samples.data, zlib.crc32(repr((weight.shape, weight.dtype)).encode()))


def weight_checksums(
    model: nn.Module, skip: Collection[str] = (), shared: nn.Module | None = None
) -> dict[str, int]:
    """Return the `checksum` of each weight of a model, by its name, in the model's order.

    Args:
        model: on any device; its weights may be packed or in 8 bits.
        skip: names of modules whose own weights are left out.
        shared: what is its own is left out, too.
    """
    others = set() if shared is None else {id(module) for module in shared.modules()}
    storages = {_storage(w) for _, w in shared.named_parameters()} if shared is not None else set()
    found = {}
    for name, module in model.named_modules():
        if name in skip or id(module) in others:
            continue
        for field, weight in _own_weights(module):
            if _storage(weight) not in storages:
                found[f"{name}.{field}".lstrip(".")] = checksum(weight)
    return found


def _own_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each weight of a module, those of its children left out."""
    yield from module.named_parameters(recurse=False)
    if isinstance(module, PackedLinear | PackedRows):
        yield from module.samples()


def _storage(weight: Tensor) -> int:
    return weight.untyped_storage().data_ptr()
