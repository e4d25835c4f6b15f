"""What policies of the draft length share: how many drafts the requests of a step get.

A policy is asked once for every step that is scheduled, and may learn from every step that was
read. It changes how long a step takes and never what is written: whatever it chooses, a draft is
judged by the same rule. What it chooses among (`choices`) is what a runner captures.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.errors import ConfigError


@dataclass
class DraftLengthConfig:
    """Base of a policy's configuration; `name` selects the policy."""

    name: str = "fixed"


@dataclass(frozen=True)
class StepOutcome:
    """A step that was read, as a policy may learn from it."""

    num_reqs: int  # of the step
    num_verified: int  # drafts that were planned for each request
    num_drafted: int  # drafts that it proposed for the next step
    seconds: float
    num_sampled: np.ndarray  # [n] tokens that each verification committed
    only_verifies: bool  # the step ran no prompt tokens


class DraftLengthBase:
    """Base class: a policy has to give `choose`, and `choices` where it is not always K.

    Args:
        config: the policy's own configuration.
        num_speculative_tokens: K, the most drafts that a request can get.
    """

    # The rows of a step are cut where the running product of `draft_confidence` falls under it.
    confidence_threshold: float | None = None
    learns = False  # False: `observe` need not be called
    by_num_reqs = False  # True: a choice depends on the number of requests and on nothing else

    def __init__(self, config: DraftLengthConfig, num_speculative_tokens: int) -> None:
        self.config = config
        self.num_speculative_tokens = num_speculative_tokens
        self.counts: Counter[int] = Counter()  # steps by the number of drafts that was chosen

    @property
    def choices(self) -> tuple[int, ...]:
        """Return the numbers of drafts that may be chosen, rising."""
        return (self.num_speculative_tokens,)

    def choose(self, num_reqs: int) -> int:
        """Return how many drafts each of a step's requests gets, one of `choices`."""
        raise NotImplementedError

    def next_length(self, num_reqs: int) -> int:
        """Choose for a step, and count the choice."""
        chosen = self.choose(num_reqs)
        assert chosen in self.choices, f"{chosen} drafts were chosen among {self.choices}"
        self.counts[chosen] += 1
        return chosen

    def observe(self, outcome: StepOutcome) -> None:
        """Learn nothing."""

    def report(self) -> dict[str, Any]:
        """Return what was chosen how often, and why, as plain values."""
        counts = {str(length): self.counts[length] for length in self.choices}
        return {"name": self.config.name, "counts": counts, "why": self.reasons()}

    def reasons(self) -> list[str]:
        """Return sentences that say what the choices are made by."""
        return []


def check_lengths(lengths: Sequence[int], num_speculative_tokens: int, what: str) -> None:
    """Check that numbers of drafts lie within 0..K.

    Raises:
        ConfigError: one does not; `what` names the key.
    """
    wrong = [length for length in lengths if not 0 <= length <= num_speculative_tokens]
    if wrong:
        raise ConfigError(
            f"{what} asks for {wrong[0]} drafts; give numbers from 0 to "
            f"num_speculative_tokens={num_speculative_tokens}, or raise that"
        )
