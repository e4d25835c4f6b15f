"""Minimum length: EOS and stop tokens are set to -inf while too few new tokens are there.

A line draws at a place of the text, so the drafts before it count as new tokens.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.buffers import StagedWriteTensor
from runner.dispatch import use_triton
from sampler.processors.base import LogitsProcessorBase
from sampler.processors.checks import check_count
from specdec.protocols import LogitsContext, ProcessorSetup, RequestContext
from specdec.types import SamplingParams

MAX_STOP_TOKENS = 128  # of a request, EOS included


class MinTokens(LogitsProcessorBase):
    """The minimum of each row, and what may not be drawn before.

    Args:
        setup: sizes of the engine.
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        rows, device, self._most = setup.max_num_reqs, setup.device, setup.max_model_len
        self._min_tokens = StagedWriteTensor(rows, torch.int32, device)
        # [N, 1 + MAX_STOP_TOKENS]: how many, then the ids.
        self._stop_tokens = StagedWriteTensor((rows, 1 + MAX_STOP_TOKENS), torch.int32, device)

    def check_request(self, params: SamplingParams, context: RequestContext) -> None:
        """Refuse more stop tokens than a row holds."""
        if params.min_tokens:
            num_stop = len(stop_tokens(params, context))
            check_count("min_tokens with stop_token_ids and EOS", num_stop, MAX_STOP_TOKENS)

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool:
        """Stage the minimum, and the stop tokens where there is one."""
        self._min_tokens.stage_write(row, 0, min(params.min_tokens, self._most))
        banned = stop_tokens(params, context)
        if params.min_tokens == 0 or not banned:
            self._stop_tokens.stage_write(row, 0, 0)
            return False
        self._stop_tokens.stage_write(row, 0, [len(banned), *banned])
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Mask, in place."""
        apply_min_tokens(logits, ctx, self._min_tokens.tensor, self._stop_tokens.tensor)


def stop_tokens(params: SamplingParams, context: RequestContext) -> list[int]:
    """Return the ids that a request with a minimum may not draw too early."""
    # With ignore_eos, too: a minimum means that the text goes on, and EOS in it is none.
    ids = context.eos_token_ids.union(params.stop_token_ids or ())
    return sorted(i for i in ids if 0 <= i < context.vocab_size)


@triton.jit
def _min_tokens_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    draw_positions_ptr,  # [L] int64
    prompt_len_ptr,  # [N] int32
    min_tokens_ptr,  # [N] int32
    stop_tokens_ptr,  # [N, 1 + max_stop_tokens] int32
    stop_tokens_stride,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if row < 0:
        return
    min_tokens = tl.load(min_tokens_ptr + row)
    if min_tokens == 0:
        return
    num_new = tl.load(draw_positions_ptr + line) - tl.load(prompt_len_ptr + row)
    if num_new >= min_tokens:
        return
    entry = stop_tokens_ptr + row * stop_tokens_stride
    j = tl.arange(0, BLOCK_SIZE)
    is_stop = j < tl.load(entry)
    tokens = tl.load(entry + 1 + j, mask=is_stop, other=0)
    banned = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    tl.store(logits_ptr + line * logits_stride + tokens, banned, mask=is_stop)


def apply_min_tokens(
    logits: Tensor, ctx: LogitsContext, min_tokens: Tensor, stop_tokens: Tensor
) -> None:
    """Set the stop tokens of lines that draw too early to -inf, in place.

    Args:
        logits: [L, V] float32.
        ctx: the lines.
        min_tokens: [N] int32, 0 = none.
        stop_tokens: [N, 1 + max_stop_tokens] int32: how many, then the ids.
    """
    if not use_triton(logits):
        apply_min_tokens_ref(logits, ctx, min_tokens, stop_tokens)
        return
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    _min_tokens_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        ctx.expanded_idx_mapping,
        ctx.draw_positions,
        ctx.state.prompt_len,
        min_tokens,
        stop_tokens,
        stop_tokens.stride(0),
        BLOCK_SIZE=triton.next_power_of_2(stop_tokens.shape[1] - 1),
    )


def apply_min_tokens_ref(
    logits: Tensor, ctx: LogitsContext, min_tokens: Tensor, stop_tokens: Tensor
) -> None:
    """Torch twin of `apply_min_tokens`."""
    rows = ctx.expanded_idx_mapping.long()
    real, rows = rows >= 0, rows.clamp(min=0)
    early = ctx.draw_positions - ctx.state.prompt_len[rows] < min_tokens[rows]
    (lines,) = (real & (min_tokens[rows] > 0) & early).nonzero(as_tuple=True)
    for line in lines.tolist():
        entry = stop_tokens[rows[line]]
        logits[line, entry[1 : 1 + int(entry[0])].long()] = float("-inf")
