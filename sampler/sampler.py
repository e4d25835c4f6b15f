"""The sampler: process the target's logits, then let the verifier judge drafts and draw tokens.

Order: temperature -> top-k -> top-p -> verify. State is read by row through `expanded_idx_mapping`,
so a request may own any number of logits lines. On a GPU nothing is decided on the host by what the
rows hold, so a captured step and an eager one run the same kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.buffers import StagedWriteTensor
from runner.dispatch import use_triton
from runner.input_batch import InputBatch
from runner.states import RequestState
from sampler.gumbel import gumbel_sample
from sampler.lines import gather_line_drafts
from sampler.noise import STREAM_DRAFT, noise_gumbel, noise_key, noise_uniform
from sampler.states import SamplingState
from sampler.temperature import scale_logits
from sampler.top_k_top_p import apply_top_k_top_p
from specdec.protocols import Noise, Verifier, VerifyInputs
from specdec.types import SamplingParams


@dataclass
class SamplerOutput:
    """What a step's verification gave, before it is committed."""

    sampled_tokens: Tensor  # [R, W] int64, -1 after num_sampled
    num_sampled: Tensor  # [R] int32
    num_drafts: Tensor  # [R] int32, valid drafts that were judged


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
    """

    def __init__(
        self, verifier: Verifier, max_num_reqs: int, vocab_size: int, device: torch.device
    ) -> None:
        self.verifier = verifier
        self.state = SamplingState(max_num_reqs, vocab_size, device)

    @property
    def tables(self) -> list[StagedWriteTensor]:
        """Return what `add_request` stages writes to; whoever runs the step applies them."""
        return self.state.tables

    @property
    def temperature(self) -> Tensor:
        """Return [N] float32, for drafters."""
        return self.state.temperature

    def add_request(
        self, row: int, params: SamplingParams, seed: int, sample_index: int = 0
    ) -> None:
        """Stage a row's parameters."""
        self.state.add_request(row, params, seed, sample_index)

    def noise(self) -> Noise:
        """Return the drafters' noise: their own stream, keyed by the row's seed."""
        temperature, seeds = self.state.temperature, self.state.seeds

        def gumbel(rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
            key = noise_key(seeds[rows.long()], positions, STREAM_DRAFT)
            return noise_gumbel((key[0][:, None], key[1][:, None]), token_ids.int())

        def uniform(rows: Tensor, positions: Tensor) -> Tensor:
            key = noise_key(seeds[rows.long()], positions, STREAM_DRAFT)
            return noise_uniform(key, torch.full_like(key[0], -1))  # -1 is no token's id

        def draw(logits: Tensor, idx_mapping: Tensor, positions: Tensor) -> Tensor:
            return gumbel_sample(logits, idx_mapping, positions, temperature, seeds, STREAM_DRAFT)

        return Noise(gumbel=gumbel, uniform=uniform, draw=draw)

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
        verified = self.verifier.verify(
            VerifyInputs(
                logits=logits if all_greedy else process_logits(logits, lines, self.state),
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
        return SamplerOutput(verified.sampled_tokens, verified.num_sampled, drafts.num_drafts)

    def _knows_all_greedy(self, logits: Tensor, lines: Tensor) -> bool:
        """Return whether the host knows, without a wait, that every line is greedy."""
        if self.verifier.greedy_only:
            return True
        if use_triton(logits):
            return False
        # A step of padding alone stands for any step (memory profile): it takes the dearest path.
        rows = lines[lines >= 0].long()
        return len(rows) > 0 and not bool((self.state.temperature[rows] > 0).any())
