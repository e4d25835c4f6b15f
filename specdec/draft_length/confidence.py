"""Up to K drafts, fewer where the drafter itself doubts them.

A row's drafts end where the running product of the probabilities that the drafter gave them falls
under a threshold. That is decided on the device, within the step (`runner.confidence`): K drafts
are computed all the same, and those behind the cut count as not drafted.

Source: Li et al. 2024 (EAGLE-2) show that a draft's confidence tells its acceptance.
"""

from dataclasses import dataclass

from specdec.draft_length.base import DraftLengthBase, DraftLengthConfig
from specdec.errors import ConfigError
from specdec.registry import register_draft_length


@dataclass
class ConfidenceConfig(DraftLengthConfig):
    """Parameters.

    Args:
        threshold: the least running product, in [0, 1]; 0 cuts nothing.
    """

    name: str = "confidence"
    threshold: float = 0.3

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 <= self.threshold <= 1:
            raise ConfigError(
                f"draft_length confidence: threshold={self.threshold} is not allowed; give a "
                f"number in [0, 1]"
            )


@register_draft_length("confidence", ConfidenceConfig)
class ConfidenceLength(DraftLengthBase):
    """K drafts, cut by row."""

    by_num_reqs = True
    config: ConfidenceConfig

    def __init__(self, config: ConfidenceConfig, num_speculative_tokens: int) -> None:
        super().__init__(config, num_speculative_tokens)
        self.confidence_threshold = config.threshold

    def choose(self, num_reqs: int) -> int:
        """Return K."""
        return self.num_speculative_tokens

    def reasons(self) -> list[str]:
        """Return the threshold."""
        return [f"cut by row where the running product of confidence < {self.config.threshold:g}"]
