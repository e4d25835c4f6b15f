"""The number of drafts by the number of requests, from a table.

Verified positions are nearly free while a step waits for memory; in a large batch they are not.
"""

import bisect
from dataclasses import dataclass, field

from specdec.draft_length.base import DraftLengthBase, DraftLengthConfig, check_lengths
from specdec.errors import ConfigError
from specdec.registry import register_draft_length


@dataclass
class ByBatchSizeConfig(DraftLengthConfig):
    """Parameters.

    Args:
        table: {n: drafts of each request in a step of up to n requests}; the entry of the largest n
            holds for all larger steps, too.
    """

    name: str = "by_batch_size"
    table: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that there is something to look up."""
        entries = [entry for pair in self.table.items() for entry in pair]
        numbers = all(isinstance(n, int) and not isinstance(n, bool) for n in entries)
        if not self.table or not numbers or min(self.table) < 1:
            raise ConfigError(
                f"draft_length by_batch_size: table={self.table} is not allowed; give "
                f"{{requests >= 1: drafts}}, for instance {{8: 4, 64: 1}}"
            )


@register_draft_length("by_batch_size", ByBatchSizeConfig)
class ByBatchSizeLength(DraftLengthBase):
    """What the table says."""

    by_num_reqs = True
    config: ByBatchSizeConfig

    def __init__(self, config: ByBatchSizeConfig, num_speculative_tokens: int) -> None:
        super().__init__(config, num_speculative_tokens)
        self._limits = sorted(config.table)
        self._lengths = [config.table[limit] for limit in self._limits]
        check_lengths(self._lengths, num_speculative_tokens, "draft_length by_batch_size: table")

    @property
    def choices(self) -> tuple[int, ...]:
        """Return the table's values."""
        return tuple(sorted(set(self._lengths)))

    def choose(self, num_reqs: int) -> int:
        """Return the entry of the smallest limit that holds the requests."""
        place = bisect.bisect_left(self._limits, num_reqs)
        return self._lengths[min(place, len(self._lengths) - 1)]

    def reasons(self) -> list[str]:
        """Return the table."""
        return [
            f"up to {limit} requests: {length}"
            for limit, length in zip(self._limits, self._lengths, strict=True)
        ]
