"""Draw the token after the accepted drafts, as rejection sampling and block verification do.

    after a rejection:       a draw of max(w p - q, 0);    p without d where draft d is one-hot
    after the last draft:    a draw of p

with w the weight of the judgement (1 in rejection sampling), p and q the softmax of target and
draft logits, by Gumbel-max; only each place's stop line draws. Greedy rows and padding take the
argmax.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from sampler.gumbel import BLOCK_SIZE, best_block_device, best_token_device, gumbel_sample
from sampler.noise import STREAM_TARGET, noise_gumbel_device, noise_key_device
from sampler.verify.chain import count_accepted_device, num_accepted_ref
from sampler.verify.judge import WITH_Q, Judgement, draft_logits_arguments
from specdec.protocols import DRAFT_KIND_WITH_Q, VerifyInputs


@triton.jit(do_not_specialize=["num_lines", "num_cells"])
def _residual_blocks_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    draft_tokens_ptr,  # [L] int64
    draft_kind_ptr,  # [L] int8
    draft_logits_ptr,  # [N, K, V] float
    draft_logits_row_stride,
    draft_logits_column_stride,
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    local_pos_ptr,  # [L] int32
    positions_ptr,  # [L] int64
    temperature_ptr,  # [N] float32
    seeds_ptr,  # [N] int64
    cu_num_logits_ptr,  # [R + 1] int32
    accepted_ptr,  # [L] int8
    lse_ptr,  # [2, L] float32: target, draft
    weight_ptr,  # [L] float32
    block_max_ptr,  # [2, R, num_blocks] float32, out: of the residual, then of the target
    block_arg_ptr,  # [2, R, num_blocks] int32, out
    num_lines,
    num_cells,  # R * num_blocks
    num_blocks,
    vocab_size,
    STREAM: tl.constexpr,
    RESIDUAL_STREAM: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    start = tl.load(cu_num_logits_ptr + place)
    lines_of_place = tl.load(cu_num_logits_ptr + place + 1) - start
    if lines_of_place <= 0:
        return
    line = start + count_accepted_device(accepted_ptr, start, lines_of_place, WIDTH).to(tl.int64)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    safe_row = tl.maximum(row, 0)
    temperature = tl.load(temperature_ptr + safe_row)
    draft = tl.load(draft_tokens_ptr + line)
    tokens = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = tokens < vocab_size
    pointers = logits_ptr + line * logits_stride + tokens
    target = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
    residual = tl.full([BLOCK_SIZE], float("-inf"), tl.float32)
    if tl.where(row >= 0, temperature, 0.0) > 0:
        seed = tl.load(seeds_ptr + safe_row)
        position = tl.load(positions_ptr + line)
        if draft >= 0:
            residual = tl.where(tokens == draft, float("-inf"), target)
            if HAS_Q:  # noqa: SIM102 (known when compiling: drops the code beneath)
                if tl.load(draft_kind_ptr + line).to(tl.int32) == WITH_Q:
                    column = tl.load(local_pos_ptr + line).to(tl.int64)
                    q_ptr = draft_logits_ptr + safe_row * draft_logits_row_stride
                    q_ptr += column * draft_logits_column_stride
                    q = tl.load(q_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
                    rest = tl.exp(target - tl.load(lse_ptr + line))
                    if HAS_WEIGHT:
                        rest *= tl.load(weight_ptr + line)
                    rest -= tl.exp(q - tl.load(lse_ptr + num_lines + line))
                    positive = tl.where(rest > 0, rest, 1.0)
                    residual = tl.where(rest > 0, tl.log(positive), float("-inf"))
            a, b = noise_key_device(seed, position, RESIDUAL_STREAM)
            residual += noise_gumbel_device(a, b, tokens)
        a, b = noise_key_device(seed, position, STREAM)
        target += noise_gumbel_device(a, b, tokens)
    cell = place * num_blocks + block
    best, token = best_token_device(residual, tokens, inside, vocab_size)
    tl.store(block_max_ptr + cell, best)
    tl.store(block_arg_ptr + cell, token)
    cell += num_cells
    best, token = best_token_device(target, tokens, inside, vocab_size)
    tl.store(block_max_ptr + cell, best)
    tl.store(block_arg_ptr + cell, token)


@triton.jit(do_not_specialize=["num_cells"])
def _next_tokens_kernel(
    cu_num_logits_ptr,  # [R + 1] int32
    accepted_ptr,  # [L] int8
    block_max_ptr,  # [2, R, num_blocks] float32: of the residual, then of the target
    block_arg_ptr,  # [2, R, num_blocks] int32
    next_tokens_ptr,  # [L] int64, out: written at the stop lines
    num_cells,  # R * num_blocks
    num_blocks,
    WIDTH: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + place)
    lines_of_place = tl.load(cu_num_logits_ptr + place + 1) - start
    if lines_of_place <= 0:
        return
    line = start + count_accepted_device(accepted_ptr, start, lines_of_place, WIDTH)
    first = place * num_blocks
    best, residual_token = best_block_device(
        block_max_ptr + first, block_arg_ptr + first, num_blocks, PADDED_BLOCKS
    )
    first += num_cells
    _, target_token = best_block_device(
        block_max_ptr + first, block_arg_ptr + first, num_blocks, PADDED_BLOCKS
    )
    # Rounding can leave nothing of a residual whose mass is below the dtype's: p is then q up to
    # that rounding, and the draw falls back to p.
    token = tl.where(best == float("-inf"), target_token, residual_token)
    tl.store(next_tokens_ptr + line, token.to(tl.int64))


def draw_next_tokens(inputs: VerifyInputs, judgement: Judgement, residual_stream: int) -> Tensor:
    """Draw at each place's stop line: from the residual if it refused a draft, else the target.

    Args:
        inputs: the step.
        judgement: of its drafts.
        residual_stream: noise stream of the draws from the residual.

    Returns:
        tokens [L] int64, which mean something at the stop lines alone.
    """
    logits, drafts, q = inputs.logits, inputs.draft_tokens, inputs.draft_logits
    if not use_triton(logits):
        return draw_next_tokens_ref(inputs, judgement, residual_stream)
    num_lines, vocab_size = logits.shape
    num_reqs = len(inputs.cu_num_logits) - 1
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    width = triton.next_power_of_2(max(inputs.max_num_logits, 1))
    block_max = logits.new_empty(2, num_reqs, num_blocks, dtype=torch.float32)
    block_arg = drafts.new_empty(2, num_reqs, num_blocks, dtype=torch.int32)
    next_tokens = torch.empty_like(drafts)
    accepted = judgement.accepted.view(torch.int8)
    _residual_blocks_kernel[(num_reqs, num_blocks)](
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
        inputs.cu_num_logits,
        accepted,
        judgement.lse,
        judgement.lse if judgement.weight is None else judgement.weight,
        block_max,
        block_arg,
        num_lines,
        num_reqs * num_blocks,
        num_blocks,
        vocab_size,
        STREAM=STREAM_TARGET,
        RESIDUAL_STREAM=residual_stream,
        HAS_Q=q is not None,
        HAS_WEIGHT=judgement.weight is not None,
        WIDTH=width,
        BLOCK_SIZE=BLOCK_SIZE,
    )
    _next_tokens_kernel[(num_reqs,)](
        inputs.cu_num_logits,
        accepted,
        block_max,
        block_arg,
        next_tokens,
        num_reqs * num_blocks,
        num_blocks,
        WIDTH=width,
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return next_tokens


def draw_next_tokens_ref(
    inputs: VerifyInputs, judgement: Judgement, residual_stream: int
) -> Tensor:
    """Torch twin of `draw_next_tokens`."""
    starts = inputs.cu_num_logits[:-1].long()
    count = num_accepted_ref(judgement.accepted, inputs.cu_num_logits, inputs.max_num_logits)
    # A place without lines repeats another one's draw: what is drawn depends on the line alone.
    lines = (starts + count).clamp(min=0)
    logits, drafts = inputs.logits[lines], inputs.draft_tokens[lines]
    rows = inputs.expanded_idx_mapping[lines]
    safe_rows = rows.long().clamp(min=0)
    rejected = (drafts >= 0) & (rows >= 0) & (inputs.temperature[safe_rows] > 0)
    residual = logits.scatter(1, drafts.clamp(min=0)[:, None], float("-inf"))
    with_q = rejected & (inputs.draft_kind[lines] == DRAFT_KIND_WITH_Q)
    if inputs.draft_logits is not None and bool(with_q.any()):
        column = inputs.expanded_local_pos[lines[with_q]].long()
        q = inputs.draft_logits[safe_rows[with_q], column].float()
        target_lse, draft_lse = judgement.lse[:, lines[with_q], None]
        target_prob = (logits[with_q] - target_lse).exp()
        if judgement.weight is not None:
            target_prob *= judgement.weight[lines[with_q], None]
        difference = target_prob - (q - draft_lse).exp()
        residual[with_q] = difference.clamp(min=0).log()
    # Rounding can leave nothing of a residual whose mass is below the dtype's: p is then q up to
    # that rounding, and the draw falls back to p.
    rejected &= (residual > float("-inf")).any(1)
    next_tokens = torch.full_like(inputs.draft_tokens, -1)
    for chosen, law, stream in (
        (rejected, residual, residual_stream),
        (~rejected, logits, STREAM_TARGET),
    ):
        if bool(chosen.any()):
            next_tokens[lines[chosen]] = gumbel_sample(
                law[chosen],
                rows[chosen],
                inputs.draw_positions[lines[chosen]],
                inputs.temperature,
                inputs.seeds,
                stream,
            )
    return next_tokens
