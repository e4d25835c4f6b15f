"""Defaults of a verifier: everything but `verify`."""

import torch

from sampler.noise import STREAM_DRAFT
from sampler.verify.config import VerifierConfig
from specdec.protocols import (
    DRAFT_KIND_NONE,
    DRAFT_KIND_ONE_HOT,
    DRAFT_KIND_WITH_Q,
    VerifyInputs,
    VerifyOutputs,
)


class VerifierBase:
    """Base class of verifiers that judge every kind of draft; says nothing of losslessness.

    Args:
        config: the verifier's own configuration.
    """

    name: str
    lossless: bool
    text_equal: bool
    draft_kinds = frozenset({DRAFT_KIND_NONE, DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q})
    greedy_only = False
    # True: noise of drafters also knows the row's length, so that it is fresh in every step.
    noise_epoch = False
    draft_stream = STREAM_DRAFT  # noise stream of drafters
    # True: a draft that was drawn from q is kept more often than the likeliest one, see
    # docs/verifiers.md; runs at a temperature advise drafters that could draw.
    favours_drawn = False
    honours_masks = (
        True  # False: keeps drafts that a mask forbids, so parameters with one are refused
    )
    note = ""  # shown beside the verdict of a lossy rule

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config

    def check(self, num_speculative_tokens: int) -> None:
        """Accept any number of drafts; a rule that cannot raises a ConfigError."""

    def bind(self, num_speculative_tokens: int, device: torch.device) -> None:
        """Make nothing; what a rule reads in every step is made here, at fixed addresses."""

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Judge the drafts of one step."""
        raise NotImplementedError
