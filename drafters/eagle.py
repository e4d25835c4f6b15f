"""EAGLE and EAGLE-2 heads, as a chain: features of the target's last layer, one draft a pass.

A head fuses the target's last hidden state of a position with the embedding of the token behind it,
runs one decoder layer and predicts the next hidden state, which the target's own output head turns
into the next draft's logits.

Source: Li et al. 2024, EAGLE and EAGLE-2 (whose trees of drafts are not built here).
"""

from dataclasses import dataclass

from drafters.heads.chain import HeadConfig, HeadDrafter
from specdec.registry import register_drafter


@dataclass
class EagleConfig(HeadConfig):
    """Parameters of an EAGLE head; see `HeadConfig`."""

    name: str = "eagle"


@register_drafter("eagle", EagleConfig)
class EagleDrafter(HeadDrafter):
    """Reads the target's last hidden states."""

    method = "eagle"
