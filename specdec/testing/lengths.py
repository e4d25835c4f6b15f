"""A policy of the draft length without any reason: nothing but speed may depend on a length."""

from dataclasses import dataclass, field

import numpy as np

from specdec.draft_length.base import DraftLengthBase, DraftLengthConfig
from specdec.registry import register_draft_length


@dataclass
class RandomLengthConfig(DraftLengthConfig):
    """Where the numbers come from, and which there are (empty: 0..K)."""

    name: str = "random_in_tests"
    seed: int = 0
    lengths: list[int] = field(default_factory=list)


@register_draft_length("random_in_tests", RandomLengthConfig)
class RandomLength(DraftLengthBase):
    """Draws the number of every step from a seed; now and then the one before is kept a while."""

    config: RandomLengthConfig

    def __init__(self, config: RandomLengthConfig, num_speculative_tokens: int) -> None:
        super().__init__(config, num_speculative_tokens)
        self._rng = np.random.default_rng(config.seed)
        self._left = 0

    @property
    def choices(self) -> tuple[int, ...]:
        """Return the configured numbers, or all."""
        return tuple(self.config.lengths or range(self.num_speculative_tokens + 1))

    def choose(self, num_reqs: int) -> int:
        """Return a number that was drawn."""
        if self._left == 0:
            self._left = int(self._rng.integers(1, 4))
            self._drawn = int(self._rng.choice(self.choices))
        self._left -= 1
        return self._drawn
