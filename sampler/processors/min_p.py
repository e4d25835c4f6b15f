"""Min-p: keep the tokens that are at least min_p times as probable as the likeliest one.

    kept where logit >= max + log(min_p)    of logits that were divided by the temperature

A NaN is never kept. Greedy lines stay as they are.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.buffers import StagedWriteTensor
from runner.dispatch import use_triton
from sampler.processors.base import LogitsProcessorBase
from specdec.protocols import LogitsContext, ProcessorSetup, RequestContext
from specdec.types import SamplingParams

_BLOCK_SIZE = 4096


class MinP(LogitsProcessorBase):
    """The logarithm of each row's min_p: greedy rows and rows without a limit have -inf.

    Args:
        setup: sizes of the engine.
    """

    after_temperature = True

    def __init__(self, setup: ProcessorSetup) -> None:
        self._log_min_p = StagedWriteTensor(
            setup.max_num_reqs, torch.float32, setup.device, fill=float("-inf")
        )

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool:
        """Stage the limit."""
        limits = params.min_p > 0 and params.temperature > 0
        self._log_min_p.stage_write(row, 0, math.log(params.min_p) if limits else float("-inf"))
        return limits

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Mask, in place."""
        apply_min_p(logits, ctx.expanded_idx_mapping, self._log_min_p.tensor)


@triton.jit
def _min_p_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    log_min_p_ptr,  # [N] float32
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if row < 0:
        return
    log_min_p = tl.load(log_min_p_ptr + row)
    if log_min_p == float("-inf"):
        return
    line_ptr = logits_ptr + line * logits_stride
    largest = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK_SIZE):
        tokens = start + tl.arange(0, BLOCK_SIZE)
        logits = tl.load(line_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
        largest = tl.maximum(largest, tl.where(logits == logits, logits, float("-inf")))
    limit = tl.max(largest, axis=0) + log_min_p
    for start in range(0, vocab_size, BLOCK_SIZE):
        tokens = start + tl.arange(0, BLOCK_SIZE)
        inside = tokens < vocab_size
        logits = tl.load(line_ptr + tokens, mask=inside, other=0.0)
        below = inside & ((logits < limit) | (logits != logits))
        tl.store(line_ptr + tokens, tl.full([BLOCK_SIZE], float("-inf"), tl.float32), mask=below)


def apply_min_p(logits: Tensor, idx_mapping: Tensor, log_min_p: Tensor) -> None:
    """Set the logits below each line's limit to -inf, in place.

    Args:
        logits: [L, V] float32, divided by the temperature.
        idx_mapping: [L] int32, line -> row, -1 in padding.
        log_min_p: [N] float32, -inf = no limit.
    """
    if not use_triton(logits):
        apply_min_p_ref(logits, idx_mapping, log_min_p)
        return
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    _min_p_kernel[(num_lines,)](
        logits,
        logits.stride(0),
        idx_mapping,
        log_min_p,
        vocab_size,
        BLOCK_SIZE=min(_BLOCK_SIZE, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )


def apply_min_p_ref(logits: Tensor, idx_mapping: Tensor, log_min_p: Tensor) -> None:
    """Torch twin of `apply_min_p`."""
    rows = idx_mapping.long()
    limits = log_min_p[rows.clamp(min=0)]
    (lines,) = ((rows >= 0) & (limits > float("-inf"))).nonzero(as_tuple=True)
    for line in lines.tolist():
        values = logits[line]
        values.masked_fill_(values.isnan(), float("-inf"))
        values.masked_fill_(values < values.max() + limits[line], float("-inf"))
