"""The processors of an engine: our own in the order in which they run, then plug-ins."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sampler.processors.allowed_token_ids import AllowedTokenIds
from sampler.processors.bad_words import BadWords
from sampler.processors.base import LogitsProcessorBase
from sampler.processors.grammar import GrammarMasks
from sampler.processors.logit_bias import LogitBias
from sampler.processors.min_p import MinP
from sampler.processors.min_tokens import MinTokens
from sampler.processors.penalties import Penalties
from specdec.errors import ConfigError
from specdec.grammar import is_available
from specdec.protocols import LogitsContext, LogitsProcessor, ProcessorSetup, RequestContext
from specdec.registry import PluginEntry
from specdec.types import SamplingParams

logger = logging.getLogger(__name__)


class NoPenalties(LogitsProcessorBase):
    """Stands where penalties are switched off, and refuses them."""

    def check_request(self, params: SamplingParams, context: RequestContext) -> None:
        """Refuse penalties."""
        for name, neutral in (
            ("repetition_penalty", 1.0),
            ("frequency_penalty", 0.0),
            ("presence_penalty", 0.0),
        ):
            value = getattr(params, name)
            if value != neutral:
                raise ConfigError(f"{name}={value} needs an engine with penalties=True")

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool:
        """Use nothing."""
        return False

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Change nothing."""


def make_processors(
    setup: ProcessorSetup,
    plugins: Sequence[tuple[PluginEntry, Any]] = (),
    penalties: bool = True,
) -> list[LogitsProcessor]:
    """Build every processor of an engine.

    Args:
        setup: sizes of the engine.
        plugins: entries and configurations, in their order.
        penalties: keep counts of tokens.

    Raises:
        ConfigError: a plug-in is no processor.
    """
    processors: list[LogitsProcessor] = [
        GrammarMasks(setup, is_available()),
        AllowedTokenIds(setup),
        BadWords(setup),
        MinTokens(setup),
        LogitBias(setup),
        Penalties(setup) if penalties else NoPenalties(),
        MinP(setup),
    ]
    for entry, config in plugins:
        processor = entry.cls(config, setup)
        if not isinstance(processor, LogitsProcessor):
            raise ConfigError(
                f"logits processor {entry.name!r} lacks methods of the interface; derive "
                f"{entry.cls.__name__} from sampler.processors.base.LogitsProcessorBase"
            )
        processors.append(processor)
    num_bytes = sum(table.tensor.nbytes for p in processors for table in p.tables)
    counts = sum(p.num_count_bytes for p in processors if isinstance(p, Penalties))
    logger.info(
        "logits processors: %.1f MiB of rows, %.1f MiB of token counts (penalties=%s)",
        num_bytes / 2**20,
        counts / 2**20,
        penalties,
    )
    return processors
