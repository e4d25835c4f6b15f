"""Judge each line's draft by itself, as rejection sampling does.

    draft d is kept where  u * q(d) < p(d),  u uniform;    q = 1 for a one-hot draft

with p and q the softmax of target and draft logits. Neither law is stored: a line keeps the
logarithm of its sum of exponentials, from which any probability follows. Greedy rows compare the
argmax.

A line is cut into blocks, whose statistics one launch takes and a second one puts together.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from sampler.gumbel import BLOCK_SIZE, best_block_device, best_token_device
from sampler.noise import (
    STREAM_ACCEPT,
    noise_key,
    noise_key_device,
    noise_uniform,
    noise_uniform_device,
)
from specdec.protocols import DRAFT_KIND_WITH_Q, VerifyInputs

WITH_Q = tl.constexpr(DRAFT_KIND_WITH_Q)


@dataclass(frozen=True)
class Judgement:
    """What became of the drafts, line by line."""

    accepted: Tensor  # [L] bool
    # [2, L] float32, log of the sum of exp(logits): of the target where a sampled row judges a
    # draft, and of the draft where that has a q; else 0.
    lse: Tensor
    # [L] float32, what the target's law is weighed with in the residual; None = 1.
    weight: Tensor | None = None
    # [L] int64, the argmax where a greedy row judges a draft; None where no line is said to.
    best_tokens: Tensor | None = None


@triton.jit
def _sum_exp_device(logits):
    """Return the largest logit of a block and the sum of exp(logit - largest)."""
    largest = tl.max(logits, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.sum(tl.exp(logits - shift), axis=0)


@triton.jit
def _log_sum_exp_device(max_ptr, sum_ptr, num_blocks, PADDED_BLOCKS: tl.constexpr):
    """Put the blocks of a line together."""
    blocks = tl.arange(0, PADDED_BLOCKS)
    inside = blocks < num_blocks
    largest = tl.load(max_ptr + blocks, mask=inside, other=float("-inf"))
    sums = tl.load(sum_ptr + blocks, mask=inside, other=0.0)
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return shift + tl.log(tl.sum(sums * tl.exp(largest - shift), axis=0))


@triton.jit(do_not_specialize=["num_cells"])
def _block_statistics_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    draft_tokens_ptr,  # [L] int64
    draft_kind_ptr,  # [L] int8
    draft_logits_ptr,  # [N, K, V] float
    draft_logits_row_stride,
    draft_logits_column_stride,
    idx_mapping_ptr,  # [L] int32: line -> row
    local_pos_ptr,  # [L] int32
    temperature_ptr,  # [N] float32
    block_stats_ptr,  # [4, L, num_blocks] float32, out: max and sum of target, then of draft
    block_arg_ptr,  # [L, num_blocks] int32, out: of greedy rows, whose sums are not taken
    num_cells,  # L * num_blocks
    num_blocks,
    vocab_size,
    HAS_Q: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if tl.load(draft_tokens_ptr + line) < 0:
        return
    tokens = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = tokens < vocab_size
    pointers = logits_ptr + line * logits_stride + tokens
    logits = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
    cell = line * num_blocks + block
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if tl.load(temperature_ptr + row) <= 0:
        best, token = best_token_device(logits, tokens, inside, vocab_size)
        tl.store(block_stats_ptr + cell, best)
        tl.store(block_arg_ptr + cell, token)
        return
    largest, total = _sum_exp_device(logits)
    tl.store(block_stats_ptr + cell, largest)
    tl.store(block_stats_ptr + num_cells + cell, total)
    if HAS_Q:  # noqa: SIM102 (a condition known when compiling drops the code beneath it)
        if tl.load(draft_kind_ptr + line).to(tl.int32) == WITH_Q:
            column = tl.load(local_pos_ptr + line).to(tl.int64)
            q_ptr = draft_logits_ptr + row * draft_logits_row_stride
            q_ptr += column * draft_logits_column_stride
            q = tl.load(q_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
            largest_q, total_q = _sum_exp_device(q)
            tl.store(block_stats_ptr + 2 * num_cells + cell, largest_q)
            tl.store(block_stats_ptr + 3 * num_cells + cell, total_q)


@triton.jit(do_not_specialize=["num_lines"])
def _judge_drafts_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    draft_tokens_ptr,  # [L] int64
    draft_kind_ptr,  # [L] int8
    draft_logits_ptr,  # [N, K, V] float
    draft_logits_row_stride,
    draft_logits_column_stride,
    idx_mapping_ptr,  # [L] int32: line -> row
    local_pos_ptr,  # [L] int32
    positions_ptr,  # [L] int64
    temperature_ptr,  # [N] float32
    seeds_ptr,  # [N] int64
    block_stats_ptr,  # [4, L, num_blocks] float32
    block_arg_ptr,  # [L, num_blocks] int32
    accepted_ptr,  # [L] int8, out
    lse_ptr,  # [2, L] float32, out: target, draft
    best_tokens_ptr,  # [L] int64, out: of greedy rows
    num_lines,
    num_blocks,
    STREAM: tl.constexpr,
    HAS_Q: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    draft = tl.load(draft_tokens_ptr + line)
    if draft < 0:
        tl.store(accepted_ptr + line, 0)
        tl.store(lse_ptr + line, 0.0)
        tl.store(lse_ptr + num_lines + line, 0.0)
        return
    num_cells = num_lines * num_blocks
    first = line * num_blocks
    max_ptr = block_stats_ptr + first
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if tl.load(temperature_ptr + row) <= 0:
        _, best = best_block_device(max_ptr, block_arg_ptr + first, num_blocks, PADDED_BLOCKS)
        tl.store(accepted_ptr + line, (best.to(tl.int64) == draft).to(tl.int8))
        tl.store(best_tokens_ptr + line, best.to(tl.int64))
        tl.store(lse_ptr + line, 0.0)
        tl.store(lse_ptr + num_lines + line, 0.0)
        return
    target_lse = _log_sum_exp_device(max_ptr, max_ptr + num_cells, num_blocks, PADDED_BLOCKS)
    logit = tl.load(logits_ptr + line * logits_stride + draft).to(tl.float32)
    target_prob = tl.exp(logit - target_lse)
    draft_lse = tl.full((), 0.0, tl.float32)
    draft_prob = tl.full((), 1.0, tl.float32)
    if HAS_Q:  # noqa: SIM102 (a condition known when compiling drops the code beneath it)
        if tl.load(draft_kind_ptr + line).to(tl.int32) == WITH_Q:
            draft_max_ptr = max_ptr + 2 * num_cells
            draft_lse = _log_sum_exp_device(
                draft_max_ptr, draft_max_ptr + num_cells, num_blocks, PADDED_BLOCKS
            )
            column = tl.load(local_pos_ptr + line).to(tl.int64)
            q_ptr = draft_logits_ptr + row * draft_logits_row_stride
            q_ptr += column * draft_logits_column_stride
            draft_prob = tl.exp(tl.load(q_ptr + draft).to(tl.float32) - draft_lse)
    a, b = noise_key_device(tl.load(seeds_ptr + row), tl.load(positions_ptr + line), STREAM)
    kept = noise_uniform_device(a, b, draft) * draft_prob < target_prob
    tl.store(accepted_ptr + line, kept.to(tl.int8))
    tl.store(lse_ptr + line, target_lse)
    tl.store(lse_ptr + num_lines + line, draft_lse)


def block_statistics(inputs: VerifyInputs) -> tuple[Tensor, Tensor]:
    """Launch the statistics of the blocks of every line that judges a draft.

    Returns:
        block_stats [4, L, num_blocks] float32 and block_arg [L, num_blocks] int32, see the kernel.
    """
    logits, drafts = inputs.logits, inputs.draft_tokens
    num_lines, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    block_stats = logits.new_empty(4, num_lines, num_blocks, dtype=torch.float32)
    block_arg = drafts.new_empty(num_lines, num_blocks, dtype=torch.int32)
    _block_statistics_kernel[(num_lines, num_blocks)](
        logits,
        logits.stride(0),
        drafts,
        inputs.draft_kind,
        *draft_logits_arguments(inputs),
        inputs.expanded_idx_mapping,
        inputs.expanded_local_pos,
        inputs.temperature,
        block_stats,
        block_arg,
        num_lines * num_blocks,
        num_blocks,
        vocab_size,
        HAS_Q=inputs.draft_logits is not None,
        BLOCK_SIZE=BLOCK_SIZE,
    )
    return block_stats, block_arg


def judge_drafts(inputs: VerifyInputs) -> Judgement:
    """Decide for each line by itself whether its draft is kept."""
    logits, drafts, q = inputs.logits, inputs.draft_tokens, inputs.draft_logits
    if not use_triton(logits):
        return judge_drafts_ref(inputs)
    num_lines = len(drafts)
    block_stats, block_arg = block_statistics(inputs)
    num_blocks = block_arg.shape[1]
    accepted = drafts.new_empty(num_lines, dtype=torch.bool)
    lse = logits.new_empty(2, num_lines, dtype=torch.float32)
    best_tokens = torch.empty_like(drafts)
    _judge_drafts_kernel[(num_lines,)](
        logits,
        logits.stride(0),
        drafts,
        inputs.draft_kind,
        *draft_logits_arguments(inputs),
        inputs.expanded_idx_mapping,
        inputs.expanded_local_pos,
        inputs.draw_positions,
        inputs.temperature,
        inputs.seeds,
        block_stats,
        block_arg,
        accepted.view(torch.int8),
        lse,
        best_tokens,
        num_lines,
        num_blocks,
        STREAM=STREAM_ACCEPT,
        HAS_Q=q is not None,
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return Judgement(accepted, lse, best_tokens=best_tokens)


def draft_logits_arguments(inputs: VerifyInputs) -> tuple[Tensor, int, int]:
    """Return the draft logits and their strides; without q, what no kernel reads."""
    q, logits = inputs.draft_logits, inputs.logits
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    if q is None:
        return logits, 0, 0
    assert q.shape[2] == logits.shape[1], f"q of {q.shape[2]} ids, target of {logits.shape[1]}"
    assert q.stride(2) == 1, f"draft logits of strides {q.stride()}"
    return q, q.stride(0), q.stride(1)


def draft_probabilities_ref(inputs: VerifyInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return what target and draft give each line's draft, [L] float32 each, and `Judgement.lse`.

    Where a line judges no draft, or in a greedy row, the target's is anything.
    """
    logits, drafts = inputs.logits, inputs.draft_tokens
    rows = inputs.expanded_idx_mapping.long().clamp(min=0)
    has_draft, safe = (drafts >= 0) & (inputs.temperature[rows] > 0), drafts.clamp(min=0)
    lse = logits.new_zeros(2, len(drafts))
    lse[0] = torch.where(has_draft, logits.logsumexp(1), 0.0)
    target_prob = (logits.gather(1, safe[:, None]).squeeze(1) - lse[0]).exp()
    draft_prob = torch.ones_like(target_prob)
    with_q = has_draft & (inputs.draft_kind == DRAFT_KIND_WITH_Q)
    if inputs.draft_logits is not None and bool(with_q.any()):
        (lines,) = with_q.nonzero(as_tuple=True)
        q = inputs.draft_logits[rows[lines], inputs.expanded_local_pos[lines].long()].float()
        lse[1, lines] = q.logsumexp(1)
        draft_prob[lines] = (q.gather(1, drafts[lines, None]).squeeze(1) - lse[1, lines]).exp()
    return target_prob, draft_prob, lse


def judge_drafts_ref(inputs: VerifyInputs) -> Judgement:
    """Torch twin of `judge_drafts`."""
    drafts = inputs.draft_tokens
    rows = inputs.expanded_idx_mapping.long().clamp(min=0)
    target_prob, draft_prob, lse = draft_probabilities_ref(inputs)
    key = noise_key(inputs.seeds[rows], inputs.draw_positions, STREAM_ACCEPT)
    kept = noise_uniform(key, drafts.clamp(min=0).int()) * draft_prob < target_prob
    best = inputs.logits.argmax(1)
    kept = torch.where(inputs.temperature[rows] > 0, kept, best == drafts)
    return Judgement((drafts >= 0) & kept, lse, best_tokens=best)
