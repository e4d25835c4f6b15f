"""Sampled match: draw the target's token at every position, keep drafts while they equal it.

Every emitted token is the target's own sample with the target's own noise, so the text is the
autoregressive one for any seed, temperature and drafter (in float32; see docs/verifiers.md).
"""

from dataclasses import dataclass

from sampler.verify.base import VerifierBase
from sampler.verify.chain import match_draws
from sampler.verify.config import VerifierConfig
from specdec.protocols import VerifyInputs, VerifyOutputs
from specdec.registry import register_verifier


@dataclass
class SampledMatchConfig(VerifierConfig):
    """No parameters."""

    name: str = "sampled_match"


@register_verifier("sampled_match", SampledMatchConfig)
class SampledMatchVerifier(VerifierBase):
    """Text of the autoregressive arm at any temperature."""

    name = "sampled_match"
    lossless = True
    text_equal = True

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Accept drafts while they equal the target's sample, then emit the sample."""
        return match_draws(inputs)
