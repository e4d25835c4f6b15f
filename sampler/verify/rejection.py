"""Standard speculative sampling, lossless in distribution.

With target law p and draft law q at a position, a draft d is kept with probability
min(1, p(d) / q(d)); after a rejection the token is drawn from the residual max(p - q, 0),
renormalised; after the last draft from p. A one-hot draft has q(d) = 1: it is kept with probability
p(d), and the residual is p without d. Greedy rows compare the argmax.

Source: Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2.
"""

from dataclasses import dataclass

from sampler.verify.config import VerifierConfig
from sampler.verify.judge import Judgement, judge_drafts
from sampler.verify.residual_rule import ResidualRule
from specdec.protocols import VerifyInputs
from specdec.registry import register_verifier


@dataclass
class RejectionConfig(VerifierConfig):
    """No parameters."""

    name: str = "rejection"


@register_verifier("rejection", RejectionConfig)
class RejectionVerifier(ResidualRule):
    """The target's law at any temperature; acceptance 1 - TV(p, q)."""

    name = "rejection"

    def _judge(self, inputs: VerifyInputs) -> Judgement:
        """Return whether each line keeps its draft."""
        return judge_drafts(inputs)
