"""A policy of the draft length from what a user gave."""

from collections.abc import Mapping
from typing import Any

from specdec.draft_length.base import DraftLengthBase, DraftLengthConfig
from specdec.draft_length.fixed import FixedLength
from specdec.registry import build_config


def make_draft_length(
    spec: str | Mapping[str, Any] | object, num_speculative_tokens: int
) -> DraftLengthBase:
    """Build a policy; where nothing is ever drafted there is nothing to choose.

    Args:
        spec: a registered name, a mapping with a key "name", or a policy's config object.
        num_speculative_tokens: K.

    Raises:
        ConfigError: an unknown name or key, or a value that is not allowed.
    """
    entry, config = build_config("draft_length", spec)
    if num_speculative_tokens == 0:
        return FixedLength(DraftLengthConfig(), 0)
    return entry.cls(config, num_speculative_tokens)
