"""Runs steps: state, staged writes, and which parts of a step are launched as graphs.

A uniform step (every request verifies K + 1 positions) has a fixed shape: it is padded to a
captured number of requests and runs on tensors at fixed addresses, so that it, or a part of it, can
be one CUDA graph (`runner.cuda_graphs`). What `graph_scope` leaves out of graphs runs by the very
same functions on the very same shapes. What a step does is in `runner.step`.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.async_output import OutputRing, PromptTensor, StepHandle, StepTensors
from runner.buffers import StagedTables
from runner.capture import capture_graphs
from runner.config import RunnerConfig
from runner.cuda_graphs import CUDAGraphManager, GraphKey, Part, capture_sizes
from runner.features import Features, FixedInputs
from runner.input_batch import InputBatch, InputBuffers, StepPlan
from runner.kv_cache import PagedKVCache
from runner.memory import choose_num_kv_blocks, log_memory
from runner.models.hf import HFModel
from runner.row_ends import RowEnds
from runner.states import NewRow, RequestState
from runner.step import SamplerProtocol, Step
from runner.step_timer import StepTimer
from specdec.checks import check_lengths_of, check_wants
from specdec.protocols import DraftBuffers, DraftContext, Drafter, TargetView

logger = logging.getLogger(__name__)


class _Dispatch(NamedTuple):
    """The fixed shape that a step runs in."""

    num_places: int | None  # captured size that holds it, None where there is none
    num_verified: int | None  # drafts that each request verifies; None where the step is ragged
    num_drafted: int
    plain: bool


class ModelRunner:
    """State, KV caches, target, sampler and drafter of one engine, on one device.

    Args:
        target: the target model.
        sampler: processes logits and verifies.
        drafter: proposes.
        config: sizes.
        tokenizer: handed to the drafter, which may have to compare it with its own.
    """

    def __init__(
        self,
        target: HFModel,
        sampler: SamplerProtocol,
        drafter: Drafter,
        config: RunnerConfig,
        tokenizer: Any | None = None,
    ) -> None:
        self.target, self.sampler, self.drafter, self.config = target, sampler, drafter, config
        self.device = device = target.device
        # By index: several times quicker to enter than by device.
        self._gpu_index = device.index or 0 if device.type == "cuda" else None
        k, max_reqs = config.num_speculative_tokens, config.max_num_reqs
        max_num_blocks = -(-config.max_model_len // config.block_size)
        self.state = RequestState(
            max_reqs, config.max_model_len, max_num_blocks, k, device, config.token_table
        )
        self._state_view = self.state.view()
        self.draft_choices = (k,) if config.draft_choices is None else config.draft_choices
        sizes = {choice: self._capture_sizes(choice) for choice in self.draft_choices}
        self.graphs = CUDAGraphManager(device, sizes)
        # A GPU keeps to the fixed shapes whatever the scope, so that scopes compute the same.
        self._fixed_shapes = device.type == "cuda" or config.graph_scope != "none"
        self._fixed_batches: dict[tuple[int, int, bool], InputBatch] = {}
        self._phase_timers: dict[GraphKey, StepTimer] = {}  # by captured step
        self.padding_is_plain = False
        largest, max_tokens = 0, config.max_num_batched_tokens
        if self._fixed_shapes:
            largest = max(own[-1] for own in sizes.values())
            max_tokens = max(max_tokens, *(own[-1] * (v + 1) for v, own in sizes.items()))
        self.buffers = InputBuffers(max_reqs, max_tokens, max_reqs * (k + 1), device)
        # One launch more than there are in flight: the host fills its places while they run.
        depth = (config.max_steps_in_flight + 1) * config.steps_per_launch
        self.outputs = OutputRing(depth, max_reqs, k + 1, device)
        self._row_ends = RowEnds(max_reqs, device) if config.steps_per_launch > 1 else None
        tables = [*self.state.tables, *sampler.tables, self.buffers.columns]
        if self._row_ends is not None:
            tables.append(self._row_ends.end_token_ids)
        self._tables = StagedTables(tables, device, depth)
        self._last_dispatch: tuple[StepPlan, _Dispatch] | None = None
        self._load_drafter(tokenizer)
        self.num_kv_blocks = config.num_kv_blocks or 1
        self.kv = target.make_kv_cache(self.num_kv_blocks, config.block_size)
        self._allocate_for_drafter(largest)
        self._bind_drafter()
        self._step = Step(
            target, sampler, drafter, self.state, self.kv, self.outputs, self.draft_logits
        )
        self._step.row_ends = self._row_ends
        if self.draft_confidence is not None:
            self._step.confidence = self.draft_confidence, config.confidence_threshold or 0.0
        if config.num_kv_blocks is None:
            self.num_kv_blocks = choose_num_kv_blocks(self)
            for kv in self.kv_caches:
                kv.resize(self.num_kv_blocks)
            self._bind_drafter()  # again: these addresses stay
        log_memory(self)
        capture_graphs(self)

    def _load_drafter(self, tokenizer: Any | None) -> None:
        """Let the drafter load what it needs, given the target."""
        target = self.target
        view = TargetView(
            model=target,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            dtype=target.dtype,
            device=self.device,
            num_speculative_tokens=self.config.num_speculative_tokens,
            max_model_len=self.config.max_model_len,
            tokenizer=tokenizer,
        )
        with self.on_device():
            self.drafter.load(view)

    def on_device(self) -> AbstractContextManager[Any]:
        """Make the runner's GPU the current one: kernels and events go there, not to a tensor's."""
        return nullcontext() if self._gpu_index is None else torch.cuda.device(self._gpu_index)

    def _capture_sizes(self, num_verified: int) -> list[int]:
        """Return the numbers of requests that a uniform step is padded to, rising."""
        config = self.config
        most_reqs = max(1, config.max_num_batched_tokens // (num_verified + 1))
        return capture_sizes(config.graph_num_reqs, min(config.max_num_reqs, most_reqs))

    @property
    def kv_caches(self) -> list[PagedKVCache]:
        """Return the target's cache and, where it has one, the drafter's."""
        return [self.kv] if self.draft_kv is None else [self.kv, self.draft_kv]

    def _allocate_for_drafter(self, largest: int) -> None:
        """Allocate what the drafter asks for, once `load` has set what that is.

        Args:
            largest: requests of the largest fixed shape.
        """
        wants, config, device = self.drafter.capabilities, self.config, self.device
        check_wants(self.drafter, config.token_table, len(self.target.layers))
        check_lengths_of(self.drafter, self.draft_choices, config.confidence_threshold)
        k = config.num_speculative_tokens
        if wants.max_context is not None:
            self.state.draft_context = min(wants.max_context, config.max_model_len)
            if k > 0 and wants.max_context < config.max_model_len:
                logger.warning(
                    "drafter %s drafts for texts up to %d tokens; behind them, up to max_model_len="
                    "%d, the target goes on alone",
                    type(self.drafter).__name__,
                    wants.max_context,
                    config.max_model_len,
                )
        self.draft_logits: Tensor | None = None
        if wants.offers_q and k > 0:
            shape = (config.max_num_reqs, k, self.target.vocab_size)
            self.draft_logits = torch.zeros(shape, dtype=torch.float32, device=device)
        self.draft_confidence: Tensor | None = None
        if config.confidence_threshold is not None and k > 0:
            shape = config.max_num_reqs, k
            self.draft_confidence = torch.zeros(shape, dtype=torch.float32, device=device)
        self.draft_kv: PagedKVCache | None = None
        if wants.kv is not None:
            self.draft_kv = PagedKVCache(
                wants.kv.num_layers,
                self.num_kv_blocks,
                config.block_size,
                wants.kv.num_kv_heads,
                wants.kv.head_size,
                wants.kv.dtype,
                device,
            )
        self._fixed = FixedInputs(largest, k + 1, self.target, wants)

    def _bind_drafter(self) -> None:
        """Give the drafter its views and buffers."""
        state = self.state
        buffers = DraftBuffers(
            state.draft_tokens,
            state.draft_kind,
            self.draft_logits,
            self.draft_kv,
            self.draft_confidence,
            from_host=state.from_host if self.drafter.capabilities.on_cpu else None,
        )
        with self.on_device():
            self.drafter.bind(state.view(), buffers)

    # --- graphs ---------------------------------------------------------------------------------

    def graph_functions(
        self, size: int, num_verified: int, num_drafted: int, plain: bool
    ) -> dict[Part, Callable[[], Any]]:
        """Return what each part runs in a shape."""
        batch, step = self._fixed_batch(size, num_verified, plain), self._step
        outcome, features = self._fixed_inputs(batch)
        key = GraphKey.of("step", size, num_verified, num_drafted, plain)
        if self.config.phase_events and key not in self._phase_timers:
            with self.on_device():
                self._phase_timers[key] = StepTimer(self.device.type == "cuda", in_graph=True)
        timer = self._phase_timers.get(key)
        return {
            "step": partial(step.run, batch, num_drafted, timer),
            "target": partial(step.run_target, batch),
            "draft": partial(step.run_drafter, batch, features, outcome, num_drafted),
            "propose": partial(step.propose, batch, outcome, num_drafted),
        }

    def repeated_step(self, key: GraphKey) -> tuple[GraphKey, Callable[[], Any]]:
        """Return the key of `steps_per_launch` steps in one launch, and what that runs."""
        num_steps = self.config.steps_per_launch
        batch = self._fixed_batch(key.num_reqs, key.num_verified, key.plain)
        function = partial(self._step.run_repeatedly, batch, key.num_drafted, num_steps)
        return dataclasses.replace(key, num_steps=num_steps), function

    def can_repeat(self, num_reqs: int, num_drafted: int) -> bool:
        """Return whether a uniform step that verifies what it drafts can be launched repeatedly."""
        places, num_steps = self.graphs.padded(num_reqs, num_drafted), self.config.steps_per_launch
        if places is None:
            return False
        key = GraphKey("step", places, num_drafted, num_drafted, num_steps=num_steps)
        return key in self.graphs

    def _fixed_batch(self, size: int, num_verified: int, plain: bool = False) -> InputBatch:
        """Return the views of a uniform step of `size` places."""
        key = size, num_verified, plain
        if key not in self._fixed_batches:
            batch = self.buffers.fixed_batch(size, num_verified + 1, self.config.max_model_len)
            self._fixed_batches[key] = dataclasses.replace(batch, plain=plain)
        return self._fixed_batches[key]

    def _fixed_inputs(self, batch: InputBatch) -> tuple[StepTensors, Features]:
        """Return the fixed tensors that stand for a target's outcome, and for its features."""
        return self._fixed.outcome(batch.num_reqs), self._fixed.features(batch.num_tokens)

    # --- requests -------------------------------------------------------------------------------

    def add_request(self, new: NewRow, params: Any, seed: int, sample_index: int = 0) -> int:
        """Give a request a row and tell sampler and drafter; returns the row."""
        row = self.state.add_request(new)
        if self._row_ends is not None:
            self._row_ends.add_request(row, new.end_token_ids)
        self.sampler.add_request(row, params, seed, sample_index, new)
        self.sampler.logprobs.prompts.add_request(row, new)
        with torch.inference_mode(), self.on_device():
            self.drafter.add_request(row)
        return row

    def add_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        """Append KV blocks to a row's block table."""
        self.state.block_table.stage_write(row, start, block_ids)

    def remove_request(self, row: int) -> None:
        """Free a row."""
        self.state.remove_request(row)
        self.sampler.logprobs.remove_request(row)

    def abandon_steps(self) -> None:
        """Forget every step in flight and free every row, because a step failed.

        Whoever owned a row has to be added again; what was staged for it counts for nothing.
        """
        self.outputs.abandon_steps()
        self.buffers.forget()
        self._last_dispatch = None
        self.state.remove_all()
        self.sampler.logprobs.clear()

    # --- the step -------------------------------------------------------------------------------

    def execute_model(self, plan: StepPlan, timed: bool = False) -> StepHandle:
        """Enqueue one step and return a handle to its outcome.

        Padding places (row -1) touch no state and write no KV, so a plan of padding alone is the
        empty step.

        Args:
            plan: the step.
            timed: measure its phases.

        After an exception nothing is known of the steps in flight: call `abandon_steps`.
        """
        with torch.inference_mode(), self.on_device():
            ring_place = self.outputs.begin_step()
            timer = StepTimer(self.device.type == "cuda") if timed else None
            width, num_tokens, prompts = self._execute(plan, ring_place, timer)
            places = self.sampler.logprobs.places(plan.rows_np)
            output = self.outputs.end_step(plan.num_reqs, width, places, prompts)
        generations = self.state.generation_np[plan.rows_np]
        return StepHandle(plan, output, timer, generations, num_tokens)

    def execute_steps(self, plan: StepPlan, num_steps: int, timed: bool = False) -> StepHandle:
        """Enqueue steps that are alike in one launch, and return a handle to their outcomes.

        Args:
            plan: of each of them: no request joins or leaves, every one verifies as many drafts as
                it proposes, and `can_repeat` says yes.
            num_steps: `steps_per_launch`.
            timed: measure the launch.

        After an exception nothing is known of the steps in flight: call `abandon_steps`.
        """
        with torch.inference_mode(), self.on_device():
            ring_place = self.outputs.begin_steps(num_steps)
            timer = StepTimer(self.device.type == "cuda") if timed else None
            num_places, num_verified, num_drafted, plain = self._dispatch(plan)
            assert num_places is not None, f"{plan.num_reqs} requests"
            assert num_verified is not None, "a step that is not uniform"
            assert num_verified == num_drafted, f"{num_verified} verified, {num_drafted} drafted"
            self.buffers.stage(plan, num_places, num_verified + 1)
            self._tables.apply(ring_place)
            self.sampler.prepare_rows(self._state_view)
            key = GraphKey.of("step", num_places, num_verified, num_drafted, plain)
            self.graphs.launch(dataclasses.replace(key, num_steps=num_steps))
            if timer is not None:
                timer.end("step")
            places = self.sampler.logprobs.places(plan.rows_np)
            shape = plan.num_reqs, num_verified + 1
            output, *later = self.outputs.end_steps(num_steps, *shape, places)
        generations = self.state.generation_np[plan.rows_np]
        num_tokens = num_places * (num_verified + 1)
        return StepHandle(plan, output, timer, generations, num_tokens, tuple(later))

    def _execute(
        self, plan: StepPlan, ring_place: int, timer: StepTimer | None
    ) -> tuple[int, int, Sequence[PromptTensor]]:
        """Launch a step.

        Returns:
            How many tokens a place of its outcome holds, how many tokens the target ran, and what
            its prompt tokens gave.
        """
        num_places, num_verified, num_drafted, plain = self._dispatch(plan)
        # Padding of a uniform step runs tokens, that of a ragged one is there for `propose` alone.
        padding_len = 0 if num_verified is None else num_verified + 1
        self.buffers.stage(plan, num_places or plan.num_reqs, padding_len)
        self._tables.apply(ring_place)
        self.sampler.prepare_rows(self._state_view)
        if num_places is None or num_verified is None:
            batch = dataclasses.replace(self.buffers.batch(plan), plain=plain)
            self._step.adopt_drafts(batch)
            width, prompts = self._run_ragged(batch, plan, num_places, timer)
            return width, batch.num_tokens, prompts
        batch = self._fixed_batch(num_places, num_verified, plain)
        self._step.adopt_drafts(batch)
        key = GraphKey.of("step", num_places, num_verified, num_drafted, plain)
        if key in self.graphs:
            self.graphs.launch(key)
            if timer is not None:
                timer.end("step")
                timer.inside = self._phase_timers.get(key)
        else:
            self._run_fixed(batch, num_drafted, timer)
        return num_verified + 1, batch.num_tokens, ()

    def _num_drafted(self, plan: StepPlan) -> int:
        """Return how many drafts a step proposes for each request."""
        k = self.config.num_speculative_tokens
        return k if plan.num_drafted is None else plan.num_drafted

    def _dispatch(self, plan: StepPlan) -> "_Dispatch":
        """Find the fixed shape that a step runs in."""
        num_drafted = self._num_drafted(plan)
        if not self._fixed_shapes:
            return _Dispatch(None, None, num_drafted, False)
        if self._last_dispatch is not None:
            last, found = self._last_dispatch
            if plan.has_arrays_of(last) and found.num_drafted == num_drafted:
                return found
        num_verified = plan.num_verified
        if num_verified not in self.draft_choices:
            num_verified = None
        # A step of padding alone stands for any step: it takes the dearest path, unless told.
        rows_np = plan.rows_np[plan.rows_np >= 0]
        plain = not self.sampler.has_extras(rows_np) if len(rows_np) else self.padding_is_plain
        num_places = self.graphs.padded(plan.num_reqs, self._sized_by(plan))
        found = _Dispatch(num_places, num_verified, num_drafted, plain)
        self._last_dispatch = plan, found
        return found

    def _sized_by(self, plan: StepPlan) -> int:
        """Return whose captured sizes a step takes: by the drafts verified, or else proposed."""
        # Of a step that is not uniform, the drafter's passes behind its first have a shape.
        verified, drafted = plan.num_verified, self._num_drafted(plan)
        return drafted if verified is None or verified not in self.draft_choices else verified

    def _run_fixed(self, batch: InputBatch, num_drafted: int, timer: StepTimer | None) -> None:
        """Run a uniform step of a fixed shape that is not one graph."""
        k, scope = self.config.num_speculative_tokens, self.config.graph_scope
        shape = batch.num_reqs, batch.max_query_len - 1, num_drafted, batch.plain
        target, draft = GraphKey.of("target", *shape), GraphKey.of("draft", *shape)
        if target in self.graphs:
            features, outcome = self.graphs.launch(target)
            if timer is not None:
                timer.end("inputs, target, verify")
        else:
            self.graphs.count_eager("target", f"graph_scope is {scope}")
            features, outcome = self._step.run_target(batch, timer)
        if draft in self.graphs:
            fixed, fixed_features = self._fixed_inputs(batch)
            fixed.num_sampled.copy_(outcome.num_sampled)
            fixed.num_rejected.copy_(outcome.num_rejected)
            fixed_features.copy_(features)
            self.graphs.launch(draft)
            outcome.num_drafts.copy_(fixed.num_drafts)
        elif k:
            safe = self.drafter.capabilities.graph_safe
            reason = f"graph_scope is {scope}" if safe else "the drafter is not graph-safe"
            self.graphs.count_eager("draft", reason)
            self._step.run_drafter(batch, features, outcome, num_drafted)
        if timer is not None:
            timer.end("draft")
        self._step.publish(outcome)

    def _run_ragged(
        self, batch: InputBatch, plan: StepPlan, num_places: int | None, timer: StepTimer | None
    ) -> tuple[int, Sequence[PromptTensor]]:
        """Run a step whose places run unlike numbers of tokens, or more than any captured shape.

        Returns:
            How many tokens a place of its outcome holds, and what its prompt tokens gave.
        """
        self.graphs.count_eager("target", self._why_ragged(plan, num_places))
        features, outcome = self._step.run_target(batch, timer)
        prompts = self._step.take_prompt_logprobs(plan, features, timer)
        if self.config.num_speculative_tokens:
            propose = partial(self._propose_ragged, plan, num_places, outcome)
            self._step.run_drafter(batch, features, outcome, self._num_drafted(plan), propose)
        if timer is not None:
            timer.end("draft")
        self._step.publish(outcome)
        return outcome.sampled_tokens.shape[1], prompts

    def _propose_ragged(
        self, plan: StepPlan, num_places: int | None, outcome: StepTensors, ctx: DraftContext
    ) -> None:
        """Propose after a first pass that ran eager, in a fixed shape where there is one."""
        wants, scope = self.drafter.capabilities, self.config.graph_scope
        keeps_kv = wants.kv is not None and not wants.splits_first_pass
        if not keeps_kv and not plan.samples_np.any():
            return  # no place can use a draft, and no KV of the step's tokens is left to write
        fixed_shape = num_places is not None and wants.splits_first_pass
        if not wants.graph_safe:
            reason = "the drafter is not graph-safe"
        elif wants.on_cpu and not wants.splits_first_pass:
            reason = "the drafter runs on the host"
        elif not wants.splits_first_pass and scope != "none":
            reason = "the drafter does not split off its first pass"
        elif fixed_shape:
            reason = f"graph_scope is {scope}"
        else:
            reason = self._why_ragged(plan, num_places)
        if not fixed_shape:
            self.graphs.count_eager("propose", reason)
            self.drafter.propose(ctx)
            return
        assert num_places is not None
        batch, n = self._fixed_batch(num_places, ctx.num_drafts), plan.num_reqs
        fixed, _ = self._fixed_inputs(batch)
        for counts, own in (
            (fixed.num_sampled, outcome.num_sampled),
            (fixed.num_rejected, outcome.num_rejected),
        ):
            counts.zero_()
            counts[:n].copy_(own)
        key = GraphKey.of("propose", num_places, ctx.num_drafts, ctx.num_drafts)
        if key in self.graphs:
            self.graphs.launch(key)
        else:
            self.graphs.count_eager("propose", reason)
            self._step.propose(batch, fixed, ctx.num_drafts)

    def _why_ragged(self, plan: StepPlan, num_places: int | None) -> str:
        """Say why a step does not run in a captured shape."""
        if not self._fixed_shapes:
            return f"graph_scope is {self.config.graph_scope}"
        if num_places is None:
            sizes = self.graphs.sizes.get(self._sized_by(plan))
            return f"more than {sizes[-1]} requests" if sizes else "no such shape is captured"
        if plan.is_prefill_np.any():
            return "the step runs prompt tokens"
        return "the requests verify unlike numbers of positions"
