"""The linear layers of `runner.models.linear` for more tokens: tiles moved by hardware.

With some tens of tokens a layer is bound by what its multiprocessors can fetch and multiply, no
longer by memory alone. Here whole tiles of weight and input are moved by the tensor memory
accelerator (Hopper and later): a program names a tile, and neither addresses nor masks take
registers, which leaves them to larger sums. What lies behind the end of a tensor reads as zero and
is not written.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of the compiler.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from runner.models.linear_launch import LinearLaunch
from runner.pdl import launch_options, let_next_begin, wait_for_predecessor


@triton.jit
def _multiply(w, x, acc, UPCAST: tl.constexpr):
    """Add the product of [rows, columns] of the weight and [tokens, columns] of the input."""
    if UPCAST:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, tl.trans(x), acc, input_precision="ieee")


@triton.jit
def _store_tile(out_desc, acc, split, t, n, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store acc [rows of the weight, tokens] as [tokens, rows] of a part."""
    tile = tl.reshape(tl.trans(acc.to(out_desc.dtype)), [1, BLOCK_T, BLOCK_N])
    out_desc.store([split, t, n], tile)


@triton.jit
def _tiled_linear_kernel(
    out_desc,  # [SPLITS, T, N] in tiles [1, BLOCK_T, BLOCK_N]
    out2_desc,  # the same in tiles [1, MORE_T, BLOCK_N], where MORE_T
    x_desc,  # [T, K] in tiles [BLOCK_T, BLOCK_K]
    x2_desc,  # the same in tiles [MORE_T, BLOCK_K], where MORE_T
    w_desc,  # [N, K], with GLU [2 * N, K], in tiles [BLOCK_N, BLOCK_K]
    bias_ptr,  # [N], read where HAS_BIAS
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    GLU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,  # products of float32 copies, which are the same numbers
    BLOCK_T: tl.constexpr,
    MORE_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SPLIT_STEPS: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    # Programs that share a tile of the weight lie side by side: it is fetched from memory once.
    t = tl.program_id(0) * (BLOCK_T + MORE_T)
    n = tl.program_id(1) * BLOCK_N
    split = tl.program_id(2)
    if EARLY:
        let_next_begin(PDL)
    wait_for_predecessor(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    up = acc
    if MORE_T:
        acc2 = tl.zeros([BLOCK_N, MORE_T], dtype=tl.float32)
        up2 = acc2
    for step in range(0, SPLIT_STEPS):
        k = (split * SPLIT_STEPS + step) * BLOCK_K
        w = w_desc.load([n, k])
        x = x_desc.load([t, k])
        acc = _multiply(w, x, acc, UPCAST)
        if MORE_T:
            x2 = x2_desc.load([t + BLOCK_T, k])
            acc2 = _multiply(w, x2, acc2, UPCAST)
        if GLU:
            w_up = w_desc.load([N + n, k])
            up = _multiply(w_up, x, up, UPCAST)
            if MORE_T:
                up2 = _multiply(w_up, x2, up2, UPCAST)
    if not EARLY:
        let_next_begin(PDL)
    if HAS_BIAS:  # once, however many splits there are
        rows = n + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
        bias = tl.where(split == 0, bias, 0.0)[:, None]
        acc += bias
        if MORE_T:
            acc2 += bias
    if GLU:
        acc = acc * tl.sigmoid(acc) * up
        if MORE_T:
            acc2 = acc2 * tl.sigmoid(acc2) * up2
    _store_tile(out_desc, acc, split, t, n, BLOCK_T, BLOCK_N)
    if MORE_T:
        _store_tile(out2_desc, acc2, split, t + BLOCK_T, n, MORE_T, BLOCK_N)


def launch_tiled(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, launch: LinearLaunch, glu: bool
) -> None:
    """Compute a linear layer in one launch; see `split_linear` and `glu_linear`.

    All tensors begin at multiples of 16 bytes, and so do their rows.

    Args:
        out: [splits, T, N], out.
        x: [T, K] with T >= 1, dense in the last dimension.
        weight: [N, K], contiguous; with `glu` [2 * N, K], the gate's rows first.
        bias: [N], added to the first part; None with `glu`.
        launch: how.
        glu: gate and up in one, with the activation.
    """
    num_splits, num_tokens, num_rows = out.shape
    first, more, rows = launch.block_t, launch.more_t or launch.block_t, launch.block_n
    grid = (
        triton.cdiv(num_tokens, launch.block_t + launch.more_t),
        triton.cdiv(num_rows, rows),
        num_splits,
    )
    _tiled_linear_kernel[grid](
        TensorDescriptor.from_tensor(out, [1, first, rows]),
        TensorDescriptor.from_tensor(out, [1, more, rows]),
        TensorDescriptor.from_tensor(x, [first, launch.block_k]),
        TensorDescriptor.from_tensor(x, [more, launch.block_k]),
        TensorDescriptor.from_tensor(weight, [rows, launch.block_k]),
        x if bias is None else bias,
        N=num_rows,
        K=x.shape[1],
        SPLITS=num_splits,
        GLU=glu,
        HAS_BIAS=bias is not None,
        # The interpreter multiplies the bits of bfloat16 as integers.
        UPCAST=not x.is_cuda and x.dtype == torch.bfloat16,
        BLOCK_T=launch.block_t,
        MORE_T=launch.more_t,
        BLOCK_N=rows,
        BLOCK_K=launch.block_k,
        EARLY=launch.early,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch_options(x),
    )
