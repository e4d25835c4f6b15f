"""Bigram drafts: the token that most often followed the last one in the request's own text.

Draft i follows draft i - 1 in the same way. Of equally frequent tokens the latest one is taken; a
token that nothing followed ends the drafts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from runner.rows import scatter_rows
from specdec.errors import ConfigError
from specdec.protocols import DraftContext, DrafterCapabilities, TargetView
from specdec.registry import register_drafter


@dataclass
class BigramConfig(DrafterConfig):
    """Parameters of bigram drafts.

    Args:
        min_count: a pair of tokens must have occurred so often.
    """

    name: str = "bigram"
    min_count: int = 1

    def __post_init__(self) -> None:
        """Check the count."""
        if self.min_count < 1:
            raise ConfigError(
                f"drafter bigram: min_count={self.min_count} is not allowed; give an integer >= 1"
            )


@register_drafter("bigram", BigramConfig, api_version=1)
class BigramDrafter(DrafterBase):
    """Counts what followed a token, for all rows of the step at once; no weights, no state."""

    # Everything happens in propose(), so that it is a graph in any step.
    capabilities = DrafterCapabilities(variable_length=True, splits_first_pass=True)
    config: BigramConfig

    def load(self, target: TargetView) -> None:
        """Note the size of the vocabulary."""
        self._vocab_size = target.vocab_size

    def propose(self, ctx: DraftContext) -> None:
        """Draft ctx.num_drafts tokens for each place of the step."""
        state = ctx.state
        rows = ctx.idx_mapping.long().clamp(min=0)  # padding reads row 0, and writes nothing
        width = min(ctx.max_seq_len, state.all_token_ids.shape[1])
        columns = torch.arange(width, device=rows.device)
        known = columns < state.total_len[rows][:, None]
        text = state.all_token_ids[:, :width].index_select(0, rows).long()
        text = torch.where(known, text, 0)
        token, drafts = state.last_sampled_tokens[rows], []
        for _ in range(ctx.num_drafts):
            follows = (text[:, :-1] == token) & known[:, 1:]
            token = self._most_frequent(text[:, 1:], follows, columns[1:])
            drafts.append(token)
        table = self.buffers.draft_tokens[:, : ctx.num_drafts]
        scatter_rows(table, ctx.idx_mapping, torch.cat(drafts, 1))

    def _most_frequent(self, tokens: Tensor, counted: Tensor, columns: Tensor) -> Tensor:
        """Return the most frequent of the counted tokens of each place, [R, 1], -1 for none.

        Integers: sums of them do not depend on their order, so that a replay counts the same.
        """
        zeros = torch.zeros(len(tokens), self._vocab_size, dtype=torch.int64, device=tokens.device)
        counts = zeros.scatter_add(1, tokens, counted.long())
        latest = zeros.scatter_reduce(1, tokens, torch.where(counted, columns, 0), "amax")
        width = len(columns) + 1
        best, token = (counts * width + latest).max(1, keepdim=True)
        return torch.where(best >= self.config.min_count * width, token, -1)
