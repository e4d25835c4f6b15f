"""Attention of a training pass, for the very modules that serve: `runner.attention` is given it.

A batch is B sequences padded to L tokens, flattened to T = B * L. A head is trained on chains: one
starts at every position s of a sequence. Pass 0 runs over the text; pass j > 0 runs the inputs at
positions s + j of all chains at once, line s of it for the chain that starts at s. What serving
lets such an input see is

    keys 0..s of pass 0      the committed text: a causal mask over lines, the same in all passes
    key s of passes 1..j     the chain's own inputs at positions s + 1 .. s + j

so the second part is j scores a line, and no mask of more than L * L is ever thought of, let alone
stored. Both parts are joined by their log-sum-exp. The backward of the causal part is that of the
fused kernel, given the output and the log-sum-exp of the *whole*: its gradients are then exact, as
its probabilities are exp(score - logsumexp), and its row sums belong to the whole output.

Source: Li et al. 2025 (EAGLE-3, training-time test); Liu et al. 2023 (Ring Attention), for the way
in which parts are joined.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runner.attention import ATTENTION_BACKENDS
from specdec.errors import UnsupportedError

BACKEND = "training"


class TrainingKV:
    """Keys and values of the passes so far, by layer; it stands where serving has its paged cache.

    Args:
        num_sequences: B.
        keeps: later passes will look at what earlier ones wrote.
    """

    def __init__(self, num_sequences: int, keeps: bool = True) -> None:
        self.num_sequences, self.keeps = num_sequences, keeps
        self._passes: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def write(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Add a pass's keys and values, [T, num_kv_heads, head_size] each, gradients included."""
        pair = (self.by_sequence(key), self.by_sequence(value))
        if self.keeps:
            self._passes.setdefault(layer, []).append(pair)
        else:
            self._passes = {layer: [pair]}

    def passes(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each pass, [B, num_kv_heads, L, head_size]."""
        return self._passes[layer]

    def by_sequence(self, lines: Tensor) -> Tensor:
        """Return [T, heads, head_size] as [B, heads, L, head_size]."""
        return lines.unflatten(0, (self.num_sequences, -1)).transpose(1, 2)


@dataclass
class TrainingPass:
    """What stands for the attention metadata of a pass.

    Args:
        kv: of the layers that run.
        positions: [T] int64; what a line sees follows from lines, not from these.
    """

    kv: TrainingKV
    positions: Tensor
    backend: str = BACKEND
    slot_mapping: Tensor = field(init=False)
    shared: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Stand in for slots, which nothing reads."""
        self.slot_mapping = self.positions


def flat_positions(num_sequences: int, length: int, device: torch.device) -> Tensor:
    """Return [T] int64: the position of each line in its own sequence."""
    return torch.arange(length, device=device).repeat(num_sequences)


def training_attention(
    query: Tensor, metadata: TrainingPass, layer: int, scaling: float, window: int | None
) -> Tensor:
    """Attend over the lines of each sequence, and over the chain of each line.

    Args:
        query: [T, num_heads, head_size].
        metadata: of the pass.
        layer: of the cache.
        scaling: factor on the scores.
        window: sliding window of the layer.

    Returns:
        [T, num_heads, head_size].

    Raises:
        UnsupportedError: the window is shorter than a sequence.
    """
    kv = metadata.kv
    q = kv.by_sequence(query)
    if window is not None and window < q.shape[2]:
        raise UnsupportedError(
            f"a sliding window of {window} is not supported in training on sequences of "
            f"{q.shape[2]} tokens; set fit.max_seq_len<={window}"
        )
    pairs = [(_for_heads(k, q), _for_heads(v, q)) for k, v in kv.passes(layer)]
    (keys, values), chain = pairs[0], pairs[1:]
    if chain:
        flat = [part for pair in chain for part in pair]
        output: Any = ChainAttention.apply(q, keys, values, scaling, *flat)
    else:
        q = q.to(keys.dtype)
        output = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scaling)
    return output.transpose(1, 2).flatten(0, 1)


def _for_heads(lines: Tensor, query: Tensor) -> Tensor:
    """Return [B, num_heads, L, head_size]: a KV head for each query head, in the fused dtype."""
    groups = query.shape[1] // lines.shape[1]
    if lines.is_cuda and lines.dtype == torch.float32:
        lines = lines.bfloat16()  # a norm's float32 weights made it wide; the kernel is bf16's
    return lines if groups == 1 else lines.repeat_interleave(groups, 1)


class ChainAttention(torch.autograd.Function):
    """Causal attention joined with a few own keys a line; see the module's text."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        *chain: Tensor,
    ) -> Tensor:
        """Return [B, H, L, D].

        Args:
            ctx: for the backward.
            query, keys, values: [B, H, L, D]; keys and values are those of pass 0.
            scaling: factor on the scores.
            chain: keys and values of passes 1..j in turn, likewise.
        """
        query = query.to(keys.dtype)
        causal, causal_lse, extra = _fused_forward(query, keys, values, scaling)
        chain_keys, chain_values = torch.stack(chain[::2]), torch.stack(chain[1::2])
        scores = _line_products(query, chain_keys) * scaling  # [j, B, H, L]
        lse = torch.logsumexp(torch.cat([causal_lse[None].float(), scores]), 0)
        output = (causal_lse - lse).exp()[..., None] * causal.float()
        weights = (scores - lse).exp()
        for weight, value in zip(weights, chain_values, strict=True):
            output += weight[..., None] * value.float()
        output = output.to(causal.dtype)
        ctx.save_for_backward(query, keys, values, chain_keys, chain_values, output, lse, weights)
        ctx.scaling, ctx.extra = scaling, extra
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients of what `forward` was given."""
        query, keys, values, chain_keys, chain_values, output, lse, weights = ctx.saved_tensors
        grad = grad_outputs[0].to(output.dtype).contiguous()
        grad_query, grad_keys, grad_values = _fused_backward(
            grad, (query, keys, values), (output, lse), ctx.scaling, ctx.extra
        )
        delta = (grad.float() * output.float()).sum(-1)  # [B, H, L]
        grad_scores = weights * (_line_products(grad, chain_values) - delta) * ctx.scaling
        grad_scores = grad_scores.to(query.dtype)[..., None]
        grad_query = grad_query + (grad_scores * chain_keys).sum(0)
        grad_chain_keys = grad_scores * query
        grad_chain_values = weights.to(grad.dtype)[..., None] * grad
        chain = [p for pair in zip(grad_chain_keys, grad_chain_values, strict=True) for p in pair]
        return grad_query, grad_keys, grad_values, None, *chain


def _line_products(a: Tensor, b: Tensor) -> Tensor:
    """Return float32 [j, B, H, L]: lines of a, [B, H, L, D], times those of b, [j, B, H, L, D]."""
    return torch.stack([(a.float() * part.float()).sum(-1) for part in b])


def _fused_forward(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Run the fused causal kernel: output, log-sum-exp [B, H, L], and what its backward needs."""
    ops = torch.ops.aten
    if query.is_cuda:
        results = ops._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, True, scale=scaling
        )
        output, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = results
        return output, lse, (cum_q, cum_k, max_q, max_k, seed, offset)
    output, lse = ops._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, True, scale=scaling
    )
    return output, lse, ()


def _fused_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    scaling: float,
    extra: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward of the fused causal kernel for an output and a log-sum-exp of more keys."""
    ops = torch.ops.aten
    if grad.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = extra
        return ops._scaled_dot_product_flash_attention_backward(
            grad, *inputs, *results, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset,
            scale=scaling,
        )  # fmt: skip
    return ops._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *inputs, *results, 0.0, True, scale=scaling
    )


ATTENTION_BACKENDS[BACKEND] = training_attention
