"""What a step of `bench=e2e` cannot do without: bytes read and written, operations, and rates.

    target     the weights of its layers and of its output head, once; an untied embedding is read
               for a few rows only, which do not count; weights of 8 bits with their scales
    eagle3     the fusion layer once, then decoder layer and output layer in each of K passes
    draft_model  layers and output head in each of K passes
    kv         keys and values of the whole context once for the target, and once for each pass of a
               drafter that has a cache; those of the step's tokens, written

over the rate at which a plain reduction reads memory in the same run. Each pass counts its weights,
whether or not a cache could have kept them from the pass before: a small head's may beat its floor.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.e2e_cases import ModelShape, ShapeSet

_REPEATS = 5
_COPY_BYTES, _MATMUL_SIZE = 2 << 30, 8192
_SMALL_BYTES, _SMALL_MATMUL = 1 << 24, 256  # on a CPU


@dataclass(frozen=True)
class StepCost:
    """Bytes and operations of a step, by part."""

    target_bytes: int
    drafter_bytes: int
    kv_bytes: int
    target_flops: int
    drafter_flops: int

    @property
    def num_bytes(self) -> int:
        """Return all bytes."""
        return self.target_bytes + self.drafter_bytes + self.kv_bytes


def layer_elements(shape: ModelShape, inputs: int = 1) -> int:
    """Return the weights of a decoder layer whose attention reads `inputs` vectors of its width."""
    h, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    attention = inputs * h * (heads + 2 * kv) + heads * h
    return attention + 3 * h * shape.intermediate_size + 2 * h


def model_elements(shape: ModelShape) -> int:
    """Return the weights that a forward reads, output head included."""
    h = shape.hidden_size
    return shape.num_layers * layer_elements(shape) + h + shape.vocab_size * h


def model_bytes(shape: ModelShape, itemsize: int) -> int:
    """Return the bytes of what a forward reads, output head included.

    Args:
        shape: of the model.
        itemsize: bytes of a weight that is not one of 8 bits.
    """
    if not shape.eight_bit:
        return model_elements(shape) * itemsize
    h = shape.hidden_size
    rows = shape.num_heads * shape.head_dim + 2 * shape.num_kv_heads * shape.head_dim
    rows += 2 * h + 2 * shape.intermediate_size
    rounded = shape.num_layers * (layer_elements(shape) - 2 * h)  # all but the norms
    scales = shape.num_layers * rows * torch.float32.itemsize
    return rounded + scales + (model_elements(shape) - rounded) * itemsize


def num_parameters(shape: ModelShape) -> int:
    """Return all weights."""
    return model_elements(shape) + (0 if shape.tied else shape.vocab_size * shape.hidden_size)


def head_elements(shape: ModelShape, rows: int) -> tuple[int, int]:
    """Return the weights that an EAGLE-3 head reads once a step, and in each of its passes."""
    h = shape.hidden_size
    return 3 * h * h, layer_elements(shape, inputs=2) + 2 * h + rows * h


def kv_elements(shape: ModelShape) -> int:
    """Return keys and values of one token."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim


def step_cost(
    shapes: ShapeSet,
    model: str,
    drafter: str,
    batch: int,
    context: float,
    num_drafts: int,
    itemsize: int,
) -> StepCost:
    """Return what a uniform step costs.

    Args:
        shapes: of the run.
        model: name of the target.
        drafter: name.
        batch: requests.
        context: tokens of each request.
        num_drafts: K, 0 without a drafter.
        itemsize: bytes of a weight that is not one of 8 bits.
    """
    shape, tokens = shapes.models[model], batch * (num_drafts + 1)
    own = kv_elements(shape)
    kv = own * (batch * context + tokens)
    width = shape.num_heads * shape.head_dim
    attention = 4 * width * context
    target = model_elements(shape)
    flops = 2 * target * tokens + attention * shape.num_layers * tokens
    once = each = draft_kv = 0
    if drafter == "eagle3":
        once, each = head_elements(shape, shapes.head_rows)
        draft_kv = own // shape.num_layers
    elif drafter == "draft_model":
        each, draft_kv = model_elements(shapes.draft_model), kv_elements(shapes.draft_model)
    passes = num_drafts if each else 0
    kv += draft_kv * (passes * batch * context + tokens + max(passes - 1, 0) * batch)
    draft_tokens = tokens + max(passes - 1, 0) * batch if each else 0
    return StepCost(
        target_bytes=model_bytes(shape, itemsize),
        drafter_bytes=(once + passes * each) * itemsize,
        kv_bytes=round(kv * itemsize),
        target_flops=round(flops),
        drafter_flops=2 * (once * tokens + each * draft_tokens),
    )


def _seconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the best seconds of a call."""
    found = []
    for _ in range(_REPEATS + 1):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
    return float(np.min(found[1:]))


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return what the device does at best: GB/s of reading and of copying, TFLOP/s of a product.

    A copy's bytes are those read and those written. The product is of fresh random numbers.
    """
    on_gpu = device.type == "cuda"
    num_bytes = _COPY_BYTES if on_gpu else _SMALL_BYTES
    source = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).normal_()
    if on_gpu:
        from experiments.bench_attention import measure_read_ceiling

        read = measure_read_ceiling(device)
    else:
        read = num_bytes / _seconds(device, source.sum) / 1e9
    target = torch.empty_like(source)
    copy = 2 * num_bytes / _seconds(device, lambda: target.copy_(source)) / 1e9
    size = _MATMUL_SIZE if on_gpu else _SMALL_MATMUL
    a, b = (torch.empty(size, size, dtype=dtype, device=device).normal_() for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> Tensor:
        return torch.mm(a, b, out=out)

    return {
        "read_gb_per_s": read,
        "copy_gb_per_s": copy,
        "matmul_tflop_per_s": 2 * size**3 / _seconds(device, multiply) / 1e12,
    }


def floor_ms(num_bytes: float, ceilings: dict[str, float]) -> float:
    """Return the milliseconds of reading so many bytes."""
    return num_bytes / ceilings["read_gb_per_s"] / 1e6
