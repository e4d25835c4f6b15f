"""Greedy verification: a draft is kept where it is the target's argmax. Temperature 0 only."""

from dataclasses import dataclass

from sampler.verify.base import VerifierBase
from sampler.verify.chain import match_draws
from sampler.verify.config import VerifierConfig
from specdec.protocols import VerifyInputs, VerifyOutputs
from specdec.registry import register_verifier


@dataclass
class GreedyConfig(VerifierConfig):
    """No parameters."""

    name: str = "greedy"


@register_verifier("greedy", GreedyConfig)
class GreedyVerifier(VerifierBase):
    """Token for token the autoregressive argmax text, whatever the drafter."""

    name = "greedy"
    lossless = True
    text_equal = True
    greedy_only = True

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Accept drafts while they equal the argmax, then emit the argmax."""
        return match_draws(inputs)
