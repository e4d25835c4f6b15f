"""Prompt lookup: propose what followed the last tokens' most recent earlier occurrence.

For n from max_n down to min_n, the last n tokens of a row are searched in the row; the longest n
that occurs earlier wins, at its most recent occurrence. A match that runs into the end of the text
goes on periodically, as the text itself would: inside "a b a b" it proposes "a b a b ...". No match
means no draft.

Source: Saxena 2023, prompt lookup decoding; Yang et al. 2023 (LLMA).
"""

from dataclasses import dataclass

import torch

from drafters.base import DrafterBase, DrafterConfig
from runner.rows import scatter_rows
from specdec.errors import ConfigError
from specdec.protocols import DraftContext, DrafterCapabilities
from specdec.registry import register_drafter


@dataclass
class NgramConfig(DrafterConfig):
    """Parameters of prompt lookup.

    Args:
        min_n: shortest run of tokens that counts as a match.
        max_n: longest run that is searched.
    """

    name: str = "ngram"
    min_n: int = 1
    max_n: int = 3

    def __post_init__(self) -> None:
        """Check the range of n."""
        if not 1 <= self.min_n <= self.max_n:
            raise ConfigError(
                f"drafter ngram needs 1 <= min_n <= max_n, got min_n={self.min_n} and "
                f"max_n={self.max_n}"
            )


@register_drafter("ngram", NgramConfig)
class NgramDrafter(DrafterBase):
    """Searches each row's own committed tokens; no weights, no state."""

    capabilities = DrafterCapabilities(variable_length=True)
    config: NgramConfig

    def propose(self, ctx: DraftContext) -> None:
        """Search all rows of the step at once, over the columns that the step can have filled."""
        num_drafts = self.buffers.num_speculative_tokens
        rows = ctx.idx_mapping.long().clamp(min=0)
        width = min(ctx.max_seq_len, ctx.state.all_token_ids.shape[1])
        tokens = ctx.state.all_token_ids[:, :width].index_select(0, rows)
        total_len = torch.where(ctx.idx_mapping >= 0, ctx.state.total_len[rows], 0).long()[:, None]
        columns = torch.arange(width, device=tokens.device)
        # match_len[r, e]: how many tokens ending at column e equal the last tokens of the text.
        match_len = torch.zeros_like(tokens)
        alive = columns < total_len - 1
        for n in range(self.config.max_n):
            last = tokens.gather(1, (total_len - 1 - n).clamp(min=0))
            shifted = torch.roll(tokens, n, dims=1)
            alive = alive & (shifted == last) & (columns >= n)
            match_len += alive
        # Longest match first, most recent occurrence among equals.
        score = torch.where(match_len >= self.config.min_n, match_len * width + columns, -1)
        best, end = score.max(1, keepdim=True)
        period = total_len - 1 - end
        offset = torch.arange(num_drafts, device=tokens.device)[None]
        source = end + 1 + offset % period.clamp(min=1)
        drafts = tokens.gather(1, source.clamp(max=width - 1)).long()
        drafts = torch.where(best >= 0, drafts, -1)
        scatter_rows(self.buffers.draft_tokens, ctx.idx_mapping, drafts)
