"""EAGLE-3 heads, trained on their own outputs as they are served (training-time test).

Pass 0 runs over the text with the target's features. Pass j runs what serving runs behind draft j:
at line s the input at position s + j, whose feature is what pass j - 1 gave for the same chain and
whose token is the text's own (`experiments.training.attention` says what it may look at).

Source: Li et al. 2025 (EAGLE-3).
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.heads.checkpoint import HeadCheckpoint, save_head
from drafters.heads.modules import HeadSpec, make_head
from experiments.training.attention import TrainingKV, TrainingPass
from experiments.training.config import FitConfig
from experiments.training.frozen_target import FrozenTarget, PaddedBatch, TargetStates
from experiments.training.trainee import Trainee, aux_layers_of, copy_layer


class Eagle3Trainee(Trainee):
    """The head of `drafters.heads.modules`, unrolled.

    Args:
        config: of the run.
        target: frozen.
        target_ids: the draft vocabulary.
    """

    method = "eagle3"
    reduces_vocabulary = True

    def __init__(self, config: FitConfig, target: FrozenTarget, target_ids: Tensor | None) -> None:
        super().__init__(config, target, target_ids)
        model = target.model
        self.aux_layers = aux_layers_of(config, len(model.layers))
        self.unroll = config.unroll
        self.offsets = tuple(range(1, config.unroll + 1))
        vocab_size = model.vocab_size
        self.spec = HeadSpec(
            method="eagle3",
            layer_config=_layer_config(model.config),
            draft_vocab_size=vocab_size if target_ids is None else len(target_ids),
            target_hidden_size=model.hidden_size,
            num_aux=len(self.aux_layers),
            aux_layers=self.aux_layers,
        )
        self.head: Any = make_head(self.spec)
        self.head.share(self._embed, model.compute_logits)
        if config.warm_start:
            warm_start(self.head, model.layers[-1], getattr(model.decoder, "norm", None))

    def forward(self, batch: PaddedBatch, states: TargetStates) -> Tensor:
        """Return [J, T, hidden], one for each pass."""
        assert states.aux is not None
        positions = batch.positions
        kv = TrainingKV(len(batch.token_ids))
        hidden = self.head.fuse(states.aux)
        outputs = []
        for j in range(self.unroll):
            at = positions + j
            hidden = self.head(batch.behind(1 + j), at, hidden, TrainingPass(kv, at))
            outputs.append(self.head.output_states(hidden))
        return torch.stack(outputs)

    def save(self, folder: Path, state: dict[str, Tensor], target_name: str) -> None:
        """Write the head, whose output layer is the target's own rows."""
        tensors = {name.removeprefix("head."): tensor for name, tensor in state.items()}
        ids = None if self.target_ids is None else self.target_ids.cpu()
        checkpoint = HeadCheckpoint(self.spec, tensors, ids)
        save_head(str(folder), checkpoint, target_name, self.unroll, shares_lm_head=True)


def warm_start(head: Any, layer: nn.Module, norm: nn.Module | None) -> None:
    """Start as the target's last layer on the deepest of the features, blind to the rest.

    Args:
        head: an EAGLE-3 head of the target's width.
        layer: the target's last layer.
        norm: the target's last norm.
    """
    copy_layer(head.layer, layer)
    size = head.spec.layer_config.hidden_size
    with torch.no_grad():
        # What is a norm of the embedding here has nothing to start from in the target's last layer.
        head.layer.input_layernorm.weight.fill_(1.0)
        source = getattr(layer, "input_layernorm", None)
        if source is not None:
            head.layer.hidden_norm.weight.copy_(source.weight)
        if norm is not None:
            head.norm.weight.copy_(norm.weight)
        if head.spec.target_hidden_size == size:
            head.fc.weight.zero_()
            head.fc.weight[:, -size:].copy_(torch.eye(size))


def _layer_config(config: Any) -> Any:
    """Return the config of one decoder layer like the target's."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = 1
    if getattr(own, "layer_types", None):
        own.layer_types = own.layer_types[:1]
    return own
