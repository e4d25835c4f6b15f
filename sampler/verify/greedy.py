"""Greedy verification: a draft is kept where it is the target's argmax. Temperature 0 only."""

from dataclasses import dataclass

from sampler.verify.chain import match_draws
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
class GreedyConfig(VerifierConfig):
    """No parameters."""

    name: str = "greedy"


@register_verifier("greedy", GreedyConfig)
class GreedyVerifier:
    """Token for token the autoregressive argmax text, whatever the drafter."""

    name = "greedy"
    draft_kinds = frozenset({DRAFT_KIND_NONE, DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q})
    lossless = True
    text_equal = True
    greedy_only = True

    def __init__(self, config: GreedyConfig) -> None:
        self.config = config

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Accept drafts while they equal the argmax, then emit the argmax."""
        return match_draws(inputs)
