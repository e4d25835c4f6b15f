"""EAGLE-3 heads, as a chain: features of several target layers, a vocabulary of frequent tokens.

A head fuses the outputs of three layers of the target, reads them in one decoder layer beside the
embedding of the token behind, and has a norm and an output head of its own, often over a part of
the target's vocabulary.

Source: Li et al. 2025, EAGLE-3 (whose trees of drafts are not built here).
"""

from dataclasses import dataclass

from drafters.heads.chain import HeadConfig, HeadDrafter
from drafters.shipped import SHIPPED
from specdec.registry import register_drafter


@dataclass
class Eagle3Config(HeadConfig):
    """Parameters of an EAGLE-3 head; see `HeadConfig`."""

    name: str = "eagle3"
    path: str = SHIPPED


@register_drafter("eagle3", Eagle3Config)
class Eagle3Drafter(HeadDrafter):
    """Reads the outputs of the target layers that the head's checkpoint names."""

    method = "eagle3"
