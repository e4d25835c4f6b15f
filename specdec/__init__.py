"""specdec: a research framework for speculative decoding.

The public surface is imported from here and loads nothing heavy until it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from specdec import _layout  # noqa: F401 - refuses a foreign runner, drafters or sampler

if TYPE_CHECKING:
    from specdec.api import LLM
    from specdec.engine import Engine
    from specdec.grammar import StructuredOutputsParams
    from specdec.protocols import Drafter, DrafterCapabilities, LogitsProcessor, Verifier
    from specdec.registry import (
        register_draft_length,
        register_drafter,
        register_logits_processor,
        register_verifier,
    )
    from specdec.types import RequestOutput, SamplingParams

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "specdec.api",
    "Engine": "specdec.engine",
    "Drafter": "specdec.protocols",
    "DrafterCapabilities": "specdec.protocols",
    "LogitsProcessor": "specdec.protocols",
    "Verifier": "specdec.protocols",
    "register_draft_length": "specdec.registry",
    "register_drafter": "specdec.registry",
    "register_logits_processor": "specdec.registry",
    "register_verifier": "specdec.registry",
    "RequestOutput": "specdec.types",
    "SamplingParams": "specdec.types",
    "StructuredOutputsParams": "specdec.grammar",
}

__all__ = [
    "LLM",
    "Drafter",
    "DrafterCapabilities",
    "Engine",
    "LogitsProcessor",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "Verifier",
    "register_draft_length",
    "register_drafter",
    "register_logits_processor",
    "register_verifier",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}; it has {sorted(_PUBLIC)}")
