"""Drafters whose `score` breaks the kit's rule about it, made of the sound ones."""

import dataclasses
from collections.abc import Callable
from typing import Any

from drafters.base import DrafterConfig
from runner.rows import scatter_rows
from specdec.protocols import DraftContext
from specdec.registry import register_drafter
from tests.broken_drafters import SoundFeatures, SoundKV, SoundLaw, TargetTwinConfig, rows_of


@register_drafter("broken_score_missing", DrafterConfig)
class ScoreMissing(SoundFeatures):
    """Says that it can score, and has no such method."""

    score: Any = None


@register_drafter("broken_score_position", DrafterConfig)
class ScorePosition(SoundFeatures):
    """Scores by the feature of one position earlier."""

    def score(self, ctx: DraftContext, fork: Callable[[], None]) -> None:
        """Shift the features."""
        assert ctx.hidden_states is not None
        super().score(dataclasses.replace(ctx, hidden_states=ctx.hidden_states.roll(1, 0)), fork)


@register_drafter("broken_score_no_first_pass", DrafterConfig)
class ScoreNoFirstPass(SoundFeatures):
    """Scores by what an earlier step left."""

    def score(self, ctx: DraftContext, fork: Callable[[], None]) -> None:
        """Leave the first half of a step out."""
        fork()
        self.propose(ctx)


@register_drafter("broken_score_first_k", DrafterConfig)
class ScoreFirstK(SoundFeatures):
    """Proposes the likeliest token last: the first k of K drafts are not those of k."""

    def propose(self, ctx: DraftContext) -> None:
        """Turn the drafts round."""
        super().propose(ctx)
        table = self.buffers.draft_tokens[:, : ctx.num_drafts]
        scatter_rows(table, ctx.idx_mapping, table[rows_of(ctx)].flip(1))


@register_drafter("broken_score_law", DrafterConfig)
class ScoreLaw(SoundLaw):
    """Scores with a flatter law than the one that it drew from."""

    def score(self, ctx: DraftContext, fork: Callable[[], None]) -> None:
        """Flatten it."""
        super().score(ctx, fork)
        assert self.buffers.draft_logits is not None
        self.buffers.draft_logits.mul_(0.3)


@register_drafter("broken_score_kind", DrafterConfig)
class ScoreKind(SoundLaw):
    """Scores without telling that its drafts have a law."""

    def score(self, ctx: DraftContext, fork: Callable[[], None]) -> None:
        """Forget the kinds."""
        super().score(ctx, fork)
        self.buffers.draft_kind.zero_()


@register_drafter("broken_score_no_fork", TargetTwinConfig)
class ScoreNoFork(SoundKV):
    """Writes the KV of all starts' drafts to the pages that they share."""

    def score(self, ctx: DraftContext, fork: Callable[[], None]) -> None:
        """Never fork."""
        super().score(ctx, lambda: None)


@register_drafter("broken_score_late_fork", TargetTwinConfig)
class ScoreLateFork(SoundKV):
    """Forks when the drafts are there: up to then each start reads those of others."""

    def score(self, ctx: DraftContext, fork: Callable[[], None]) -> None:
        """Fork last."""
        self.first_pass(ctx)
        self.propose(ctx)
        fork()


@register_drafter("broken_score_early_fork", TargetTwinConfig)
class ScoreEarlyFork(SoundKV):
    """Forks before it runs over the text: no start reads what the others committed last."""

    def score(self, ctx: DraftContext, fork: Callable[[], None]) -> None:
        """Fork first."""
        fork()
        self.first_pass(ctx)
        self.propose(ctx)
