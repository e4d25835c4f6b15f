"""Standard speculative sampling, lossless in distribution.

With target law p and draft law q at a position, a draft d is kept with probability
min(1, p(d) / q(d)); after a rejection the token is drawn from the residual max(p - q, 0),
renormalised; after the last draft from p. A one-hot draft has q(d) = 1: it is kept with probability
p(d), and the residual is p without d. Greedy rows compare the argmax.

Source: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sampler.gumbel import gumbel_sample
from sampler.noise import STREAM_ACCEPT, STREAM_RESIDUAL, STREAM_TARGET, noise_key, noise_uniform
from sampler.verify.chain import assemble, count_accepted, stop_lines, verify_argmax
from sampler.verify.config import VerifierConfig
from specdec.protocols import (
    DRAFT_KIND_NONE,
    DRAFT_KIND_ONE_HOT,
    DRAFT_KIND_WITH_Q,
    VerifyInputs,
    VerifyOutputs,
)
from specdec.registry import register_verifier


@dataclass
class RejectionConfig(VerifierConfig):
    """No parameters."""

    name: str = "rejection"


@register_verifier("rejection", RejectionConfig)
class RejectionVerifier:
    """The target's law at any temperature; acceptance 1 - TV(p, q)."""

    name = "rejection"
    draft_kinds = frozenset({DRAFT_KIND_NONE, DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q})
    lossless = True
    text_equal = False
    greedy_only = False
    residual_stream = STREAM_RESIDUAL

    def __init__(self, config: RejectionConfig) -> None:
        self.config = config

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Accept a prefix of the drafts and draw the token after it."""
        if inputs.all_greedy:
            return verify_argmax(inputs)
        num_accepted = count_accepted(inputs, self._accepted(inputs))
        lines = stop_lines(inputs, num_accepted)
        return assemble(inputs, num_accepted, self._next_tokens(inputs, lines))

    def _accepted(self, inputs: VerifyInputs) -> Tensor:
        """Return whether each line keeps its draft, [L] bool."""
        logits, drafts = inputs.logits, inputs.draft_tokens
        rows = inputs.expanded_idx_mapping.long().clamp(min=0)
        has_draft = drafts >= 0
        safe = drafts.clamp(min=0)
        target_prob = (logits.gather(1, safe[:, None]).squeeze(1) - logits.logsumexp(1)).exp()
        draft_prob = torch.ones_like(target_prob)
        if inputs.draft_logits is not None:
            draft_law = self._draft_law(inputs, torch.arange(len(rows), device=rows.device))
            with_q = inputs.draft_kind == DRAFT_KIND_WITH_Q
            q = draft_law.gather(1, safe[:, None]).squeeze(1)
            draft_prob = torch.where(with_q, q, draft_prob)
        key = noise_key(inputs.seeds[rows], inputs.draw_positions, STREAM_ACCEPT)
        kept = noise_uniform(key, safe.int()) * draft_prob < target_prob
        greedy = inputs.temperature[rows] == 0
        return has_draft & torch.where(greedy, logits.argmax(1) == drafts, kept)

    def _draft_law(self, inputs: VerifyInputs, lines: Tensor) -> Tensor:
        """Return the draft law q at each given line over the target's ids, [len(lines), V]."""
        assert inputs.draft_logits is not None
        rows = inputs.expanded_idx_mapping[lines].long().clamp(min=0)
        column = inputs.expanded_local_pos[lines].long()
        column = column.clamp(max=inputs.draft_logits.shape[1] - 1)
        return inputs.draft_logits[rows, column].float().softmax(1)

    def _next_tokens(self, inputs: VerifyInputs, lines: Tensor) -> Tensor:
        """Draw from the residual where the stop line rejected a draft, else from the target."""
        logits = inputs.logits[lines]
        drafts = inputs.draft_tokens[lines]
        idx_mapping = inputs.expanded_idx_mapping[lines]
        greedy = inputs.temperature[idx_mapping.long().clamp(min=0)] == 0
        rejected = (drafts >= 0) & ~greedy
        residual = logits.scatter(1, drafts.clamp(min=0)[:, None], float("-inf"))
        if inputs.draft_logits is not None:
            difference = logits.softmax(1) - self._draft_law(inputs, lines)
            with_q = (inputs.draft_kind[lines] == DRAFT_KIND_WITH_Q)[:, None]
            residual = torch.where(with_q, difference.clamp(min=0).log(), residual)
        # Rounding can leave nothing of a residual whose mass is below the dtype's: p is then q up
        # to that rounding, and the draw falls back to p.
        empty = residual.amax(1) == float("-inf")
        rejected &= ~empty
        logits = torch.where(rejected[:, None], residual, logits)
        args = (logits, idx_mapping, inputs.draw_positions[lines], inputs.temperature, inputs.seeds)
        drawn = gumbel_sample(*args, STREAM_TARGET)
        if inputs.draft_tokens.numel() == len(lines):
            return drawn  # one line a place: no drafts in this step
        return torch.where(rejected, gumbel_sample(*args, self.residual_stream), drawn)
