"""K drafts in every step."""

from specdec.draft_length.base import DraftLengthBase, DraftLengthConfig
from specdec.registry import register_draft_length


@register_draft_length("fixed", DraftLengthConfig)
class FixedLength(DraftLengthBase):
    """Always K."""

    by_num_reqs = True

    def choose(self, num_reqs: int) -> int:
        """Return K."""
        return self.num_speculative_tokens
