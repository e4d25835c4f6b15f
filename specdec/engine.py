"""The engine: composition root and step loop.

A step reads: schedule -> prepare -> forward -> verify -> commit -> propose. The device part is
enqueued by `runner.model_runner`; outcomes are read `max_steps_in_flight - 1` steps later.
"""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

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
from specdec.checks import check_pairing, check_params, check_placement
from specdec.config import EngineConfig, from_mapping
from specdec.ending import Detokenizer, Trimmed, trim
from specdec.errors import ConfigError
from specdec.intake import Prompt, PromptReader
from specdec.kv_cache import BlockAllocator
from specdec.outcomes import (
    Outcomes,
    count_outcome,
    fold_outcomes,
    judged,
    new_outcomes,
    trace_lines,
)
from specdec.registry import build_config
from specdec.request import Request
from specdec.scheduler import ScheduledStep, Scheduler, SchedulerConfig, SchedulerOutput
from specdec.trace import StepTrace
from specdec.types import (
    CompletionOutput,
    FinishReason,
    Increment,
    RequestOutput,
    SamplingParams,
)

logger = logging.getLogger(__name__)


# Where captured steps are replayed, the plan's bounds on lengths grow by so many tokens at a time:
# a plan that stays the same needs no copies.
_COARSE_BOUND = 64


@dataclass(slots=True)
class _InFlight:
    """A step whose outcome was not read yet."""

    handle: StepHandle
    scheduled: ScheduledStep
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
        check_pairing(self.drafter, self.verifier)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        if isinstance(target, str | PathLike):
            target = load_target(str(target), dtype, device)
        if not isinstance(target, LoadedTarget):
            raise ConfigError(
                f"target={target!r} is not allowed; give a name, a folder or a LoadedTarget"
            )
        check_placement(target.model, config, device, dtype)
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
        self.graph_scope: str = config.graph_scope
        if self.graph_scope == "auto":
            self.graph_scope = "step" if on_gpu else "none"
        # On a GPU every scope computes the same shapes, so that their texts are the same.
        uniform_verify = on_gpu or self.graph_scope in ("step", "draft")
        self._bound_step = _COARSE_BOUND if uniform_verify else 1
        self.runner = self._make_runner(max_num_reqs, target)
        # Again: a drafter may know what it offers only once it is loaded.
        check_pairing(self.drafter, self.verifier)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_reqs,
                config.max_num_batched_tokens,
                self.num_speculative_tokens,
                uniform_verify,
            ),
            BlockAllocator(self.runner.num_kv_blocks, config.block_size),
        )
        self._drafts_known = self.max_steps_in_flight == 1
        self._reader = PromptReader(target.tokenizer, model.vocab_size, config.max_model_len)
        self._eos_token_ids = eos_token_ids(model, target.tokenizer)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._planned: ScheduledStep | None = None  # what the plan at hand was made for
        self._pending: list[Increment] = []
        self._arrivals = itertools.count()
        self._steps = itertools.count()
        self._last_read = 0.0

    def _make_runner(self, max_num_reqs: int, target: LoadedTarget) -> ModelRunner:
        """Build the runner and its sampler."""
        config, model = self.config, target.model
        runner_config = RunnerConfig(
            max_num_reqs=max_num_reqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_speculative_tokens=self.num_speculative_tokens,
            num_kv_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            graph_scope=self.graph_scope,
            graph_num_reqs=config.graph_num_reqs,
            max_steps_in_flight=self.max_steps_in_flight,
            token_table=config.token_table,
        )
        sampler = Sampler(self.verifier, max_num_reqs, model.vocab_size, model.device)
        return ModelRunner(model, sampler, self.drafter, runner_config, target.tokenizer)

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
        params = check_params(
            SamplingParams() if params is None else params,
            self.verifier,
            self.num_speculative_tokens,
            self.tokenizer is not None,
        )
        if request_id in self._requests:
            raise ConfigError(f"request id {request_id!r} is already running; give another")
        budget = params.num_speculative_tokens
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
            detokenizer=Detokenizer(self.tokenizer, params.stop_strings),
            end_token_ids=frozenset(params.stop_token_ids or ()).union(
                () if params.ignore_eos else self._eos_token_ids
            ),
        )
        request.outcomes = new_outcomes(self.num_speculative_tokens)
        request.stats.drafted_per_position = [0] * self.num_speculative_tokens
        request.stats.accepted_per_position = [0] * self.num_speculative_tokens
        self.scheduler.add(request)
        self._requests[request_id] = request

    def abort(self, request_id: str) -> None:
        """End a request; its increment with finish_reason "abort" comes with the next step.

        Raises:
            ConfigError: no unfinished request has that id.
        """
        increment = self.discard(request_id)
        self._pending.append(increment)

    def discard(self, request_id: str) -> Increment:
        """End a request at once; its last increment is returned here and comes with no step.

        Raises:
            ConfigError: no unfinished request has that id.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise ConfigError(f"no unfinished request has the id {request_id!r}")
        # A step that failed may have left increments that were not handed out.
        self._pending = [i for i in self._pending if i.request_id != request_id]
        start = len(request.detokenizer.token_ids)
        return self._finish(request, start, Trimmed([], "abort"))

    def put_back(self, increments: list[Increment]) -> None:
        """Keep increments that were not for the caller of a step; they come with the next one."""
        self._pending += increments

    @property
    def unfinished_ids(self) -> set[str]:
        """Return the ids of the requests that wait or run."""
        return set(self._requests)

    @property
    def has_requests(self) -> bool:
        """Return whether a step would do anything."""
        return bool(self.scheduler.has_requests or self._in_flight or self._pending)

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> list[Increment]:
        """Enqueue one step, read one outcome, and return what it added to which request."""
        increments, self._pending = self._pending, []
        try:
            drained = not self._enqueue()
            while self._in_flight and (drained or len(self._in_flight) >= self.max_steps_in_flight):
                # An interrupt nearly always comes while waiting: the step must still be there then.
                self._in_flight[0].handle.output.wait()
                increments += self._read(self._in_flight.popleft())
        except BaseException:
            self._pending = increments
            self._start_over()
            raise
        return increments

    def _enqueue(self) -> bool:
        """Schedule and enqueue a step; returns whether more may be enqueued before one is read."""
        started = time.perf_counter()
        schedule = self.scheduler.schedule(len(self._in_flight))
        for request in schedule.preempted:
            self._release(request)
        scheduled = schedule.step
        if scheduled is not None:
            plan = self._prepare(scheduled, schedule)
            handle = self.runner.execute_model(plan, timed=self.trace is not None)
            self._in_flight.append(_InFlight(handle, scheduled, next(self._steps), started))
        return scheduled is not None and not schedule.must_drain

    def _start_over(self) -> None:
        """Forget what is in flight and send every request back to wait, because a step failed.

        They resume with the tokens that were committed to them; noise is keyed by position, so
        their texts go on as if nothing had happened.
        """
        self._in_flight.clear()
        for request in self.scheduler.preempt_all():
            request.row = None
        self.runner.abandon_steps()
        self._planned = None

    def _prepare(self, scheduled: ScheduledStep, schedule: SchedulerOutput) -> StepPlan:
        """Give rows and blocks to the schedule and turn it into the runner's plan.

        A batch that goes on as it was gets the same arrays again, or even the same plan: the runner
        need not ship it again then.
        """
        for request in schedule.new_requests:
            new = NewRow(
                request.token_ids,
                request.num_prompt_tokens,
                request.max_total_len,
                request.draft_budget,
            )
            request.row = self.runner.add_request(new, request.params, request.seed)
            request.generation = int(self.runner.state.generation_np[request.row])
        for request, start, block_ids in schedule.new_blocks:
            assert request.row is not None
            self.runner.add_blocks(request.row, start, block_ids)
        max_seq_len, max_total_len = self._bound(schedule.max_seq_len, schedule.max_total_len)
        if scheduled is self._planned:
            plan, rows_np = self._plan, self._plan.rows_np
            if plan.max_seq_len == max_seq_len and plan.max_total_len == max_total_len:
                return plan
        else:
            rows_np = np.array([request.row for request in scheduled.requests], dtype=np.int32)
        self._planned = scheduled
        self._plan = StepPlan(
            rows_np=rows_np,
            query_lens_np=scheduled.num_tokens,
            is_prefill_np=scheduled.is_prefill,
            is_last_chunk_np=scheduled.is_last_chunk,
            max_seq_len=max_seq_len,
            max_total_len=max_total_len,
        )
        return self._plan

    def _bound(self, *lengths: int) -> list[int]:
        """Round bounds on lengths up, so that the plan can keep them for some steps."""
        step, limit = self._bound_step, self.config.max_model_len
        return [min(-(-length // step) * step, limit) for length in lengths]

    def _read(self, flight: _InFlight) -> list[Increment]:
        """Wait for a step's outcome and commit it to the requests that still own their rows."""
        output, scheduled = flight.handle.output.wait(), flight.scheduled
        places, must_trim = self.scheduler.commit(
            scheduled,
            flight.handle.generations,
            output.num_sampled,
            output.num_rejected,
            output.num_drafts if self._drafts_known else None,
        )
        requests, verifies, tokens = scheduled.requests, scheduled.verifies, output.sampled_tokens
        num_sampled, num_judged = output.num_sampled, output.num_judged
        if places is not None:
            owned = places.tolist()
            requests = [requests[place] for place in owned]
            verifies = [verifies[place] for place in owned]
            tokens, num_sampled, num_judged = (
                tokens[places],
                num_sampled[places],
                num_judged[places],
            )
        outcomes = Outcomes(
            requests, verifies, tokens.tolist(), num_sampled.tolist(), num_judged.tolist()
        )
        increments = self._append(outcomes, must_trim.tolist())
        if self.trace is not None and flight.handle.timer is not None:
            num_tokens = scheduled.num_tokens if places is None else scheduled.num_tokens[places]
            lines = trace_lines(flight.step, num_tokens.tolist(), outcomes, increments)
            for line in lines:
                self.trace.add_request_step(line)
            self._trace_step(flight, sum(len(i.new_token_ids) for i in increments))
        return increments

    def _append(self, outcomes: Outcomes, must_trim: list[bool]) -> list[Increment]:
        """Append what a step sampled; an increment for each request that got tokens."""
        increments: list[Increment] = []
        width = self.num_speculative_tokens + 1
        for request, verifies, run, num_sampled, num_judged, trims in zip(
            *outcomes, must_trim, strict=True
        ):
            if num_sampled == 0:
                continue
            del run[num_sampled:]
            # Nothing else ends a text: of any other run `trim` would keep all.
            if trims or not request.end_token_ids.isdisjoint(run):
                increments.append(self._trim(request, verifies, run, num_judged))
                continue
            detokenizer = request.detokenizer
            start = len(detokenizer.token_ids)
            detokenizer.token_ids += run
            request.token_ids += run
            if verifies:
                request.outcomes[num_sampled * width + num_judged] += 1
            increments.append(Increment(request.request_id, run, detokenizer, start))
        return increments

    def _trim(self, request: Request, verifies: bool, run: list[int], num_judged: int) -> Increment:
        """Append a run that may hold the end of its text."""
        detokenizer, params = request.detokenizer, request.params
        start = len(detokenizer.token_ids)
        room = request.max_total_len - len(request.token_ids)
        trimmed = trim(run, room, params, self._eos_token_ids, detokenizer)
        kept = trimmed.token_ids
        request.token_ids += kept
        if verifies:
            num_judged, num_accepted = judged(
                len(run), num_judged, len(kept), trimmed.finish_reason
            )
            count_outcome(request.stats, len(kept), num_judged, num_accepted)
        if trimmed.finish_reason is not None:
            return self._finish(request, start, trimmed)
        return Increment(request.request_id, kept, detokenizer, start)

    def _finish(self, request: Request, start: int, trimmed: Trimmed) -> Increment:
        """Free what a request holds and build its output; `start`: new tokens before this step."""
        self.scheduler.remove(request)
        self._release(request)
        del self._requests[request.request_id]
        request.detokenizer.finish()
        fold_outcomes(request.outcomes, request.stats)
        reason: FinishReason | None = trimmed.finish_reason
        completion = CompletionOutput(
            index=0,
            text=request.detokenizer.text,
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
        return Increment(
            request.request_id, trimmed.token_ids, request.detokenizer, start, reason, result
        )

    def _release(self, request: Request) -> None:
        """Free a request's row, where it has one."""
        if request.row is not None:
            self.runner.remove_request(request.row)
            request.row = None

    def _trace_step(self, flight: _InFlight, num_committed: int) -> None:
        assert self.trace is not None
        timer = flight.handle.timer
        assert timer is not None
        phases, total_ms = timer.phases_ms(), timer.total_ms()
        known_ms = sum(ms for ms in phases.values() if not math.isnan(ms))
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
                flight.handle.num_computed_tokens,
                num_committed,
                *phases.values(),
                max(0.0, total_ms - known_ms),
                max(0.0, step_ms - total_ms),
                step_ms,
            )
        )
