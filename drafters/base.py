"""Defaults for drafters: everything but `propose`. Nothing here knows a method."""

from collections.abc import Callable
from dataclasses import dataclass

from specdec.protocols import (
    DraftBuffers,
    DraftContext,
    DrafterCapabilities,
    StateView,
    TargetView,
    VerifyContext,
)


@dataclass
class DrafterConfig:
    """Base of a drafter's configuration; `name` selects the drafter."""

    name: str = "none"

    @property
    def is_recorder(self) -> bool:
        """Return whether the drafter keeps what it is given in files of its own.

        A run gives it the timed requests alone: no warm-up, and no second pass over the texts.
        """
        return False


class DrafterBase:
    """Base class with defaults for the whole life cycle except `propose`.

    Unless a drafter declares `graph_safe=False`, what `first_pass`, `propose` and `observe` launch
    is captured once and replayed for other steps: they read and write device tensors at the
    addresses of the context and of `bind`, and never look at a value on the host.

    Args:
        config: the drafter's own configuration.
    """

    capabilities = DrafterCapabilities()
    never_drafts = False  # True: the engine sets K to 0, and no position is verified for nothing

    def __init__(self, config: DrafterConfig) -> None:
        self.config = config

    def load(self, target: TargetView) -> None:
        """Load nothing."""

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Keep the views; buffers of a drafter's own are allocated here, at fixed addresses."""
        self.state = state
        self.buffers = buffers

    def add_request(self, req_state_idx: int) -> None:
        """Keep nothing by row."""

    def first_pass(self, ctx: DraftContext) -> None:
        """Run nothing over the step's own tokens.

        It also runs in steps where no place samples, which `propose` does only for a drafter that
        has KV of its own and does not split off this pass.
        """

    def propose(self, ctx: DraftContext) -> None:
        """Fill `self.buffers.draft_tokens[row, :ctx.num_drafts]`; -1 where there is no draft.

        `runner.rows.scatter_rows` writes one line a place to the places' rows.
        """
        raise NotImplementedError

    def score(self, ctx: DraftContext, fork: Callable[[], None]) -> None:
        """Run both halves of a step; see `specdec.protocols.ScoringDrafter`.

        Right as it is for a drafter without KV, and for one that splits off its first pass; but
        never where drafts depend on more than text, features and noise.
        """
        if self.capabilities.splits_first_pass:
            self.first_pass(ctx)
        fork()
        self.propose(ctx)

    def observe(self, ctx: VerifyContext) -> None:
        """Learn nothing."""

    def state_bytes(self) -> int:
        """Return 0: nothing is kept beside weights and KV."""
        return 0
