"""Replays given texts: an upper bound, and a probe of the harness itself.

A row whose prompt begins one of the given texts is proposed that text's continuation. With `rates`,
the draft at position i is replaced by a wrong token with probability 1 - rates[i], independently,
so that against a target that writes the given text the conditional acceptance per position equals
the rates.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from runner.rows import scatter_rows
from specdec.errors import ConfigError
from specdec.protocols import DraftContext, DrafterCapabilities, StateView, TargetView
from specdec.registry import register_drafter


@dataclass
class OracleConfig(DrafterConfig):
    """Parameters of the oracle.

    Args:
        texts: token ids of whole texts, prompt included.
        rates: acceptance wanted at each draft position, in [0, 1]; the last one holds for all
            positions behind it. Empty: replay faithfully.
    """

    name: str = "oracle"
    texts: list[list[int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the rates."""
        for rate in self.rates:
            if not 0 <= rate <= 1:
                raise ConfigError(f"drafter oracle: rate {rate} is not in [0, 1]")


@register_drafter("oracle", OracleConfig)
class OracleDrafter(DrafterBase):
    """Knows the texts; -1 past their ends and for unknown prompts."""

    capabilities = DrafterCapabilities(variable_length=True, splits_first_pass=True, can_score=True)
    config: OracleConfig

    def load(self, target: TargetView) -> None:
        """Lay the texts out as one padded table.

        Raises:
            ConfigError: a text holds an id outside the target's vocabulary.
        """
        if any(not 0 <= t < target.vocab_size for text in self.config.texts for t in text):
            raise ConfigError(
                f"drafter oracle: texts hold ids outside the vocabulary [0, {target.vocab_size})"
            )
        self._vocab_size = target.vocab_size
        longest = max((len(text) for text in self.config.texts), default=1)
        width = longest + target.num_speculative_tokens
        table = torch.full((max(len(self.config.texts), 1), width), -1, dtype=torch.int64)
        for i, text in enumerate(self.config.texts):
            table[i, : len(text)] = torch.tensor(text, dtype=torch.int64)
        weights = torch.randint(
            -(2**63), 2**63 - 1, (width,), generator=torch.Generator().manual_seed(0)
        )
        hashes = torch.zeros(len(table), width + 1, dtype=torch.int64)
        torch.cumsum(table * weights, 1, out=hashes[:, 1:])
        self._texts = table.to(target.device)  # [texts, width]
        # A prefix is known by its hash, sum of token * weight modulo 2^64: comparing every prompt
        # with every text would take a [R, texts, width] tensor.
        self._weights = weights.to(target.device)  # [width]
        self._hashes = hashes.to(target.device)  # [texts, width + 1], of each prefix
        rates = self.config.rates or [1.0]
        padded = [rates[min(i, len(rates) - 1)] for i in range(target.num_speculative_tokens)]
        self._rates = torch.tensor(padded, device=target.device)

    def propose(self, ctx: DraftContext) -> None:
        """Find each row's text by its prompt and propose what follows."""
        num_drafts = ctx.num_drafts
        rows = ctx.idx_mapping.long().clamp(min=0)
        text, known = self._find(ctx.state, rows)
        position = ctx.state.total_len[rows].long()[:, None]
        position = position + torch.arange(num_drafts, device=rows.device)
        drafts = text.gather(1, position.clamp(max=text.shape[1] - 1))
        usable = known[:, None] & (position < text.shape[1]) & (drafts >= 0)
        drafts = torch.where(usable, drafts, -1)
        if self.config.rates:
            repeated = rows[:, None].expand(-1, num_drafts)
            noise = ctx.noise.uniform(repeated.reshape(-1), position.reshape(-1))
            wrong = noise.view_as(drafts) >= self._rates[:num_drafts]
            drafts = torch.where(wrong & usable, (drafts + 1) % self._vocab_size, drafts)
        scatter_rows(self.buffers.draft_tokens[:, :num_drafts], ctx.idx_mapping, drafts)

    def _find(self, state: StateView, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Find the first text that begins with each row's prompt.

        Returns:
            That text [R, width], and whether there is one [R] bool.
        """
        width = min(state.all_token_ids.shape[1], self._texts.shape[1])
        tokens = state.all_token_ids[:, :width].index_select(0, rows).long()
        prompt_len = state.prompt_len[rows].long()[:, None]
        outside = torch.arange(width, device=rows.device) >= prompt_len
        hashes = (torch.where(outside, 0, tokens) * self._weights[:width]).sum(1)
        prefixes = self._hashes[:, prompt_len[:, 0].clamp(max=width)]  # [texts, R]
        text = self._texts[(prefixes == hashes).int().argmax(0)]
        # The hash chooses, the tokens decide: an unknown prompt is never taken for a known one.
        return text, ((tokens == text[:, :width]) | outside).all(1)
