"""Weights of decoder layers in 8-bit floating point, half the bytes that a step must read.

Each row of a weight has a scale, so that its largest entry becomes the largest number of the format
(e4m3: three bits of mantissa). Activations, norms, embedding and output head stay as they are; the
kernel turns a tile back into the activations' dtype on its way to the tensor cores, and multiplies
by the scales behind the sum.

Source: Micikevicius et al. 2022 (FP8 formats).
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton

_BLOCK = 2048
_OLDEST = (8, 9)  # compute capability that Triton compiles these numbers for
FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# Tokenized where there is a tokenizer, to say what the rounding does to a text.
SAMPLE_TEXT = (
    "A lighthouse keeper wrote down the weather every evening for forty years. Most entries are "
    "short: wind from the west, rain after noon, two ships before dark. In the winter of 1911 he "
    "noted that the barometer fell faster than he had ever seen, and that the gulls had left the "
    "day before. When his notebooks were found, a student added up the numbers and asked a plain "
    "question: how often was tomorrow like today? The answer was four times out of five. A rule "
    "that says nothing but 'the same again' is hard to beat, and every forecast should be measured "
    "against it before anybody believes it."
)


@dataclass(frozen=True)
class WeightEffect:
    """What rounding the weights did to the law of the next token, over a text.

    Args:
        num_tokens: positions compared.
        top1_agreement: share of positions where the likeliest token stayed.
        mean_kl: nats, of the rounded law from the one before.
        relative_error: of the logits, in norm.
    """

    num_tokens: int
    top1_agreement: float
    mean_kl: float
    relative_error: float


def quantize_rows(
    weight: Tensor, of_ranks: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Round a weight to 8 bits.

    Args:
        weight: [N, K].
        of_ranks: gives the largest of the ranks' numbers [N] float32, where each rank has a part of
            every row; None where the rows are whole.

    Returns:
        Values [N, K] float8_e4m3fn, and scales [N] float32: row n is values[n] * scales[n].
    """
    largest = weight.abs().amax(1).float()
    if of_ranks is not None:
        largest = of_ranks(largest)
    scales = torch.where(largest == 0, 1.0, largest / _LARGEST)  # of a row with NaN: NaN
    values = (weight.float() / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(FP8)
    return values, scales


@triton.jit
def _dequantize_rows_kernel(
    weight_ptr,  # [N, K], out
    values_ptr,  # [N, K] float8_e4m3fn
    scales_ptr,  # [N] float32
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < K
    values = tl.load(values_ptr + row * K + k, mask=mask)
    weight = values.to(tl.float16).to(tl.float32) * tl.load(scales_ptr + row)
    tl.store(weight_ptr + row * K + k, weight.to(weight_ptr.dtype.element_ty), mask=mask)


def dequantize_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight [N, K] of its rounded values.

    Args:
        values: [N, K] float8_e4m3fn, contiguous.
        scales: [N] float32.
        dtype: of the weight.
    """
    if not use_triton(values) or not _compiles(values):
        return dequantize_rows_ref(values, scales, dtype)
    assert values.is_contiguous(), f"strides {values.stride()}"
    num_rows, columns = values.shape
    weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    grid = (num_rows, triton.cdiv(columns, _BLOCK))
    _dequantize_rows_kernel[grid](weight, values, scales, K=columns, BLOCK=_BLOCK)
    return weight


def dequantize_rows_ref(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Torch twin of `dequantize_rows`."""
    return (values.to(torch.float32) * scales[:, None]).to(dtype)


def _compiles(values: Tensor) -> bool:
    """Return whether the kernel can be built for where a tensor lies."""
    return not values.is_cuda or torch.cuda.get_device_capability(values.device) >= _OLDEST


def compare_logits(before: Tensor, after: Tensor) -> WeightEffect:
    """Compare the logits [T, V] float32 of a text before and after rounding."""
    old, new = before.log_softmax(1), after.log_softmax(1)
    kl = (old.exp() * (old - new)).sum(1).mean()
    return WeightEffect(
        num_tokens=len(before),
        top1_agreement=float((before.argmax(1) == after.argmax(1)).float().mean()),
        mean_kl=float(kl),
        relative_error=float((after - before).norm() / before.norm()),
    )
