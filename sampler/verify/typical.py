"""Typical acceptance: keep drafts that are likely enough for how sure the target is. Lossy.

    draft d is kept where  p(d) > min(epsilon, delta * exp(-H(p)))

with p the target's processed law and H its entropy in nats. So a flat law lets many drafts pass and
a sharp one only the likeliest. The token after the kept drafts is the target's own sample at that
line, a refused draft not excluded. Greedy rows compare the argmax. The text does not have the
target's law: it has no noise where drafts are kept, and follows the drafter's taste.

Source: Cai et al. 2024 (Medusa), arXiv 2401.10774, section 2.3.1; Hewitt et al. 2022.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from runner.dispatch import use_triton
from sampler.gumbel import BLOCK_SIZE, best_block_device, best_token_device
from sampler.noise import STREAM_TARGET
from sampler.verify.base import VerifierBase
from sampler.verify.chain import match_draws
from sampler.verify.config import VerifierConfig
from sampler.verify.judge import Judgement
from sampler.verify.residual import draw_runs
from specdec.errors import ConfigError
from specdec.protocols import VerifyInputs, VerifyOutputs
from specdec.registry import register_verifier


@dataclass
class TypicalConfig(VerifierConfig):
    """Parameters of typical acceptance.

    Args:
        epsilon: a probability above this is always enough, in [0, 1].
        delta: factor on exp(-entropy), at least 0.
    """

    name: str = "typical"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.epsilon <= 1:
            raise ConfigError(
                f"verifier typical: epsilon={self.epsilon} is not allowed; give a number in [0, 1]"
            )
        if not 0 <= self.delta < float("inf"):
            raise ConfigError(
                f"verifier typical: delta={self.delta} is not allowed; give a number >= 0"
            )


@register_verifier("typical", TypicalConfig)
class TypicalVerifier(VerifierBase):
    """Keeps likely drafts of any kind; the text does not have the target's law."""

    name = "typical"
    lossless = False
    text_equal = False
    note = "drafts are kept where the target finds them likely enough"
    config: TypicalConfig

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Accept drafts while they are likely enough, then emit the target's sample."""
        if inputs.all_greedy or inputs.max_num_logits == 1:
            return match_draws(inputs)
        judgement = judge_typical(inputs, self.config.epsilon, self.config.delta)
        return draw_runs(inputs, judgement, STREAM_TARGET, refuses=False)


@triton.jit(do_not_specialize=["num_cells"])
def _entropy_blocks_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    draft_tokens_ptr,  # [L] int64
    block_stats_ptr,  # [3, L, num_blocks] float32, out: max, sum of e, sum of e * (logit - max)
    block_arg_ptr,  # [L, num_blocks] int32, out
    num_cells,  # L * num_blocks
    num_blocks,
    vocab_size,
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
    _, token = best_token_device(logits, tokens, inside, vocab_size)
    largest = tl.max(logits, axis=0)
    # A masked token weighs nothing, whereas 0 * -inf is no number.
    below = tl.where(logits == float("-inf"), 0.0, logits - largest)
    weight = tl.where(logits == float("-inf"), 0.0, tl.exp(below))
    cell = line * num_blocks + block
    tl.store(block_arg_ptr + cell, token)
    tl.store(block_stats_ptr + cell, largest)
    tl.store(block_stats_ptr + num_cells + cell, tl.sum(weight, axis=0))
    tl.store(block_stats_ptr + 2 * num_cells + cell, tl.sum(weight * below, axis=0))


@triton.jit(do_not_specialize=["num_cells"])
def _judge_typical_kernel(
    logits_ptr,  # [L, V] float
    logits_stride,
    draft_tokens_ptr,  # [L] int64
    idx_mapping_ptr,  # [L] int32: line -> row
    temperature_ptr,  # [N] float32
    block_stats_ptr,  # [3, L, num_blocks] float32
    block_arg_ptr,  # [L, num_blocks] int32
    accepted_ptr,  # [L] int8, out
    num_cells,  # L * num_blocks
    num_blocks,
    epsilon,
    delta,
    PADDED_BLOCKS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    draft = tl.load(draft_tokens_ptr + line)
    if draft < 0:
        tl.store(accepted_ptr + line, 0)
        return
    blocks = tl.arange(0, PADDED_BLOCKS)
    inside = blocks < num_blocks
    first = line * num_blocks
    pointers = block_stats_ptr + first + blocks
    largest = tl.load(pointers, mask=inside, other=float("-inf"))
    sums = tl.load(pointers + num_cells, mask=inside, other=0.0)
    moments = tl.load(pointers + 2 * num_cells, mask=inside, other=0.0)
    top = tl.max(largest, axis=0)
    below = tl.where(largest == float("-inf"), 0.0, largest - top)
    scale = tl.where(largest == float("-inf"), 0.0, tl.exp(below))
    total = tl.sum(sums * scale, axis=0)
    moment = tl.sum(scale * (moments + sums * below), axis=0)
    entropy = tl.log(total) - moment / total
    logit = tl.load(logits_ptr + line * logits_stride + draft).to(tl.float32)
    prob = tl.exp(logit - top - tl.log(total))
    kept = (prob > tl.minimum(epsilon, delta * tl.exp(-entropy))).to(tl.int32)
    _, best = best_block_device(
        block_stats_ptr + first, block_arg_ptr + first, num_blocks, PADDED_BLOCKS
    )
    is_best = (best.to(tl.int64) == draft).to(tl.int32)
    row = tl.load(idx_mapping_ptr + line).to(tl.int64)
    kept = tl.where(tl.load(temperature_ptr + row) > 0, kept, is_best)
    tl.store(accepted_ptr + line, kept.to(tl.int8))


def judge_typical(inputs: VerifyInputs, epsilon: float, delta: float) -> Judgement:
    """Decide for each line whether its draft is likely enough.

    Args:
        inputs: the step; draft logits are not read.
        epsilon: a probability above this is always enough.
        delta: factor on exp(-entropy).

    Returns:
        A judgement whose `lse` means nothing.
    """
    if not use_triton(inputs.logits):
        return judge_typical_ref(inputs, epsilon, delta)
    logits, drafts = inputs.logits, inputs.draft_tokens
    assert logits.stride(1) == 1, f"logits of strides {logits.stride()}"
    num_lines, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    num_cells = num_lines * num_blocks
    block_stats = logits.new_empty(3, num_lines, num_blocks, dtype=torch.float32)
    block_arg = drafts.new_empty(num_lines, num_blocks, dtype=torch.int32)
    accepted = drafts.new_empty(num_lines, dtype=torch.bool)
    _entropy_blocks_kernel[(num_lines, num_blocks)](
        logits,
        logits.stride(0),
        drafts,
        block_stats,
        block_arg,
        num_cells,
        num_blocks,
        vocab_size,
        BLOCK_SIZE=BLOCK_SIZE,
    )
    _judge_typical_kernel[(num_lines,)](
        logits,
        logits.stride(0),
        drafts,
        inputs.expanded_idx_mapping,
        inputs.temperature,
        block_stats,
        block_arg,
        accepted.view(torch.int8),
        num_cells,
        num_blocks,
        float(epsilon),
        float(delta),
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return Judgement(accepted, block_stats)


def judge_typical_ref(inputs: VerifyInputs, epsilon: float, delta: float) -> Judgement:
    """Torch twin of `judge_typical`."""
    logits, drafts = inputs.logits, inputs.draft_tokens
    rows = inputs.expanded_idx_mapping.long().clamp(min=0)
    log_probs = logits.log_softmax(1)
    probs = log_probs.exp()
    entropy = -torch.where(probs > 0, probs * log_probs, 0.0).sum(1)
    prob = probs.gather(1, drafts.clamp(min=0)[:, None]).squeeze(1)
    kept = prob > (delta * (-entropy).exp()).clamp(max=epsilon)
    kept = torch.where(inputs.temperature[rows] > 0, kept, logits.argmax(1) == drafts)
    return Judgement((drafts >= 0) & kept, log_probs)
