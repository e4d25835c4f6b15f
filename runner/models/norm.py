"""RMSNorm fused with what stands before it: adding up a linear layer's parts and the residual.

Source: Zhang and Sennrich 2019 (RMSNorm).
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of the compiler.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from runner.pdl import launch_options, let_next_begin, wait_for_predecessor


@triton.jit(do_not_specialize=["num_tokens"])
def _add_rms_norm_kernel(
    normed_ptr,  # [T, H], out; rows `normed_stride` apart
    normed_stride,
    residual_out_ptr,  # [T, H], out where ADDS; rows `residual_out_stride` apart
    residual_out_stride,
    parts_ptr,  # [PARTS, T, H]; a table [V, H] where GATHERS
    parts_stride,  # between rows
    residual_ptr,  # [T, H], read where HAS_RESIDUAL
    residual_stride,
    ids_ptr,  # [T] int64, read where GATHERS: row of the table
    weight_ptr,  # [H]
    eps,
    num_tokens,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = h < H
    line = token
    if GATHERS:
        line = tl.load(ids_ptr + token)
    x = tl.zeros([BLOCK_H], dtype=tl.float32)
    for part in tl.static_range(PARTS):  # pyright: ignore
        offset = (part * num_tokens + line).to(tl.int64) * parts_stride
        x += tl.load(parts_ptr + offset + h, mask=mask, other=0.0).to(tl.float32)
    # Rounded where the modules it stands for round: the layer's output, then the sum.
    x = x.to(normed_ptr.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + token * residual_stride + h, mask=mask, other=0.0).to(
            tl.float32
        )
        x = x.to(normed_ptr.dtype.element_ty).to(tl.float32)
    if ADDS:
        residual_out = x.to(residual_out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + token * residual_out_stride + h, residual_out, mask=mask)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    normed = (x * scale).to(normed_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=mask, other=0.0).to(tl.float32)
    out = (normed * weight).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + token * normed_stride + h, out, mask=mask)


def add_rms_norm(
    parts: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    residual_out: Tensor | None = None,
    ids: Tensor | None = None,
) -> None:
    """Add up parts and residual, and norm the sum, in one launch.

    Args:
        parts: [S, T, H] of a linear layer; or with `ids` a table [V, H] whose rows are taken.
        residual: [T, H], or None.
        weight: [H] of the norm.
        eps: of the norm.
        normed: [T, H], out: the normed sum, dense in the last dimension.
        residual_out: [T, H], out: the sum itself, dense in the last dimension; may be `residual`.
        ids: [T] int64 rows of the table.
    """
    if not use_triton(normed):
        add_rms_norm_ref(parts, residual, weight, eps, normed, residual_out, ids)
        return
    num_tokens, width = normed.shape
    given = (normed, residual_out, residual)
    assert all(t is None or t.stride(1) == 1 for t in given), "dense in the last dimension"
    assert parts.is_contiguous(), f"strides {parts.stride()}"
    out, old = residual_out, residual
    _add_rms_norm_kernel[(num_tokens,)](
        normed,
        normed.stride(0),
        normed if out is None else out,
        0 if out is None else out.stride(0),
        parts,
        width,
        normed if old is None else old,
        0 if old is None else old.stride(0),
        normed if ids is None else ids,
        weight,
        eps,
        num_tokens,
        H=width,
        PARTS=1 if ids is not None else len(parts),
        GATHERS=ids is not None,
        HAS_RESIDUAL=old is not None,
        ADDS=out is not None,
        BLOCK_H=triton.next_power_of_2(width),
        num_warps=4 if width <= 1024 else 8,
        **launch_options(normed),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [T, H], contiguous, by weight [H]; see `add_rms_norm`."""
    normed = torch.empty_like(x)
    add_rms_norm(x[None], None, weight, eps, normed)
    return normed


def add_rms_norm_ref(
    parts: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    residual_out: Tensor | None = None,
    ids: Tensor | None = None,
) -> None:
    """Torch twin of `add_rms_norm`."""
    if ids is not None:
        x = parts.index_select(0, ids)
    else:
        x = parts[0] if parts.shape[0] == 1 else parts.float().sum(0)
    if x.dtype != normed.dtype:
        x = x.to(normed.dtype)
    if residual is not None:
        x = torch.add(residual, x, out=residual_out)
    elif residual_out is not None:
        residual_out.copy_(x)
    torch.mul(x, rms_scale(x, eps), out=normed)
    normed.mul_(weight)


def rms_scale(x: Tensor, eps: float) -> Tensor | float:
    """Return 1 / sqrt(mean of squares + eps) over the last dimension, float32, [..., 1].

    Narrow x takes as few operations as torch allows, one row on a CPU a number of the host: at a
    few rows the operations are the time. They sum less exactly than a mean does, which float32
    would show.
    """
    if x.dtype == torch.float32:
        return x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    if x.is_cpu and x.numel() == x.shape[-1]:
        wide = x.float().view(-1)
        return (torch.dot(wide, wide).item() / wide.shape[0] + eps) ** -0.5
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(_scalar(eps, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)
