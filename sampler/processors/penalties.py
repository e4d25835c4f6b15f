"""Repetition, frequency and presence penalties.

    logit = logit / repetition  where the token is in the prompt or the new text, and logit > 0
            logit * repetition  where it is, and logit <= 0
    logit = logit - frequency * count - presence * (count > 0)

`count` is how often the new text holds the token: what was committed behind the prompt, and the
row's drafts before the line. Counts of what was committed are kept for each row and token, with a
bitmask of the prompt: they are built when a row gets a new owner, and each step's tokens are added.
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of its own.
# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.buffers import StagedWriteTensor
from runner.dispatch import use_triton
from sampler.processors.base import LogitsProcessorBase
from sampler.processors.token_mask import has_bit_device, has_bits_ref, num_mask_words
from specdec.protocols import (
    CommitContext,
    LogitsContext,
    ProcessorSetup,
    RequestContext,
    StateView,
)
from specdec.types import SamplingParams

_BLOCK_SIZE = 4096
_TOKEN_BLOCK = 1024  # tokens of a text that a program counts


@dataclass(frozen=True)
class PenaltyRows:
    """What the rows hold."""

    penalties: Tensor  # [N, 3] float32: repetition, frequency, presence; 1, 0, 0 = none
    counts: Tensor  # [N, V] int32, of committed new tokens
    prompt_mask: Tensor  # [N, ceil(V / 32)] int32, bit v % 32 of word v // 32: the prompt has v


class Penalties(LogitsProcessorBase):
    """Penalties, counts and prompt masks of all rows.

    Args:
        setup: sizes of the engine.
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        num_rows, vocab_size, device = setup.max_num_reqs, setup.vocab_size, setup.device
        self._penalties = StagedWriteTensor((num_rows, 3), torch.float32, device)
        self._penalties.tensor[:, 0] = 1
        self.rows = PenaltyRows(
            penalties=self._penalties.tensor,
            counts=torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device),
            prompt_mask=torch.zeros(
                num_rows, num_mask_words(vocab_size), dtype=torch.int32, device=device
            ),
        )

    @property
    def num_count_bytes(self) -> int:
        """Return the bytes of counts and prompt masks."""
        return self.rows.counts.nbytes + self.rows.prompt_mask.nbytes

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool:
        """Stage the penalties; `prepare_rows` counts."""
        values = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        self._penalties.stage_write(row, 0, values)
        return values != [1.0, 0.0, 0.0]

    def prepare_rows(self, rows: Tensor, state: StateView) -> None:
        """Count what the rows' new owners bring."""
        count_tokens(self.rows, rows, state)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Penalize, in place."""
        apply_penalties(logits, ctx, self.rows)

    def commit(self, ctx: CommitContext) -> None:
        """Count what was committed."""
        count_committed(self.rows, ctx)


@triton.jit
def _penalties_kernel(
    logits_ptr,  # [L, V] float32, in/out
    logits_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    local_pos_ptr,  # [L] int32
    draft_tokens_ptr,  # [N, K] int64
    draft_tokens_stride,
    penalties_ptr,  # [N, 3] float32
    counts_ptr,  # [N, V] int32
    prompt_mask_ptr,  # [N, ceil(V / 32)] int32
    prompt_mask_stride,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if row < 0:
        return
    repetition = tl.load(penalties_ptr + row * 3)
    frequency = tl.load(penalties_ptr + row * 3 + 1)
    presence = tl.load(penalties_ptr + row * 3 + 2)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    tokens = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = tokens < vocab_size
    pointers = logits_ptr + line * logits_stride + tokens
    logits = tl.load(pointers, mask=inside, other=0.0)
    counts = tl.load(counts_ptr + row * vocab_size + tokens, mask=inside, other=0)
    for j in range(tl.load(local_pos_ptr + line)):
        draft = tl.load(draft_tokens_ptr + row * draft_tokens_stride + j)
        counts += (tokens == draft).to(tl.int32)
    in_prompt = has_bit_device(prompt_mask_ptr + row * prompt_mask_stride, tokens, inside)
    repeats = (in_prompt > 0) | (counts > 0)
    factor = tl.where(repeats, repetition, 1.0)
    logits = tl.where(logits > 0, tl.div_rn(logits, factor), logits * factor)
    logits -= frequency * counts.to(tl.float32)
    logits -= tl.where(counts > 0, presence, 0.0)
    tl.store(pointers, logits, mask=inside)


@triton.jit
def _clear_rows_kernel(
    rows_ptr,  # [M] int32
    counts_ptr,  # [N, V] int32, out
    prompt_mask_ptr,  # [N, num_words] int32, out
    vocab_size,
    num_words,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    cells = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    zeros = tl.zeros([BLOCK_SIZE], tl.int32)
    tl.store(counts_ptr + row * vocab_size + cells, zeros, mask=cells < vocab_size)
    tl.store(prompt_mask_ptr + row * num_words + cells, zeros, mask=cells < num_words)


@triton.jit
def _count_tokens_kernel(
    rows_ptr,  # [M] int32
    all_token_ids_ptr,  # [N, max_model_len] int32
    all_token_ids_stride,
    prompt_len_ptr,  # [N] int32
    total_len_ptr,  # [N] int32
    counts_ptr,  # [N, V] int32, in/out
    prompt_mask_ptr,  # [N, num_words] int32, in/out
    vocab_size,
    num_words,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    total_len = tl.load(total_len_ptr + row)
    start = tl.program_id(1) * BLOCK_SIZE
    if start >= total_len:
        return
    places = start + tl.arange(0, BLOCK_SIZE)
    inside = places < total_len
    pointers = all_token_ids_ptr + row * all_token_ids_stride + places
    tokens = tl.load(pointers, mask=inside, other=0)
    prompt_len = tl.load(prompt_len_ptr + row)
    bits = tl.full([BLOCK_SIZE], 1, tl.int32) << (tokens % 32)
    words = prompt_mask_ptr + row * num_words + tokens // 32
    tl.atomic_or(words, bits, mask=inside & (places < prompt_len))
    one = tl.full([BLOCK_SIZE], 1, tl.int32)
    tl.atomic_add(counts_ptr + row * vocab_size + tokens, one, mask=inside & (places >= prompt_len))


@triton.jit
def _count_committed_kernel(
    idx_mapping_ptr,  # [R] int32, -1 in padding
    sampled_tokens_ptr,  # [R, W] int64
    sampled_tokens_stride,
    num_sampled_ptr,  # [R] int32
    penalties_ptr,  # [N, 3] float32
    counts_ptr,  # [N, V] int32, in/out
    vocab_size,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + place).to(tl.int64)
    if row < 0:
        return
    repetition = tl.load(penalties_ptr + row * 3)
    frequency = tl.load(penalties_ptr + row * 3 + 1)
    presence = tl.load(penalties_ptr + row * 3 + 2)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    j = tl.arange(0, WIDTH)
    kept = j < tl.load(num_sampled_ptr + place)
    tokens = tl.load(sampled_tokens_ptr + place * sampled_tokens_stride + j, mask=kept, other=0)
    one = tl.full([WIDTH], 1, tl.int32)
    tl.atomic_add(counts_ptr + row * vocab_size + tokens, one, mask=kept)


def apply_penalties(logits: Tensor, ctx: LogitsContext, rows: PenaltyRows) -> None:
    """Penalize the tokens of the text before each line, in place.

    Args:
        logits: [L, V] float32.
        ctx: the lines.
        rows: penalties and counts.
    """
    if not use_triton(logits):
        apply_penalties_ref(logits, ctx, rows)
        return
    num_lines, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    block_size = min(_BLOCK_SIZE, triton.next_power_of_2(vocab_size))
    _penalties_kernel[(num_lines, triton.cdiv(vocab_size, block_size))](
        logits,
        logits.stride(0),
        ctx.expanded_idx_mapping,
        ctx.expanded_local_pos,
        ctx.draft_tokens,
        ctx.draft_tokens.stride(0),
        rows.penalties,
        rows.counts,
        rows.prompt_mask,
        rows.prompt_mask.stride(0),
        vocab_size,
        BLOCK_SIZE=block_size,
        num_warps=8,
    )


def count_tokens(rows: PenaltyRows, new_rows: Tensor, state: StateView) -> None:
    """Count the tokens of new rows from nothing: prompt into the mask, the others into counts.

    Args:
        rows: counts and masks, out.
        new_rows: [M] int32.
        state: rows whose tokens and lengths are there.
    """
    if not use_triton(rows.counts):
        count_tokens_ref(rows, new_rows, state)
        return
    vocab_size, num_words = rows.counts.shape[1], rows.prompt_mask.shape[1]
    clear = (len(new_rows), triton.cdiv(vocab_size, _BLOCK_SIZE))
    _clear_rows_kernel[clear](
        new_rows, rows.counts, rows.prompt_mask, vocab_size, num_words, BLOCK_SIZE=_BLOCK_SIZE
    )
    max_len = state.all_token_ids.shape[1]
    _count_tokens_kernel[(len(new_rows), triton.cdiv(max_len, _TOKEN_BLOCK))](
        new_rows,
        state.all_token_ids,
        state.all_token_ids.stride(0),
        state.prompt_len,
        state.total_len,
        rows.counts,
        rows.prompt_mask,
        vocab_size,
        num_words,
        BLOCK_SIZE=_TOKEN_BLOCK,
    )


def count_committed(rows: PenaltyRows, ctx: CommitContext) -> None:
    """Add what a step committed to the counts of rows with penalties.

    Args:
        rows: counts, in/out.
        ctx: the step.
    """
    if not use_triton(rows.counts):
        count_committed_ref(rows, ctx)
        return
    _count_committed_kernel[(len(ctx.idx_mapping),)](
        ctx.idx_mapping,
        ctx.sampled_tokens,
        ctx.sampled_tokens.stride(0),
        ctx.num_sampled,
        rows.penalties,
        rows.counts,
        rows.counts.shape[1],
        WIDTH=triton.next_power_of_2(ctx.sampled_tokens.shape[1]),
    )


def _penalized(rows: PenaltyRows, idx_mapping: Tensor) -> list[int]:
    """Return which entries of a mapping name a row with penalties."""
    none = torch.tensor([1.0, 0.0, 0.0], device=idx_mapping.device)
    differs = (rows.penalties[idx_mapping.long().clamp(min=0)] != none).any(1)
    return (differs & (idx_mapping >= 0)).nonzero(as_tuple=True)[0].tolist()


def apply_penalties_ref(logits: Tensor, ctx: LogitsContext, rows: PenaltyRows) -> None:
    """Torch twin of `apply_penalties`."""
    vocab_size = logits.shape[1]
    for line in _penalized(rows, ctx.expanded_idx_mapping):
        row = ctx.expanded_idx_mapping[line]
        repetition, frequency, presence = rows.penalties[row]
        drafts = ctx.draft_tokens[row, : int(ctx.expanded_local_pos[line])]
        drafts = drafts[drafts >= 0]
        counts = rows.counts[row].index_add(0, drafts, torch.ones_like(drafts, dtype=torch.int32))
        repeats = has_bits_ref(rows.prompt_mask[row], vocab_size) | (counts > 0)
        factor = torch.where(repeats, repetition, 1.0)
        values = logits[line]
        values.copy_(torch.where(values > 0, values / factor, values * factor))
        values -= frequency * counts
        values -= torch.where(counts > 0, presence, 0.0)


def count_tokens_ref(rows: PenaltyRows, new_rows: Tensor, state: StateView) -> None:
    """Torch twin of `count_tokens`."""
    vocab_size = rows.counts.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=rows.counts.device)
    for row in new_rows.tolist():
        prompt_len, total_len = int(state.prompt_len[row]), int(state.total_len[row])
        tokens = state.all_token_ids[row, :total_len].long()
        rows.counts[row] = torch.bincount(tokens[prompt_len:], minlength=vocab_size).int()
        bits = torch.zeros_like(shifts).repeat(rows.prompt_mask.shape[1], 1)
        bits.view(-1)[tokens[:prompt_len]] = 1
        # As a sum the bits of a word are one number: no two of them are the same.
        rows.prompt_mask[row] = (bits << shifts).sum(1).int()


def count_committed_ref(rows: PenaltyRows, ctx: CommitContext) -> None:
    """Torch twin of `count_committed`."""
    for place in _penalized(rows, ctx.idx_mapping):
        tokens = ctx.sampled_tokens[place, : int(ctx.num_sampled[place])]
        one = torch.ones_like(tokens, dtype=torch.int32)
        rows.counts[ctx.idx_mapping[place]].index_add_(0, tokens, one)
