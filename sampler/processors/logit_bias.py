"""Logit bias: a number is added to the logits of some tokens."""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.buffers import StagedWriteTensor
from runner.dispatch import use_triton
from sampler.processors.base import LogitsProcessorBase
from sampler.processors.checks import check_count, check_ids
from specdec.protocols import LogitsContext, ProcessorSetup, RequestContext
from specdec.types import SamplingParams

MAX_BIASED_TOKENS = 1024  # of a request


class LogitBias(LogitsProcessorBase):
    """Token ids and biases of each row.

    Args:
        setup: sizes of the engine.
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        rows, device = setup.max_num_reqs, setup.device
        self._num_biased = StagedWriteTensor(rows, torch.int32, device)
        self._token_ids = StagedWriteTensor((rows, MAX_BIASED_TOKENS), torch.int32, device)
        self._biases = StagedWriteTensor((rows, MAX_BIASED_TOKENS), torch.float32, device)

    def check_request(self, params: SamplingParams, context: RequestContext) -> None:
        """Refuse ids that are not in the vocabulary, and more of them than a row holds."""
        biases = params.logit_bias or {}
        check_ids("logit_bias", biases, context.vocab_size)
        check_count("logit_bias", len(biases), MAX_BIASED_TOKENS)

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool:
        """Stage ids and biases."""
        biases = params.logit_bias or {}
        self._num_biased.stage_write(row, 0, len(biases))
        self._token_ids.stage_write(row, 0, list(biases))
        self._biases.stage_write(row, 0, list(biases.values()))
        return len(biases) > 0

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Add, in place."""
        apply_logit_bias(
            logits,
            ctx.expanded_idx_mapping,
            self._num_biased.tensor,
            self._token_ids.tensor,
            self._biases.tensor,
        )


@triton.jit
def _logit_bias_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    num_biased_ptr,  # [N] int32
    token_ids_ptr,  # [N, max_biased] int32
    biases_ptr,  # [N, max_biased] float32
    row_stride,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if row < 0:
        return
    num_biased = tl.load(num_biased_ptr + row)
    if num_biased == 0:
        return
    j = tl.arange(0, BLOCK_SIZE)
    inside = j < num_biased
    tokens = tl.load(token_ids_ptr + row * row_stride + j, mask=inside, other=0)
    biases = tl.load(biases_ptr + row * row_stride + j, mask=inside, other=0.0)
    pointers = logits_ptr + line * logits_stride + tokens
    tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + biases, mask=inside)


def apply_logit_bias(
    logits: Tensor, idx_mapping: Tensor, num_biased: Tensor, token_ids: Tensor, biases: Tensor
) -> None:
    """Add each row's biases to its lines, in place.

    Args:
        logits: [L, V] float32.
        idx_mapping: [L] int32, line -> row, -1 in padding.
        num_biased: [N] int32, 0 = none.
        token_ids: [N, max_biased] int32; those of a row are all unlike.
        biases: [N, max_biased] float32.
    """
    if not use_triton(logits):
        apply_logit_bias_ref(logits, idx_mapping, num_biased, token_ids, biases)
        return
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    _logit_bias_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        idx_mapping,
        num_biased,
        token_ids,
        biases,
        biases.stride(0),
        BLOCK_SIZE=triton.next_power_of_2(token_ids.shape[1]),
    )


def apply_logit_bias_ref(
    logits: Tensor, idx_mapping: Tensor, num_biased: Tensor, token_ids: Tensor, biases: Tensor
) -> None:
    """Torch twin of `apply_logit_bias`."""
    rows = idx_mapping.long()
    (lines,) = ((rows >= 0) & (num_biased[rows.clamp(min=0)] > 0)).nonzero(as_tuple=True)
    for line in lines.tolist():
        row = rows[line]
        count = int(num_biased[row])
        logits[line, token_ids[row, :count].long()] += biases[row, :count]
