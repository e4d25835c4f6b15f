"""The engine: composition root and step loop.

A step reads: schedule -> prepare -> forward -> verify -> commit -> propose. The device part is
enqueued by `runner.model_runner`; outcomes are read `max_steps_in_flight - 1` steps later.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

from runner.async_output import StepHandle, StepOutput
from runner.config import RunnerConfig
from runner.input_batch import padding_plan
from runner.loader import LoadedTarget, load_target, resolve_device, resolve_dtype
from runner.model_runner import ModelRunner
from sampler.processors.grammar import GrammarMasks
from specdec.admission import Admission
from specdec.checks import check_host_drafter, check_pairing, check_placement
from specdec.config import EngineConfig, from_mapping
from specdec.delivery import Delivery, deliver_logprobs
from specdec.draft_length.registered import make_draft_length
from specdec.ending import Trimmed
from specdec.errors import ConfigError
from specdec.grammar_steps import GrammarSteps
from specdec.host_drafts import HostDrafts, steps_in_flight
from specdec.intake import Prompt
from specdec.interrupts import InterruptShield
from specdec.kv_cache import BlockAllocator
from specdec.launches import LaunchInFlight, steps_per_launch
from specdec.outcomes import Outcomes, as_seen_by_policy, trace_outcomes
from specdec.parallel.tensor_ranks import TensorRanks
from specdec.planning import Planner
from specdec.registry import build_config
from specdec.request import Request
from specdec.samples import RequestGroup
from specdec.sampling_setup import make_sampler
from specdec.scheduler import Scheduler, SchedulerConfig
from specdec.step_times import StepClock, step_line
from specdec.trace import StepTrace
from specdec.types import Increment, SamplingParams

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests step by step.

    Args:
        target: name, hub id or folder of the target, or one that is already loaded.
        drafter: registered name, mapping with a key "name", or a drafter's config object.
        verifier: likewise.
        num_speculative_tokens: K; 0 together with the drafter "none" is plain decoding.
        config: sizes and device.
        trace: collects step traces where given.
        draft_length: how many of the K drafts a step proposes: "fixed" (all), or the name, a
            mapping with a key "name", or a config object of another policy.
        options: fields of `EngineConfig`, instead of `config`. With tensor_parallel_size above 1
            every rank builds its engine and makes the same calls; a target that is loaded whole is
            this rank's part from then on (docs/parallel.md).

    Raises:
        ConfigError: a wrong name, key, value or pairing; raised before the target loads.
        WeightsError, UnsupportedError, CapacityError: the target cannot be had or run.
        RankError: ranks lost, or contradict, one another.
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
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={config.data_parallel_size}: an Engine is one replica; use "
                "LLM, or specdec.parallel.replicas.DataParallelEngine, in as many processes"
            )
        drafter_entry, drafter_config = build_config("drafter", drafter)
        verifier_entry, verifier_config = build_config("verifier", verifier)
        self._processors = [
            build_config("logits_processor", spec) for spec in config.logits_processors
        ]
        k = num_speculative_tokens
        if not isinstance(k, int) or isinstance(k, bool) or k < 0:
            raise ConfigError(f"num_speculative_tokens={k!r} is not allowed; give an integer >= 0")
        never_drafts = getattr(drafter_entry.cls, "never_drafts", False)
        self.num_speculative_tokens = 0 if never_drafts else k
        config.check(self.num_speculative_tokens)
        self._ranks = TensorRanks(config)
        self.config = config = self._ranks.config
        self.draft_length = make_draft_length(draft_length, self.num_speculative_tokens)
        self.drafter = drafter_entry.cls(drafter_config)
        self.verifier = verifier_entry.cls(verifier_config)
        check_pairing(self.drafter, self.verifier, self.num_speculative_tokens)
        check_host_drafter(self.drafter, config)
        names = drafter_entry.name, verifier_entry.name, str(getattr(target, "name", target))
        told = names, verifier_config, self.num_speculative_tokens, self.draft_length.config
        self._ranks.compare_options(*told)
        self._ranks.compare_configs(target)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        if isinstance(target, str | PathLike):
            ranks, weights = self._ranks.tensor_parallel, config.weight_dtype
            target = load_target(str(target), dtype, device, ranks, weights)
        if not isinstance(target, LoadedTarget):
            raise ConfigError(
                f"target={target!r} is not allowed; give a name, a folder or a LoadedTarget"
            )
        check_placement(target.model, config, device, dtype)
        self._ranks.take_part(target)
        self._ranks.compare_targets(target)
        self.target = target
        self.tokenizer = target.tokenizer
        self.trace = trace
        self._build(target)

    def _build(self, target: LoadedTarget) -> None:
        """Build runner and scheduler around a loaded target."""
        config, model, k = self.config, target.model, self.num_speculative_tokens
        limit = model.max_position_embeddings
        if config.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={config.max_model_len} exceeds the target's context of {limit}; "
                f"set max_model_len<={limit}"
            )
        on_gpu = model.device.type == "cuda"
        max_num_reqs = config.max_num_reqs or (1024 if on_gpu else 64)
        ahead = on_gpu and not config.phase_events
        self.max_steps_in_flight = steps_in_flight(self.drafter, config, 2 if ahead else 1)
        self.graph_scope: str = config.graph_scope
        if self.graph_scope == "auto":
            self.graph_scope = "step" if on_gpu else "none"
        self.steps_per_launch = steps_per_launch(
            config, self.graph_scope, self.drafter, self.draft_length, k
        )
        # On a GPU every scope computes the same shapes, so that their texts are the same.
        uniform_verify = on_gpu or self.graph_scope in ("step", "draft")
        self._sampler = make_sampler(
            config, self.verifier, self._processors, k, max_num_reqs, target
        )
        self.runner = self._make_runner(max_num_reqs, target)
        self._planner = Planner(self.runner, config.max_model_len, coarse=uniform_verify)
        # Again: a drafter may know what it offers only once it is loaded.
        check_pairing(self.drafter, self.verifier, k)
        check_host_drafter(
            self.drafter, replace(config, max_steps_in_flight=self.max_steps_in_flight)
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_reqs, config.max_num_batched_tokens, k, uniform_verify),
            BlockAllocator(self.runner.num_kv_blocks, config.block_size),
            self._ranks.next_length(self.draft_length),
        )
        self._drafts_known = self.max_steps_in_flight == 1
        self._host_drafts = HostDrafts(
            self.drafter,
            self.runner.state,
            self.scheduler,
            self.runner.graphs.launches,
            model.vocab_size,
            self._ranks.agree_on_drafts,
        )
        self._admission = Admission(target, self.verifier, config, k)
        eos_token_ids = self._admission.eos_token_ids
        self._delivery = Delivery(k, eos_token_ids)
        self._grammars = GrammarSteps(
            self._admission.grammars,
            self._host_drafts,
            next(p for p in self._sampler.processors.processors if isinstance(p, GrammarMasks)),
            k,
        )
        self._groups: dict[str, RequestGroup] = {}
        self._in_flight: deque[LaunchInFlight] = deque()
        self._pending: list[Increment] = []
        self._empty_steps: deque[StepHandle] = deque()
        self.num_steps = 0  # enqueued so far, empty ones not counted
        self._clock, self._shield = StepClock(), InterruptShield()
        self._ranks.compare_choices(self.runner)

    def _make_runner(self, max_num_reqs: int, target: LoadedTarget) -> ModelRunner:
        """Build the runner around the sampler."""
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
            phase_events=config.phase_events,
            draft_choices=self.draft_length.choices,
            confidence_threshold=self.draft_length.confidence_threshold,
            steps_per_launch=self.steps_per_launch,
            least_of_ranks=self._ranks.least,
        )
        return ModelRunner(model, self._sampler, self.drafter, runner_config, target.tokenizer)

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
            UnsupportedError: stop strings or structured output that this target cannot have.
            CapacityError: the KV cache could not hold it even alone.
        """
        self.enqueue(self.admit(request_id, prompt, params, label))

    def admit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        label: Any = None,
    ) -> RequestGroup:
        """Check a request and count it, without queueing it; see `add_request`.

        Data-parallel replicas all admit every request, and so give it the same seed.
        """
        if request_id in self._groups:
            raise ConfigError(f"request id {request_id!r} is already running; give another")
        group = self._admission.build(request_id, prompt, params, label)
        first = group.samples[0]
        self._sampler.check_request(first.params, first.token_ids)
        self.scheduler.check(first)  # all samples are of one size
        self._admission.count()
        self._ranks.note_request(group)
        return group

    def enqueue(self, group: RequestGroup) -> None:
        """Queue a request that was admitted."""
        with self._shield:
            for request in group.samples:
                self.scheduler.add(request)
                self._grammars.add(request)
            self._groups[group.samples[0].request_id] = group

    def abort(self, request_id: str) -> None:
        """End a request; its increment with finish_reason "abort" comes with the next step.

        Raises:
            ConfigError: no unfinished request has that id.
        """
        self._end(request_id, self._pending)
        self._host_drafts.tell_ended()

    def discard(self, request_id: str) -> Increment:
        """End a request at once; its last increment is returned here and comes with no step.

        Raises:
            ConfigError: no unfinished request has that id.
        """
        increments: list[Increment] = []
        ended = self._end(request_id, increments)
        # A step that failed may have left increments that were not handed out.
        self._pending = [i for i in self._pending if (i.request_id, i.sample_index) not in ended]
        self._host_drafts.tell_ended()
        return increments[-1]

    def _end(self, request_id: str, increments: list[Increment]) -> set[tuple[str, int]]:
        """End every sample of a request that goes on; returns which.

        Args:
            request_id: of the request.
            increments: added to; the last one holds the output.
        """
        group = self._groups.get(request_id)
        if group is None:
            raise ConfigError(f"no unfinished request has the id {request_id!r}")
        self._ranks.note_end(request_id)
        ended = group.unfinished
        with self._shield:
            for request in ended:
                start = len(request.detokenizer.token_ids)
                self._finish(request, start, Trimmed([], "abort"), increments)
        return {(request_id, request.sample_index) for request in ended}

    def take_back(self, request_id: str) -> None:
        """Forget increments of a request that no step has handed out."""
        self._pending = [i for i in self._pending if i.request_id != request_id]

    def share(self, value: Any) -> Any:
        """Return the first rank's value on every rank, for what ranks see differently: a clock.

        Args:
            value: what JSON can hold; that of other ranks does not count.
        """
        return self._ranks.share(value)

    def put_back(self, increments: list[Increment]) -> None:
        """Keep increments that were not for the caller of a step; they come with the next one."""
        self._pending += increments

    @property
    def unfinished_ids(self) -> set[str]:
        """Return the ids of the requests that wait or run."""
        return set(self._groups)

    @property
    def has_requests(self) -> bool:
        """Return whether a step would do anything."""
        return bool(self.scheduler.has_requests or self._in_flight or self._pending)

    # --- the step -------------------------------------------------------------------------------

    def step(self) -> list[Increment]:
        """Enqueue one launch, read one, and return what it added to which request.

        A launch is a step, or `steps_per_launch` of them: then a request may get several increments
        at once, in order.
        """
        self._ranks.check_alive()
        with self._shield:
            try:
                if self._in_flight and self._grammars.need_outcomes:
                    self.runner.graphs.launches["waits for a grammar"] += 1
                    self._read_down_to(0)
                drained = not self._enqueue()
                self._read_down_to(0 if drained else self.max_steps_in_flight - 1)
                if not self.scheduler.has_requests:  # what is in flight is nobody's
                    self._read_down_to(0)
                self._host_drafts.tell_ended()
            except BaseException as error:
                if self._ranks.is_alone:
                    self._start_over()
                # Of several ranks none goes further. A sum on the device may wait for one that has
                # ended, and to wait for what is in flight would take as long.
                self._ranks.fail(error)
                raise
        increments, self._pending = self._pending, []
        return increments

    def run_empty_step(self) -> None:
        """Run padding alone through `execute_model`: no state is touched, and nothing comes of it.

        A replica without work does so while others have some, so that the collectives inside their
        targets find their partners. Nothing is in flight, but for earlier empty steps.
        """
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        plan = padding_plan(1, self.num_speculative_tokens + 1)
        self._empty_steps.append(self.runner.execute_model(plan))
        self._settle_empty_steps(self.max_steps_in_flight - 1)

    def _settle_empty_steps(self, num_in_flight: int = 0) -> None:
        """Wait for empty steps, the oldest first, until so many are left."""
        while len(self._empty_steps) > num_in_flight:
            self._empty_steps.popleft().output.wait()

    def _read_down_to(self, num_in_flight: int) -> None:
        """Read launches, the oldest first, until so many are left."""
        while len(self._in_flight) > num_in_flight:
            with self._shield.lifted():
                output = self._in_flight[0].handle.output.wait()
            flight = self._in_flight.popleft()
            self._read(flight, output)
            if flight.num_steps > 1:
                for later in flight.handle.later:
                    flight.step += 1
                    self._read(flight, later.wait())

    def _enqueue(self) -> bool:
        """Schedule and enqueue a step; returns whether more may be enqueued before one is read."""
        started = time.perf_counter()
        self._host_drafts.propose()
        most_steps = 1 if self.steps_per_launch == 1 else self._most_steps()
        schedule = self.scheduler.schedule(len(self._in_flight), most_steps)
        for request in schedule.preempted:
            self._planner.release(request)
        scheduled = schedule.step
        if scheduled is not None:
            plan = self._planner.prepare(scheduled, schedule)
            self._host_drafts.stage(scheduled)
            self._grammars.stage(scheduled)
            self._settle_empty_steps()
            num_steps, timed = schedule.num_steps, self.trace is not None
            with self._shield.lifted():
                if num_steps == 1:
                    handle = self.runner.execute_model(plan, timed=timed)
                else:
                    handle = self.runner.execute_steps(plan, num_steps, timed=timed)
            launch = LaunchInFlight(handle, scheduled, self.num_steps, started, num_steps)
            self._in_flight.append(launch)
            self.num_steps += num_steps
        return scheduled is not None and not schedule.must_drain

    def _most_steps(self) -> int:
        """Return how many steps the next launch may hold."""
        steady = self.scheduler.steady
        if steady is None or self._grammars.need_outcomes:
            return 1
        repeats = self.runner.can_repeat(len(steady.requests), steady.num_drafted)
        return self.steps_per_launch if repeats else 1

    def _start_over(self) -> None:
        """Forget what is in flight and send every request back to wait, because a step failed.

        They resume with the tokens that were committed to them; noise is keyed by position, so
        their texts go on as if nothing had happened.
        """
        self._in_flight.clear()
        self._empty_steps.clear()
        self.scheduler.preempt_all()
        for request in self.scheduler.waiting:  # one that was just preempted still has its row
            request.row = None
        self.runner.abandon_steps()
        self._planner.forget()

    def _read(self, flight: LaunchInFlight, output: StepOutput) -> None:
        """Commit a step's outcome to the requests that still own their rows."""
        self._ranks.note_step(flight.step, flight.handle, output)
        scheduled = flight.scheduled
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
        first = len(self._pending)
        self._delivery.append(outcomes, must_trim.tolist(), self._finish, self._pending)
        increments = self._pending[first:]
        if output.logprobs is not None or output.prompts:
            deliver_logprobs(output, scheduled.requests, set(requests), increments)
        seconds = flight.seconds or self._clock.read(flight.started) / flight.num_steps
        flight.seconds = seconds
        if self.draft_length.learns:
            self.draft_length.observe(as_seen_by_policy(scheduled, outcomes, seconds))
        if self.trace is not None and flight.handle.timer is not None:
            counts = num_sampled, num_judged
            num_committed = trace_outcomes(
                self.trace, flight.step, scheduled, places, requests, counts, increments
            )
            lengths = scheduled.num_verified, scheduled.num_drafted, flight.num_steps
            line = step_line(flight.step, flight.handle, seconds, num_committed, flight.num_steps)
            self.trace.add_step((*line, *lengths))

    def _finish(
        self, request: Request, start: int, trimmed: Trimmed, increments: list[Increment]
    ) -> None:
        """Free what a sample holds; the last one brings the output.

        Args:
            request: the sample.
            start: its new tokens before this step.
            trimmed: what this step added, and why it ended.
            increments: added to.
        """
        self.scheduler.remove(request)
        self._grammars.remove(request)
        self._host_drafts.end(request)
        self._planner.release(request)
        name = request.request_id
        group = self._groups[name]
        if group.unfinished == [request]:  # now: a tokenizer may fail over the text
            del self._groups[name]
        output = group.end_sample(request, trimmed)
        told = trimmed.token_ids, request.detokenizer, start, request.sample_index
        increments.append(Increment(name, *told, trimmed.finish_reason, output))
