"""Bytes and numbers between ranks, on the host; every rank of a group calls each function alike."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from specdec.parallel.groups import LostRankError, watch_ranks

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


def decide(
    group: dist.ProcessGroup, shape: tuple[int, ...], choose: Callable[[], Any]
) -> np.ndarray:
    """Let the first rank choose for all: one broadcast.

    Args:
        group: of gloo.
        shape: of what is chosen, the same on every rank.
        choose: returns integers of that shape; called on the first rank alone.

    Returns:
        [*shape] int64, the same on every rank.

    Raises:
        LostRankError: another rank ended, or the first one could not choose.
    """
    cells = torch.zeros(1 + int(np.prod(shape)), dtype=torch.int64)  # the first tells a failure
    failure: BaseException | None = None
    if dist.get_rank(group) == 0:
        try:
            chosen = np.asarray(choose(), dtype=np.int64).reshape(shape)
            cells[1:] = torch.from_numpy(chosen.ravel())
        except BaseException as error:  # the others wait for an answer
            failure, cells[0] = error, 1
    with watch_ranks("hear what the first rank chose"):
        dist.broadcast(cells, group=group, group_src=0)
    if failure is not None:
        raise failure
    if cells[0]:
        first = dist.get_process_group_ranks(group)[0]
        raise LostRankError(f"rank {first} failed in a step; see what was told of it")
    return cells[1:].numpy().reshape(shape)


def least(group: dist.ProcessGroup, value: int) -> int:
    """Return the least of the ranks' integers."""
    cell = torch.tensor([value], dtype=torch.int64)
    with watch_ranks("agree on sizes"):
        dist.all_reduce(cell, dist.ReduceOp.MIN, group)
    return int(cell)


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
