"""Gumbel coupling: sampled match whose drafter draws with the target's own noise.

    draft = argmax_v (log q(v) + g(v)),    target's sample = argmax_v (log p(v) + g(v))

with the same Gumbel noise g, keyed by seed, position and token. The draft has law q and the sample
law p, and they are equal with chance at least (1 - TV) / (1 + TV), TV the total variation of p and
q: more than the sum of p q that independent noise gives. The framework hands drafters that noise
(`draft_stream`); they draw as ever. Every emitted token is the target's own sample, so the text is
the autoregressive one for any seed, temperature and drafter.

Source: Daliri et al. 2024, arXiv 2408.07978.
"""

from dataclasses import dataclass

from sampler.noise import STREAM_TARGET
from sampler.verify.base import VerifierBase
from sampler.verify.chain import match_draws
from sampler.verify.config import VerifierConfig
from specdec.protocols import VerifyInputs, VerifyOutputs
from specdec.registry import register_verifier


@dataclass
class CoupledConfig(VerifierConfig):
    """No parameters."""

    name: str = "coupled"


@register_verifier("coupled", CoupledConfig)
class CoupledVerifier(VerifierBase):
    """Text of the autoregressive arm; drafts that are drawn are drawn with the target's noise."""

    name = "coupled"
    lossless = True
    text_equal = True
    draft_stream = STREAM_TARGET

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Accept drafts while they equal the target's sample, then emit the sample."""
        return match_draws(inputs)
