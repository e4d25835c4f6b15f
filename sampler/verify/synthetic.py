"""Synthetic acceptance: keep drafts at given rates, whatever they are. Lossy, for systems work.

    kept = the number of positions i with u < rate_i, at most the drafts that there are

with one uniform u for each row and step, so that draft i (from 1) is kept with chance rate_i
whatever became of the others: the rates are unconditional, and never rise along a run. The tokens
that are emitted are the drafts themselves, then the target's own sample (greedy rows: its argmax).
Nothing is compared, so a text means nothing; what is measured is what speculation would cost and
gain at such rates.

Given a mean length m (tokens a step, the one after the drafts included), the rates fall by the same
factor a from draft to draft: rate_i = a^i, with 1 + a + ... + a^K = m.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import itertools
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from sampler.noise import (
    STREAM_ACCEPT,
    STREAM_TARGET,
    noise_key,
    noise_key_device,
    noise_uniform,
    noise_uniform_device,
)
from sampler.verify.base import VerifierBase
from sampler.verify.config import VerifierConfig
from sampler.verify.judge import Judgement
from sampler.verify.residual import draw_runs
from specdec.errors import ConfigError
from specdec.protocols import VerifyInputs, VerifyOutputs
from specdec.registry import register_verifier


@dataclass
class SyntheticConfig(VerifierConfig):
    """Parameters of synthetic acceptance; give one of the two.

    Args:
        rates: unconditional acceptance of draft 1, 2, ..., in [0, 1] and never rising, one for
            each of the K drafts.
        mean_length: tokens a verification step, bonus included, in [1, K + 1].
    """

    name: str = "synthetic"
    rates: list[float] = field(default_factory=list)
    mean_length: float | None = None

    def __post_init__(self) -> None:
        """Check the choice and the ranges."""
        if bool(self.rates) == (self.mean_length is not None):
            raise ConfigError(
                f"verifier synthetic needs rates or mean_length, got rates={self.rates} and "
                f"mean_length={self.mean_length}"
            )
        falls = all(a >= b for a, b in itertools.pairwise(self.rates))
        if not falls or not all(0 <= rate <= 1 for rate in self.rates):
            raise ConfigError(
                f"verifier synthetic: rates={self.rates} is not allowed; give numbers in [0, 1] "
                f"that never rise"
            )
        if self.mean_length is not None and not 1 <= self.mean_length < float("inf"):
            raise ConfigError(
                f"verifier synthetic: mean_length={self.mean_length} is not allowed; give a "
                f"number >= 1"
            )


def rates_of(config: SyntheticConfig, num_speculative_tokens: int) -> list[float]:
    """Return the unconditional rates of K drafts."""
    k, mean = num_speculative_tokens, config.mean_length
    if mean is None:
        return list(config.rates)
    low, high = 0.0, 1.0
    for _ in range(60):
        factor = (low + high) / 2
        too_long = 1 + sum(factor**i for i in range(1, k + 1)) > mean
        low, high = (low, factor) if too_long else (factor, high)
    return [high**i for i in range(1, k + 1)]


@register_verifier("synthetic", SyntheticConfig)
class SyntheticVerifier(VerifierBase):
    """Keeps drafts of any kind at given rates; the text means nothing."""

    name = "synthetic"
    lossless = False
    honours_masks = False
    text_equal = False
    note = "synthetic: drafts are kept at given rates, for systems work only"
    config: SyntheticConfig

    def check(self, num_speculative_tokens: int) -> None:
        """Refuse rates, or a mean length, that do not fit K.

        Raises:
            ConfigError: they do not.
        """
        k, config = num_speculative_tokens, self.config
        if config.rates and len(config.rates) != k:
            raise ConfigError(
                f"verifier synthetic has {len(config.rates)} rates for "
                f"num_speculative_tokens={k}; give {k}"
            )
        if config.mean_length is not None and config.mean_length > k + 1:
            raise ConfigError(
                f"verifier synthetic: mean_length={config.mean_length} cannot be reached with "
                f"num_speculative_tokens={k}; give at most {k + 1}"
            )

    def bind(self, num_speculative_tokens: int, device: torch.device) -> None:
        """Lay the rates out on the device, 0 behind the last one."""
        rates = rates_of(self.config, num_speculative_tokens)
        self.rates = torch.tensor([*rates, 0.0], dtype=torch.float32, device=device)

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Accept as many drafts as the rates say, then emit the target's sample."""
        judgement = judge_by_rates(inputs, self.rates)
        return draw_runs(inputs, judgement, STREAM_TARGET, refuses=False)


@triton.jit(do_not_specialize=["num_lines"])
def _judge_by_rates_kernel(
    draft_tokens_ptr,  # [L] int64
    idx_mapping_ptr,  # [L] int32: line -> row, -1 in padding
    local_pos_ptr,  # [L] int32
    positions_ptr,  # [L] int64
    seeds_ptr,  # [N] int64
    rates_ptr,  # [K + 1] float32
    accepted_ptr,  # [L] int8, out
    num_lines,
    max_rate,  # last entry of the rates
    STREAM: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
):
    lines = tl.program_id(0).to(tl.int64) * BLOCK_LINES + tl.arange(0, BLOCK_LINES)
    inside = lines < num_lines
    draft = tl.load(draft_tokens_ptr + lines, mask=inside, other=-1)
    local = tl.load(local_pos_ptr + lines, mask=inside, other=0)
    row = tl.load(idx_mapping_ptr + lines, mask=inside, other=0).to(tl.int64)
    seed = tl.load(seeds_ptr + tl.maximum(row, 0), mask=inside, other=0)
    # The place in the text of the row's first line: the same for all its lines.
    position = tl.load(positions_ptr + lines, mask=inside, other=0) - local
    rate = tl.load(rates_ptr + tl.minimum(local, max_rate), mask=inside, other=0.0)
    a, b = noise_key_device(seed, position, STREAM)
    kept = (noise_uniform_device(a, b, lines * 0) < rate) & (draft >= 0)
    tl.store(accepted_ptr + lines, kept.to(tl.int8), mask=inside)


def judge_by_rates(inputs: VerifyInputs, rates: Tensor) -> Judgement:
    """Decide for each line whether its row's uniform lies below the line's rate.

    Args:
        inputs: the step.
        rates: [K + 1] float32, never rising; the last one holds for all lines behind.

    Returns:
        A judgement whose `lse` means nothing.
    """
    drafts = inputs.draft_tokens
    if not use_triton(drafts):
        return judge_by_rates_ref(inputs, rates)
    num_lines, block_lines = len(drafts), 128
    accepted = drafts.new_empty(num_lines, dtype=torch.bool)
    _judge_by_rates_kernel[(triton.cdiv(num_lines, block_lines),)](
        drafts,
        inputs.expanded_idx_mapping,
        inputs.expanded_local_pos,
        inputs.draw_positions,
        inputs.seeds,
        rates,
        accepted.view(torch.int8),
        num_lines,
        len(rates) - 1,
        STREAM=STREAM_ACCEPT,
        BLOCK_LINES=block_lines,
    )
    return Judgement(accepted, rates)


def judge_by_rates_ref(inputs: VerifyInputs, rates: Tensor) -> Judgement:
    """Torch twin of `judge_by_rates`."""
    local = inputs.expanded_local_pos.long()
    rows = inputs.expanded_idx_mapping.long().clamp(min=0)
    key = noise_key(inputs.seeds[rows], inputs.draw_positions - local, STREAM_ACCEPT)
    kept = noise_uniform(key, torch.zeros_like(key[0])) < rates[local.clamp(max=len(rates) - 1)]
    return Judgement((inputs.draft_tokens >= 0) & kept, rates)
