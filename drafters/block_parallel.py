"""A head that proposes all drafts in one pass, from masked positions.

Like an EAGLE-3 head it reads, at position i, the outputs of some of the target's layers for token i
and the embedding of token i + 1, and runs a few decoder layers with KV of their own; the embedding
and the projection to the vocabulary are the target's. Unlike it, it does not feed its drafts back:
positions whose token and features are not known yet carry a learned mask embedding and a learned
mask feature, and each predicts one draft. So K drafts cost the first pass over what the step
committed and one pass over K - 1 masks, whatever K is, and a draft depends on the drafts before it
only through what their masks attend to.

Source: in the manner of P-EAGLE (parallel drafting EAGLE) and DFlash (arXiv 2602.06036).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.draft_sampling import DraftSamplingConfig, SamplingDrafter
from runner.attention import ATTENTION_NAME
from runner.attention_metadata import AttentionMetadata
from runner.head_files import check_shape, read_head, write_head
from runner.head_inputs import first_head_inputs
from runner.kv_cache import PagedKVCache
from runner.mask_inputs import mask_inputs
from runner.models.packed_linear import pack_linears
from runner.weights import check_folder
from specdec.errors import ConfigError, WeightsError
from specdec.protocols import (
    DraftContext,
    KVSpec,
    TargetView,
)
from specdec.registry import register_drafter

_TYPE = "specdec_block_parallel"  # `model_type` in a head's config.json


@dataclass
class BlockParallelConfig(DraftSamplingConfig):
    """Parameters of a block-parallel head, beside how drafts are chosen.

    Args:
        path: folder that `save_block_parallel` wrote.
    """

    name: str = "block_parallel"
    path: str = ""

    def __post_init__(self) -> None:
        """Check the choices, and a local folder."""
        if not self.path:
            raise ConfigError("drafter block_parallel needs path=<folder of the head>, got none")
        check_folder(self.path, "head")
        super().__post_init__()


@dataclass(frozen=True)
class BlockParallelSizes:
    """Sizes of a head, as its config.json has them.

    Args:
        hidden_size: of the target.
        aux_layers: the target's layers that are read, from 0.
        num_layers, num_heads, num_kv_heads, head_size, intermediate_size: of the decoder layers.
        rms_norm_eps, rope_theta: of the decoder layers.
        max_positions: the head drafts for texts up to this length.
    """

    hidden_size: int
    aux_layers: Sequence[int]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 4096


class BlockParallelHead(nn.Module):
    """The weights of a head.

    Args:
        sizes: of the head.
    """

    def __init__(self, sizes: BlockParallelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.fuse = nn.Linear(len(sizes.aux_layers) * size, size, bias=False)
        self.feature_norm = nn.RMSNorm(size, eps)
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.merge = nn.Linear(2 * size, size, bias=False)
        self.mask_embedding = nn.Parameter(torch.randn(size))
        self.mask_feature = nn.Parameter(torch.randn(size))
        config = LlamaConfig(
            vocab_size=1,
            hidden_size=size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_size,
            rms_norm_eps=eps,
            rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
            max_position_embeddings=sizes.max_positions,
            bos_token_id=None,
            eos_token_id=None,
        )
        config._attn_implementation = ATTENTION_NAME
        self.body: Any = LlamaModel(config)
        self.body.embed_tokens = None  # it is given embeddings: the target's, and the mask's
        # Not on the meta device, where a head is built whose weights are read afterwards.
        with torch.device("cpu"):
            self.body.rotary_emb = LlamaRotaryEmbedding(config)

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the weights; the frequencies of the positions stay float32."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(device, dtype)
        self.to(device)

    def inputs(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Return the decoder layers' inputs [T, hidden] where tokens are known.

        Args:
            embeddings: [T, hidden] of the tokens at positions i + 1.
            features: [T, A * hidden], outputs of the target's layers at positions i.
        """
        return self._merged(embeddings, self.fuse(features))

    def mask_input(self) -> Tensor:
        """Return the decoder layers' input [1, hidden] where nothing is known."""
        return self._merged(self.mask_embedding[None], self.mask_feature[None])

    def _merged(self, embeddings: Tensor, features: Tensor) -> Tensor:
        parts = [self.embedding_norm(embeddings), self.feature_norm(features)]
        return self.merge(torch.cat(parts, dim=1))

    def forward(self, inputs: Tensor, attn_metadata: AttentionMetadata) -> Tensor:
        """Return hidden states [T, hidden] behind the last norm; head logits come from these."""
        output = self.body(
            inputs_embeds=inputs[None],
            position_ids=attn_metadata.positions[None],
            use_cache=False,
            attn_metadata=attn_metadata,
        )
        return output.last_hidden_state[0]


@register_drafter("block_parallel", BlockParallelConfig)
class BlockParallelDrafter(SamplingDrafter):
    """All drafts from one pass over masks."""

    config: BlockParallelConfig

    def load(self, target: TargetView) -> None:
        """Load the head.

        Raises:
            WeightsError: it cannot be read, or fits another target.
        """
        head = load_block_parallel(self.config.path, target.hidden_size)
        head.place(target.device, target.dtype)
        pack_linears(head)
        self.head = head.requires_grad_(False).eval()
        self._target: Any = target.model
        self._embedding: nn.Module = self._target.model.get_input_embeddings()
        with torch.inference_mode():
            self._mask_input = self.head.mask_input()  # [1, hidden]
        sizes = head.sizes
        self.set_up(
            target.vocab_size,
            sizes.hidden_size,
            target.dtype,
            aux_layers=tuple(sizes.aux_layers),
            kv=KVSpec(sizes.num_layers, sizes.num_kv_heads, sizes.head_size, target.dtype),
            max_context=sizes.max_positions,
        )

    def first_pass(self, ctx: DraftContext) -> None:
        """Run over the step's own tokens: those that were committed get their KV."""
        assert ctx.aux_hidden_states is not None
        step = first_head_inputs(ctx, self._kv)
        inputs = self.head.inputs(self._embedding(step.input_ids), ctx.aux_hidden_states)
        hidden = self.head(inputs, step.attn_metadata)
        torch.index_select(hidden, 0, step.last_indices, out=self._hidden[: ctx.num_reqs])

    def propose(self, ctx: DraftContext) -> None:
        """Run the masks, and choose all drafts."""
        num_reqs, num_drafts = ctx.num_reqs, ctx.num_drafts
        hidden = self._hidden[None, :num_reqs]
        if num_drafts > 1:
            metadata = mask_inputs(ctx, self._kv, num_drafts - 1)
            masks = self.head(self._mask_input.expand(len(metadata.positions), -1), metadata)
            by_place = masks.view(num_reqs, num_drafts - 1, -1)
            hidden = torch.cat([hidden, by_place.transpose(0, 1)])
        logits = self._target.compute_logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        drafts = [self.sampler.choose(ctx, logits[i], i) for i in range(num_drafts)]
        self.sampler.write(ctx, drafts)

    @property
    def _kv(self) -> PagedKVCache:
        """Return the head's own cache."""
        assert self.buffers.kv is not None, "the runner allocates the KV that capabilities ask for"
        return self.buffers.kv


def save_block_parallel(path: str | Path, head: BlockParallelHead) -> None:
    """Save a head: its tensors by their names here, and its sizes in config.json."""
    write_head(path, {"model_type": _TYPE, **asdict(head.sizes)}, head.state_dict())


def load_block_parallel(path: str, hidden_size: int) -> BlockParallelHead:
    """Load a head for a target.

    Args:
        path: folder that `save_block_parallel` wrote.
        hidden_size: of the target.

    Raises:
        WeightsError: another kind of head, unknown or missing sizes or tensors, or other shapes.
    """
    config, tensors = read_head(path)
    kind = config.pop("model_type", None)
    if kind != _TYPE:
        raise WeightsError(
            f"head {path!r} is of type {kind!r}, drafter block_parallel takes {_TYPE!r}; give a "
            f"folder that save_block_parallel wrote"
        )
    known = [f.name for f in fields(BlockParallelSizes)]
    try:
        sizes = BlockParallelSizes(**config)
        with torch.device("meta"):
            head = BlockParallelHead(sizes)
    except Exception as error:  # transformers checks sizes by errors of its own
        reason = " ".join(str(error).split())[:200]
        raise WeightsError(
            f"head {path!r}: its config.json does not describe a head ({reason}); known sizes: "
            f"{', '.join(known)}"
        ) from error
    if sizes.hidden_size != hidden_size:
        raise WeightsError(
            f"head {path!r} was trained for hidden size {sizes.hidden_size}, the target has "
            f"{hidden_size}; give a head that was trained for this target"
        )
    wanted = head.state_dict()
    for name in sorted(set(wanted) ^ set(tensors)):
        what = "lacks the" if name in wanted else "holds an unknown"
        raise WeightsError(f"head {path!r} {what} tensor {name!r}; copy it again from its source")
    for name, tensor in tensors.items():
        check_shape(path, name, tensor, tuple(wanted[name].shape), "sizes in config.json")
    head.load_state_dict(tensors, assign=True)
    return head
