"""What rules share that judge a run of drafts, then draw behind it from what the drafts left."""

from typing import Any

from sampler.noise import STREAM_RESIDUAL
from sampler.verify.base import VerifierBase
from sampler.verify.chain import match_draws
from sampler.verify.residual import draw_runs
from specdec.protocols import VerifyInputs, VerifyOutputs


class ResidualRule(VerifierBase):
    """A rule of the target's law at any temperature; a subclass says which drafts stay."""

    lossless = True
    text_equal = False
    favours_drawn = True
    residual_stream = STREAM_RESIDUAL

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Accept a prefix of the drafts and draw the token after it."""
        # With one line a place there is no draft to judge, and each line draws from the target.
        if inputs.all_greedy or inputs.max_num_logits == 1:
            return match_draws(inputs)
        return self._draw(inputs, self._judge(inputs))

    def _judge(self, inputs: VerifyInputs) -> Any:
        """Return the judgement of each line: whether its draft stays, and what residuals need."""
        raise NotImplementedError(f"{type(self).__name__} does not say which drafts stay")

    def _draw(self, inputs: VerifyInputs, judgement: Any) -> VerifyOutputs:
        """Lay out what stays, and draw the token behind it."""
        return draw_runs(inputs, judgement, self.residual_stream)
