"""The sampler: process the target's logits, then let the verifier judge drafts and draw tokens.

Order: temperature -> top-k -> top-p -> verify. State is read by row through `expanded_idx_mapping`,
so a request may own any number of logits lines.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner.input_batch import InputBatch
from runner.states import RequestState
from sampler.noise import STREAM_DRAFT, noise_gumbel, noise_key, noise_uniform
from sampler.states import SamplingState
from sampler.top_k_top_p import apply_top_k_top_p
from specdec.protocols import Noise, Verifier, VerifyInputs
from specdec.types import SamplingParams


@dataclass
class SamplerOutput:
    """What a step's verification gave, before it is committed."""

    sampled_tokens: Tensor  # [R, W] int64, -1 after num_sampled
    num_sampled: Tensor  # [R] int32
    num_drafts: Tensor  # [R] int32, valid drafts that were judged


class Sampler:
    """Sampling state and pipeline of one engine.

    Args:
        verifier: decides how many drafts are kept.
        max_num_reqs: N.
        vocab_size: V.
        device: where logits and rows live.
    """

    def __init__(
        self, verifier: Verifier, max_num_reqs: int, vocab_size: int, device: torch.device
    ) -> None:
        self.verifier = verifier
        self.state = SamplingState(max_num_reqs, vocab_size, device)

    @property
    def temperature(self) -> Tensor:
        """Return [N] float32, for drafters."""
        return self.state.temperature

    def add_request(
        self, row: int, params: SamplingParams, seed: int, sample_index: int = 0
    ) -> None:
        """Stage a row's parameters."""
        self.state.add_request(row, params, seed, sample_index)

    def apply_staged_writes(self) -> None:
        """Ship what was staged since the last step."""
        self.state.apply_staged_writes()

    def noise(self) -> Noise:
        """Return the drafters' noise: their own stream, keyed by the row's seed."""
        seeds = self.state.seeds

        def gumbel(rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
            key = noise_key(seeds[rows.long()], positions, STREAM_DRAFT)
            return noise_gumbel((key[0][:, None], key[1][:, None]), token_ids.int())

        def uniform(rows: Tensor, positions: Tensor) -> Tensor:
            key = noise_key(seeds[rows.long()], positions, STREAM_DRAFT)
            return noise_uniform(key, torch.full_like(key[0], -1))  # -1 is no token's id

        return Noise(gumbel=gumbel, uniform=uniform)

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
            draft_logits: [N, K, V_draft] where the drafter offers q.
        """
        lines = batch.expanded_idx_mapping
        rows = lines.long().clamp(min=0)
        rows_np = batch.plan.rows_np[batch.plan.rows_np >= 0]
        # A step of padding alone stands for any step (memory profile): it takes the dearest path.
        idle = len(rows_np) == 0
        all_greedy = not (idle or (self.state.temperature_np[rows_np] > 0).any())
        processed = logits if all_greedy else self._process(logits, batch, rows_np)
        line_grid, line_valid = _line_grid(batch)
        drafts = _drafts_of_lines(batch, state, rows)
        verified = self.verifier.verify(
            VerifyInputs(
                logits=processed,
                all_greedy=all_greedy,
                draft_tokens=drafts,
                draft_kind=state.draft_kind[rows],
                draft_logits=draft_logits,
                line_grid=line_grid,
                line_valid=line_valid,
                expanded_idx_mapping=lines,
                expanded_local_pos=batch.expanded_local_pos,
                draw_positions=batch.positions[batch.logits_indices] + 1,
                temperature=self.state.temperature,
                seeds=self.state.seeds,
            )
        )
        num_drafts = ((drafts >= 0)[line_grid] & line_valid).sum(1, dtype=torch.int32)
        return SamplerOutput(verified.sampled_tokens, verified.num_sampled, num_drafts)

    def _process(self, logits: Tensor, batch: InputBatch, rows_np: np.ndarray) -> Tensor:
        """Return float32 logits, divided by the temperature and truncated where a row asks."""
        # A copy even where the target is float32: processing writes in place.
        processed = logits.to(torch.float32, copy=True)
        rows = batch.expanded_idx_mapping.long().clamp(min=0)
        temperature = self.state.temperature[rows]
        processed.div_(torch.where(temperature > 0, temperature, 1.0)[:, None])
        if len(rows_np) == 0 or self.state.truncates_np[rows_np].any():
            apply_top_k_top_p(
                processed, batch.expanded_idx_mapping, self.state.top_k, self.state.top_p
            )
        return processed


def _line_grid(batch: InputBatch) -> tuple[Tensor, Tensor]:
    """Return (line of each place and local position, whether that line exists), [R, W]."""
    width = int(batch.plan.num_logits_np.max())
    j = torch.arange(width, device=batch.cu_num_logits.device)
    valid = j < batch.num_logits_per_req[:, None]
    grid = batch.cu_num_logits[:-1, None].long() + j
    return grid.clamp(max=batch.num_logits - 1), valid


def _drafts_of_lines(batch: InputBatch, state: RequestState, rows: Tensor) -> Tensor:
    """Return the draft that each line judges, [L] int64, -1 where it judges none."""
    num_columns = state.num_speculative_tokens
    if num_columns == 0:
        return torch.full_like(rows, -1)
    local = batch.expanded_local_pos.long()
    drafts = state.draft_tokens[rows, local.clamp(max=num_columns - 1)]
    # The last line of a place draws the token after its last draft.
    is_last = torch.zeros_like(rows, dtype=torch.bool)
    is_last[batch.cu_num_logits[1:].long() - 1] = True
    real = batch.expanded_idx_mapping >= 0
    return torch.where(is_last | ~real | (local >= num_columns), -1, drafts)
