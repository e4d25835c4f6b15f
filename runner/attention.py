"""Paged attention of a transformers model, registered under `specdec_paged`.

A pass's tokens come flattened as one sequence; `AttentionMetadata` says which tokens belong to
which request and where their KV lies.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from runner.attention_metadata import AttentionMetadata, single_request_metadata
from runner.paged_attention import paged_attention_forward
from specdec.errors import UnsupportedError

__all__ = [
    "ATTENTION_BACKENDS",
    "ATTENTION_NAME",
    "AttentionMetadata",
    "paged_attention",
    "single_request_metadata",
]

ATTENTION_NAME = "specdec_paged"

# What computes the output, by name: (query [T, num_heads, head_size], metadata, layer, scaling,
# window) -> output like query, after the layer's KV was written.
ATTENTION_BACKENDS: dict[str, Callable[..., Tensor]] = {"paged": paged_attention_forward}


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attn_metadata: AttentionMetadata | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write a layer's KV and attend over the pages of each request.

    Args:
        module: the attention module; `layer_idx` selects the cache's layer.
        query: [1, num_heads, T, head_size].
        key: [1, num_kv_heads, T, head_size].
        value: like `key`.
        attention_mask: must be None: what a query sees is in the metadata.
        scaling: factor on the scores, None = 1 / sqrt(head_size).
        sliding_window: keys seen by a query, None = all.
        attn_metadata: of this pass; handed through the model's forward.

    Returns:
        Output [1, T, num_heads, head_size], and no attention weights.
    """
    assert attn_metadata is not None, "specdec_paged needs attn_metadata; run it by the runner"
    assert attention_mask is None, "a mask was built, which waits for the device"
    refused = [
        name for name in ("s_aux", "softcap", "position_bias") if kwargs.get(name) is not None
    ]
    if refused:
        raise UnsupportedError(f"attention option {refused[0]} of this model is not supported")
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    attn_metadata.kv.write(
        layer, attn_metadata.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    forward = ATTENTION_BACKENDS[attn_metadata.backend]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    output = forward(query[0].transpose(0, 1), attn_metadata, layer, scaling, sliding_window)
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
