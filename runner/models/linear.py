"""Linear layers for few rows: what a step verifies is a handful of tokens against all weights.

Such a layer takes as long as its weight takes to read, so the kernel streams weight tiles through
the tensor cores as their *left* operand (64 or more rows of the weight; the tokens are the narrow
side), and splits the inner dimension over programs until the device is full. Splits are not added
up here: the kernel behind reads `parts` [S, T, N] and adds them while it does its own work.

Before it waits for its input, a program asks for the first of its weights: they travel to the L2
cache while the kernel ahead still runs (`runner.pdl`).
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of the compiler.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from runner.models.fp8 import FP8
from runner.models.linear_launch import LinearLaunch, LinearShape
from runner.models.linear_tiled import launch_tiled
from runner.pdl import launch_options, let_next_begin, wait_for_predecessor


@triton.jit
def _prefetch_rows(ptrs, BYTES: tl.constexpr):
    """Ask for BYTES behind each address to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [ptrs, tl.full(ptrs.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_x(x_ptr, x_stride, t, num_tokens, k, k_end, EVEN_K: tl.constexpr):
    """Load [tokens, columns] of the input; what is not there reads as zero."""
    mask = (t < num_tokens)[:, None]
    if not EVEN_K:
        mask = mask & (k < k_end)[None, :]
    return tl.load(x_ptr + t.to(tl.int64)[:, None] * x_stride + k[None, :], mask=mask, other=0.0)


@triton.jit
def _load_w(w_ptr, n, n_end, k, k_end, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Load [rows, columns] of the weight, each of which is read by one program alone."""
    ptrs = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(ptrs, eviction_policy="evict_first")
    mask = (n < n_end)[:, None] & (k < k_end)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _widen(w, DTYPE: tl.constexpr):
    """Turn 8-bit weights into the dtype of the input, which holds all their numbers.

    By way of float32: the one instruction from float16 to bfloat16 is of low rate.
    """
    return w.to(tl.float16).to(tl.float32).to(DTYPE)


@triton.jit
def _store(out_ptr, acc, n, n_end, t, num_tokens, line, N: tl.constexpr):
    """Store acc [rows of the weight, tokens] as [tokens, rows] from `line` on."""
    offsets = (line + t).to(tl.int64)[None, :] * N + n[:, None]
    mask = (n < n_end)[:, None] & (t < num_tokens)[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_top(top_ptr, index_ptr, acc, n, t, num_tokens, DTYPE: tl.constexpr, N: tl.constexpr):
    """Store the largest of a program's rows for each token, and the first row that has it."""
    value = tl.where((n < N)[:, None], acc.to(DTYPE).to(tl.float32), float("-inf"))
    top = tl.max(value, 0)
    index = tl.min(tl.where(value == top[None, :], n[:, None], N), 0)
    line = tl.program_id(0) * num_tokens + t
    tl.store(top_ptr + line, top, mask=t < num_tokens)
    tl.store(index_ptr + line, index, mask=t < num_tokens)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    out_ptr,  # [SPLITS, T, N]; with GLU [T, N]; with TOP [tiles, T] float32, largest of the tile
    index_ptr,  # [tiles, T] int32, written with TOP: row of the weight that gave it
    x_ptr,  # [T, K]
    x_stride,
    w_ptr,  # [N, K]; with GLU [2 * N, K], the gate's rows first
    bias_ptr,  # [N], read where HAS_BIAS
    scale_ptr,  # [N] float32, with GLU [2 * N], read where SCALED: factors on the weight's rows
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    GLU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    UPCAST: tl.constexpr,  # products of float32 copies, which are the same numbers
    BLOCK_T: tl.constexpr,
    MORE_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SPLIT_STEPS: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    EVEN_K: tl.constexpr = K % BLOCK_K == 0 and STEPS % SPLITS == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    t = tl.program_id(2) * (BLOCK_T + MORE_T) + tl.arange(0, BLOCK_T)
    k_begin = split * SPLIT_STEPS * BLOCK_K
    k_end = tl.minimum(k_begin + SPLIT_STEPS * BLOCK_K, K)
    if PDL and PREFETCH > 0:
        rows = tl.minimum(n, N - 1).to(tl.int64)
        _prefetch_rows(w_ptr + rows * K + k_begin, PREFETCH)
        if GLU:
            _prefetch_rows(w_ptr + (N + rows) * K + k_begin, PREFETCH)
    if EARLY:
        let_next_begin(PDL)
    wait_for_predecessor(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    up = acc
    if MORE_T:
        t2 = tl.program_id(2) * (BLOCK_T + MORE_T) + BLOCK_T + tl.arange(0, MORE_T)
        acc2 = tl.zeros([BLOCK_N, MORE_T], dtype=tl.float32)
        up2 = acc2
    for step in range(0, SPLIT_STEPS):
        k = k_begin + step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = _load_w(w_ptr, n, N, k, k_end, K, EVEN_N, EVEN_K)
        x = _load_x(x_ptr, x_stride, t, num_tokens, k, k_end, EVEN_K)
        if MORE_T:
            x2 = _load_x(x_ptr, x_stride, t2, num_tokens, k, k_end, EVEN_K)
        if SCALED:
            w = _widen(w, x.dtype)
        if UPCAST:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GLU:
            w_up = _load_w(w_ptr + N * K, n, N, k, k_end, K, EVEN_N, EVEN_K)
            if SCALED:
                w_up = _widen(w_up, x.dtype)
            if UPCAST:
                w_up = w_up.to(tl.float32)
            up = tl.dot(w_up, tl.trans(x), up, input_precision="ieee")
        if MORE_T:
            if UPCAST:
                x2 = x2.to(tl.float32)
            acc2 = tl.dot(w, tl.trans(x2), acc2, input_precision="ieee")
            if GLU:
                up2 = tl.dot(w_up, tl.trans(x2), up2, input_precision="ieee")
    if not EARLY:
        let_next_begin(PDL)
    if SCALED:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
        acc *= scale
        if MORE_T:
            acc2 *= scale
        if GLU:
            up_scale = tl.load(scale_ptr + N + n, mask=n < N, other=0.0)[:, None]
            up *= up_scale
            if MORE_T:
                up2 *= up_scale
    if HAS_BIAS:  # once, however many splits there are
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        bias = tl.where(split == 0, bias, 0.0)[:, None]
        acc += bias
        if MORE_T:
            acc2 += bias
    if GLU:
        acc = acc * tl.sigmoid(acc) * up
        if MORE_T:
            acc2 = acc2 * tl.sigmoid(acc2) * up2
    if TOP:
        _store_top(out_ptr, index_ptr, acc, n, t, num_tokens, x_ptr.dtype.element_ty, N)
        return
    line = split * num_tokens
    _store(out_ptr, acc, n, N, t, num_tokens, line, N)
    if MORE_T:
        _store(out_ptr, acc2, n, N, t2, num_tokens, line, N)


def split_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    launch: LinearLaunch,
    out_dtype: torch.dtype,
    scales: Tensor | None = None,
) -> Tensor:
    """Multiply by a weight in parts along the inner dimension, in one launch.

    Args:
        x: [T, K], dense in the last dimension.
        weight: [N, K], contiguous; float8_e4m3fn with `scales`.
        bias: [N], added to the first part.
        launch: how.
        out_dtype: of the parts.
        scales: [N] float32, factors on the weight's rows.

    Returns:
        Parts [launch.splits, T, N], whose sum is x @ weight.T + bias.
    """
    if not use_triton(x):
        return split_linear_ref(x, weight, bias, launch, out_dtype, scales)
    out = torch.empty((launch.splits, len(x), weight.shape[0]), dtype=out_dtype, device=x.device)
    if launch.tiled:
        assert scales is None, "8-bit weights are not computed by tiles"
        launch_tiled(out, x, weight, bias, launch, glu=False)
        return out
    _launch(out, None, x, weight, (bias, scales), launch, glu=False)
    return out


def split_linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    launch: LinearLaunch,
    out_dtype: torch.dtype,
    scales: Tensor | None = None,
) -> Tensor:
    """Torch twin of `split_linear`."""
    steps = -(-weight.shape[1] // launch.block_k)
    width = -(-steps // launch.splits) * launch.block_k
    parts = [
        x[:, i * width : (i + 1) * width].float() @ weight[:, i * width : (i + 1) * width].float().T
        for i in range(launch.splits)
    ]
    if scales is not None:
        parts = [part * scales for part in parts]
    if bias is not None:
        parts[0] = parts[0] + bias.float()
    return torch.stack(parts).to(out_dtype)


def glu_linear(
    x: Tensor, weight: Tensor, launch: LinearLaunch, scales: Tensor | None = None
) -> Tensor:
    """Multiply by gate and up weights, and gate: SiLU(x @ gate.T) * (x @ up.T), in one launch.

    Args:
        x: [T, K], dense in the last dimension.
        weight: [2 * N, K], contiguous, the gate's rows first; float8_e4m3fn with `scales`.
        launch: how; `splits` is 1.
        scales: [2 * N] float32, factors on the weight's rows.

    Returns:
        [T, N] in the dtype of `x`.
    """
    assert launch.splits == 1, "a product of two sums is not the sum of products"
    if not use_triton(x):
        return glu_linear_ref(x, weight, launch, scales)
    out = torch.empty((len(x), weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    if launch.tiled:
        assert scales is None, "8-bit weights are not computed by tiles"
        launch_tiled(out[None], x, weight, None, launch, glu=True)
        return out
    _launch(out, None, x, weight, (None, scales), launch, glu=True)
    return out


def glu_linear_ref(
    x: Tensor, weight: Tensor, launch: LinearLaunch, scales: Tensor | None = None
) -> Tensor:
    """Torch twin of `glu_linear`."""
    packed = x.float() @ weight.float().T
    gate, up = (packed if scales is None else packed * scales).chunk(2, dim=1)
    return (F.silu(gate) * up).to(x.dtype)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _reduce_top_kernel(
    tokens_ptr,  # [T] int64, out
    values_ptr,  # [T] float32, out where VALUES
    top_ptr,  # [tiles, T] float32
    index_ptr,  # [tiles, T] int32
    ids_ptr,  # [N] int64, read where MAPS
    num_tokens,
    num_tiles,
    N: tl.constexpr,
    MAPS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait_for_predecessor(PDL)
    token = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    mask, line = tile < num_tiles, tile * num_tokens + token
    top = tl.load(top_ptr + line, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + line, mask=mask, other=N)
    largest = tl.max(top, 0)
    first = tl.min(tl.where(top == largest, index, N), 0)
    if VALUES:
        tl.store(values_ptr + token, largest)
    chosen = tl.minimum(first, N - 1).to(tl.int64)  # with nothing but NaN there is no largest
    if MAPS:
        chosen = tl.load(ids_ptr + chosen)
    tl.store(tokens_ptr + token, chosen)


def top1_linear(
    x: Tensor,
    weight: Tensor,
    launch: LinearLaunch,
    ids: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """Return which output of a layer is the largest, in two launches that write no output.

    Args:
        x: [T, K], dense in the last dimension.
        weight: [N, K], contiguous.
        launch: how; without splits and further tokens.
        ids: [N] int64 that stand for the rows, None = their places.
        values: [T] float32, out: the largest outputs.

    Returns:
        [T] int64. Outputs are compared in the dtype of `x`; among equal ones the first is taken.
    """
    assert launch.splits == 1, "the largest of a sum is not the sum of the largest"
    assert launch.more_t == 0, "one tile of tokens a program"
    assert not launch.tiled, "whole outputs are written by tiles"
    if not use_triton(x):
        return top1_linear_ref(x, weight, launch, ids, values)
    num_tokens, num_rows = len(x), len(weight)
    num_tiles = triton.cdiv(num_rows, launch.block_n)
    top = torch.empty((num_tiles, num_tokens), dtype=torch.float32, device=x.device)
    index = torch.empty((num_tiles, num_tokens), dtype=torch.int32, device=x.device)
    tokens = torch.empty(num_tokens, dtype=torch.int64, device=x.device)
    _launch(top, index, x, weight, (None, None), launch, glu=False)
    _reduce_top_kernel[(num_tokens,)](
        tokens,
        top if values is None else values,
        top,
        index,
        tokens if ids is None else ids,
        num_tokens,
        num_tiles,
        N=num_rows,
        MAPS=ids is not None,
        VALUES=values is not None,
        BLOCK=triton.next_power_of_2(num_tiles),
        **launch_options(x),
    )
    return tokens


def top1_linear_ref(
    x: Tensor,
    weight: Tensor,
    launch: LinearLaunch,
    ids: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """Torch twin of `top1_linear`."""
    outputs = (x.float() @ weight.float().T).to(x.dtype)
    chosen = outputs.argmax(1)
    if values is not None:
        values.copy_(outputs.gather(1, chosen[:, None])[:, 0])
    return chosen if ids is None else ids[chosen]


def compile_linear(shape: LinearShape, launch: LinearLaunch, dtype: torch.dtype) -> None:
    """Compile a launch for the current device into Triton's cache.

    A tiled one also runs, over numbers that mean nothing: descriptors are made of tensors alone.

    Args:
        shape: of the layer.
        launch: how.
        dtype: of the input, and of a wide weight.
    """
    out_dtype = torch.float32 if launch.splits > 1 else dtype
    if launch.tiled:
        weight = torch.empty((shape.weight_rows, shape.columns), dtype=dtype, device="cuda")
        x = torch.empty((launch.block_t, shape.columns), dtype=dtype, device="cuda")
        out = torch.empty((launch.splits, len(x), shape.rows), dtype=out_dtype, device="cuda")
        launch_tiled(out, x, weight, None, launch, shape.glu)
        torch.cuda.synchronize()  # what fails here is this launch, not a later one
        return
    like = torch.empty(0, dtype=dtype, device="cuda")
    constants = _constants(shape.rows, shape.columns, launch, shape.glu, like)
    constants |= {"HAS_BIAS": False, "SCALED": shape.eight_bit, "TOP": False}
    weight, scale = (FP8, torch.float32) if shape.eight_bit else (dtype, dtype)
    kinds = (out_dtype, torch.int32, dtype, shape.columns, weight, dtype, scale, launch.block_t)
    _linear_kernel.warmup(*kinds, **constants, grid=(1, 1, 1))


def _constants(
    rows: int, columns: int, launch: LinearLaunch, glu: bool, like: Tensor
) -> dict[str, Any]:
    """Return what is fixed when the kernel is compiled."""
    return {
        "N": rows,
        "K": columns,
        "SPLITS": launch.splits,
        "GLU": glu,
        # The interpreter multiplies the bits of bfloat16 as integers.
        "UPCAST": not like.is_cuda and like.dtype == torch.bfloat16,
        "BLOCK_T": launch.block_t,
        "MORE_T": launch.more_t,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": launch.block_k,
        "PREFETCH": launch.prefetch,
        "EARLY": launch.early,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        **launch_options(like),
    }


def _launch(
    out: Tensor,
    index: Tensor | None,
    x: Tensor,
    weight: Tensor,
    by_row: tuple[Tensor | None, Tensor | None],
    launch: LinearLaunch,
    glu: bool,
) -> None:
    """Launch the kernel; `by_row` are bias and scales."""
    bias, scales = by_row
    num_rows, width = weight.shape
    num_rows = num_rows // 2 if glu else num_rows
    assert x.stride(1) == 1, f"strides {x.stride()}"
    assert weight.is_contiguous(), f"strides {weight.stride()}"
    block_t = launch.block_t + launch.more_t
    grid = (triton.cdiv(num_rows, launch.block_n), launch.splits, triton.cdiv(len(x), block_t))
    _linear_kernel[grid](
        out,
        out if index is None else index,
        x,
        x.stride(0),
        weight,
        x if bias is None else bias,
        x if scales is None else scales,
        len(x),
        HAS_BIAS=bias is not None,
        SCALED=scales is not None,
        TOP=index is not None,
        **_constants(num_rows, width, launch, glu, x),
    )
