"""Ranks that have to agree say so: checksums of what each chose, compared every few steps.

What ranks load is compared once, entry by entry.
"""

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from specdec.parallel.exchange import gather_bytes
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
    who = _who_differs(ranks, table[:, line, column].tolist())
    return (
        f"{who} in {what} at step {table[0, line, 0]}: ranks have to compute the same there; run "
        "the same code, versions and options on each"
    )


def compare_loaded(
    group: dist.ProcessGroup | None, what: str, entries: Mapping[str, Any], tells: bool = False
) -> None:
    """Check that the ranks of a group loaded the same.

    Args:
        group: on the host (gloo); None where there is one rank: then nothing is compared.
        what: was loaded, for the message.
        entries: of this rank, by their names; numbers and strings.
        tells: whether the message shows what each rank has, which says nothing of checksums.

    Raises:
        RankError: ranks disagree; names them, and the first entry that differs.
        LostRankError: another rank ended.
    """
    if group is None:
        return
    messages = gather_bytes(group, json.dumps(list(entries.items())).encode())
    if any(message != messages[0] for message in messages):
        ranks = dist.get_process_group_ranks(group)
        told = [dict(json.loads(message)) for message in messages]
        raise RankError(describe_loaded(ranks, what, told, tells))


def describe_loaded(
    ranks: Sequence[int], what: str, told: Sequence[Mapping[str, Any]], tells: bool
) -> str:
    """Say who loaded something else than whom, and where it differs first.

    Args:
        ranks: R of them.
        what: was loaded.
        told: entries of each rank, by name; not all alike, in their order at least.
        tells: whether to show the values.
    """
    names = list(dict.fromkeys(name for entries in told for name in entries))
    odd = [name for name in names if len({entries.get(name) for entries in told}) > 1]
    if not odd:
        who, where = _named(ranks) + " disagree", "the order of its entries"
    else:
        values = [entries.get(odd[0]) for entries in told]
        who, where = _who_differs(ranks, values), odd[0]
        if tells:
            shown = zip(ranks, values, strict=True)
            where += f", {', '.join(f'{str(v)[:80]} on rank {rank}' for rank, v in shown)}"
        if len(odd) > 1:
            where += f"; and {len(odd) - 1} more of {len(names)}"
    return (
        f"{who} in {what} ({where}): ranks have to load the same; give each the same revision of "
        "the files, the same dtype and the same weight_dtype"
    )


def _who_differs(ranks: Sequence[int], values: Sequence[Any]) -> str:
    """Say which ranks have other values than most, or that they all disagree."""
    usual, times = Counter(values).most_common(1)[0]
    if 2 * times > len(values):
        odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
        return f"{_named(odd)} and the rest of {len(ranks)} ranks disagree"
    return f"{_named(ranks)} disagree"  # there is no majority to hold one against


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
