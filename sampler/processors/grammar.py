"""Mask what a grammar forbids: line i of a row by the mask that the host made for it.

logits[line, t] = -inf   where bit t % 32 of word t // 32 of masks[row, local position] is 0

The host walks the grammar over the row's drafts (`specdec.grammar`), so the masks of a step are
staged before it, whatever else of the row stays as it was.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import numpy as np
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


@triton.jit
def _mask_lines_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    local_pos_ptr,  # [L] int32
    num_lines_ptr,  # [N] int32
    masks_ptr,  # [N, lines * num_words] int32
    masks_stride,
    num_words,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if row < 0:
        return
    local_pos = tl.load(local_pos_ptr + line).to(tl.int64)
    if local_pos >= tl.load(num_lines_ptr + row):
        return
    token = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = token < vocab_size
    mask_ptr = masks_ptr + row * masks_stride + local_pos * num_words
    word = tl.load(mask_ptr + token // 32, mask=inside, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    minus_inf = tl.full((BLOCK_SIZE,), float("-inf"), tl.float32)
    tl.store(logits_ptr + line * logits_stride + token, minus_inf, mask=inside & forbidden)


def mask_lines(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    num_lines: Tensor,
    masks: Tensor,
) -> None:
    """Set forbidden logits to -inf, in place.

    Args:
        logits: [L, V] float32, in/out.
        expanded_idx_mapping: [L] int32, line -> row, -1 in padding.
        expanded_local_pos: [L] int32, place of the line in its row's run.
        num_lines: [N] int32, lines of each row that have a mask: the first ones.
        masks: [N, lines * ceil(V / 32)] int32, a row's masks one behind the other.
    """
    if not use_triton(logits):
        mask_lines_ref(logits, expanded_idx_mapping, expanded_local_pos, num_lines, masks)
        return
    num_logits, vocab_size = logits.shape
    grid = (num_logits, triton.cdiv(vocab_size, _BLOCK_SIZE))
    _mask_lines_kernel[grid](
        logits,
        logits.stride(0),
        expanded_idx_mapping,
        expanded_local_pos,
        num_lines,
        masks,
        masks.stride(0),
        triton.cdiv(vocab_size, 32),
        vocab_size,
        BLOCK_SIZE=_BLOCK_SIZE,
    )


class GrammarMasks(LogitsProcessorBase):
    """Masks of the rows whose text follows a grammar.

    Args:
        setup: sizes.
        enabled: whether there can be such rows at all; without them no memory is taken.
    """

    def __init__(self, setup: ProcessorSetup, enabled: bool = True) -> None:
        self._num_words = -(-setup.vocab_size // 32)
        self._max_lines = setup.num_speculative_tokens + 1
        num_rows = setup.max_num_reqs if enabled else 0
        # [N], how many of a row's lines have a mask; 0 = the row follows no grammar.
        self.num_lines = StagedWriteTensor(num_rows, torch.int32, setup.device)
        shape = (num_rows, self._max_lines * self._num_words)
        self.masks = StagedWriteTensor(shape, torch.int32, setup.device)

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool:
        """Forget the masks of the row's last owner."""
        if len(self.num_lines.tensor):
            self.num_lines.stage_write(row, 0, 0)
        return params.structured_outputs is not None

    def stage(self, row: int, masks: np.ndarray) -> None:
        """Stage a row's masks for the next step, [lines, ceil(V / 32)] int32."""
        assert len(masks) <= self._max_lines, (masks.shape, self._max_lines)
        assert masks.shape[1] == self._num_words, (masks.shape, self._num_words)
        self.num_lines.stage_write(row, 0, len(masks))
        self.masks.stage_write(row, 0, masks.reshape(-1))

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Mask the lines that have one."""
        num_lines = self.num_lines.tensor
        if len(num_lines):
            lines, local_pos = ctx.expanded_idx_mapping, ctx.expanded_local_pos
            mask_lines(logits, lines, local_pos, num_lines, self.masks.tensor)


def mask_lines_ref(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    num_lines: Tensor,
    masks: Tensor,
) -> None:
    """Torch twin of `mask_lines`."""
    real = (expanded_idx_mapping >= 0).nonzero()[:, 0]
    row = expanded_idx_mapping[real].long()
    local_pos = expanded_local_pos[real].long()
    has_mask = local_pos < num_lines[row]
    line, row, local_pos = real[has_mask], row[has_mask], local_pos[has_mask]
    num_words = -(-logits.shape[1] // 32)
    words = masks.view(len(masks), -1, num_words)[row, local_pos]
    token = torch.arange(logits.shape[1], device=logits.device)
    allowed = (words[:, token // 32] >> (token % 32).int()) & 1
    logits[line] = logits[line].masked_fill(allowed == 0, float("-inf"))
