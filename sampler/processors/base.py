"""Defaults of a logits processor: uses no row state, refuses nothing, keeps nothing of the text."""

from torch import Tensor

from runner.buffers import StagedWriteTensor
from specdec.protocols import CommitContext, LogitsContext, RequestContext, StateView
from specdec.types import SamplingParams


class LogitsProcessorBase:
    """All of `specdec.protocols.LogitsProcessor` but `apply`."""

    after_temperature = False

    @property
    def tables(self) -> list[StagedWriteTensor]:
        """Return every staged table that the processor keeps as an attribute."""
        return [value for value in vars(self).values() if isinstance(value, StagedWriteTensor)]

    def check_request(self, params: SamplingParams, context: RequestContext) -> None:
        """Refuse nothing."""

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool | None:
        """Take every request for one that uses the processor."""

    def prepare_rows(self, rows: Tensor, state: StateView) -> None:
        """Need nothing of a new row's tokens."""

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Change logits, [L, V] float32, in place."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it does to logits")

    def commit(self, ctx: CommitContext) -> None:
        """Keep nothing of what was committed."""
