"""Kernels of the fused target against their twins: odd sizes, poison around what is read."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runner.models.fp8 import FP8, dequantize_rows, dequantize_rows_ref, quantize_rows
from runner.models.glu import silu_mul, silu_mul_ref
from runner.models.linear import (
    glu_linear,
    glu_linear_ref,
    split_linear,
    split_linear_ref,
    top1_linear,
    top1_linear_ref,
)
from runner.models.linear_launch import LinearLaunch
from runner.models.norm import add_rms_norm, add_rms_norm_ref
from runner.models.rope import HeadNorms, HeadShape, turn_heads, turn_heads_ref

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

F32, BF16 = torch.float32, torch.bfloat16
# Relative difference of norms; sums are taken in another order. The interpreter cuts off what does
# not fit bfloat16 where hardware rounds, up to three times in a row.
TOLERANCE = {F32: 1e-5, BF16: 6e-3 if torch.cuda.is_available() else 1.5e-2}


def rows(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random rows inside a wider tensor of NaN, so that a wrong stride or mask shows."""
    wide = torch.full((count + 2, width + 16), float("nan"), dtype=dtype, device=device)
    wide[1 : count + 1, :width] = torch.randn(count, width).to(device, dtype)
    return wide[1 : count + 1, :width]


def assert_close(given: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    given, expected = given.float().cpu(), expected.float().cpu()
    assert given.shape == expected.shape
    assert bool(torch.isfinite(given).all()), "a cell was not written, or read from poison"
    assert float((given - expected).norm() / expected.norm()) < TOLERANCE[dtype]


LINEAR_CASES = {
    "one token": (1, 48, 64, LinearLaunch(16, 16, 32)),
    "odd rows": (5, 45, 64, LinearLaunch(16, 16, 32)),
    "odd columns": (3, 32, 72, LinearLaunch(16, 16, 32)),
    "splits": (7, 32, 128, LinearLaunch(16, 16, 32, splits=4)),
    "uneven splits": (7, 40, 104, LinearLaunch(16, 16, 32, splits=3)),
    "a split without columns": (2, 16, 48, LinearLaunch(16, 16, 16, splits=4)),
    "several tiles of tokens": (37, 32, 64, LinearLaunch(16, 16, 32)),
    "more tokens": (35, 24, 40, LinearLaunch(32, 16, 32, more_t=16)),
    "more tokens than both": (51, 24, 40, LinearLaunch(32, 16, 32, more_t=16)),
}
# Sizes in bytes that the tensor memory accelerator takes: multiples of 16.
TILED_CASES = {
    "tiled, one token": (1, 48, 64, LinearLaunch(16, 16, 32, tiled=True)),
    "tiled, odd rows": (5, 40, 64, LinearLaunch(16, 16, 32, tiled=True)),
    "tiled, odd columns": (3, 32, 72, LinearLaunch(16, 16, 32, tiled=True)),
    "tiled, several tiles": (37, 32, 64, LinearLaunch(16, 16, 32, tiled=True)),
    "tiled, more tokens": (51, 24, 40, LinearLaunch(32, 16, 32, more_t=16, tiled=True)),
    "tiled, as on Hopper": (77, 136, 192, LinearLaunch(64, 64, 64, more_t=16, tiled=True)),
    "tiled, early": (21, 72, 128, LinearLaunch(16, 64, 64, early=True, tiled=True)),
    "tiled, uneven splits": (7, 40, 104, LinearLaunch(16, 16, 32, splits=3, tiled=True)),
    "tiled, split without columns": (2, 16, 48, LinearLaunch(16, 16, 16, splits=4, tiled=True)),
}
ALL_CASES = LINEAR_CASES | TILED_CASES


@pytest.mark.parametrize("name", ALL_CASES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_split_linear(device: torch.device, name: str, dtype: torch.dtype, has_bias: bool) -> None:
    num_tokens, num_rows, columns, launch = ALL_CASES[name]
    x = rows(num_tokens, columns, dtype, device)
    weight = torch.randn(num_rows, columns).to(device, dtype)
    bias = torch.randn(num_rows).to(device, dtype) if has_bias else None
    given = split_linear(x, weight, bias, launch, F32)
    expected = split_linear_ref(x, weight, bias, launch, F32)
    assert given.shape == (launch.splits, num_tokens, num_rows)
    assert_close(given.sum(0), expected.sum(0), dtype)
    product = x.cpu().double() @ weight.cpu().double().T
    assert_close(given.sum(0), product if bias is None else product + bias.cpu(), dtype)
    for part, expected_part in zip(given, expected, strict=True):
        assert float((part - expected_part).abs().max()) < 1e-2


@pytest.mark.parametrize("name", [name for name in ALL_CASES if "split" not in name])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_glu_linear(device: torch.device, name: str, dtype: torch.dtype) -> None:
    num_tokens, num_rows, columns, launch = ALL_CASES[name]
    x = rows(num_tokens, columns, dtype, device)
    weight = torch.randn(2 * num_rows, columns).to(device, dtype) * 0.2
    given = glu_linear(x, weight, launch)
    assert given.dtype == dtype
    assert_close(given, glu_linear_ref(x, weight, launch), dtype)


@pytest.mark.parametrize(
    "name", ["one token", "odd rows", "odd columns", "several tiles of tokens"]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("maps", [False, True])
def test_top1_linear(device: torch.device, name: str, dtype: torch.dtype, maps: bool) -> None:
    num_tokens, num_rows, columns, launch = LINEAR_CASES[name]
    # Small integers: sums are exact in any order, and several rows share the largest.
    x = torch.randint(-2, 3, (num_tokens, columns)).to(device, dtype)
    weight = torch.randint(-2, 3, (num_rows, columns)).to(device, dtype)
    weight[num_rows // 2 :] = weight[: num_rows - num_rows // 2].clone()
    ids = torch.randperm(1000)[:num_rows].to(device) if maps else None
    values = torch.full((2, num_tokens), float("nan"), device=device)
    expected = top1_linear_ref(x, weight, launch, ids, values[0])
    assert torch.equal(top1_linear(x, weight, launch, ids), expected)
    assert torch.equal(top1_linear(x, weight, launch, ids, values[1]), expected)
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], (x.float() @ weight.float().T).to(dtype).amax(1).float())


@pytest.mark.parametrize("name", LINEAR_CASES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_linears_over_eight_bit_weights(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    num_tokens, num_rows, columns, launch = LINEAR_CASES[name]
    x = rows(num_tokens, columns, dtype, device)
    values, scales = quantize_rows(torch.randn(2 * num_rows, columns).to(device))
    weight, own = values[:num_rows].contiguous(), scales[:num_rows].contiguous()
    given = split_linear(x, weight, None, launch, F32, own)
    assert_close(given.sum(0), split_linear_ref(x, weight, None, launch, F32, own).sum(0), dtype)
    wide = dequantize_rows(weight, own, torch.float64)
    assert_close(given.sum(0), x.cpu().double() @ wide.cpu().T, dtype)
    if launch.splits == 1:
        scales *= 0.2
        gated = glu_linear(x, values, launch, scales)
        assert_close(gated, glu_linear_ref(x, values, launch, scales), dtype)


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("columns", [1, 999, 2048, 4100])
def test_dequantize_rows(device: torch.device, dtype: torch.dtype, columns: int) -> None:
    # All numbers of the format over rows of very different sizes. The interpreter cuts off what
    # does not fit bfloat16, and reads the format's NaN as a number.
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = numbers[~numbers.float().isnan()].view(torch.uint8)
    values = numbers.repeat(7 * columns)[: 7 * columns].view(FP8).reshape(7, columns).to(device)
    scales = torch.logspace(-3, 2, 7).to(device)
    given = dequantize_rows(values, scales, dtype)
    expected = dequantize_rows_ref(values.cpu(), scales.cpu(), dtype)
    rtol = 2.0**-7 if dtype == BF16 and device.type == "cpu" else 0
    torch.testing.assert_close(given.cpu(), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 40), (5, 1024), (3, 1300)])
def test_silu_mul(device: torch.device, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    packed = torch.randn(num_tokens, 2 * width).to(device, dtype)
    assert_close(silu_mul(packed), silu_mul_ref(packed), dtype)


NORM_CASES: dict[str, dict[str, Any]] = {
    "norm alone": {},
    "parts": {"parts": 3},
    "residual": {"residual": True},
    "parts and residual, sum kept": {"parts": 2, "residual": True, "keeps": "new"},
    "sum in place": {"residual": True, "keeps": "in place"},
    "rows of a table": {"gathers": True, "keeps": "new"},
}


@pytest.mark.parametrize("name", NORM_CASES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [24, 576])
def test_add_rms_norm(device: torch.device, name: str, dtype: torch.dtype, width: int) -> None:
    case, num_tokens = NORM_CASES[name], 5
    num_parts = case.get("parts", 1)
    parts = torch.randn(num_parts, num_tokens, width).to(device, F32 if num_parts > 1 else dtype)
    ids = None
    if case.get("gathers"):
        parts = torch.randn(11, width).to(device, dtype)
        ids = torch.randint(11, (num_tokens,)).to(device)
    residual = rows(num_tokens, width, dtype, device) if case.get("residual") else None
    weight = torch.randn(width).to(device, dtype)
    results = []
    for norm in (add_rms_norm, add_rms_norm_ref):
        own = None if residual is None else rows(num_tokens, width, dtype, device).copy_(residual)
        normed = rows(num_tokens, width, dtype, device).fill_(float("nan"))
        keeps = case.get("keeps")
        kept = own if keeps == "in place" else torch.full_like(normed, float("nan"))
        kept = kept if keeps else None
        norm(parts, own, weight, 1e-5, normed, kept, ids)
        results.append((normed, kept))
    (normed, kept), (normed_ref, kept_ref) = results
    assert_close(normed, normed_ref, dtype)
    if kept is not None and kept_ref is not None:
        assert_close(kept, kept_ref, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_size", [16, 24])
def test_turn_heads(
    device: torch.device, dtype: torch.dtype, num_parts: int, has_norms: bool, head_size: int
) -> None:
    shape, num_tokens, num_slots = HeadShape(6, 2, head_size), 5, 12
    parts = torch.randn(num_parts, num_tokens, shape.packed_width)
    parts = parts.to(device, F32 if num_parts > 1 else dtype)
    turns = torch.randn(40, 2, head_size // 2).to(device, dtype)
    positions = torch.tensor([7, 8, 0, 39, 50]).to(device)  # 40 and above: behind the table
    slots = torch.tensor([4, 0, -1, 9, 10]).to(device)
    norms = None
    if has_norms:
        first, second = torch.randn(2, head_size).to(device, dtype)
        norms = HeadNorms(first, second, 1e-5)
    results = []
    for turn in (turn_heads, turn_heads_ref):
        caches = [
            torch.full((num_slots, 2, head_size), float("nan"), dtype=dtype, device=device)
            for _ in range(2)
        ]
        query = turn(parts, shape, turns, positions, norms, slots, *caches)
        results.append((query, *caches))
    written = [4, 0, 9, 10]
    for i, (given, expected) in enumerate(zip(*results, strict=True)):
        if i == 0:
            assert_close(given, expected, dtype)
            continue
        assert_close(given[written], expected[written], dtype)
        others = [slot for slot in range(num_slots - 1) if slot not in written]
        assert bool(given[others].isnan().all()), "a slot of no token was written"
