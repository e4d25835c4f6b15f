"""The loop of drafters that are an EAGLE-style head: a pass over the step's tokens, one a draft.

The first pass of a step runs over the step's own tokens, so that the head's KV is that of the
committed text and of the target's true features; K - 1 single-token passes follow, which read what
the head itself gave before. The head shares the target's block tables over a KV cache of its own.
"""

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from drafters.draft_sampling import DraftSamplingConfig, SamplingDrafter
from drafters.heads.checkpoint import HeadCheckpoint, load_head
from drafters.heads.modules import ChainHead, make_head
from drafters.shipped import SHIPPED, shipped_folder
from runner.head_inputs import first_head_inputs, next_head_inputs
from runner.kv_cache import PagedKVCache
from runner.weights import check_folder
from specdec.errors import ConfigError, UnsupportedError
from specdec.protocols import (
    DraftContext,
    KVSpec,
    TargetView,
)

logger = logging.getLogger(__name__)


@dataclass
class HeadConfig(DraftSamplingConfig):
    """Parameters of a head, beside how drafts are chosen.

    Args:
        path: folder or hub id with config.json and *.safetensors, in the layout of the EAGLE
            repository, of SpecForge or of speculators; "shipped" = the one that comes with the
            project for the target.
    """

    path: str = ""

    def __post_init__(self) -> None:
        """Check the choices, and a local folder."""
        if not self.path:
            raise ConfigError(f"drafter {self.name} needs path=<folder of the head>, got none")
        if self.path != SHIPPED:
            check_folder(self.path, "head")
        super().__post_init__()


class HeadDrafter(SamplingDrafter):
    """Base of drafters that run an EAGLE-style head."""

    config: HeadConfig
    method: ClassVar[str]

    def load(self, target: TargetView) -> None:
        """Load the head, and take from the target what it does not bring.

        Raises:
            ConfigError: it was made for another target, or is another kind of head.
            WeightsError, UnsupportedError: its files cannot be read, or it cannot be run.
        """
        path = self.config.path
        if path == SHIPPED:
            path = shipped_folder(self.config.name, target, "path")
        checkpoint = load_head(path, self.method)
        check_fits(checkpoint, path, target)
        spec = checkpoint.spec
        self.head = build_head(checkpoint, target)
        # [V_draft] int64, where the head knows a part of the target's vocabulary alone
        self._target_ids: Tensor | None = None
        if checkpoint.target_ids is not None:
            self._target_ids = checkpoint.target_ids.to(target.device)
        attention = self.head.layer.self_attn
        layer_config = spec.layer_config
        aux_layers = checkpoint.resolved_aux_layers(len(target.model.layers))
        self.set_up(
            target.vocab_size,
            layer_config.hidden_size,
            target.dtype,
            hidden_states="none" if aux_layers else "last",
            aux_layers=aux_layers,
            kv=KVSpec(1, layer_config.num_key_value_heads, attention.head_dim, target.dtype),
            max_context=layer_config.max_position_embeddings,
        )

    def first_pass(self, ctx: DraftContext) -> None:
        """Run over the step's own tokens, each beside the target's features of its position."""
        wants_aux = bool(self.capabilities.aux_layers)
        features = ctx.aux_hidden_states if wants_aux else ctx.hidden_states
        assert features is not None, "the runner hands over what capabilities ask for"
        step = first_head_inputs(ctx, self._kv)
        features = self.head.fuse(features)
        self._hidden[: ctx.num_reqs] = self.head(
            step.input_ids, step.positions, features, step.attn_metadata, step.last_indices
        )

    def propose(self, ctx: DraftContext) -> None:
        """Choose K drafts, with a pass between two of them."""
        hidden = self._hidden[: ctx.num_reqs]
        drafts: list[Tensor] = []
        for i in range(ctx.num_drafts):
            drafts.append(self._draft(ctx, hidden, i))
            if i + 1 < ctx.num_drafts:
                step = next_head_inputs(ctx, self._kv, drafts[-1], i + 1)
                hidden = self.head(step.input_ids, step.positions, hidden, step.attn_metadata)
        self.sampler.write(ctx, drafts)

    def _draft(self, ctx: DraftContext, hidden: Tensor, index: int) -> Tensor:
        """Choose draft `index` of each place, [R] int64, from what a pass returned for it."""
        if self.sampler.needs_logits:
            logits = self.head.compute_logits(hidden)
            return self.sampler.choose_among(ctx, logits, index, self._target_ids)
        return self.head.top1(hidden, self._target_ids)

    @property
    def _kv(self) -> PagedKVCache:
        """Return the head's own cache."""
        assert self.buffers.kv is not None, "the runner allocates the KV that capabilities ask for"
        return self.buffers.kv


def check_fits(checkpoint: HeadCheckpoint, path: str, target: TargetView) -> None:
    """Refuse a head that was made for another target.

    Raises:
        ConfigError: names the size of the head and that of the target.
    """
    spec = checkpoint.spec
    hidden_size = target.hidden_size
    pairs = [("vocabulary", spec.layer_config.vocab_size, target.vocab_size)]
    pairs.append(("hidden size", spec.target_hidden_size, hidden_size))
    if not spec.owns_embedding or not spec.owns_lm_head:
        pairs.append(("hidden size", spec.layer_config.hidden_size, hidden_size))
    if not spec.owns_lm_head and checkpoint.target_ids is None:
        pairs.append(("vocabulary", spec.draft_vocab_size, target.vocab_size))
    for what, own, wanted in pairs:
        if own != wanted:
            raise ConfigError(
                f"head {path!r} has {what} {own}, the target has {wanted}; give a head that was "
                f"trained for this target"
            )


def build_head(checkpoint: HeadCheckpoint, target: TargetView) -> ChainHead:
    """Build a head on the target's device and in its dtype."""
    with torch.device("meta"):
        head = make_head(checkpoint.spec)
    tensors = {
        name: tensor.to(target.device, target.dtype) for name, tensor in checkpoint.tensors.items()
    }
    head.load_state_dict(tensors, assign=True)
    head.rotary.to(target.device)
    head.eval().requires_grad_(False)
    embedding = target.model.model.get_input_embeddings()
    own = head.embed_tokens
    if own is not None and torch.equal(own.weight, embedding.weight):
        head.embed_tokens = None  # a copy of the target's: no memory for it
    if checkpoint.target_ids is not None and not checkpoint.spec.owns_lm_head:
        head.lm_head = target.model.head_of(checkpoint.target_ids)
    head.share(embedding.__call__, target.model.compute_logits)
    try:
        head.fuse_kernels(embedding.weight.detach())
    except UnsupportedError as error:
        logger.info("%s head runs unfused: %s", checkpoint.layout, error)
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    logger.info("loaded %s head: %.0f M parameters", checkpoint.layout, num_parameters / 1e6)
    return head
