"""The ranks of a job and their process groups, set up from the environment that torchrun gives.

A job has data_parallel_size x tensor_parallel_size ranks. Ranks of one replica follow one another:
rank = dp_rank * tensor_parallel_size + tp_rank. What ranks tell one another on the host (requests,
results, checksums) travels over `control`, which is gloo on every device, so that it never waits
for a GPU, as does `tp_host` between the ranks of one replica; `tp` and `dp` carry the tensors of a
step, by nccl on GPUs and gloo on CPUs.

With one rank nothing of torch.distributed is initialised.
"""

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from specdec.errors import ConfigError, SpecdecError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0


class RankError(SpecdecError):
    """Ranks of a job that lost, or contradict, one another."""


class LostRankError(RankError):
    """Another rank failed, or does not answer any more; this rank cannot go on without it."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks of a job share the work.

    Args:
        data_parallel_size: replicas, each with requests of its own.
        tensor_parallel_size: ranks of a replica, which share its layers.
        timeout_s: seconds that a rank waits for the others before it gives up.

    Raises:
        ConfigError: a size below 1.
    """

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    timeout_s: float = _TIMEOUT_S

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("data_parallel_size", "tensor_parallel_size"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} is not allowed; give an integer >= 1")

    @property
    def world_size(self) -> int:
        """Return the ranks of the job."""
        return self.data_parallel_size * self.tensor_parallel_size

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return a rank's replica, and its place in it: (dp_rank, tp_rank)."""
        return divmod(rank, self.tensor_parallel_size)


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place among the others; the groups are None where it would be alone in them."""

    config: ParallelConfig
    rank: int = 0
    local_rank: int = 0  # on its host
    control: dist.ProcessGroup | None = None  # all ranks, gloo
    tp: dist.ProcessGroup | None = None  # the ranks of this replica
    dp: dist.ProcessGroup | None = None  # the ranks with this place in the other replicas
    tp_host: dist.ProcessGroup | None = None  # the ranks of this replica, gloo

    @property
    def world_size(self) -> int:
        """Return the ranks of the job."""
        return self.config.world_size

    @property
    def dp_rank(self) -> int:
        """Return the replica that this rank belongs to."""
        return self.config.place_of(self.rank)[0]

    @property
    def tp_rank(self) -> int:
        """Return this rank's place in its replica."""
        return self.config.place_of(self.rank)[1]


class _Releasable(Protocol):
    """Holds what has to go before the groups that it uses."""

    def release(self) -> None: ...


_groups: ParallelGroups | None = None
_before_joining: Callable[[], None] | None = None
_holders: "weakref.WeakSet[_Releasable]" = weakref.WeakSet()


def is_rank() -> bool:
    """Return whether this process is a rank of a job, by torchrun or by `launch`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Return whether this process is the rank that writes and prints, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def init_groups(config: ParallelConfig, device_type: str = "cpu") -> ParallelGroups:
    """Set up the process groups of this rank; all ranks call it alike.

    What is set up lasts until `destroy_groups`, or the end of the process; asked again for the same
    sizes, it is returned again, with the `timeout_s` of the first call.

    Args:
        config: the sizes.
        device_type: "cuda" or "cpu": where the tensors of a step are.

    Raises:
        ConfigError: the environment's world size is another one, or there is no GPU for this rank.
        RankError: the other ranks cannot be reached.
    """
    global _groups
    if config.world_size == 1:
        return ParallelGroups(config)
    if _groups is not None and _sizes(_groups.config) == _sizes(config):
        return _groups
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != config.world_size:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} x tensor_parallel_size="
            f"{config.tensor_parallel_size} needs {config.world_size} ranks, and this process is "
            f"one of {world_size}; start it by `torchrun --nproc-per-node {config.world_size} ...`"
        )
    if _groups is not None:
        raise ConfigError(
            f"the ranks of this job are set up as {_groups.config.data_parallel_size} x "
            f"{_groups.config.tensor_parallel_size} (data x tensor) already; use the same sizes"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    timeout = timedelta(seconds=config.timeout_s)
    if _before_joining is not None:
        _before_joining()
    with watch_ranks("set up its process groups"):
        if not dist.is_initialized():
            if device_type == "cuda":
                _take_gpu(local_rank)
            backend = "nccl" if device_type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timeout)
        _groups = _make_groups(config, local_rank, timeout)
    atexit.register(destroy_groups)
    logger.debug("rank %d of %d is set up", _groups.rank, config.world_size)
    return _groups


def _sizes(config: ParallelConfig) -> tuple[int, int]:
    return config.data_parallel_size, config.tensor_parallel_size


def _take_gpu(local_rank: int) -> None:
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU of its own, for there are {num_gpus}; "
            "start at most one rank a GPU, or give device='cpu'"
        )
    torch.cuda.set_device(local_rank)


def _make_groups(config: ParallelConfig, local_rank: int, timeout: timedelta) -> ParallelGroups:
    """Make the sub-groups; every rank takes part in the making of each."""
    rank, dp_size, tp_size = dist.get_rank(), config.data_parallel_size, config.tensor_parallel_size
    control: Any = dist.new_group(backend="gloo", timeout=timeout)
    own: dict[str, dist.ProcessGroup | None] = {"tp": None, "dp": None, "tp_host": None}
    tp_lists = [[dp * tp_size + tp for tp in range(tp_size)] for dp in range(dp_size)]
    dp_lists = [[dp * tp_size + tp for dp in range(dp_size)] for tp in range(tp_size)]
    for name, lists in (("tp", tp_lists), ("dp", dp_lists), ("tp_host", tp_lists)):
        backend = "gloo" if name == "tp_host" else None  # else that of the device
        for ranks in lists:
            group: Any = None
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=timeout, backend=backend)
            if rank in ranks:
                own[name] = group
    return ParallelGroups(config, rank, local_rank, control, **own)


def groups_of_replica(tensor_parallel_size: int, device_type: str) -> ParallelGroups:
    """Return the groups that an engine of so many ranks runs in; all its ranks call it alike.

    Where replicas of that size are set up, these are theirs; else the job is one replica.

    Args:
        tensor_parallel_size: ranks of a replica.
        device_type: see `init_groups`.

    Raises:
        ConfigError, RankError: see `init_groups`.
    """
    config = ParallelConfig(1, tensor_parallel_size)
    if _groups is not None and _groups.config.tensor_parallel_size == tensor_parallel_size > 1:
        config = _groups.config
    return init_groups(config, device_type)


def call_before_joining(act: Callable[[], None]) -> None:
    """Let `init_groups` call `act` before this rank waits for the others to join."""
    global _before_joining
    _before_joining = act


def release_before_groups(holder: _Releasable) -> None:
    """Let `destroy_groups` release a holder first, if it still lives.

    NCCL waits for every CUDA graph that holds one of its collectives before it leaves a group.
    """
    _holders.add(holder)


def destroy_groups() -> None:
    """Leave all process groups; where none was set up, nothing happens."""
    global _groups
    if _groups is None:
        return
    _groups = None
    for holder in list(_holders):
        holder.release()
    atexit.unregister(destroy_groups)
    if dist.is_initialized():
        dist.destroy_process_group()


def is_broken_connection(error: BaseException) -> bool:
    """Return whether an error comes from a collective that lost its partner."""
    if isinstance(error, LostRankError):
        return True
    # Of gloo they are plain RuntimeErrors that name its source files.
    names_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return not isinstance(error, SpecdecError) and (names_gloo or isinstance(error, dist.DistError))


@contextmanager
def watch_ranks(doing: str) -> Iterator[None]:
    """Turn a failed collective inside the block into one sentence.

    Args:
        doing: what this rank was about to do, behind "could not".

    Raises:
        LostRankError: the others could not be reached.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        if isinstance(error, SpecdecError):
            raise
        rank = os.environ.get("RANK", "0")
        reason = " ".join(str(error).split())[:200]
        raise LostRankError(
            f"rank {rank} could not {doing}, for another rank ended or does not answer ({reason}); "
            "see what was told of the rank that ended first"
        ) from error
