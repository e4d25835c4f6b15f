"""Draw the token after the accepted drafts, as rejection sampling and block verification do, and
lay out the run.

    after a rejection:       a draw of max(w p - q, 0);    p without d where draft d is one-hot
    after the last draft:    a draw of p

with w the weight of the judgement (1 in rejection sampling), p and q the softmax of target and
draft logits, by Gumbel-max; only each place's stop line draws. Greedy rows and padding take the
argmax, which the judgement knows of lines that judge a draft.

Blocks are bounded and searched as in `sampler.gumbel`.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from sampler.gumbel import (
    BLOCK_SIZE,
    LOG_OF_BITS,
    add_noise_bound_device,
    best_token_device,
    better_token_device,
    gumbel_sample,
    next_block_device,
    score_bounds_device,
)
from sampler.noise import STREAM_TARGET, noise_gumbel_device, noise_key_device
from sampler.verify.chain import assemble_run_ref, count_accepted_device, num_accepted_ref
from sampler.verify.judge import WITH_Q, Judgement, draft_logits_arguments
from specdec.protocols import DRAFT_KIND_WITH_Q, VerifyInputs, VerifyOutputs

_MAX_PROGRAMS = 1024  # of the bounds, about what a large GPU holds at once
# log2(x) <= bits(x) / 2^23 - 127 + 0.0861
_REST_BOUND = tl.constexpr((0.0861 - 127) * 0.6931471805599453)


@triton.jit
def _block_scores_device(
    logits_ptr,  # of the line
    q_ptr,  # of the line's draft, where `with_q`
    block,
    vocab_size,
    draft,  # one-hot: not drawn; -1 = the target's own law
    with_q,  # int32: the law is max(w p - q, 0)
    target_lse,
    draft_lse,
    weight,
    a,  # key of the noise
    b,
    sampled,  # int32: 0 = no noise
    ROUGH: tl.constexpr,  # bounds instead of scores
    HAS_Q: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the noisy scores of a block of a law, its tokens and which of them exist.

    Bounds of noisy scores lack what `add_noise_bound_device` adds.
    """
    tokens = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = tokens < vocab_size
    target = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.where(tokens == draft, float("-inf"), target)
    if HAS_Q:  # noqa: SIM102 (known when compiling: drops the code beneath)
        if with_q > 0:
            q = tl.load(q_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
            rest = weight * tl.exp(target - target_lse) - tl.exp(q - draft_lse)
            positive = tl.where(rest > 0, rest, 1.0)
            if ROUGH:  # above the logarithm by at most 0.0861 * ln 2
                bits = positive.to(tl.int32, bitcast=True)
                scores = bits.to(tl.float32) * LOG_OF_BITS + _REST_BOUND
            else:
                scores = tl.log(positive)
            scores = tl.where(rest > 0, scores, float("-inf"))
    scores = tl.where(scores == scores, scores, float("-inf"))
    if sampled > 0:
        if ROUGH:
            scores = score_bounds_device(scores, a, b, tokens)
        else:
            scores += noise_gumbel_device(a, b, tokens)
    return scores, tokens, inside


@triton.jit
def _law_device(
    draft_tokens_ptr,
    draft_kind_ptr,
    draft_logits_ptr,
    draft_logits_row_stride,
    draft_logits_column_stride,
    idx_mapping_ptr,
    local_pos_ptr,
    positions_ptr,
    temperature_ptr,
    seeds_ptr,
    lse_ptr,
    weight_ptr,
    line,
    num_lines,
    STREAM: tl.constexpr,
    RESIDUAL_STREAM: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Return what a stop line draws from: draft, sampled, with_q, q_ptr, lse and weight, key."""
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    safe_row = tl.maximum(row, 0)
    sampled = ((row >= 0) & (tl.load(temperature_ptr + safe_row) > 0)).to(tl.int32)
    draft = tl.load(draft_tokens_ptr + line)
    refuses = sampled * (draft >= 0).to(tl.int32)
    seed, position = tl.load(seeds_ptr + safe_row), tl.load(positions_ptr + line)
    a, b = noise_key_device(seed, position, STREAM)
    if refuses > 0:
        a, b = noise_key_device(seed, position, RESIDUAL_STREAM)
    with_q = refuses * 0
    target_lse = tl.full((), 0.0, tl.float32)
    draft_lse = tl.full((), 0.0, tl.float32)
    weight = tl.full((), 1.0, tl.float32)
    if HAS_Q:
        with_q = refuses * (tl.load(draft_kind_ptr + line).to(tl.int32) == WITH_Q).to(tl.int32)
        target_lse = tl.load(lse_ptr + line)
        draft_lse = tl.load(lse_ptr + num_lines + line)
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + line)
    column = tl.load(local_pos_ptr + line).to(tl.int64)
    draft_logits_ptr += safe_row * draft_logits_row_stride + column * draft_logits_column_stride
    return draft, sampled, with_q, draft_logits_ptr, target_lse, draft_lse, weight, a, b


@triton.jit(do_not_specialize=["num_lines"])
def _residual_bounds_kernel(
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
    bounds_ptr,  # [R, num_blocks] float32, out
    num_lines,
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
    start = tl.load(cu_num_logits_ptr + place)
    lines_of_place = tl.load(cu_num_logits_ptr + place + 1) - start
    if lines_of_place <= 0:
        return
    line = start + count_accepted_device(accepted_ptr, start, lines_of_place, WIDTH).to(tl.int64)
    draft, sampled, with_q, q_ptr, target_lse, draft_lse, weight, a, b = _law_device(
        draft_tokens_ptr,
        draft_kind_ptr,
        draft_logits_ptr,
        draft_logits_row_stride,
        draft_logits_column_stride,
        idx_mapping_ptr,
        local_pos_ptr,
        positions_ptr,
        temperature_ptr,
        seeds_ptr,
        lse_ptr,
        weight_ptr,
        line,
        num_lines,
        STREAM=STREAM,
        RESIDUAL_STREAM=RESIDUAL_STREAM,
        HAS_Q=HAS_Q,
        HAS_WEIGHT=HAS_WEIGHT,
    )
    if (sampled == 0) & (draft >= 0):
        return  # the judgement knows the argmax
    logits_ptr += line * logits_stride
    bounds_ptr += place * num_blocks
    # A program takes several blocks, for what it loads before the first takes longer than one. From
    # the end, because what was read last may still be in L2.
    for i in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
        block = num_blocks - 1 - i
        scores, _, _ = _block_scores_device(
            logits_ptr,
            q_ptr,
            block,
            vocab_size,
            draft,
            with_q,
            target_lse,
            draft_lse,
            weight,
            a,
            b,
            sampled,
            ROUGH=True,
            HAS_Q=HAS_Q,
            BLOCK_SIZE=BLOCK_SIZE,
        )
        bound = tl.max(scores, axis=0)
        bound = tl.where(sampled > 0, add_noise_bound_device(bound), bound)
        tl.store(bounds_ptr + block, bound)


@triton.jit(do_not_specialize=["num_lines"])
def _draw_runs_kernel(
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
    bounds_ptr,  # [R, num_blocks] float32
    best_tokens_ptr,  # [L] int64, of greedy rows' lines that judge a draft
    kept_tokens_ptr,  # [L] int64, the drafts as they are emitted
    sampled_tokens_ptr,  # [R, W] int64, out
    num_sampled_ptr,  # [R] int32, out
    max_num_logits,
    num_lines,
    num_blocks,
    vocab_size,
    STREAM: tl.constexpr,
    RESIDUAL_STREAM: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + place)
    lines_of_place = tl.load(cu_num_logits_ptr + place + 1) - start
    if lines_of_place <= 0:
        nothing = tl.full([WIDTH], -1, tl.int64)
        j = tl.arange(0, WIDTH)
        out = sampled_tokens_ptr + place * max_num_logits + j
        tl.store(out, nothing, mask=j < max_num_logits)
        tl.store(num_sampled_ptr + place, 0)
        return
    line = start + count_accepted_device(accepted_ptr, start, lines_of_place, WIDTH).to(tl.int64)
    draft, sampled, with_q, q_ptr, target_lse, draft_lse, weight, a, b = _law_device(
        draft_tokens_ptr,
        draft_kind_ptr,
        draft_logits_ptr,
        draft_logits_row_stride,
        draft_logits_column_stride,
        idx_mapping_ptr,
        local_pos_ptr,
        positions_ptr,
        temperature_ptr,
        seeds_ptr,
        lse_ptr,
        weight_ptr,
        line,
        num_lines,
        STREAM=STREAM,
        RESIDUAL_STREAM=RESIDUAL_STREAM,
        HAS_Q=HAS_Q,
        HAS_WEIGHT=HAS_WEIGHT,
    )
    logits_ptr += line * logits_stride
    blocks = tl.arange(0, PADDED_BLOCKS)
    known = (sampled == 0) & (draft >= 0)  # to the judgement: nothing is searched
    num_bounds = tl.where(known, 0, num_blocks)
    bounds_ptr += place * num_blocks
    bounds = tl.load(bounds_ptr + blocks, mask=blocks < num_bounds, other=float("-inf"))
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    block = next_block_device(bounds, blocks, num_blocks, best)
    while block >= 0:
        scores, tokens, inside = _block_scores_device(
            logits_ptr,
            q_ptr,
            block,
            vocab_size,
            draft,
            with_q,
            target_lse,
            draft_lse,
            weight,
            a,
            b,
            sampled,
            ROUGH=False,
            HAS_Q=HAS_Q,
            BLOCK_SIZE=BLOCK_SIZE,
        )
        block_best, block_token = best_token_device(scores, tokens, inside, vocab_size)
        best, token = better_token_device(best, token, block_best, block_token)
        bounds = tl.where(blocks == block, float("-inf"), bounds)
        block = next_block_device(bounds, blocks, num_blocks, best)
        # Without noise a bound is a score, and blocks that tie come in the order of the ids.
        block = tl.where((sampled == 0) & (best > float("-inf")), -1, block)
    # Rounding can leave nothing of a residual whose mass is below the dtype's: p is then q up to
    # that rounding, and the draw falls back to p.
    if (sampled > 0) & (draft >= 0) & (best == float("-inf")):
        row = tl.load(idx_mapping_ptr + line).to(tl.int64)
        a, b = noise_key_device(tl.load(seeds_ptr + row), tl.load(positions_ptr + line), STREAM)
        for i in range(num_blocks):
            scores, tokens, inside = _block_scores_device(
                logits_ptr,
                q_ptr,
                i,
                vocab_size,
                -1,
                0,
                target_lse,
                draft_lse,
                weight,
                a,
                b,
                sampled,
                ROUGH=False,
                HAS_Q=False,
                BLOCK_SIZE=BLOCK_SIZE,
            )
            block_best, block_token = best_token_device(scores, tokens, inside, vocab_size)
            best, token = better_token_device(best, token, block_best, block_token)
    next_token = token.to(tl.int64)
    if known:
        next_token = tl.load(best_tokens_ptr + line)
    j = tl.arange(0, WIDTH)
    num_accepted = line - start
    kept = tl.load(kept_tokens_ptr + start + j, mask=j < num_accepted, other=-1)
    run = tl.where(j == num_accepted, next_token, kept)
    out = sampled_tokens_ptr + place * max_num_logits + j
    tl.store(out, run, mask=j < max_num_logits)
    tl.store(num_sampled_ptr + place, (num_accepted + 1).to(tl.int32))


def draw_runs(
    inputs: VerifyInputs, judgement: Judgement, residual_stream: int, refuses: bool = True
) -> VerifyOutputs:
    """Lay out each place's accepted drafts, and draw the token after them.

    Args:
        inputs: the step.
        judgement: of its drafts.
        residual_stream: noise stream of the draws from the residual.
        refuses: False draws from the target whether or not a draft was refused.
    """
    if not use_triton(inputs.logits):
        return draw_runs_ref(inputs, judgement, residual_stream, refuses)
    kept_tokens, logits = inputs.draft_tokens, inputs.logits
    if not refuses:
        inputs = _without_drafts(inputs)
    drafts, q = inputs.draft_tokens, inputs.draft_logits
    num_lines, vocab_size = logits.shape
    num_reqs = len(inputs.cu_num_logits) - 1
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    bounds = logits.new_empty(num_reqs, num_blocks, dtype=torch.float32)
    sampled_tokens = drafts.new_empty(num_reqs, inputs.max_num_logits)
    num_sampled = drafts.new_empty(num_reqs, dtype=torch.int32)
    shared = (
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
        judgement.accepted.view(torch.int8),
        judgement.lse,
        judgement.lse if judgement.weight is None else judgement.weight,
        bounds,
    )
    sizes = (num_lines, num_blocks, vocab_size)
    choices = {
        "STREAM": STREAM_TARGET,
        "RESIDUAL_STREAM": residual_stream,
        "HAS_Q": q is not None,
        "HAS_WEIGHT": judgement.weight is not None,
        "WIDTH": triton.next_power_of_2(max(inputs.max_num_logits, 1)),
        "BLOCK_SIZE": BLOCK_SIZE,
    }
    num_programs = min(num_blocks, triton.cdiv(_MAX_PROGRAMS, num_reqs))
    _residual_bounds_kernel[(num_reqs, num_programs)](*shared, *sizes, **choices)
    _draw_runs_kernel[(num_reqs,)](
        *shared,
        kept_tokens if judgement.best_tokens is None else judgement.best_tokens,
        kept_tokens,
        sampled_tokens,
        num_sampled,
        inputs.max_num_logits,
        *sizes,
        **choices,
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=8,  # few programs, each of which scores one block as fast as it can
    )
    return VerifyOutputs(sampled_tokens, num_sampled)


def _without_drafts(inputs: VerifyInputs) -> VerifyInputs:
    """Return a step whose lines judge nothing."""
    none = torch.full_like(inputs.draft_tokens, -1)
    return dataclasses.replace(inputs, draft_tokens=none, draft_logits=None)


def draw_runs_ref(
    inputs: VerifyInputs, judgement: Judgement, residual_stream: int, refuses: bool = True
) -> VerifyOutputs:
    """Torch twin of `draw_runs`."""
    next_tokens = _next_tokens_ref(
        inputs if refuses else _without_drafts(inputs), judgement, residual_stream
    )
    return assemble_run_ref(
        judgement.accepted,
        inputs.draft_tokens,
        next_tokens,
        inputs.cu_num_logits,
        inputs.max_num_logits,
    )


def _next_tokens_ref(inputs: VerifyInputs, judgement: Judgement, residual_stream: int) -> Tensor:
    """Return the token that each place's stop line draws, at that line of [L] int64."""
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
