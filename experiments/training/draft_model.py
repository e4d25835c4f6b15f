"""A few of the target's own layers, taught to write what the target writes.

Embedding and output head stay the target's. A draft only counts while the drafts before it were
what the target chose, so a pass over the text is what serving runs: there is nothing to unroll.

Source: Leviathan et al. 2023; Zhou et al. 2024 (DistillSpec).
"""

import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.training.attention import TrainingKV, TrainingPass
from experiments.training.config import FitConfig
from experiments.training.frozen_target import FrozenTarget, PaddedBatch, TargetStates
from experiments.training.trainee import MAX_FILE_BYTES, Trainee, copy_layer
from runner.attention import ATTENTION_NAME
from runner.shared_model import save_shared_model
from specdec.errors import ConfigError


class DraftModelTrainee(Trainee):
    """A decoder of the target's family with fewer layers.

    Args:
        config: of the run.
        target: frozen.
        target_ids: the draft vocabulary.
    """

    method = "draft_model"
    reduces_vocabulary = True
    offsets = (0,)

    def __init__(self, config: FitConfig, target: FrozenTarget, target_ids: Tensor | None) -> None:
        super().__init__(config, target, target_ids)
        model = target.model
        chosen = _chosen_layers(config.copied_layers, len(model.layers))
        own = copy.deepcopy(model.config)
        own.num_hidden_layers, own.vocab_size = len(chosen), 1
        own.bos_token_id = own.eos_token_id = own.pad_token_id = None
        if getattr(own, "layer_types", None):
            own.layer_types = [own.layer_types[layer] for layer in chosen]
        own._attn_implementation = ATTENTION_NAME
        self.vocab_size = model.vocab_size
        decoder: Any = type(model.decoder)(own)
        self.decoder = decoder.float()
        self.decoder.embed_tokens = None  # the target's
        if config.warm_start:
            for layer, source in zip(self.decoder.layers, chosen, strict=True):
                copy_layer(layer, model.layers[source])
            copy_layer(self.decoder.norm, model.decoder.norm)  # pyright: ignore

    def forward(self, batch: PaddedBatch, states: TargetStates) -> Tensor:
        """Return [1, T, hidden]."""
        positions = batch.positions
        output = self.decoder(
            inputs_embeds=self._embed(batch.token_ids.flatten())[None],
            position_ids=positions[None],
            use_cache=False,
            attn_metadata=TrainingPass(TrainingKV(len(batch.token_ids)), positions),
        )
        return output.last_hidden_state

    def save(self, folder: Path, state: dict[str, Tensor], target_name: str) -> None:
        """Write the layers, without embedding and output head."""
        tensors = {name.removeprefix("decoder."): tensor for name, tensor in state.items()}
        save_shared_model(
            folder, self.decoder.config, tensors, self.target_ids, self.vocab_size, MAX_FILE_BYTES
        )

    @classmethod
    def drafter(cls, folder: Path) -> dict[str, Any]:
        """Return what selects the drafter with a saved folder."""
        return {"name": cls.method, "model": str(folder)}


def _chosen_layers(wanted: list[int], num_layers: int) -> list[int]:
    """Return the layers to start from, counted from 0; negative ones count from the end.

    Raises:
        ConfigError: the target has no such layer.
    """
    if not wanted or any(not -num_layers <= layer < num_layers for layer in wanted):
        raise ConfigError(
            f"fit.copied_layers={wanted} is not allowed; give layers of the target's {num_layers}, "
            f"from 0, or from -1 for the last"
        )
    return [layer % num_layers for layer in wanted]
