"""Logits processors of strangers, for the tests of the plug-in interface."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.buffers import StagedWriteTensor
from sampler.processors.base import LogitsProcessorBase
from specdec.errors import ConfigError
from specdec.protocols import (
    CommitContext,
    LogitsContext,
    ProcessorSetup,
    RequestContext,
    StateView,
)
from specdec.registry import register_logits_processor
from specdec.types import SamplingParams


@dataclass
class NoEchoConfig:
    """How much a token is held back behind an equal one."""

    strength: float = 4.0

    def __post_init__(self) -> None:
        """Check the range."""
        if self.strength < 0:
            raise ConfigError(f"strength={self.strength} is not allowed; give a number >= 0")


@register_logits_processor("no_echo", NoEchoConfig)
class NoEcho(LogitsProcessorBase):
    """Holds back the token before a line, and every new token as often as it is in the text.

    Used by requests without a presence penalty. Written with torch alone: shapes are those of the
    step, and nothing is read on the host.
    """

    def __init__(self, config: NoEchoConfig, setup: ProcessorSetup) -> None:
        self.strength = config.strength
        self._is_used = StagedWriteTensor(setup.max_num_reqs, torch.int32, setup.device)
        # One row more, for padding.
        shape = (setup.max_num_reqs + 1, setup.vocab_size)
        self._counts = torch.zeros(shape, device=setup.device)
        self.num_commits = 0

    def check_request(self, params: SamplingParams, context: RequestContext) -> None:
        """Refuse one parameter, to show how."""
        if params.presence_penalty > 0 and params.frequency_penalty > 0:
            raise ConfigError("no_echo takes a presence or a frequency penalty, not both")

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool:
        """Stage whether the row uses it."""
        used = params.presence_penalty == 0
        self._is_used.stage_write(row, 0, int(used))
        return used

    def prepare_rows(self, rows: Tensor, state: StateView) -> None:
        """Count the last committed tokens of a resumed text."""
        tokens = state.all_token_ids[rows.long()].long().clamp(0, self._counts.shape[1] - 1)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        begin, end = state.prompt_len[rows.long()][:, None], state.total_len[rows.long()][:, None]
        new = ((place >= begin) & (place < end)).float()
        self._counts[rows.long()] = 0
        self._counts.index_put_((rows.long()[:, None], tokens), new, accumulate=True)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Subtract."""
        rows = ctx.expanded_idx_mapping.long()
        used = (rows >= 0) & (self._is_used.tensor[rows.clamp(min=0)] > 0)
        rows, local = rows.clamp(min=0), ctx.expanded_local_pos.long()
        before = ctx.state.all_token_ids[rows, (ctx.draw_positions - 1).clamp(min=0)].long()
        for j in range(ctx.draft_tokens.shape[1]):
            draft = ctx.draft_tokens[rows, j].clamp(0, logits.shape[1] - 1)
            before = torch.where(local == j + 1, draft, before)
            counts = (0.3 * (used & (local > j)))[:, None]
            logits.scatter_add_(1, draft[:, None], -counts)
        before = before.clamp(0, logits.shape[1] - 1)[:, None]
        logits.sub_(0.3 * self._counts[rows] * used[:, None])
        logits.scatter_add_(1, before, -self.strength * used[:, None].float())

    def commit(self, ctx: CommitContext) -> None:
        """Count."""
        self.num_commits += 1
        padding, width = len(self._counts) - 1, ctx.sampled_tokens.shape[1]
        rows = torch.where(ctx.idx_mapping < 0, padding, ctx.idx_mapping.long())[:, None]
        kept = torch.arange(width, device=rows.device) < ctx.num_sampled[:, None]
        tokens = ctx.sampled_tokens.clamp(min=0)
        self._counts.index_put_((rows.expand(-1, width), tokens), kept.float(), accumulate=True)
