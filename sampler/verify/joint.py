"""Judge the drafts of a place together, as block verification does.

With p and q the target's and the draft's law after the drafts before (q = 1 for a one-hot draft):

    w_0 = 1,    w_i = min(1, w_{i-1} p(d_i) / q(d_i))                   chance that d_1..d_i stay
    r_i = sum over x of max(w_i p(x) - q(x), 0)                         one-hot: w_i (1 - p(d))
    h_i = r_i / (r_i + 1 - w_i)    where draft i + 1 follows            chance to stop at i, given
    h_i = w_i                      after the last draft                 that no longer run is kept

    kept = the longest run whose own uniform is below h_i, else no draft

Line i of a place holds the law after i drafts, so it has w_i, r_i and h_i. Greedy rows keep the
leading drafts that are the argmax. The uniform of a run is keyed by the row's length at drafting
and the run's: by the position where the run ends alone, it would judge again in the next step, when
its outcome has already told something of it.

Launches: statistics of each line's blocks, w of each place, r of each line's blocks, the judgement
of each place.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from sampler.gumbel import BLOCK_SIZE
from sampler.noise import (
    STREAM_ACCEPT,
    noise_key,
    noise_key_device,
    noise_uniform,
    noise_uniform_device,
)
from sampler.verify.judge import (
    WITH_Q,
    Judgement,
    block_statistics,
    draft_logits_arguments,
    draft_probabilities_ref,
)
from specdec.protocols import DRAFT_KIND_WITH_Q, VerifyInputs


@dataclass(frozen=True)
class JointJudgement(Judgement):
    """What became of the drafts, and the chances that decided it."""

    # [L] float32, h of the run that ends before the line; 0 where a line ends none (a place's
    # first line, lines behind its last draft) and in greedy rows.
    stop_prob: Tensor | None = None


@triton.jit
def _log_sum_exp_lines_device(
    max_ptr, sum_ptr, lines, inside, num_blocks, PADDED_BLOCKS: tl.constexpr
):
    """Put the blocks of several lines together; 0 for a line that is not inside."""
    blocks = tl.arange(0, PADDED_BLOCKS)
    cells = lines[:, None] * num_blocks + blocks[None, :]
    mask = (inside[:, None] > 0) & (blocks[None, :] < num_blocks)
    largest = tl.load(max_ptr + cells, mask=mask, other=float("-inf"))
    sums = tl.load(sum_ptr + cells, mask=mask, other=0.0)
    top = tl.max(largest, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp(largest - shift[:, None]), axis=1)
    return tl.where(inside > 0, shift + tl.log(tl.where(inside > 0, total, 1.0)), 0.0)


@triton.jit(do_not_specialize=["num_lines", "num_cells"])
def _prefix_weights_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    draft_tokens_ptr,  # [L] int64
    draft_kind_ptr,  # [L] int8
    draft_logits_ptr,  # [N, K, V] float
    draft_logits_row_stride,
    draft_logits_column_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    local_pos_ptr,  # [L] int32
    temperature_ptr,  # [N] float32
    cu_num_logits_ptr,  # [R + 1] int32
    block_stats_ptr,  # [4, L, num_blocks] float32
    lse_ptr,  # [2, L] float32, out: target, draft
    target_prob_ptr,  # [L] float32, out: what the target gives the draft of a sampled row's line
    weight_ptr,  # [L] float32, out
    num_lines,
    num_cells,  # L * num_blocks
    num_blocks,
    HAS_Q: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + place)
    lines_of_place = tl.load(cu_num_logits_ptr + place + 1) - start
    j = tl.arange(0, WIDTH)
    lines = start.to(tl.int64) + j
    inside = j < lines_of_place
    draft = tl.load(draft_tokens_ptr + lines, mask=inside, other=-1)
    row = tl.load(idx_mapping_ptr + lines, mask=inside, other=0).to(tl.int64)
    sampled = tl.load(temperature_ptr + tl.maximum(row, 0)) > 0
    judges = ((draft >= 0) & sampled).to(tl.int32)
    has_draft = judges > 0
    target_lse = _log_sum_exp_lines_device(
        block_stats_ptr, block_stats_ptr + num_cells, lines, judges, num_blocks, PADDED_BLOCKS
    )
    pointers = logits_ptr + lines * logits_stride + draft
    logit = tl.load(pointers, mask=has_draft, other=0.0).to(tl.float32)
    target_prob = tl.where(has_draft, tl.exp(logit - target_lse), 0.0)
    draft_prob = tl.full([WIDTH], 1.0, tl.float32)
    draft_lse = tl.full([WIDTH], 0.0, tl.float32)
    if HAS_Q:
        kind = tl.load(draft_kind_ptr + lines, mask=inside, other=0).to(tl.int32)
        with_q = judges * (kind == WITH_Q).to(tl.int32)
        draft_stats_ptr = block_stats_ptr + 2 * num_cells
        draft_lse = _log_sum_exp_lines_device(
            draft_stats_ptr, draft_stats_ptr + num_cells, lines, with_q, num_blocks, PADDED_BLOCKS
        )
        column = tl.load(local_pos_ptr + lines, mask=inside, other=0).to(tl.int64)
        q_ptr = draft_logits_ptr + row * draft_logits_row_stride
        q_ptr += column * draft_logits_column_stride + draft
        q = tl.load(q_ptr, mask=with_q > 0, other=0.0).to(tl.float32)
        draft_prob = tl.where(with_q > 0, tl.exp(q - draft_lse), 1.0)
    weight = tl.full((), 1.0, tl.float32)
    weights = tl.full([WIDTH], 0.0, tl.float32)
    for i in range(WIDTH):
        weights = tl.where(j == i, weight, weights)
        scaled = weight * tl.sum(tl.where(j == i, target_prob, 0.0), axis=0)
        prob = tl.sum(tl.where(j == i, draft_prob, 0.0), axis=0)
        # Where nothing is left a NaN or a q of 0 must not make something of it.
        weight = tl.where(scaled < prob, scaled / prob, 1.0)
        weight = tl.where(scaled > 0, weight, 0.0)
    tl.store(lse_ptr + lines, target_lse, mask=inside)
    tl.store(lse_ptr + num_lines + lines, draft_lse, mask=inside)
    tl.store(target_prob_ptr + lines, target_prob, mask=inside)
    tl.store(weight_ptr + lines, weights, mask=inside)


@triton.jit(do_not_specialize=["num_lines"])
def _block_residuals_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    draft_tokens_ptr,  # [L] int64
    draft_kind_ptr,  # [L] int8
    draft_logits_ptr,  # [N, K, V] float
    draft_logits_row_stride,
    draft_logits_column_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    local_pos_ptr,  # [L] int32
    temperature_ptr,  # [N] float32
    lse_ptr,  # [2, L] float32
    weight_ptr,  # [L] float32
    block_residual_ptr,  # [L, num_blocks] float32, out
    num_lines,
    num_blocks,
    vocab_size,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    block = num_blocks - 1 - tl.program_id(1)  # what was read last may still be in L2
    cell = block_residual_ptr + line * num_blocks + block
    # A first line ends no run, and for a one-hot draft the sum is known: nothing is read.
    column = tl.load(local_pos_ptr + line).to(tl.int64)
    kind = tl.load(draft_kind_ptr + line).to(tl.int32)
    needed = (tl.load(draft_tokens_ptr + line) >= 0).to(tl.int32)
    needed *= (column > 0).to(tl.int32) * (kind == WITH_Q).to(tl.int32)
    if needed == 0:
        return
    weight = tl.load(weight_ptr + line)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    if weight * tl.load(temperature_ptr + row) > 0:
        tokens = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        inside = tokens < vocab_size
        pointers = logits_ptr + line * logits_stride + tokens
        target = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
        q_ptr = draft_logits_ptr + row * draft_logits_row_stride
        q_ptr += column * draft_logits_column_stride + tokens
        q = tl.load(q_ptr, mask=inside, other=float("-inf")).to(tl.float32)
        rest = weight * tl.exp(target - tl.load(lse_ptr + line))
        rest -= tl.exp(q - tl.load(lse_ptr + num_lines + line))
        tl.store(cell, tl.sum(tl.where(rest > 0, rest, 0.0), axis=0))
    else:
        tl.store(cell, 0.0)


@triton.jit
def _judge_prefixes_kernel(
    draft_tokens_ptr,  # [L] int64
    draft_kind_ptr,  # [L] int8
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    positions_ptr,  # [L] int64
    temperature_ptr,  # [N] float32
    seeds_ptr,  # [N] int64
    cu_num_logits_ptr,  # [R + 1] int32
    block_stats_ptr,  # [4, L, num_blocks] float32
    block_arg_ptr,  # [L, num_blocks] int32
    target_prob_ptr,  # [L] float32
    weight_ptr,  # [L] float32
    block_residual_ptr,  # [L, num_blocks] float32
    accepted_ptr,  # [L] int8, out
    stop_prob_ptr,  # [L] float32, out
    best_tokens_ptr,  # [L] int64, out: of greedy rows
    num_blocks,
    STREAM: tl.constexpr,
    HAS_Q: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + place)
    lines_of_place = tl.load(cu_num_logits_ptr + place + 1) - start
    if lines_of_place <= 0:
        return
    row = tl.load(idx_mapping_ptr + start).to(tl.int64)
    safe_row = tl.maximum(row, 0)
    j = tl.arange(0, WIDTH)
    lines = start.to(tl.int64) + j
    inside = j < lines_of_place
    draft = tl.load(draft_tokens_ptr + lines, mask=inside, other=-1)
    num_drafts = tl.min(tl.where(draft < 0, j, WIDTH), axis=0)
    judges = j < num_drafts
    blocks = tl.arange(0, PADDED_BLOCKS)
    cells = lines[:, None] * num_blocks + blocks[None, :]
    mask = judges[:, None] & (blocks[None, :] < num_blocks)
    if tl.where(row >= 0, tl.load(temperature_ptr + safe_row), 0.0) > 0:
        weight = tl.load(weight_ptr + lines, mask=inside, other=0.0)
        target_prob = tl.load(target_prob_ptr + lines, mask=inside, other=0.0)
        residual = weight * (1.0 - target_prob)
        if HAS_Q:
            kind = tl.load(draft_kind_ptr + lines, mask=inside, other=0).to(tl.int32)
            sums = tl.load(block_residual_ptr + cells, mask=mask, other=0.0)
            residual = tl.where(kind == WITH_Q, tl.sum(sums, axis=1), residual)
        rest = residual + (1.0 - weight)
        # Nothing left: p is q and every draft so far is kept for sure, as is the next one.
        none_left = rest <= 0
        stop_prob = tl.where(none_left, 1.0, residual / tl.where(none_left, 1.0, rest))
        stop_prob = tl.where(j == num_drafts, weight, stop_prob)
        stop_prob = tl.where((j > 0) & (j <= num_drafts), stop_prob, 0.0)
        # The first line of a place draws the token after the text.
        total_len = tl.load(positions_ptr + start)
        a, b = noise_key_device(tl.load(seeds_ptr + safe_row), total_len, STREAM)
        keeps = noise_uniform_device(a, b, j) < stop_prob
        num_accepted = tl.max(tl.where(keeps, j, 0), axis=0)
    else:
        stop_prob = tl.full([WIDTH], 0.0, tl.float32)
        largest = tl.load(block_stats_ptr + cells, mask=mask, other=float("-inf"))
        top = tl.max(largest, axis=1)
        block = tl.where(largest == top[:, None], blocks[None, :], num_blocks - 1)
        best_cell = lines * num_blocks + tl.minimum(tl.min(block, axis=1), num_blocks - 1)
        best = tl.load(block_arg_ptr + best_cell, mask=judges, other=-1).to(tl.int64)
        tl.store(best_tokens_ptr + lines, best, mask=judges)
        matches = judges & (best == draft)
        num_accepted = tl.minimum(tl.min(tl.where(matches, WIDTH, j), axis=0), num_drafts)
    tl.store(accepted_ptr + lines, (j < num_accepted).to(tl.int8), mask=inside)
    tl.store(stop_prob_ptr + lines, stop_prob, mask=inside)


def _law_arguments(inputs: VerifyInputs) -> tuple[Any, ...]:
    """Return the first arguments of the kernels that read laws."""
    return (
        inputs.logits,
        inputs.logits.stride(0),
        inputs.draft_tokens,
        inputs.draft_kind,
        *draft_logits_arguments(inputs),
        inputs.expanded_idx_mapping,
        inputs.expanded_local_pos,
    )


def _launch_weights(
    inputs: VerifyInputs, block_stats: Tensor, widths: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return lse [2, L], the target's probability of each line's draft [L], and w [L]."""
    num_lines, num_blocks = block_stats.shape[1:]
    lse = block_stats.new_empty(2, num_lines)
    # Each allocated alone: kernels are compiled for the alignment of their arguments.
    target_prob, weight = block_stats.new_empty(num_lines), block_stats.new_empty(num_lines)
    _prefix_weights_kernel[(len(inputs.cu_num_logits) - 1,)](
        *_law_arguments(inputs),
        inputs.temperature,
        inputs.cu_num_logits,
        block_stats,
        lse,
        target_prob,
        weight,
        num_lines,
        num_lines * num_blocks,
        num_blocks,
        HAS_Q=inputs.draft_logits is not None,
        **widths,
    )
    return lse, target_prob, weight


def judge_prefixes(inputs: VerifyInputs) -> JointJudgement:
    """Decide for each place how many of its drafts are kept."""
    if not use_triton(inputs.logits):
        return judge_prefixes_ref(inputs)
    drafts, has_q = inputs.draft_tokens, inputs.draft_logits is not None
    block_stats, block_arg = block_statistics(inputs)
    num_reqs, num_blocks = len(inputs.cu_num_logits) - 1, block_arg.shape[1]
    widths = {
        "WIDTH": triton.next_power_of_2(max(inputs.max_num_logits, 1)),
        "PADDED_BLOCKS": triton.next_power_of_2(num_blocks),
    }
    lse, target_prob, weight = _launch_weights(inputs, block_stats, widths)
    block_residual = torch.empty_like(block_stats[0])
    if has_q:
        _block_residuals_kernel[(len(drafts), num_blocks)](
            *_law_arguments(inputs),
            inputs.temperature,
            lse,
            weight,
            block_residual,
            len(drafts),
            num_blocks,
            inputs.logits.shape[1],
            BLOCK_SIZE=BLOCK_SIZE,
        )
    accepted = drafts.new_empty(len(drafts), dtype=torch.bool)
    stop_prob, best_tokens = torch.empty_like(weight), torch.empty_like(drafts)
    _judge_prefixes_kernel[(num_reqs,)](
        drafts,
        inputs.draft_kind,
        inputs.expanded_idx_mapping,
        inputs.draw_positions,
        inputs.temperature,
        inputs.seeds,
        inputs.cu_num_logits,
        block_stats,
        block_arg,
        target_prob,
        weight,
        block_residual,
        accepted.view(torch.int8),
        stop_prob,
        best_tokens,
        num_blocks,
        STREAM=STREAM_ACCEPT,
        HAS_Q=has_q,
        **widths,
    )
    return JointJudgement(accepted, lse, weight, best_tokens, stop_prob)


def _residual_mass_ref(
    inputs: VerifyInputs, lse: Tensor, weight: Tensor, target_prob: Tensor
) -> Tensor:
    """Return r of every line, [L]; only lines that judge a draft and end a run mean something."""
    residual = weight * (1.0 - target_prob)
    needed = (inputs.draft_tokens >= 0) & (inputs.draft_kind == DRAFT_KIND_WITH_Q)
    needed &= inputs.expanded_local_pos > 0
    if inputs.draft_logits is not None and bool(needed.any()):
        (lines,) = needed.nonzero(as_tuple=True)
        rows = inputs.expanded_idx_mapping[lines].long()
        q = inputs.draft_logits[rows, inputs.expanded_local_pos[lines].long()].float()
        target = weight[lines, None] * (inputs.logits[lines].float() - lse[0, lines, None]).exp()
        rest = target - (q - lse[1, lines, None]).exp()
        residual[lines] = torch.where(rest > 0, rest, 0.0).sum(1)
    return residual


def judge_prefixes_ref(inputs: VerifyInputs) -> JointJudgement:
    """Torch twin of `judge_prefixes`."""
    drafts, grid, valid = inputs.draft_tokens, inputs.line_grid, inputs.line_valid
    grid = grid.clamp(min=0)
    target_prob, draft_prob, lse = draft_probabilities_ref(inputs)
    sampled_lines = inputs.temperature[inputs.expanded_idx_mapping.long().clamp(min=0)] > 0
    target_prob = torch.where((drafts >= 0) & sampled_lines, target_prob, 0.0)
    weight = torch.zeros_like(target_prob)
    running = torch.ones_like(target_prob[grid[:, 0]])
    for i in range(inputs.max_num_logits):
        own = valid[:, i]
        weight[grid[own, i]] = running[own]
        scaled, prob = running * target_prob[grid[:, i]], draft_prob[grid[:, i]]
        running = torch.where(scaled < prob, scaled / prob, 1.0)
        running = torch.where(scaled > 0, running, 0.0)
    residual = _residual_mass_ref(inputs, lse, weight, target_prob)
    rest = residual + (1.0 - weight)
    stop_prob = torch.where(rest <= 0, 1.0, residual / torch.where(rest <= 0, 1.0, rest))

    j = torch.arange(inputs.max_num_logits, device=drafts.device)
    row = inputs.expanded_idx_mapping[grid[:, 0]].long()
    num_drafts = ((drafts[grid] >= 0) & valid).int().cumprod(1).sum(1)[:, None]
    sampled = ((row >= 0) & (inputs.temperature[row.clamp(min=0)] > 0))[:, None]
    stop = torch.where(j == num_drafts, weight[grid], stop_prob[grid])
    stop = torch.where(sampled & (j > 0) & (j <= num_drafts), stop, 0.0)
    seeds, total_len = inputs.seeds[row.clamp(min=0)], inputs.draw_positions[grid[:, 0]]
    key = noise_key(seeds[:, None], total_len[:, None], STREAM_ACCEPT)
    keeps = noise_uniform(key, j.int()) < stop
    num_accepted = torch.where(keeps, j, 0).amax(1, keepdim=True)
    best = inputs.logits.argmax(1)
    matches = ((best == drafts)[grid] & (j < num_drafts)).int().cumprod(1).sum(1, keepdim=True)
    num_accepted = torch.where(sampled, num_accepted, matches)
    accepted = torch.zeros_like(drafts, dtype=torch.bool)
    accepted[grid[valid]] = (j < num_accepted)[valid]
    stop_line = torch.zeros_like(weight)
    stop_line[grid[valid]] = stop[valid]
    return JointJudgement(accepted, lse, weight, best, stop_line)
