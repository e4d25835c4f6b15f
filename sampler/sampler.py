"""The sampler: process the target's logits, then let the verifier judge drafts and draw tokens.

Order: logits processors (`sampler.processors.chain`) -> temperature -> min-p -> top-k -> top-p ->
verify. Greedy lines go through what can change an argmax: the processors before the temperature.
State is read by row through `expanded_idx_mapping`,
so a request may own any number of logits lines. On a GPU nothing is decided on the host by what the
rows hold, so a captured step and an eager one run the same kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner.buffers import StagedWriteTensor
from runner.dispatch import use_triton
from runner.input_batch import InputBatch
from runner.states import NewRow, RequestState
from sampler.draft_noise import draft_noise
from sampler.lines import LineDrafts, gather_line_drafts
from sampler.logprob_rows import Logprobs
from sampler.processors.chain import ProcessorChain
from sampler.states import SamplingState
from sampler.temperature import scale_deferred, scale_logits
from sampler.top_k_top_p import apply_top_k_top_p
from specdec.protocols import LogitsContext, Noise, StateView, Verifier, VerifyInputs
from specdec.types import SamplingParams


@dataclass
class SamplerOutput:
    """What a step's verification gave, before it is committed."""

    sampled_tokens: Tensor  # [R, W] int64, -1 after num_sampled
    num_sampled: Tensor  # [R] int32
    num_drafts: Tensor  # [R] int32, valid drafts that were judged
    processed_logits: Tensor  # [L, V] float, that tokens were drawn from


def process_logits(logits: Tensor, idx_mapping: Tensor, state: SamplingState) -> Tensor:
    """Return logits [L, V] in float32, divided by the temperature and truncated where a row asks.

    Lines of greedy rows and of padding keep their raw logits.

    Args:
        logits: [L, V] any float dtype, raw; not changed.
        idx_mapping: [L] int32, line -> row, -1 in padding.
        state: parameters by row.
    """
    processed = scale_logits(logits, idx_mapping, state.temperature)
    apply_top_k_top_p(processed, idx_mapping, state.temperature, state.top_k, state.top_p)
    return processed


class Sampler:
    """Sampling state and pipeline of one engine.

    Args:
        verifier: decides how many drafts are kept.
        max_num_reqs: N.
        vocab_size: V.
        device: where logits and rows live.
        logprobs_mode: which logits log-probabilities are taken from, see `sampler.logprob_rows`.
        processors: what changes logits before they are verified, beside temperature, top-k and
            top-p; None = nothing.
    """

    def __init__(
        self,
        verifier: Verifier,
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: str = "raw",
        processors: ProcessorChain | None = None,
    ) -> None:
        self.verifier = verifier
        self.state = SamplingState(max_num_reqs, vocab_size, device)
        self.logprobs = Logprobs(max_num_reqs, device, logprobs_mode)
        self.processors = processors or ProcessorChain([], max_num_reqs, vocab_size, device)

    @property
    def tables(self) -> list[StagedWriteTensor]:
        """Return what `add_request` stages writes to; whoever runs the step applies them."""
        return [*self.state.tables, *self.logprobs.tables, *self.processors.tables]

    @property
    def temperature(self) -> Tensor:
        """Return [N] float32, for drafters."""
        return self.state.temperature

    def check_request(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Refuse parameters that cannot be honoured.

        Raises:
            ConfigError, UnsupportedError: one sentence.
        """
        self.processors.check_request(params, prompt_token_ids)

    def add_request(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        sample_index: int = 0,
        new: NewRow | None = None,
    ) -> None:
        """Stage a row's parameters."""
        self.state.add_request(row, params, seed, sample_index)
        self.logprobs.add_request(row, params)
        self.processors.add_request(row, params, new)

    def has_extras(self, rows_np: np.ndarray) -> bool:
        """Return whether any of some rows uses logits processors or log-probabilities."""
        return self.processors.uses(rows_np) or self.logprobs.places(rows_np) is not None

    def prepare_rows(self, state: StateView) -> None:
        """Build what new rows need of their tokens; their staged writes were applied."""
        self.processors.prepare_rows(state)

    def commit(
        self, batch: InputBatch, state: StateView, sampled_tokens: Tensor, num_sampled: Tensor
    ) -> None:
        """Take in what a step committed.

        Args:
            batch: the step.
            state: the rows, already advanced.
            sampled_tokens: [R, W] int64.
            num_sampled: [R] int32, committed tokens of each place.
        """
        self.processors.commit(batch, state, sampled_tokens, num_sampled)

    def noise(self, total_len: Tensor | None = None) -> Noise:
        """Return the drafters' noise, keyed by the row's seed.

        Args:
            total_len: [N] int32, lengths of the rows, which some verifiers' noise has to know.
        """
        state = self.state
        return draft_noise(self.verifier, state.temperature, state.seeds, total_len)

    def sample(
        self,
        logits: Tensor,
        batch: InputBatch,
        state: RequestState,
        draft_logits: Tensor | None,
    ) -> SamplerOutput:
        """Process one step's logits and verify.

        Args:
            logits: [L, V], any float dtype, raw.
            batch: the step.
            state: rows with the drafts that the step verified.
            draft_logits: [N, K, V] where the drafter offers q.
        """
        lines = batch.expanded_idx_mapping
        all_greedy = self._knows_all_greedy(logits, lines)
        drafts = gather_line_drafts(batch, state)
        processed = self._process(logits, batch, state, drafts, all_greedy)
        verified = self.verifier.verify(
            VerifyInputs(
                logits=processed,
                all_greedy=all_greedy,
                draft_tokens=drafts.draft_tokens,
                draft_kind=drafts.draft_kind,
                draft_logits=draft_logits,
                cu_num_logits=batch.cu_num_logits,
                max_num_logits=batch.max_num_logits,
                expanded_idx_mapping=lines,
                expanded_local_pos=batch.expanded_local_pos,
                draw_positions=drafts.draw_positions,
                temperature=self.state.temperature,
                seeds=self.state.seeds,
            )
        )
        return SamplerOutput(
            verified.sampled_tokens, verified.num_sampled, drafts.num_drafts, processed
        )

    def _process(
        self,
        logits: Tensor,
        batch: InputBatch,
        state: RequestState,
        drafts: LineDrafts,
        all_greedy: bool,
    ) -> Tensor:
        """Return what tokens are drawn from: the raw logits themselves where nothing changes them.

        Args:
            logits: [L, V] any float dtype, raw; not changed.
            batch: the step.
            state: rows with the drafts that the step verifies.
            drafts: where the lines draw.
            all_greedy: no line has a temperature.
        """
        lines, rows = batch.expanded_idx_mapping, self.state
        early, late = self.processors.active(logits, batch)
        if all_greedy and not early:
            return logits
        if not early and not late:
            return process_logits(logits, lines, rows)
        ctx = LogitsContext(
            state=state.view(),
            expanded_idx_mapping=lines,
            expanded_local_pos=batch.expanded_local_pos,
            draft_tokens=state.draft_tokens,
            draw_positions=drafts.draw_positions,
        )
        deferred = self.processors.deferred.tensor if early else None
        processed = scale_logits(logits, lines, rows.temperature, deferred)
        for processor in early:
            processor.apply(processed, ctx)
        if all_greedy:
            return processed
        if deferred is not None:
            scale_deferred(processed, lines, rows.temperature, deferred)
        for processor in late:
            processor.apply(processed, ctx)
        apply_top_k_top_p(processed, lines, rows.temperature, rows.top_k, rows.top_p)
        return processed

    def _knows_all_greedy(self, logits: Tensor, lines: Tensor) -> bool:
        """Return whether the host knows, without a wait, that every line is greedy."""
        if self.verifier.greedy_only:
            return True
        if use_triton(logits):
            return False
        # A step of padding alone stands for any step (memory profile): it takes the dearest path.
        rows_np = lines.cpu().numpy()
        rows_np = rows_np[rows_np >= 0]
        temperatures_np = self.state.temperature.cpu().numpy()[rows_np]
        return len(rows_np) > 0 and not bool((temperatures_np > 0).any())
