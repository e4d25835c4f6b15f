"""The ranks that share the layers of one engine: what they agree on, and how they notice that not.

Every rank runs the same engine on the same calls. What a rank computes on its own (the schedule,
the noise, the tokens that are sampled) is a function of what all of them know, so nothing is sent
round after a step. What a rank alone knows, such as a time or the memory that is free, is agreed on
here. Every `check_ranks_every` steps that were read, the ranks compare checksums of what they were
asked for, launched, drafted and sampled, from what lies on the host.

An engine of one rank has such an object, too; it does nothing.
"""

import dataclasses
import logging
import zlib
from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from runner.async_output import StepHandle, StepOutput
from runner.loader import LoadedTarget
from runner.model_runner import ModelRunner
from runner.models.hf import HFModel
from runner.models.linear_choices import choices_digest, load_choices
from runner.tensor_parallel import TensorParallel
from specdec.config import EngineConfig
from specdec.draft_length.base import DraftLengthBase
from specdec.errors import ConfigError, UnsupportedError
from specdec.parallel.exchange import decide, least, share
from specdec.parallel.groups import (
    LostRankError,
    RankError,
    groups_of_replica,
    is_broken_connection,
    release_before_groups,
    watch_ranks,
)
from specdec.parallel.placement import device_of_rank, device_type
from specdec.parallel.rank_check import RankCheck
from specdec.parallel.weight_check import compare_configs, compare_drafters, compare_targets
from specdec.samples import RequestGroup

logger = logging.getLogger(__name__)


class TensorRanks:
    """The ranks of one engine, as one of them sees them.

    Args:
        config: of the engine; `tensor_parallel_size` ranks are set up, or found.

    Raises:
        ConfigError: this process is not one of so many ranks, or names one GPU for all.
        RankError: the others cannot be reached.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config  # on this rank's device
        self._group: dist.ProcessGroup | None = None
        self.tensor_parallel: TensorParallel | None = None
        if config.tensor_parallel_size > 1:
            groups = groups_of_replica(config.tensor_parallel_size, device_type(config))
            self.config = dataclasses.replace(config, device=device_of_rank(config, groups))
            self._group, self.groups = groups.tp_host, groups
            self.tensor_parallel = tensor_parallel_of(config)
        self._check = RankCheck(self._group, config.check_ranks_every)
        self._ended = 0  # sum over the names of those that calls ended
        self._failure: str | None = None

    @property
    def is_alone(self) -> bool:
        """Return whether there is one rank."""
        return self._group is None

    def take_part(self, target: LoadedTarget) -> None:
        """Cut a target that is whole down to this rank's part, in place.

        Everyone who holds it sees the part from then on, and what it had beyond is freed.

        Raises:
            ConfigError, UnsupportedError: its layers cannot be divided; or it is a part already, of
                another division.
        """
        model = target.model
        if model.tensor_parallel == self.tensor_parallel:
            return
        if model.tensor_parallel is not None:
            raise ConfigError(
                f"the layers of target {target.name!r} are shared by {model.tensor_parallel.size} "
                f"ranks already, and tensor_parallel_size={self.config.tensor_parallel_size}; give "
                "that size, or load the target again"
            )
        if model.is_packed:
            raise UnsupportedError(
                f"target {target.name!r} was loaded whole and has packed weights (bf16 on a CPU, "
                "or 8 bits), which cannot be divided among ranks; give its name, and each rank "
                "loads its part"
            )
        HFModel.__init__(model, model.model, tensor_parallel=self.tensor_parallel)

    # --- what is agreed on ----------------------------------------------------------------------

    def compare_options(self, *told: Any) -> None:
        """Check that the ranks were built alike, before any of them waits for another in a pass.

        Args:
            told: what else has to be equal; its `repr` is compared.

        Raises:
            RankError: they were not.
        """
        if self._group is None:
            return
        # Which GPU of its host a rank has is its own.
        config = dataclasses.replace(self.config, device="")
        self._compare_once("options", (config, *told))

    def compare_configs(self, target: Any) -> None:
        """Check that the ranks' targets have the same config, before they are loaded.

        Args:
            target: as an engine is given it.

        Raises:
            RankError: they have not.
            WeightsError: this rank cannot read it.
        """
        if isinstance(target, LoadedTarget | str | PathLike):
            given = target if isinstance(target, LoadedTarget) else str(target)
            compare_configs(self._group, given)

    def compare_targets(self, target: LoadedTarget) -> None:
        """Check that the ranks hold the same target, in what each of them has whole.

        Raises:
            RankError: they do not.
        """
        compare_targets(self._group, target.model)

    def compare_choices(self, runner: ModelRunner) -> None:
        """Check that ranks have the same drafter, and run the same kernels in the same shapes.

        Called once all is captured; that is released before the ranks leave their groups.

        Raises:
            RankError: they do not.
        """
        if self._group is None:
            return
        compare_drafters(self._group, runner.drafter, runner.target)
        device, dtype = runner.device, runner.target.dtype
        name, linears = device.type, ""
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            linears = choices_digest(load_choices(name, dtype))
        graphs = runner.graphs
        release_before_groups(graphs)
        told = (torch.__version__, name, dtype, linears, graphs.sizes, graphs.keys)
        self._compare_once("kernel choices", (*told, runner.num_kv_blocks))

    def _compare_once(self, kind: str, told: Any) -> None:
        check = RankCheck(self._group, 1)
        check.add(kind, np.frombuffer(repr(told).encode(), dtype=np.uint8))
        check.compare(0)

    def least(self, value: int) -> int:
        """Return the least of the ranks' integers: of memory, all take what the poorest has."""
        return value if self._group is None else least(self._group, value)

    def share(self, value: Any) -> Any:
        """Return the first rank's value on every rank, for what ranks see differently: a clock.

        Args:
            value: what JSON can hold.
        """
        return share(self._group, value)

    @property
    def agree_on_drafts(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return what turns drafts of the host into those of the first rank; None for one rank.

        Every rank asks its drafter, so that each knows what the others' know.
        """
        group = self._group
        return None if group is None else lambda own: decide(group, own.shape, lambda: own)

    def next_length(self, policy: DraftLengthBase) -> Callable[[int], int]:
        """Return a policy's `next_length`, the same on every rank.

        A policy that may look at more than the number of requests, a clock above all, is asked on
        the first rank alone.
        """
        group = self._group
        if group is None or policy.by_num_reqs:
            return policy.next_length
        is_first = dist.get_rank(group) == 0

        def next_length(num_reqs: int) -> int:
            chosen = int(decide(group, (), lambda: policy.next_length(num_reqs)))
            if not is_first:
                policy.counts[chosen] += 1
            return chosen

        return next_length

    # --- what is compared -----------------------------------------------------------------------

    def note_request(self, group: RequestGroup) -> None:
        """Take in a request that was admitted."""
        if self._group is not None:
            first = group.samples[0]
            told = first.request_id, first.prompt_token_ids, first.params, first.seed
            self._check.add("requests", np.frombuffer(repr(told).encode(), dtype=np.uint8))

    def note_end(self, request_id: str) -> None:
        """Take in that a request was ended by a call; in which order several are does not count.

        Callers go through sets of names, whose order is another one in every process.
        """
        self._ended += zlib.crc32(request_id.encode())

    def note_step(self, step: int, handle: StepHandle, output: StepOutput) -> None:
        """Take in a step that was read, and compare where it is time.

        Args:
            step: its index.
            handle: how it was launched.
            output: its outcome.

        Raises:
            RankError: ranks disagree; names them, the step, and what differs.
            LostRankError: another rank ended.
        """
        if self._group is None:
            return
        check, plan, sampled = self._check, handle.plan, output.num_sampled
        check.add("requests", np.array(self._ended))
        self._ended = 0
        shape = plan.num_reqs, plan.max_seq_len, handle.num_computed_tokens, len(handle.later)
        # Launch choices are functions of these; tokens behind a run's end mean nothing.
        check.add("kernel choices", np.array(shape))
        check.add("drafts", np.stack([output.num_judged, output.num_rejected, output.num_drafts]))
        behind = np.arange(output.sampled_tokens.shape[1]) >= sampled[:, None]
        check.add("tokens", np.where(behind, -1, output.sampled_tokens))
        check.compare(step)

    # --- when a step fails ----------------------------------------------------------------------

    def check_alive(self) -> None:
        """Refuse another step once one failed: the other ranks went on, or wait for this one.

        Raises:
            RankError: one failed.
        """
        if self._failure is not None:
            raise RankError(f"the ranks go no further, for a step failed: {self._failure}")

    def fail(self, error: BaseException) -> None:
        """Take in that a step failed, which its caller raises on.

        Raises:
            LostRankError: the error only tells that another rank ended.
        """
        if self._group is None:
            return
        self._failure = f"{type(error).__name__}: {error}"
        if is_broken_connection(error) and not isinstance(error, LostRankError):
            with watch_ranks("run a step"):
                raise error


def tensor_parallel_of(config: EngineConfig) -> TensorParallel | None:
    """Return this rank's place among those that share the layers of an engine; None where alone.

    Raises:
        ConfigError, RankError: see `TensorRanks`.
    """
    if config.tensor_parallel_size == 1:
        return None
    groups = groups_of_replica(config.tensor_parallel_size, device_type(config))
    return TensorParallel(groups.tp_rank, config.tensor_parallel_size, groups.tp)
