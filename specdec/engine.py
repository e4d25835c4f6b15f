"""The engine: composition root and step loop.

A step reads: schedule -> prepare -> forward -> verify -> commit -> propose. The device part is
enqueued by `runner.model_runner`; outcomes are read `max_steps_in_flight - 1` steps later.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch

from runner.async_output import StepOutput
from runner.input_batch import StepPlan
from runner.loader import (
    LoadedTarget,
    eos_token_ids,
    load_target,
    resolve_device,
    resolve_dtype,
)
from runner.model_runner import ModelRunner, RunnerConfig, StepHandle
from runner.states import NewRow
from sampler.sampler import Sampler
from specdec.config import EngineConfig, from_mapping
from specdec.ending import Detokenizer, Trimmed, trim
from specdec.errors import ConfigError, UnsupportedError
from specdec.intake import Prompt, PromptReader
from specdec.kv_cache import BlockAllocator
from specdec.registry import build_config
from specdec.request import Request
from specdec.scheduler import ScheduledRequest, Scheduler, SchedulerConfig, SchedulerOutput
from specdec.trace import StepTrace
from specdec.types import (
    CompletionOutput,
    FinishReason,
    Increment,
    RequestOutput,
    SamplingParams,
)

logger = logging.getLogger(__name__)


@dataclass
class _InFlight:
    """A step whose outcome was not read yet."""

    handle: StepHandle
    scheduled: list[ScheduledRequest]
    step: int
    started: float


class Engine:
    """Runs requests step by step.

    Args:
        target: name, hub id or folder of the target, or one that is already loaded.
        drafter: registered name, mapping with a key "name", or a drafter's config object.
        verifier: likewise.
        num_speculative_tokens: K; 0 together with the drafter "none" is plain decoding.
        config: sizes and device.
        trace: collects step traces where given.
        options: fields of `EngineConfig`, instead of `config`.

    Raises:
        ConfigError: a wrong name, key, value or pairing; raised before the target loads.
        WeightsError, UnsupportedError, CapacityError: the target cannot be had or run.
    """

    def __init__(
        self,
        target: str | LoadedTarget,
        drafter: str | Mapping[str, Any] | object = "none",
        verifier: str | Mapping[str, Any] | object = "rejection",
        num_speculative_tokens: int = 4,
        config: EngineConfig | None = None,
        trace: StepTrace | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise ConfigError(f"give config or {sorted(options)[0]}, not both")
        config = config or from_mapping(EngineConfig, options, "engine option")
        self.config = config
        drafter_entry, drafter_config = build_config("drafter", drafter)
        verifier_entry, verifier_config = build_config("verifier", verifier)
        if not isinstance(num_speculative_tokens, int) or num_speculative_tokens < 0:
            raise ConfigError(
                f"num_speculative_tokens={num_speculative_tokens!r} is not allowed; "
                f"give an integer >= 0"
            )
        never_drafts = getattr(drafter_entry.cls, "never_drafts", False)
        self.num_speculative_tokens = 0 if never_drafts else num_speculative_tokens
        config.check(self.num_speculative_tokens)
        self.drafter = drafter_entry.cls(drafter_config)
        self.verifier = verifier_entry.cls(verifier_config)
        self._check_pairing()
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        if isinstance(target, str | PathLike):
            target = load_target(str(target), dtype, device)
        _check_loaded(target, config, device, dtype)
        self.target = target
        self.tokenizer = target.tokenizer
        self.trace = trace
        self._build(target)

    def _build(self, target: LoadedTarget) -> None:
        """Build runner and scheduler around a loaded target."""
        config, model = self.config, target.model
        limit = model.max_position_embeddings
        if config.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={config.max_model_len} exceeds the target's context of {limit}; "
                f"set max_model_len<={limit}"
            )
        on_gpu = model.device.type == "cuda"
        max_num_reqs = config.max_num_reqs or (1024 if on_gpu else 64)
        self.max_steps_in_flight = config.max_steps_in_flight or (2 if on_gpu else 1)
        runner_config = RunnerConfig(
            max_num_reqs=max_num_reqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_speculative_tokens=self.num_speculative_tokens,
            num_kv_blocks=config.num_kv_blocks,
            block_size=config.block_size,
        )
        sampler = Sampler(self.verifier, max_num_reqs, model.vocab_size, model.device)
        self.runner = ModelRunner(model, sampler, self.drafter, runner_config, target.tokenizer)
        self._check_pairing()  # again: a drafter may know what it offers only once it is loaded
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_reqs, config.max_num_batched_tokens, self.num_speculative_tokens
            ),
            BlockAllocator(self.runner.num_kv_blocks, config.block_size),
        )
        self._reader = PromptReader(target.tokenizer, model.vocab_size, config.max_model_len)
        self._eos_token_ids = eos_token_ids(model, target.tokenizer)
        self._requests: dict[str, Request] = {}
        self._detokenizers: dict[str, Detokenizer] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._aborted: list[Increment] = []
        self._arrivals = itertools.count()
        self._steps = itertools.count()
        self._last_read = 0.0

    def _check_pairing(self) -> None:
        """Refuse a drafter whose drafts the verifier cannot judge."""
        kinds = {1, 2} if self.drafter.capabilities.offers_q else {1}
        if not kinds <= self.verifier.draft_kinds:
            raise ConfigError(
                f"verifier {self.verifier.name!r} judges draft kinds "
                f"{sorted(self.verifier.draft_kinds)}, the drafter gives {sorted(kinds)}; "
                f"choose another verifier or drafter"
            )

    # --- requests -------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        label: Any = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: the caller's name for it, unique among unfinished ones.
            prompt: a string, a list of token ids, or a list of chat messages.
            params: how to sample, and when to end.
            label: the caller's mark, carried into traces.

        Raises:
            ConfigError: empty or too long prompt, known id, parameters the verifier refuses.
            UnsupportedError: a sampling parameter that does not work yet.
            CapacityError: the KV cache could not hold it even alone.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params={params!r} is not allowed; give SamplingParams")
        params.check_supported()
        if request_id in self._requests:
            raise ConfigError(f"request id {request_id!r} is already running; give another")
        if self.verifier.greedy_only and params.temperature > 0:
            raise ConfigError(
                f"verifier {self.verifier.name!r} takes temperature 0 only, got "
                f"{params.temperature}; use sampled_match or rejection"
            )
        budget = params.num_speculative_tokens
        if budget is not None and budget > self.num_speculative_tokens > 0:
            raise ConfigError(
                f"num_speculative_tokens={budget} of the request exceeds the engine's "
                f"{self.num_speculative_tokens}; give at most that"
            )
        if params.stop_strings and self.tokenizer is None:
            raise UnsupportedError(
                "stop strings need a tokenizer, which this target has not; give stop_token_ids"
            )
        text, token_ids = self._reader.read(prompt)
        arrival = next(self._arrivals)
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            # Unseeded requests get a seed from the engine's own and their arrival: recorded.
            seed=params.seed if params.seed is not None else self.config.seed * 1_000_003 + arrival,
            max_total_len=min(len(token_ids) + params.max_tokens, self.config.max_model_len),
            draft_budget=min(
                self.num_speculative_tokens,
                self.num_speculative_tokens if budget is None else budget,
            ),
            label=label,
            token_ids=list(token_ids),
        )
        request.stats.drafted_per_position = [0] * self.num_speculative_tokens
        request.stats.accepted_per_position = [0] * self.num_speculative_tokens
        self.scheduler.add(request)
        self._requests[request_id] = request
        self._detokenizers[request_id] = Detokenizer(self.tokenizer, params.stop_strings)

    def abort(self, request_id: str) -> None:
        """End a request; its increment with finish_reason "abort" comes with the next step.

        Raises:
            ConfigError: no unfinished request has that id.
        """
        self._aborted.append(self.discard(request_id))

    def discard(self, request_id: str) -> Increment:
        """End a request at once; its last increment is returned here and comes with no step.

        Raises:
            ConfigError: no unfinished request has that id.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise ConfigError(f"no unfinished request has the id {request_id!r}")
        return self._finish(request, [], Trimmed([], "abort"))

    @property
    def unfinished_ids(self) -> set[str]:
        """Return the ids of the requests that wait or run."""
        return set(self._requests)

    @property
    def has_requests(self) -> bool:
        """Return whether a step would do anything."""
        return bool(self.scheduler.has_requests or self._in_flight or self._aborted)

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> list[Increment]:
        """Enqueue one step, read one outcome, and return what it added to which request."""
        increments, self._aborted = self._aborted, []
        started = time.perf_counter()
        schedule = self.scheduler.schedule()
        for request in schedule.preempted:
            self._release(request)
        if schedule.scheduled:
            handle = self.runner.execute_model(self._prepare(schedule))
            self._in_flight.append(
                _InFlight(handle, schedule.scheduled, next(self._steps), started)
            )
        drained = schedule.must_drain or not schedule.scheduled
        while self._in_flight and (drained or len(self._in_flight) >= self.max_steps_in_flight):
            increments += self._read(self._in_flight.popleft())
        return increments

    def _prepare(self, schedule: SchedulerOutput) -> StepPlan:
        """Give rows and blocks to the schedule and turn it into the runner's plan."""
        scheduled = schedule.scheduled
        for entry in scheduled:
            request = entry.request
            if entry.is_new:
                new = NewRow(
                    request.token_ids,
                    request.num_prompt_tokens,
                    request.max_total_len,
                    request.draft_budget,
                )
                request.row = self.runner.add_request(new, request.params, request.seed)
                request.generation = int(self.runner.state.generation_np[request.row])
            if entry.new_blocks:
                assert request.row is not None
                self.runner.add_blocks(request.row, entry.new_blocks_start, entry.new_blocks)
        # The CPU's num_computed_tokens is a bound that already includes this step.
        computed = max(s.request.num_computed_tokens for s in scheduled)
        known = max(computed, *(s.request.prefill_len for s in scheduled)) + 1
        return StepPlan(
            rows_np=np.array([s.request.row for s in scheduled], dtype=np.int32),
            query_lens_np=np.array([s.num_tokens for s in scheduled], dtype=np.int32),
            is_prefill_np=np.array([s.is_prefill for s in scheduled]),
            is_last_chunk_np=np.array([s.is_last_chunk for s in scheduled]),
            max_seq_len=min(computed, self.config.max_model_len),
            max_total_len=min(known, self.config.max_model_len),
        )

    def _read(self, flight: _InFlight) -> list[Increment]:
        """Wait for a step's outcome and commit it to the requests that still own their rows."""
        output = flight.handle.output.wait()
        increments, num_committed = [], 0
        for place, entry in enumerate(flight.scheduled):
            request = entry.request
            request.num_in_flight -= 1
            request.num_in_flight_sampling -= not entry.is_prefill or entry.is_last_chunk
            owned = (
                self._requests.get(request.request_id) is request
                and request.generation == flight.handle.generations[place]
            )
            if not owned:
                continue
            increment = self._commit(entry, output, place, flight.step)
            if increment is not None:
                increments.append(increment)
                num_committed += len(increment.new_token_ids)
        if self.trace is not None:
            self._trace_step(flight, num_committed)
        return increments

    def _commit(
        self, entry: ScheduledRequest, output: StepOutput, place: int, step: int
    ) -> Increment | None:
        """Apply a step's outcome to one request."""
        request = entry.request
        num_sampled = int(output.num_sampled[place])
        request.num_computed_tokens -= int(output.num_rejected[place])
        if self.max_steps_in_flight == 1 and num_sampled:
            # Known before the next step is scheduled: it verifies no position without a draft.
            request.num_drafts = int(output.num_drafts[place])
        if num_sampled == 0:
            return None
        context_len = len(request.token_ids)
        run = output.sampled_tokens[place, :num_sampled].tolist()
        room = request.max_total_len - context_len
        detokenizer = self._detokenizers[request.request_id]
        trimmed = trim(run, room, request.params, self._eos_token_ids, detokenizer)
        kept = trimmed.token_ids
        request.token_ids += kept
        num_judged = int(output.num_judged[place])
        if trimmed.finish_reason is not None:
            num_judged = min(num_judged, len(kept))  # drafts behind the end were judged for nothing
        num_accepted = min(num_sampled - 1, num_judged)
        if not entry.is_prefill:
            _count(request, len(kept), num_judged, num_accepted)
        if self.trace is not None:
            self.trace.add_request_step(
                (
                    request.request_id,
                    request.label,
                    step,
                    not entry.is_prefill,
                    context_len,
                    entry.num_tokens,
                    num_judged,
                    num_accepted,
                    len(kept),
                    trimmed.finish_reason or "",
                )
            )
        if trimmed.finish_reason is not None:
            return self._finish(request, kept, trimmed)
        return Increment(request.request_id, kept, detokenizer.stream(finished=False))

    def _finish(self, request: Request, new_token_ids: list[int], trimmed: Trimmed) -> Increment:
        """Free what a request holds and build its output."""
        self.scheduler.remove(request)
        self._release(request)
        del self._requests[request.request_id]
        detokenizer = self._detokenizers.pop(request.request_id)
        detokenizer.finish()
        reason: FinishReason | None = trimmed.finish_reason
        completion = CompletionOutput(
            index=0,
            text=detokenizer.text,
            token_ids=request.output_token_ids,
            finish_reason=reason,
            stop_reason=trimmed.stop_reason,
        )
        result = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            stats=request.stats,
            seed=request.seed,
        )
        new_text = detokenizer.stream(finished=True)
        return Increment(request.request_id, new_token_ids, new_text, reason, result)

    def _release(self, request: Request) -> None:
        """Free a request's row, where it has one."""
        if request.row is not None:
            self.runner.remove_request(request.row)
            request.row = None

    def _trace_step(self, flight: _InFlight, num_committed: int) -> None:
        assert self.trace is not None
        phases = flight.handle.timer.phases_ms()
        # With more than one step in flight, a step's time begins where the last one's ended.
        now = time.perf_counter()
        step_ms = (now - max(flight.started, self._last_read)) * 1e3
        self._last_read = now
        plan = flight.handle.plan
        self.trace.add_step(
            (
                flight.step,
                plan.num_reqs,
                plan.num_tokens,
                num_committed,
                *phases.values(),
                max(0.0, step_ms - sum(phases.values())),
                step_ms,
            )
        )


def _check_loaded(
    target: Any, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Check a target that the caller may have loaded: where it is, it stays.

    Raises:
        ConfigError: it is no target, or device or dtype are given and are not its own.
    """
    if not isinstance(target, LoadedTarget):
        raise ConfigError(
            f"target={target!r} is not allowed; give a name, a folder or a LoadedTarget"
        )
    model = target.model
    for name, given, own in (
        ("device", _indexed(device), _indexed(model.device)),
        ("dtype", dtype, model.dtype),
    ):
        if getattr(config, name) != "auto" and given != own:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is not that of the loaded target ({own}); "
                f"leave it out, or load the target with it"
            )


def _indexed(device: torch.device) -> torch.device:
    """Return a device with its index, 0 where it has none."""
    return torch.device(device.type, device.index or 0)


def _count(request: Request, num_committed: int, num_judged: int, num_accepted: int) -> None:
    """Add one verification step to a request's statistics."""
    stats = request.stats
    stats.num_verify_steps += 1
    stats.num_verify_tokens += num_committed
    stats.num_drafted += num_judged
    stats.num_accepted += num_accepted
    for i in range(num_judged):
        stats.drafted_per_position[i] += 1
    for i in range(num_accepted):
        stats.accepted_per_position[i] += 1
