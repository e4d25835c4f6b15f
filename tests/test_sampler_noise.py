"""The law of the noise: uniform, independent along every axis, bounded; and what is drawn with it.

Every statistical test has a fixed bound and a sibling in which a bug is injected, which must exceed
it. Bounds: Kolmogorov-Smirnov sqrt(n) * D < 5 (a false alarm of about 4e-22), correlations
|r| < 10 / sqrt(n), chi-square df + 10 * sqrt(2 * df).
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sampler.gumbel import gumbel_sample, gumbel_sample_ref
from sampler.noise import (
    GUMBEL_MAX,
    STREAM_ACCEPT,
    STREAM_DRAFT,
    STREAM_RESIDUAL,
    STREAM_TARGET,
    mix_seed,
    noise_gumbel,
    noise_key,
    noise_uniform,
)
from tests.hypotheses import QUICK, seeds
from tests.strategies import extreme_noise_keys

STREAMS = (STREAM_TARGET, STREAM_DRAFT, STREAM_ACCEPT, STREAM_RESIDUAL)
NUM = 50_000
KS_BOUND = 5.0
CORRELATION_BOUND = 10 / math.sqrt(NUM)
SEED = 1234


def uniforms(
    seed: Tensor | int, position: Tensor | int, token: Tensor | int, stream: int
) -> Tensor:
    """Return NUM uniforms; what is a number stays the same over all of them."""
    full = [
        value if isinstance(value, Tensor) else torch.full((NUM,), value, dtype=torch.int64)
        for value in (seed, position, token)
    ]
    return noise_uniform(noise_key(full[0], full[1], stream), full[2].int())


def count() -> Tensor:
    return torch.arange(NUM)


def mixed_seeds() -> Tensor:
    return torch.tensor([mix_seed(seed, 0) for seed in range(NUM)])


AXES: dict[str, Callable[[int], Tensor]] = {
    "token ids": lambda stream: uniforms(SEED, 77, count(), stream),
    "positions": lambda stream: uniforms(SEED, count(), 42, stream),
    "plain seeds": lambda stream: uniforms(count(), 77, 42, stream),
    "mixed seeds": lambda stream: uniforms(mixed_seeds(), 77, 42, stream),
    "high halves": lambda stream: uniforms(count() << 32, 77, 42, stream),
    "a diagonal": lambda stream: uniforms(count(), count(), count(), stream),
}


def ks_distance(values: Tensor) -> float:
    """Return sqrt(n) times the Kolmogorov-Smirnov distance from the uniform law."""
    result = scipy.stats.kstest(values.double().numpy(), "uniform")
    return float(result.statistic) * math.sqrt(len(values))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_along_every_axis(axis: str, stream: int) -> None:
    values = AXES[axis](stream)
    assert float(values.min()) > 0
    assert float(values.max()) < 1
    assert ks_distance(values) < KS_BOUND


def test_uniformity_bound_catches_signed_bits() -> None:
    # The hash read as a signed number, with the halves pushed back into (0, 1).
    values = (AXES["token ids"](STREAM_TARGET) - 0.5).abs() + 0.25
    assert ks_distance(values) > KS_BOUND
    # A slight bend of the law is caught as well.
    assert ks_distance(AXES["token ids"](STREAM_TARGET) ** 1.1) > KS_BOUND


def test_gumbel_noise_has_the_gumbel_law() -> None:
    key = noise_key(torch.tensor(SEED), torch.tensor(5), STREAM_TARGET)
    noise = noise_gumbel(key, count().int())
    uniform = torch.exp(-torch.exp(-noise.double()))
    assert ks_distance(uniform) < KS_BOUND
    assert ks_distance(torch.exp(-torch.exp(-1.1 * noise.double()))) > KS_BOUND


def correlation(first: Tensor, second: Tensor) -> float:
    return abs(float(np.corrcoef(first.numpy(), second.numpy())[0, 1]))


# Pairs of noise that differ in one step of one or two axes.
NEIGHBOURS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    name: (lambda: uniforms(SEED, 77, count(), STREAM_TARGET), second)
    for name, second in {
        "draft stream": lambda: uniforms(SEED, 77, count(), STREAM_DRAFT),
        "accept stream": lambda: uniforms(SEED, 77, count(), STREAM_ACCEPT),
        "residual stream": lambda: uniforms(SEED, 77, count(), STREAM_RESIDUAL),
        "position": lambda: uniforms(SEED, 78, count(), STREAM_TARGET),
        "seed": lambda: uniforms(SEED + 1, 77, count(), STREAM_TARGET),
        "high half": lambda: uniforms(SEED + (1 << 32), 77, count(), STREAM_TARGET),
        "token id": lambda: uniforms(SEED, 77, count() + 1, STREAM_TARGET),
    }.items()
}
# What a key that is only added or xored together would take for the same: a step along one axis
# undone along another, by one or by the factor that the hash gives that axis.
for name, first, second in (
    (
        "seed against position",
        lambda: uniforms(count(), 5, 42, STREAM_TARGET),
        lambda: uniforms(count() + 1, 4, 42, STREAM_TARGET),
    ),
    (
        "position against token id",
        lambda: uniforms(SEED, count(), 42, STREAM_TARGET),
        lambda: uniforms(SEED, count() + 1, 41, STREAM_TARGET),
    ),
    (
        "seed against token id",
        lambda: uniforms(count(), 77, 42, STREAM_TARGET),
        lambda: uniforms(count() + 0x9E3779B1, 77, 41, STREAM_TARGET),
    ),
    (
        "seed against stream",
        lambda: uniforms(count(), 77, 42, STREAM_DRAFT),
        lambda: uniforms(count() ^ STREAM_DRAFT, 77, 42, STREAM_TARGET),
    ),
):
    NEIGHBOURS[name] = (first, second)


@pytest.mark.parametrize("pair", NEIGHBOURS)
def test_neighbouring_noise_is_uncorrelated(pair: str) -> None:
    first, second = (noise() for noise in NEIGHBOURS[pair])
    assert correlation(first, second) < CORRELATION_BOUND
    # Also far out, where an argmax is decided, and between the squares of the deviations.
    assert correlation((first > 0.9).float(), (second > 0.9).float()) < CORRELATION_BOUND
    assert correlation((first - 0.5) ** 2, (second - 0.5) ** 2) < CORRELATION_BOUND


def test_correlation_bound_catches_keys_that_add_seed_and_position() -> None:
    first = uniforms(count() + 5, 0, 42, STREAM_TARGET)
    second = uniforms((count() + 1) + 4, 0, 42, STREAM_TARGET)
    assert correlation(first, second) > CORRELATION_BOUND
    # One stream for two uses, seen through a tenth of the noise only.
    other = uniforms(SEED, 77, count(), STREAM_DRAFT)
    leaky = torch.where(count() % 10 == 0, first, other)
    assert correlation(first, leaky) > CORRELATION_BOUND


def test_sample_indices_and_seeds_have_seeds_of_their_own() -> None:
    mixed = {mix_seed(seed, index) for seed in range(-500, 500) for index in range(20)}
    assert len(mixed) == 20_000
    assert all(-(2**63) <= value < 2**63 for value in mixed)


def test_extreme_bits_stay_inside_the_bounds() -> None:
    key, token_ids = extreme_noise_keys()
    uniform, noise = noise_uniform(key, token_ids), noise_gumbel(key, token_ids)
    assert uniform.tolist()[0] == 2.0**-33
    assert uniform.tolist()[2] == 1.0 - 2.0**-24
    assert noise.isfinite().all()
    assert 22.87 < float(noise[0]) <= GUMBEL_MAX
    assert float(noise.min()) > -3


def test_gumbel_noise_is_accurate_where_the_series_meets_the_logarithm() -> None:
    key = noise_key(torch.tensor(SEED), torch.tensor(0), STREAM_TARGET)
    token_ids = torch.arange(1_000_000, dtype=torch.int32)
    uniform = noise_uniform(key, token_ids)
    small = uniform < 2.0**-10
    exact = -torch.log(-torch.log1p(-uniform[small].double()))
    noise = noise_gumbel(key, token_ids[small])
    assert int(small.sum()) > 500
    # Worst just above 2^-12, where 1 - u is rounded by up to 2^-25 of 1.
    torch.testing.assert_close(noise.double(), exact, rtol=0, atol=2.0**-12)


def full_gumbel_argmax(
    logits: Tensor,
    idx_mapping: Tensor,
    positions: Tensor,
    temperature: Tensor,
    noise_seeds: Tensor,
    stream: int,
) -> Tensor:
    """Draw as `gumbel_sample` does, hashing every token."""
    rows = idx_mapping.long()
    key = noise_key(noise_seeds[rows], positions, stream)
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32)
    noise = noise_gumbel((key[0][:, None], key[1][:, None]), token_ids)
    noise = torch.where((temperature[rows] > 0)[:, None], noise, 0.0)
    return (logits + noise).argmax(1)


@QUICK
@given(seeds, st.sampled_from([1, 2, 61, 3000]), st.sampled_from([0.0, 0.1, 3.0, 30.0, 1e5]))
def test_pruning_changes_no_token(seed: int, vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab_size, generator=generator) * spread
    logits[1, torch.rand(vocab_size, generator=generator) < 0.5] = float("-inf")
    temperature = torch.tensor([1.0, 0.7, 0.0])
    idx_mapping = torch.randint(3, (6,), generator=generator, dtype=torch.int32)
    positions = torch.randint(10_000, (6,), generator=generator)
    noise_seeds = torch.randint(-(2**63), 2**63 - 1, (3,), generator=generator)
    arguments = (logits, idx_mapping, positions, temperature, noise_seeds, STREAM_RESIDUAL)
    assert torch.equal(gumbel_sample_ref(*arguments), full_gumbel_argmax(*arguments))


LAW = torch.tensor([0.45, 0.3, 0.15, 0.06, 0.03, 0.01])
NUM_DRAWS = 1000


@functools.cache
def draws(temperature: float, divide: bool = True, moving: bool = True) -> Tensor:
    """Draw NUM_DRAWS tokens at successive positions; each flag set to False injects a bug."""
    logits = LAW.log()[None] / (temperature if divide else 1.0)
    positions = torch.arange(NUM_DRAWS) if moving else torch.zeros(NUM_DRAWS, dtype=torch.int64)
    return gumbel_sample(
        logits.repeat(NUM_DRAWS, 1),
        torch.zeros(NUM_DRAWS, dtype=torch.int32),
        positions,
        torch.tensor([temperature]),
        torch.tensor([mix_seed(SEED, 0)]),
        STREAM_TARGET,
    )


def chi_square(tokens: Tensor, temperature: float) -> tuple[float, float]:
    """Return the statistic against softmax(logits / temperature), and its bound."""
    expected = (LAW.double().log() / temperature).softmax(0).numpy() * len(tokens)
    assert expected.min() >= 5
    observed = np.bincount(tokens.numpy(), minlength=len(LAW))
    df = len(LAW) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic, df + 10 * math.sqrt(2 * df)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_drawn_tokens_have_the_softmax_law(temperature: float) -> None:
    statistic, bound = chi_square(draws(temperature), temperature)
    assert statistic < bound


def test_law_bound_catches_noise_that_ignores_the_position() -> None:
    statistic, bound = chi_square(draws(1.0, moving=False), 1.0)
    assert statistic > bound


def test_law_bound_catches_a_temperature_that_is_ignored() -> None:
    statistic, bound = chi_square(draws(1.5, divide=False), 1.5)
    assert statistic > bound


def test_draws_at_successive_positions_are_independent() -> None:
    tokens = draws(1.0)

    def pair_statistic(first: Tensor, second: Tensor) -> float:
        # Few bins: the two most probable tokens and the rest, for each of the pair.
        law = torch.tensor([LAW[0], LAW[1], LAW[2:].sum()]).double()
        expected = (law[:, None] * law * len(first)).flatten().numpy()
        cells = first.clamp(max=2) * 3 + second.clamp(max=2)
        observed = np.bincount(cells.numpy(), minlength=9)
        return float(((observed - expected) ** 2 / expected).sum())

    bound = 8 + 10 * math.sqrt(16)
    assert pair_statistic(tokens[:-1:2], tokens[1::2]) < bound
    assert pair_statistic(tokens[:-1:2], tokens[:-1:2]) > bound  # the same draw twice
