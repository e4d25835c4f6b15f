"""Ranks that have to agree say so: checksums of what each chose, compared every few steps."""

import zlib
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist

from specdec.parallel.groups import RankError, watch_ranks

# What differs first is told: the later kinds follow from the earlier ones.
KINDS = ("options", "requests", "kernel choices", "drafts", "tokens")


class RankCheck:
    """Compares what the ranks of a group did.

    A step costs a CRC-32 of the given bytes, every `every` steps one all-reduce of a few integers.

    Args:
        group: on the host (gloo); None where there is one rank: then nothing is compared.
        every: steps between two comparisons.
    """

    def __init__(self, group: dist.ProcessGroup | None, every: int) -> None:
        assert every >= 1, every
        self._group, self._every = group, every
        self._sums = [0] * len(KINDS)  # since the last comparison
        self._history: list[tuple[int, ...]] = []  # the step, and the sums behind it

    def add(self, kind: str, array: np.ndarray) -> None:
        """Take in what this rank chose in the step at hand.

        Args:
            kind: one of KINDS.
            array: any shape and dtype, on the host.
        """
        index = KINDS.index(kind)
        self._sums[index] = zlib.crc32(np.ascontiguousarray(array).data, self._sums[index])

    def compare(self, step: int) -> None:
        """End a step; every `every`-th call compares what was added since.

        Args:
            step: its number, the same on every rank.

        Raises:
            RankError: ranks disagree; names them, the first such step, and what differs.
            LostRankError: another rank ended.
        """
        if self._group is None:
            return
        self._history.append((step, *self._sums))
        if len(self._history) < self._every:
            return
        sums = torch.tensor(self._sums, dtype=torch.int64)
        extremes = torch.cat([sums, -sums])
        with watch_ranks("compare itself with the others"):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, self._group)
        largest, smallest = extremes[: len(KINDS)], -extremes[len(KINDS) :]
        if not torch.equal(largest, smallest):
            self._tell()
        self._sums = [0] * len(KINDS)
        self._history.clear()

    def _tell(self) -> None:
        """Raise what differs, from the sums of all steps since the last comparison."""
        assert self._group is not None
        own = torch.tensor(self._history, dtype=torch.int64)
        gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size(self._group))]
        with watch_ranks("compare itself with the others"):
            dist.all_gather(gathered, own, self._group)
        ranks = dist.get_process_group_ranks(self._group)
        raise RankError(describe(ranks, torch.stack(gathered).numpy()))


def describe(ranks: list[int], table: np.ndarray) -> str:
    """Say who differs from whom, in which step first, and in what.

    Args:
        ranks: R of them.
        table: [R, steps, 1 + kinds] int64, the step and the sums of KINDS behind it; not all alike.
    """
    differs = (table != table[:1]).any(axis=0)
    line = int(differs.any(axis=1).argmax())
    column = int(differs[line].argmax())
    what = KINDS[column - 1] if column else "the number of the step"
    values = table[:, line, column].tolist()
    usual, times = Counter(values).most_common(1)[0]
    if 2 * times > len(values):
        odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
        who = f"{_named(odd)} and the rest of {len(ranks)} ranks disagree"
    else:  # there is no majority to hold one against
        who = f"{_named(ranks)} disagree"
    return (
        f"{who} in {what} at step {table[0, line, 0]}: ranks have to compute the same there; run "
        "the same code, versions and options on each"
    )


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
