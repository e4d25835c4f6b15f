"""Block-parallel heads: masks behind every position, each judged by the law of its own place.

Mask m of the chain that starts at line s lies at position s + m and sees what serving lets it see:
the inputs up to s and the masks before it (`experiments.training.attention`).

Source: in the manner of P-EAGLE and DFlash (arXiv 2602.06036).
"""

from pathlib import Path

import torch
from torch import Tensor

from drafters.block_parallel import BlockParallelHead, BlockParallelSizes, save_block_parallel
from experiments.training.attention import TrainingKV, TrainingPass
from experiments.training.config import FitConfig
from experiments.training.frozen_target import FrozenTarget, PaddedBatch, TargetStates
from experiments.training.trainee import Trainee, aux_layers_of, copy_layer


class BlockParallelTrainee(Trainee):
    """The head of `drafters.block_parallel`, with masks behind every line.

    Args:
        config: of the run.
        target: frozen.
        target_ids: None.
    """

    method = "block_parallel"
    reduces_vocabulary = False

    def __init__(self, config: FitConfig, target: FrozenTarget, target_ids: Tensor | None) -> None:
        super().__init__(config, target, target_ids)
        model, own = target.model, target.model.config
        self.aux_layers = aux_layers_of(config, len(model.layers))
        self.offsets = tuple(range(1, config.unroll + 1))
        sizes = BlockParallelSizes(
            hidden_size=model.hidden_size,
            aux_layers=list(self.aux_layers),
            num_layers=config.num_layers,
            num_heads=own.num_attention_heads,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            intermediate_size=own.intermediate_size,
            rms_norm_eps=own.rms_norm_eps,
            rope_theta=float((own.rope_parameters or {}).get("rope_theta", 10000.0)),
            max_positions=model.max_position_embeddings,
        )
        self.head = BlockParallelHead(sizes)
        if config.warm_start:
            self._warm_start(target)

    def forward(self, batch: PaddedBatch, states: TargetStates) -> Tensor:
        """Return [J, T, hidden]: the text's own inputs, then each mask."""
        assert states.aux is not None
        positions = batch.positions
        kv = TrainingKV(len(batch.token_ids))
        inputs = self.head.inputs(self._embed(batch.behind(1)), states.aux)
        outputs = [self.head(inputs, TrainingPass(kv, positions))]  # pyright: ignore
        mask = self.head.mask_input().expand(len(positions), -1)
        for m in range(1, len(self.offsets)):
            outputs.append(self.head(mask, TrainingPass(kv, positions + m)))  # pyright: ignore
        return torch.stack(outputs)

    def save(self, folder: Path, state: dict[str, Tensor], target_name: str) -> None:
        """Write the head."""
        head = BlockParallelHead(self.head.sizes)
        own = {name.removeprefix("head."): tensor for name, tensor in state.items()}
        head.load_state_dict(own, assign=True)
        save_block_parallel(folder, head)

    def _warm_start(self, target: FrozenTarget) -> None:
        """Start as the target's last layers on the deepest of the features."""
        model, size = target.model, target.model.hidden_size
        layers = list(self.head.body.layers)
        for layer, source in zip(layers, list(model.layers)[-len(layers) :], strict=True):
            copy_layer(layer, source)
        copy_layer(self.head.body.norm, model.decoder.norm)  # pyright: ignore
        with torch.no_grad():
            self.head.fuse.weight.zero_()
            self.head.fuse.weight[:, -size:].copy_(torch.eye(size))
            self.head.merge.weight[:, :size].mul_(0.1)
            self.head.merge.weight[:, size:].copy_(torch.eye(size))
