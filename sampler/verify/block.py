"""Block verification: judge the drafts of a run together; lossless, and no shorter in the mean.

Rejection sampling stops at the first draft that fails its own test, with p target law and q draft
law kept with chance min(1, p / q). Here the drafts share what they have too much of: draft i may
make up for one before it. The longest run is kept that passes a test with the probabilities of
`sampler.verify.joint`,

    w_0 = 1,    w_i = min(1, w_{i-1} p(d_i) / q(d_i)),    r_i = sum of max(w_i p - q, 0)
    h_i = r_i / (r_i + 1 - w_i),    after the last draft h_K = w_K

and the token after it is drawn from max(w_i p - q, 0), renormalised, or from p after the last
draft.

Why it is lossless: by induction from the end, d_1..d_i stay (in a run of i or more) with chance
w_i. For the last draft this is h_K. Before, over the next draft, a longer run stays with chance
s = sum q min(1, w_i p / q) = w_i - r_i, and h_i + (1 - h_i) s = w_i. The token x after d_1..d_i is
then either the next draft, with q(x) w_{i+1} = min(w_i p(x), q(x)), or drawn, with
(w_i - s) max(w_i p(x) - q(x), 0) / r_i = max(w_i p(x) - q(x), 0): together w_i p(x), which is the
target's law.

The mean is no shorter: w_i >= the product of min(1, p / q) that rejection sampling keeps d_1..d_i
with. For one-hot drafts the two are equal.

A refused draft tells something of the drafts behind it, so what draws and judges the next ones must
be fresh: drafters' noise is keyed by the row's length too (`noise_epoch`), as are the uniforms.
Residual and target noise is used once a position, and needs no epoch.

Source: Sun et al. 2024, arXiv 2403.10444, Algorithm 2.
"""

from dataclasses import dataclass

from sampler.verify.config import VerifierConfig
from sampler.verify.joint import JointJudgement, judge_prefixes
from sampler.verify.residual_rule import ResidualRule
from specdec.protocols import VerifyInputs
from specdec.registry import register_verifier


@dataclass
class BlockConfig(VerifierConfig):
    """No parameters."""

    name: str = "block"


@register_verifier("block", BlockConfig)
class BlockVerifier(ResidualRule):
    """The target's law at any temperature; runs are no shorter in the mean than `rejection`'s."""

    name = "block"
    noise_epoch = True

    def _judge(self, inputs: VerifyInputs) -> JointJudgement:
        """Return which lines keep their draft: the first ones of each place."""
        return judge_prefixes(inputs)
