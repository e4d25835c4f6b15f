"""Data parallelism: an engine on every rank, and one list of requests that all ranks know.

A replica is a rank, or the ranks that share its layers (`specdec.parallel.tensor_ranks`): these
make the same steps and get the same results, and so take part as one.

All ranks make the same calls in the same order (they run the same script), and all get the same
increments. Every rank checks, counts and remembers every request; the router, whose choice is a
function of what all ranks know, says which replica runs it. So nobody is the master.

A step of all replicas is, on every rank:

1. one `execute_model`: that of the own engine's step, or, where this had nothing to enqueue, that
   of an empty step. Thus every rank enqueues as many steps as any other, whatever it has to do, and
   collectives inside the target's layers always find their partners. (A drafter's passes differ
   from step to step: a step that only runs prompts has none. Collectives between replicas are not
   for them; those between the ranks of a replica are, which run the same steps.)
2. every `exchange_every` steps, one all-gather of what the replicas' requests got since. From it
   every rank brings its list of unfinished requests and the router's loads up to date.

Whether anyone has work is read off that list, which only changes by calls that all ranks make and
by exchanges that all ranks take part in; so all ranks stop stepping behind the same exchange, and
none can wait for one that has stopped. A message also carries the number of the step and a checksum
of the calls before it: ranks that were asked for different things say so.
"""

import contextlib
import dataclasses
import json
import logging
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from runner.loader import LoadedTarget
from runner.model_runner import ModelRunner
from specdec.config import EngineConfig, from_mapping
from specdec.draft_length.base import DraftLengthBase
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.intake import Prompt
from specdec.parallel.exchange import gather_bytes, share
from specdec.parallel.groups import LostRankError, ParallelConfig, RankError, init_groups
from specdec.parallel.messages import encode, pack, unpack
from specdec.parallel.placement import device_of_rank, device_type
from specdec.parallel.rank_check import RankCheck
from specdec.parallel.router import Router
from specdec.parallel.weight_check import compare_configs, compare_drafters, compare_targets
from specdec.registry import build_config
from specdec.samples import RequestGroup
from specdec.trace import StepTrace
from specdec.types import Increment, SamplingParams

logger = logging.getLogger(__name__)


class DataParallelEngine:
    """An `Engine` over several replicas, one a rank; every rank makes the same calls.

    Seeds of unseeded requests, and so all texts, are those of one engine that is asked the same.

    Args:
        target, drafter, verifier, num_speculative_tokens, config, trace, draft_length, options: see
            `Engine`; the trace holds what this rank's replica ran.

    Raises:
        ConfigError: see `Engine`; or there are not as many ranks as replicas.
        RankError: the ranks were given different options, or loaded unlike models.
    """

    def __init__(
        self,
        target: str | LoadedTarget,
        drafter: str | Mapping[str, Any] | object = "none",
        verifier: str | Mapping[str, Any] | object = "rejection",
        num_speculative_tokens: int = 4,
        config: EngineConfig | None = None,
        trace: StepTrace | None = None,
        draft_length: str | Mapping[str, Any] | object = "fixed",
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise ConfigError(f"give config or {sorted(options)[0]}, not both")
        config = config or from_mapping(EngineConfig, options, "engine option")
        config.check(0)  # its sizes, before ranks wait for one another
        parallel = ParallelConfig(config.data_parallel_size, config.tensor_parallel_size)
        self.config, self.groups = config, init_groups(parallel, device_type(config))
        own = dataclasses.replace(
            config, data_parallel_size=1, device=device_of_rank(config, self.groups)
        )
        self.engine = Engine(
            target, drafter, verifier, num_speculative_tokens, own, trace, draft_length
        )
        self._router = Router(parallel.data_parallel_size)
        self._requests: dict[str, RequestGroup] = {}  # unfinished, of all replicas
        self._replica: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._outbox: list[Increment] = []  # of this replica, not told to the others yet
        self._pending: list[Increment] = []
        self._calls = self._ended = 0  # checksums of all calls so far
        self._num_steps = 0
        self._failure: str | None = None
        self._check_options(build_config("verifier", verifier)[1])

    def _check_options(self, verifier_config: Any) -> None:
        """Compare what the ranks were built with.

        What one replica can hold, each can: a given number of blocks is an option, and a chosen one
        holds at least a request of `max_model_len`.
        """
        engine, check = self.engine, RankCheck(self.groups.control, 1)
        names = [type(part).__name__ for part in (engine.drafter, engine.verifier)]
        names.append(type(engine.draft_length).__name__)
        config = dataclasses.replace(self.config, device="auto")
        parts = names, verifier_config, engine.draft_length.config
        told = repr((config, engine.num_speculative_tokens, *parts, engine.target.name))
        check.add("options", np.frombuffer(told.encode(), dtype=np.uint8))
        check.compare(0)
        model = engine.target.model
        compare_configs(self.groups.control, engine.target)
        compare_targets(self.groups.control, model)
        compare_drafters(self.groups.control, engine.drafter, model)

    # --- what an engine shows -------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the one that writes and prints."""
        return self.groups.rank == 0

    @property
    def tokenizer(self) -> Any:
        """Return the target's tokenizer."""
        return self.engine.tokenizer

    @property
    def target(self) -> LoadedTarget:
        """Return this rank's target."""
        return self.engine.target

    @property
    def runner(self) -> ModelRunner:
        """Return this rank's runner."""
        return self.engine.runner

    @property
    def draft_length(self) -> DraftLengthBase:
        """Return this rank's policy of the draft length."""
        return self.engine.draft_length

    @property
    def trace(self) -> StepTrace | None:
        """Return the trace of this rank's replica."""
        return self.engine.trace

    @trace.setter
    def trace(self, trace: StepTrace | None) -> None:
        self.engine.trace = trace

    @property
    def loads(self) -> list[int]:
        """Return the tokens outstanding of each replica."""
        return list(self._router.loads)

    @property
    def unfinished_ids(self) -> set[str]:
        """Return the ids of the requests that wait or run, on any replica."""
        return set(self._requests)

    @property
    def has_requests(self) -> bool:
        """Return whether a step would do anything, on any replica: the same on every rank."""
        return bool(self._requests or self._pending)

    def share(self, value: Any) -> Any:
        """Return the first rank's value on every rank, for what ranks see differently: a clock.

        A server that only the first rank can hear shares what it was asked in this way, and then
        every rank makes the same calls.

        Args:
            value: what JSON can hold; that of other ranks does not count.
        """
        return share(self.groups.control, value)

    # --- requests -------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        label: Any = None,
    ) -> None:
        """Queue a request on the replica that has the fewest tokens outstanding.

        Args, Raises: see `Engine.add_request`; an id is free again once its output was handed out.
        """
        if request_id in self._requests:
            raise ConfigError(f"request id {request_id!r} is already running; give another")
        group = self.engine.admit(request_id, prompt, params, label)
        first = group.samples[0]
        told = request_id, first.prompt_token_ids, repr(first.params), first.seed
        self._calls = zlib.crc32(encode(told), self._calls)
        num_new = first.max_total_len - first.num_prompt_tokens
        replica = self._router.assign(
            request_id, first.num_prompt_tokens, num_new, len(group.samples)
        )
        self._requests[request_id], self._replica[request_id] = group, replica
        if replica == self.groups.dp_rank:
            self.engine.enqueue(group)

    def abort(self, request_id: str) -> None:
        """End a request; its increment with finish_reason "abort" comes with the next exchange.

        It comes with its real end where its replica had reached that before.

        Raises:
            ConfigError: no unfinished request has that id.
        """
        if request_id not in self._requests or request_id in self._aborted:
            raise ConfigError(f"no unfinished request has the id {request_id!r}")
        self._note_end(request_id)
        self._aborted.add(request_id)
        if request_id in self.engine.unfinished_ids:
            self.engine.abort(request_id)

    def discard(self, request_id: str) -> None:
        """End a request at once; nothing more comes of it.

        Raises:
            ConfigError: no unfinished request has that id.
        """
        if request_id not in self._requests:
            raise ConfigError(f"no unfinished request has the id {request_id!r}")
        self._note_end(request_id)
        if request_id in self.engine.unfinished_ids:
            self.engine.discard(request_id)
        self.take_back(request_id)
        self._forget(request_id)

    def take_back(self, request_id: str) -> None:
        """Forget increments of a request that no step has handed out."""
        self.engine.take_back(request_id)
        self._outbox = [i for i in self._outbox if i.request_id != request_id]
        self._pending = [i for i in self._pending if i.request_id != request_id]

    def put_back(self, increments: list[Increment]) -> None:
        """Keep increments that were not for the caller of a step; they come with the next one."""
        self._pending += increments

    def _note_end(self, request_id: str) -> None:
        """Take in that a request was ended; in which order several are does not count.

        Callers go through sets of names, whose order is another one in every process.
        """
        self._ended = (self._ended + zlib.crc32(request_id.encode())) % 2**32

    def _forget(self, request_id: str) -> None:
        self._router.remove(request_id)
        self._aborted.discard(request_id)
        del self._requests[request_id], self._replica[request_id]

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> list[Increment]:
        """Run a step of every replica; returns what all of them added, in the order of ranks.

        Raises:
            LostRankError: another rank ended; what was returned before stays.
            RankError: ranks were asked for different things; or the step before failed.
        """
        if self._failure is not None:
            raise RankError(f"the replicas go no further, for a step failed: {self._failure}")
        increments, self._pending = self._pending, []
        try:
            self._step_own()
            self._num_steps += 1
            if self._num_steps % self.config.exchange_every == 0:
                increments += self._exchange()
        except BaseException as error:
            # The others are a step ahead or wait for this rank: there is no way back in.
            self._pending = increments
            self._failure = f"{type(error).__name__}: {error}"
            if isinstance(error, Exception) and not isinstance(error, RankError):
                self._tell_failure(self._failure)
            raise
        return increments

    def _step_own(self) -> None:
        """Enqueue exactly one step of this rank, an empty one where there is nothing to run."""
        engine = self.engine
        before = engine.num_steps
        if engine.has_requests:
            self._outbox += engine.step()
        if engine.num_steps == before:
            engine.run_empty_step()

    def _exchange(self) -> list[Increment]:
        """Tell the others what this replica's requests got, and hear of theirs."""
        own, self._outbox = self._outbox, []
        if self.groups.control is None:
            found = [own]
        else:
            told = pack(own, self._requests) if self.groups.tp_rank == 0 else []
            calls = self._calls << 32 | self._ended
            message = encode([[self._num_steps, calls, None], told])
            texts = gather_bytes(self.groups.control, message)
            messages = [json.loads(text) for text in texts]
            self._compare([told for told, _ in messages])
            # All ranks of a replica got the same; its first one tells the other replicas.
            firsts = messages[:: self.groups.config.tensor_parallel_size]
            found = [
                own if replica == self.groups.dp_rank else unpack(values, self._requests)
                for replica, (_, values) in enumerate(firsts)
            ]
        increments = [increment for part in found for increment in part]
        for increment in increments:
            self._router.advance(increment)
            if increment.output is not None:
                self._forget(increment.request_id)
        if not self._requests:
            while self.engine.has_requests:  # outcomes of nobody, still in flight
                self.engine.step()
        return increments

    def _tell_failure(self, failure: str) -> None:
        """Answer the others once more, so that they learn of a failure rather than wait.

        Where ranks share layers, the rest of the replica waits inside its step, and nobody would
        hear: there this rank's end is what tells them.
        """
        if self.groups.control is not None and self.groups.tp is None:
            with contextlib.suppress(LostRankError):
                gather_bytes(self.groups.control, encode([[0, 0, failure[:500]], []]))

    def _compare(self, states: list[list[Any]]) -> None:
        """Refuse to go on where a rank failed, or ranks were asked for different things."""
        for rank, (_, _, failure) in enumerate(states):
            if failure is not None:
                raise LostRankError(f"rank {rank} failed in a step: {failure}")
        odd = [rank for rank, state in enumerate(states) if state != states[0]]
        if odd:
            raise RankError(
                f"before step {self._num_steps} rank {odd[0]} was asked for other requests than "
                "rank 0; all ranks have to make the same calls in the same order"
            )
