"""Bytes and numbers between all ranks, on the host; every rank calls each function alike."""

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from specdec.parallel.groups import watch_ranks

# Of a message, its length included; what does not fit goes round a second time.
_SLOT_BYTES = 8192
_LENGTH_BYTES = 8


def gather_bytes(group: dist.ProcessGroup, message: bytes) -> list[bytes]:
    """Give every rank the messages of all, in the order of ranks: mostly one collective.

    Args:
        group: of gloo.
        message: of this rank; lengths may differ.

    Raises:
        LostRankError: another rank ended.
    """
    size = dist.get_world_size(group)
    room = _SLOT_BYTES - _LENGTH_BYTES
    slot = _padded(len(message).to_bytes(_LENGTH_BYTES, "little") + message[:room], _SLOT_BYTES)
    slots = [bytes(t.numpy()) for t in _all_gather(group, slot, size)]
    lengths = [int.from_bytes(slot[:_LENGTH_BYTES], "little") for slot in slots]
    found = [slot[_LENGTH_BYTES:][:n] for slot, n in zip(slots, lengths, strict=True)]
    longest = max(lengths)
    if longest > room:
        rest = _all_gather(group, _padded(message[room:], longest - room), size)
        found = [head + bytes(t.numpy()) for head, t in zip(found, rest, strict=True)]
        found = [text[:n] for text, n in zip(found, lengths, strict=True)]
    return found


def share(group: dist.ProcessGroup | None, value: Any) -> Any:
    """Return the value that the first rank gave; those of the others do not count.

    Args:
        group: of gloo; None where there is one rank.
        value: what JSON can hold.
    """
    if group is None:
        return value
    message = json.dumps(value).encode() if dist.get_rank(group) == 0 else b""
    return json.loads(gather_bytes(group, message)[0])


def _padded(message: bytes, size: int) -> torch.Tensor:
    """Return [size] uint8, the message and zeros behind it."""
    cells = np.zeros(size, dtype=np.uint8)
    cells[: len(message)] = np.frombuffer(message, dtype=np.uint8)
    return torch.from_numpy(cells)


def _all_gather(group: dist.ProcessGroup, tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    parts = [torch.zeros_like(tensor) for _ in range(size)]
    with watch_ranks("exchange results"):
        dist.all_gather(parts, tensor, group=group)
    return parts
