"""The target's own first layers draft: early exit through its last norm and its head.

This is for targets that were trained for early exit. The hidden state in the middle of any other
model means nothing to the head, so that next to no draft is accepted. The layers, the norm, the
embedding and the head are the target's own modules: the drafter holds no weights, only the KV of
its layers over the committed text.

Source: Elhoushi et al. 2024 (LayerSkip); Zhang et al. 2023 (self-speculative decoding).
"""

from dataclasses import dataclass

from drafters.autoregressive import AutoregressiveDrafter
from drafters.draft_sampling import DraftSamplingConfig
from specdec.errors import ConfigError
from specdec.protocols import TargetView
from specdec.registry import register_drafter


@dataclass
class LayerSkipConfig(DraftSamplingConfig):
    """Parameters of early exit, beside how drafts are chosen.

    Args:
        num_layers: layers to run before the exit, from 1 to one less than the target has.
    """

    name: str = "layer_skip"
    num_layers: int = 1

    def __post_init__(self) -> None:
        """Check the choices."""
        super().__post_init__()
        if self.num_layers < 1:
            raise ConfigError(
                f"drafter layer_skip: num_layers={self.num_layers} is not allowed; give 1 or more"
            )


@register_drafter("layer_skip", LayerSkipConfig)
class LayerSkipDrafter(AutoregressiveDrafter):
    """The target, left after `num_layers` layers."""

    config: LayerSkipConfig

    def load(self, target: TargetView) -> None:
        """Take the target's first layers.

        Raises:
            ConfigError: the target has no layer to skip.
        """
        num_layers, own = self.config.num_layers, len(target.model.layers)
        if num_layers >= own:
            raise ConfigError(
                f"drafter layer_skip: num_layers={num_layers} is not allowed, the target has {own} "
                f"layers; give less than that (draft_model with model='target' runs all of them)"
            )
        self.use_model(target.model.first_layers(num_layers), target)
