"""Standard speculative sampling, lossless in distribution.

With target law p and draft law q at a position, a draft d is kept with probability
min(1, p(d) / q(d)); after a rejection the token is drawn from the residual max(p - q, 0),
renormalised; after the last draft from p. A one-hot draft has q(d) = 1: it is kept with probability
p(d), and the residual is p without d. Greedy rows compare the argmax.

Source: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2.
"""

from dataclasses import dataclass

from torch import Tensor

from sampler.noise import STREAM_RESIDUAL
from sampler.verify.base import VerifierBase
from sampler.verify.chain import assemble_run, match_draws
from sampler.verify.config import VerifierConfig
from sampler.verify.judge import Judgement, judge_drafts
from sampler.verify.residual import draw_next_tokens
from specdec.protocols import VerifyInputs, VerifyOutputs
from specdec.registry import register_verifier


@dataclass
class RejectionConfig(VerifierConfig):
    """No parameters."""

    name: str = "rejection"


@register_verifier("rejection", RejectionConfig)
class RejectionVerifier(VerifierBase):
    """The target's law at any temperature; acceptance 1 - TV(p, q)."""

    name = "rejection"
    lossless = True
    text_equal = False
    residual_stream = STREAM_RESIDUAL

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Accept a prefix of the drafts and draw the token after it."""
        # With one line a place there is no draft to judge, and each line draws from the target.
        if inputs.all_greedy or inputs.max_num_logits == 1:
            return match_draws(inputs)
        judgement = self._judge(inputs)
        return assemble_run(
            judgement.accepted,
            inputs.draft_tokens,
            self._next_tokens(inputs, judgement),
            inputs.cu_num_logits,
            inputs.max_num_logits,
        )

    def _judge(self, inputs: VerifyInputs) -> Judgement:
        """Return whether each line keeps its draft."""
        return judge_drafts(inputs)

    def _next_tokens(self, inputs: VerifyInputs, judgement: Judgement) -> Tensor:
        """Return the token that each place's stop line draws, at that line of [L]."""
        return draw_next_tokens(inputs, judgement, self.residual_stream)
