"""Proposes nothing: autoregressive decoding, the arm that everything is compared with."""

from dataclasses import dataclass

from drafters.base import DrafterBase, DrafterConfig
from specdec.protocols import DraftContext, DrafterCapabilities
from specdec.registry import register_drafter


@dataclass
class NoneConfig(DrafterConfig):
    """No parameters."""

    name: str = "none"


@register_drafter("none", NoneConfig)
class NoneDrafter(DrafterBase):
    """Leaves every row at "no draft"."""

    capabilities = DrafterCapabilities(
        variable_length=True, splits_first_pass=True, reads_token_table=False
    )
    never_drafts = True

    def propose(self, ctx: DraftContext) -> None:
        """Propose nothing: the runner has already cleared the step's rows."""
