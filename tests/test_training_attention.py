"""Attention of chains against dense attention with the mask written out, gradients included."""

from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.training import attention
from experiments.training.attention import TrainingKV, TrainingPass, training_attention
from specdec.errors import UnsupportedError

B, L, HEADS, KV_HEADS, SIZE, PASSES = 2, 9, 4, 2, 24, 4
SCALING = 0.3


def inputs(seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return query, key and value of every pass."""
    generator = torch.Generator().manual_seed(seed)

    def lines(heads: int) -> Tensor:
        return torch.randn(B * L, heads, SIZE, generator=generator).requires_grad_()

    return [(lines(HEADS), lines(KV_HEADS), lines(KV_HEADS)) for _ in range(PASSES)]


def own(passes: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    kv, outputs = TrainingKV(B), []
    step = TrainingPass(kv, torch.arange(L).repeat(B))
    for query, key, value in passes:
        kv.write(0, step.slot_mapping, key, value)
        outputs.append(training_attention(query, step, 0, SCALING, None))
    return outputs


def dense(passes: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Attend each query to a list of keys that is put together for it alone."""
    outputs = []
    for j, (query, _, _) in enumerate(passes):
        rows = []
        for t in range(B * L):
            first = t - t % L
            seen = [(0, i) for i in range(first, t + 1)] + [(m, t) for m in range(1, j + 1)]
            heads = []
            for head in range(HEADS):
                shared = head * KV_HEADS // HEADS
                keys = torch.stack([passes[m][1][i, shared] for m, i in seen])
                values = torch.stack([passes[m][2][i, shared] for m, i in seen])
                heads.append((keys @ query[t, head] * SCALING).softmax(0) @ values)
            rows.append(torch.stack(heads))
        outputs.append(torch.stack(rows))
    return outputs


def gradients(outputs: list[Tensor], passes: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    total = sum((o * torch.randn(o.shape, generator=generator)).sum() for o in outputs)
    flat = [part for triple in passes for part in triple]
    return list(torch.autograd.grad(total, flat))  # pyright: ignore


def test_output_and_gradients_are_those_of_dense_attention() -> None:
    passes = inputs()
    found, expected = own(passes), dense(passes)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients(found, passes), gradients(expected, passes), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_gradients_of_the_causal_part_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own output in place of the whole's, in the backward.
    right: Any = attention._fused_backward

    def wrong(grad: Any, parts: Any, results: Any, scaling: float, extra: Any) -> Any:
        _, lse, _ = attention._fused_forward(*parts, scaling)
        return right(grad, parts, (results[0], lse), scaling, extra)

    passes = inputs()
    expected = gradients(dense(passes), passes)
    monkeypatch.setattr(attention, "_fused_backward", wrong)
    found = gradients(own(passes), passes)
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) > 0.05


def test_a_chain_sees_no_later_line() -> None:
    passes = inputs()
    before = own(passes)
    with torch.no_grad():
        for _, key, value in passes:
            key[L - 1] += 3.0  # the last line of the first sequence
            value[L - 1] += 3.0
    after = own(passes)
    for a, b in zip(before, after, strict=True):
        kept = [t for t in range(B * L) if t != L - 1]
        torch.testing.assert_close(a[kept], b[kept], rtol=0, atol=0)
        assert float((a[L - 1] - b[L - 1]).detach().abs().max()) > 0.1


def test_a_pass_that_is_looked_at_by_none_is_not_kept() -> None:
    kv, (query, key, value) = TrainingKV(B, keeps=False), inputs()[0]
    for layer in range(3):
        kv.write(layer, torch.arange(B * L), key, value)
        training_attention(query, TrainingPass(kv, torch.arange(B * L)), layer, SCALING, None)
    with pytest.raises(KeyError):
        kv.passes(0)


def test_a_window_shorter_than_a_sequence_is_refused() -> None:
    kv, (query, key, value) = TrainingKV(B), inputs()[0]
    kv.write(0, torch.arange(B * L), key, value)
    step = TrainingPass(kv, torch.arange(B * L))
    training_attention(query, step, 0, SCALING, L)
    with pytest.raises(UnsupportedError, match="max_seq_len<=4"):
        training_attention(query, step, 0, SCALING, 4)
