"""Where the ranks of a job run: each on a GPU of its own, or all on the CPU."""

import torch

from runner.loader import resolve_device
from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.parallel.groups import ParallelGroups


def device_type(config: EngineConfig) -> str:
    """Return "cuda" or "cpu": where the ranks of this configuration run.

    Raises:
        ConfigError: see `runner.loader.resolve_device`.
    """
    return resolve_device(config.device).type


def check_host(config: EngineConfig) -> None:
    """Check that this machine alone has what all ranks need, before they are started.

    Raises:
        ConfigError: it has fewer GPUs than ranks.
    """
    num_ranks = config.num_ranks
    if device_type(config) == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} x tensor_parallel_size="
            f"{config.tensor_parallel_size} needs {num_ranks} GPUs, and this machine has "
            f"{torch.cuda.device_count()}; give smaller sizes, or start more machines by torchrun"
        )


def device_of_rank(config: EngineConfig, groups: ParallelGroups) -> str:
    """Return the device of a rank: the GPU of its place on its host, or the CPU.

    Raises:
        ConfigError: one GPU is named for several ranks.
    """
    if groups.world_size == 1 or device_type(config) == "cpu":
        return config.device
    own = f"cuda:{groups.local_rank}"
    if config.device not in ("auto", "cuda", own):
        raise ConfigError(
            f"device={config.device!r} names one GPU for {groups.world_size} ranks; give 'cuda', "
            "and each rank takes its own"
        )
    return own
