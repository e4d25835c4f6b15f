"""What every chain verifier shares: count the accepted prefix and lay out the run.

num_accepted   = leading lines of the place that accept their draft
sampled_tokens = the accepted drafts, then the token of the line after them (the stop line)
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from sampler.gumbel import gumbel_sample
from sampler.noise import STREAM_TARGET
from specdec.protocols import VerifyInputs, VerifyOutputs


@triton.jit
def count_accepted_device(accepted_ptr, start, num_lines, WIDTH: tl.constexpr):
    """Return how many leading lines of a place accept, at most all but its last one.

    A place without lines has -1.
    """
    j = tl.arange(0, WIDTH)
    accepted = tl.load(accepted_ptr + start + j, mask=j < num_lines, other=0).to(tl.int32)
    first_refusal = tl.min(tl.where(accepted == 0, j, WIDTH), axis=0)
    return tl.minimum(first_refusal, num_lines - 1)


@triton.jit
def _assemble_run_kernel(
    accepted_ptr,  # [L] int8
    draft_tokens_ptr,  # [L] int64
    next_tokens_ptr,  # [L] int64
    cu_num_logits_ptr,  # [R + 1] int32
    sampled_tokens_ptr,  # [R, W] int64, out
    num_sampled_ptr,  # [R] int32, out
    max_num_logits,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + place)
    num_lines = tl.load(cu_num_logits_ptr + place + 1) - start
    num_accepted = count_accepted_device(accepted_ptr, start, num_lines, WIDTH)
    j = tl.arange(0, WIDTH)
    lines = start + j
    drafts = tl.load(draft_tokens_ptr + lines, mask=j < num_accepted, other=-1)
    next_token = tl.load(next_tokens_ptr + lines, mask=j == num_accepted, other=-1)
    run = tl.where(j == num_accepted, next_token, drafts)
    pointers = sampled_tokens_ptr + place * max_num_logits + j
    tl.store(pointers, run, mask=j < max_num_logits)
    tl.store(num_sampled_ptr + place, num_accepted + 1)


def assemble_run(
    accepted: Tensor,
    draft_tokens: Tensor,
    next_tokens: Tensor,
    cu_num_logits: Tensor,
    max_num_logits: int,
) -> VerifyOutputs:
    """Lay out each place's accepted drafts, followed by the token of the line after them.

    Args:
        accepted: [L] bool, whether the line accepts its draft; False where it judges none.
        draft_tokens: [L] int64.
        next_tokens: [L] int64, the token that a line draws; read at the stop line alone.
        cu_num_logits: [R + 1] int32, lines before each place.
        max_num_logits: W, bound on the lines of a place.
    """
    if not use_triton(accepted):
        return assemble_run_ref(accepted, draft_tokens, next_tokens, cu_num_logits, max_num_logits)
    num_reqs, device = len(cu_num_logits) - 1, accepted.device
    sampled_tokens = torch.empty(num_reqs, max_num_logits, dtype=torch.int64, device=device)
    num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=device)
    _assemble_run_kernel[(num_reqs,)](
        accepted.view(torch.int8),
        draft_tokens,
        next_tokens,
        cu_num_logits,
        sampled_tokens,
        num_sampled,
        max_num_logits,
        WIDTH=triton.next_power_of_2(max(max_num_logits, 1)),
    )
    return VerifyOutputs(sampled_tokens, num_sampled)


def match_draws(inputs: VerifyInputs) -> VerifyOutputs:
    """Draw at every line, and keep drafts while they equal what was drawn.

    Greedy rows take the argmax.
    """
    drawn = gumbel_sample(
        inputs.logits,
        inputs.expanded_idx_mapping,
        inputs.draw_positions,
        inputs.temperature,
        inputs.seeds,
        STREAM_TARGET,
    )
    drafts = inputs.draft_tokens
    return assemble_run(drawn == drafts, drafts, drawn, inputs.cu_num_logits, inputs.max_num_logits)


def num_accepted_ref(accepted: Tensor, cu_num_logits: Tensor, max_num_logits: int) -> Tensor:
    """Torch twin of `count_accepted_device` for all places, [R] int64."""
    num_lines = cu_num_logits.diff()[:, None].long()
    j = torch.arange(max_num_logits, device=accepted.device)
    grid = (cu_num_logits[:-1, None].long() + j).clamp(max=len(accepted) - 1)
    leading = (accepted[grid] & (j < num_lines)).int().cumprod(1).sum(1)
    return torch.minimum(leading, num_lines[:, 0] - 1)


def assemble_run_ref(
    accepted: Tensor,
    draft_tokens: Tensor,
    next_tokens: Tensor,
    cu_num_logits: Tensor,
    max_num_logits: int,
) -> VerifyOutputs:
    """Torch twin of `assemble_run`."""
    count = num_accepted_ref(accepted, cu_num_logits, max_num_logits)[:, None]
    j = torch.arange(max_num_logits, device=accepted.device)
    grid = (cu_num_logits[:-1, None].long() + j).clamp(max=len(accepted) - 1)
    run = torch.where(j == count, next_tokens[grid], torch.where(j < count, draft_tokens[grid], -1))
    return VerifyOutputs(run, (count[:, 0] + 1).int())
