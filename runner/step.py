"""What a step does on the device: inputs, target, verification, commit, draft passes, outcome.

Every function here may be captured: given a batch of a fixed shape it reads and writes tensors at
fixed addresses and decides nothing on the host by what the places hold. How the parts are launched
is `runner.model_runner`'s.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from runner.adopt_drafts import adopt_drafts
from runner.async_output import OutputRing, PromptTensor, StepTensors, publish_output
from runner.attention import AttentionMetadata
from runner.buffers import StagedWriteTensor
from runner.confidence import cut_by_confidence
from runner.features import Features
from runner.input_batch import InputBatch, StepPlan
from runner.kv_cache import PagedKVCache
from runner.models.hf import HFModel
from runner.postprocess import clear_drafts, limit_drafts, post_update
from runner.prepare import prepare_inputs
from runner.row_ends import RowEnds, end_rows
from runner.states import NewRow, RequestState
from runner.step_timer import StepTimer
from specdec.protocols import (
    DraftContext,
    Drafter,
    Noise,
    SplitDrafter,
    StateView,
    VerifyContext,
)


class PromptLogprobsProtocol(Protocol):
    """Log-probabilities of prompts, taken chunk by chunk."""

    def add_request(self, row: int, new: NewRow) -> None: ...

    def take(
        self, plan: StepPlan, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
    ) -> list[PromptTensor]: ...


class LogprobsProtocol(Protocol):
    """Which rows want log-probabilities; all but `write` is on the host alone."""

    @property
    def prompts(self) -> PromptLogprobsProtocol: ...

    def remove_request(self, row: int) -> None: ...

    def clear(self) -> None: ...

    def places(self, rows_np: np.ndarray) -> np.ndarray | None: ...

    def write(
        self,
        raw: Tensor,
        processed: Tensor,
        batch: InputBatch,
        outcome: StepTensors,
        outputs: OutputRing,
    ) -> None: ...


class SamplerProtocol(Protocol):
    """What the runner asks of a sampler; `sampler.sampler.Sampler` is the one we ship."""

    @property
    def temperature(self) -> Tensor: ...

    @property
    def tables(self) -> list[StagedWriteTensor]: ...

    @property
    def logprobs(self) -> LogprobsProtocol: ...

    def add_request(
        self,
        row: int,
        params: Any,
        seed: int,
        sample_index: int = 0,
        new: NewRow | None = None,
    ) -> None: ...

    def has_extras(self, rows_np: np.ndarray) -> bool: ...

    def prepare_rows(self, state: StateView) -> None: ...

    def commit(
        self, batch: InputBatch, state: StateView, sampled_tokens: Tensor, num_sampled: Tensor
    ) -> None: ...

    def noise(self, total_len: Tensor | None = None) -> Noise: ...

    def sample(
        self, logits: Tensor, batch: InputBatch, state: RequestState, draft_logits: Tensor | None
    ) -> Any: ...


class Step:
    """The parts of a step, over the state of one engine.

    Args:
        target: the target model.
        sampler: processes logits and verifies.
        drafter: bound to `state`.
        state: the rows.
        kv: the target's KV cache.
        outputs: where outcomes go.
        draft_logits: [N, K, V] where the drafter offers q.
    """

    def __init__(
        self,
        target: HFModel,
        sampler: SamplerProtocol,
        drafter: Drafter,
        state: RequestState,
        kv: PagedKVCache,
        outputs: OutputRing,
        draft_logits: Tensor | None,
    ) -> None:
        self.target, self.sampler, self.drafter = target, sampler, drafter
        self.state, self.kv, self.outputs = state, kv, outputs
        self._draft_logits = draft_logits
        self._state_view = state.view()
        self._noise = sampler.noise(state.total_len.tensor)
        # [N, K] float32 and the threshold of `runner.confidence`, where drafts are cut by it.
        self.confidence: tuple[Tensor, float] | None = None
        # Ends rows on the device, where launches of several steps may follow.
        self.row_ends: RowEnds | None = None

    def adopt_drafts(self, batch: InputBatch) -> None:
        """Take what the host staged as the step's drafts, where the drafter runs there."""
        if self.drafter.capabilities.on_cpu and self.state.num_speculative_tokens:
            adopt_drafts(batch, self.state)

    def run_target(
        self, batch: InputBatch, timer: StepTimer | None = None
    ) -> tuple[Features, StepTensors]:
        """Build the inputs, run the target, verify and commit.

        Args:
            batch: views whose columns were staged.
            timer: marked after each phase.

        Returns:
            Features of the T tokens, and what was sampled.
        """
        prepare_inputs(batch, self.state, self.kv.block_size, self.outputs.step)
        metadata = AttentionMetadata(
            kv=self.kv,
            block_table=self.state.block_table.tensor,
            idx_mapping=batch.idx_mapping,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        _mark(timer, "inputs")
        # Read here: a drafter may know what it wants only once it is loaded.
        layers = self.drafter.capabilities.aux_layers if self.state.num_speculative_tokens else ()
        hidden, aux = self.target.forward_with_layers(
            batch.input_ids, batch.positions, metadata, layers
        )
        # As many lines as tokens means that every token has its line, in order.
        all_lines = batch.num_logits == batch.num_tokens
        lines = hidden if all_lines else hidden.index_select(0, batch.logits_indices)
        logits = self.target.compute_logits(lines)
        _mark(timer, "target")
        sampled = self.sampler.sample(logits, batch, self.state, self._draft_logits)
        outcome = StepTensors(
            sampled_tokens=sampled.sampled_tokens,
            num_sampled=sampled.num_sampled,
            num_rejected=torch.empty_like(sampled.num_sampled),
            num_judged=sampled.num_drafts,
            num_drafts=torch.zeros_like(sampled.num_sampled),
        )
        post_update(
            batch, self.state, outcome.sampled_tokens, outcome.num_sampled, outcome.num_rejected
        )
        if self.row_ends is not None:
            end_rows(
                batch.idx_mapping,
                outcome.sampled_tokens,
                outcome.num_sampled,
                self.row_ends.end_token_ids.tensor,
                self.state,
            )
        self.sampler.commit(batch, self._state_view, outcome.sampled_tokens, outcome.num_sampled)
        self.sampler.logprobs.write(logits, sampled.processed_logits, batch, outcome, self.outputs)
        _mark(timer, "verify")
        return Features(hidden, aux), outcome

    def take_prompt_logprobs(
        self, plan: StepPlan, features: Features, timer: StepTimer | None = None
    ) -> list[PromptTensor]:
        """Enqueue the log-probabilities of a step's prompt tokens, where they are wanted.

        Args:
            plan: the step, which is never a graph.
            features: of its tokens.
            timer: marked where there were any.
        """
        hidden = features.hidden_states
        assert hidden is not None, "a step's own features hold its hidden states"
        taken = self.sampler.logprobs.prompts.take(plan, hidden, self.target.compute_logits)
        if taken:
            _mark(timer, "verify")
        return taken

    def run_drafter(
        self,
        batch: InputBatch,
        features: Features,
        outcome: StepTensors,
        num_drafts: int,
        propose: Callable[[DraftContext], None] | None = None,
    ) -> None:
        """Let the drafter learn and propose, then cut what it proposed to what is usable.

        Args:
            batch: the step.
            features: those that the drafter wants.
            outcome: `num_sampled` and `num_rejected` are read, `num_drafts` is written.
            num_drafts: how many to propose; with 0 the drafter runs its first pass alone.
            propose: stands in for the drafter's own, where that is launched as a graph.
        """
        drafts, kind = self.state.draft_tokens, self.state.draft_kind
        if batch.rows_np is not None:
            # A row that runs its prompt may still hold the drafts of an earlier owner.
            prefills = torch.where(batch.is_verify > 0, -1, batch.idx_mapping)
            clear_drafts(prefills, drafts, kind)
        # Before the others are cleared: a drafter may want to see which of its own were rejected.
        self.drafter.observe(
            VerifyContext(
                batch.idx_mapping, batch.is_verify, outcome.num_sampled, outcome.num_rejected
            )
        )
        clear_drafts(batch.idx_mapping, drafts, kind)
        ctx = self._draft_context(batch, features, outcome, num_drafts)
        if self.drafter.capabilities.splits_first_pass:
            cast(SplitDrafter, self.drafter).first_pass(ctx)
        if num_drafts:
            (propose or self.drafter.propose)(ctx)
            if self.confidence is not None:
                cut_by_confidence(batch.idx_mapping, drafts, kind, *self.confidence)
        limit_drafts(batch, self.state, outcome.num_drafts, num_drafts)

    def propose(self, batch: InputBatch, outcome: StepTensors, num_drafts: int) -> None:
        """Run the drafter's passes behind its first; the tokens of the step are not there."""
        missing = cast(Any, None)
        by_place = dataclasses.replace(
            batch, positions=missing, input_ids=missing, query_start_loc=missing, seq_lens=missing
        )
        self.drafter.propose(self._draft_context(by_place, Features(), outcome, num_drafts))

    def publish(self, outcome: StepTensors) -> None:
        """Write the outcome to its place of the ring."""
        publish_output(self.outputs.step, outcome, self.outputs.tensor)

    def run(self, batch: InputBatch, num_drafts: int, timer: StepTimer | None = None) -> None:
        """Run a whole step of a fixed shape.

        Args:
            batch: its fixed views.
            num_drafts: how many to propose.
            timer: one made for being captured.
        """
        if timer is not None:
            timer.restart()
        features, outcome = self.run_target(batch, timer)
        if self.state.num_speculative_tokens:
            self.run_drafter(batch, features, outcome, num_drafts)
        _mark(timer, "draft")
        self.publish(outcome)

    def run_repeatedly(self, batch: InputBatch, num_drafts: int, num_steps: int) -> None:
        """Run a step of a fixed shape some times over, for places that stay as they are.

        No column of the plan depends on the step: lengths, positions and drafts come from state,
        blocks were handed out for all of them, and a row that reaches its end commits nothing more.

        Args:
            batch: its fixed views; it verifies as many drafts as it proposes.
            num_drafts: how many to propose.
            num_steps: repetitions.
        """
        assert batch.max_query_len == num_drafts + 1, f"{batch.max_query_len} tokens a place"
        for _ in range(num_steps):
            self.run(batch, num_drafts)

    def _draft_context(
        self, batch: InputBatch, features: Features, outcome: StepTensors, num_drafts: int
    ) -> DraftContext:
        wants = self.drafter.capabilities
        return DraftContext(
            state=self._state_view,
            idx_mapping=batch.idx_mapping,
            query_lens=batch.query_lens,
            samples=batch.samples,
            is_verify=batch.is_verify,
            query_start_loc=batch.query_start_loc,
            positions=batch.positions,
            input_ids=batch.input_ids,
            seq_lens=batch.seq_lens,
            hidden_states=features.hidden_states if wants.hidden_states == "last" else None,
            aux_hidden_states=features.aux_hidden_states,
            num_sampled=outcome.num_sampled,
            num_rejected=outcome.num_rejected,
            temperature=self.sampler.temperature,
            noise=self._noise,
            block_size=self.kv.block_size,
            max_seq_len=min(batch.max_total_len, self.state.max_model_len),
            max_query_len=batch.max_query_len,
            num_last_chunks=batch.num_last_chunks,
            num_drafts=num_drafts,
        )


def _mark(timer: StepTimer | None, phase: str) -> None:
    if timer is not None:
        timer.end(phase)
