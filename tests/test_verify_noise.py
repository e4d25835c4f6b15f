"""Seeds of an epoch: noise under them is uniform, and unlike that of every neighbour.

Bounds and sizes as in test_sampler_noise.py.
"""

from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from sampler.noise import STREAM_ACCEPT, STREAM_DRAFT, mix_epoch, noise_key, noise_uniform

NUM = 50_000
KS_BOUND = 5.0
CORRELATION_BOUND = 10 / NUM**0.5
SEED = 1234


def uniforms(
    seed: Tensor | int, epoch: Tensor | int, position: Tensor | int, token: Tensor | int
) -> Tensor:
    """Return NUM uniforms; what is a number stays the same over all of them."""
    s, e, p, t = (
        value if isinstance(value, Tensor) else torch.full((NUM,), value, dtype=torch.int64)
        for value in (seed, epoch, position, token)
    )
    return noise_uniform(noise_key(mix_epoch(s, e.int()), p, STREAM_DRAFT), t.int())


def count() -> Tensor:
    return torch.arange(NUM)


AXES: dict[str, Callable[[], Tensor]] = {
    "epochs": lambda: uniforms(SEED, count(), 77, 42),
    "epochs and positions together": lambda: uniforms(SEED, count(), count() + 3, 42),
    "seeds": lambda: uniforms(count(), 77, 80, 42),
    "high halves": lambda: uniforms(count() << 32, 77, 80, 42),
}
NEIGHBOURS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "next epoch": (lambda: uniforms(SEED, 5, 9, count()), lambda: uniforms(SEED, 6, 9, count())),
    "epoch against position": (
        lambda: uniforms(SEED, count(), 9, 42),
        lambda: uniforms(SEED, count() + 1, 8, 42),
    ),
    "epoch against seed": (
        lambda: uniforms(count(), 5, 9, 42),
        lambda: uniforms(count() ^ (5 * 0xC2B2AE3D) % 2**32, 0, 9, 42),
    ),
    "no epoch": (
        lambda: uniforms(SEED, 0, count(), 42),
        lambda: noise_uniform(
            noise_key(torch.tensor(SEED), count(), STREAM_DRAFT),
            torch.tensor(42, dtype=torch.int32),
        ),
    ),
    "accept stream of the same length": (
        lambda: uniforms(SEED, count(), count(), 1),
        lambda: noise_uniform(
            noise_key(torch.tensor(SEED), count(), STREAM_ACCEPT),
            torch.tensor(1, dtype=torch.int32),
        ),
    ),
}


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_uniform_along_epochs(axis: str) -> None:
    values = AXES[axis]()
    distance = scipy.stats.kstest(values.double().numpy(), "uniform").statistic
    assert float(distance) * NUM**0.5 < KS_BOUND


def correlation(first: Tensor, second: Tensor) -> float:
    return abs(float(np.corrcoef(first.numpy(), second.numpy())[0, 1]))


@pytest.mark.parametrize("pair", [name for name in NEIGHBOURS if name != "epoch against seed"])
def test_neighbouring_epochs_are_uncorrelated(pair: str) -> None:
    first, second = (noise() for noise in NEIGHBOURS[pair])
    assert correlation(first, second) < CORRELATION_BOUND
    assert correlation((first > 0.9).float(), (second > 0.9).float()) < CORRELATION_BOUND


def test_bound_catches_two_epochs_that_share_a_seed() -> None:
    # A seed of 64 bits cannot hold seed and epoch: chosen pairs meet. Requests' seeds are hashed
    # (`mix_seed`), so that none are chosen.
    first, second = (noise() for noise in NEIGHBOURS["epoch against seed"])
    assert correlation(first, second) > CORRELATION_BOUND


def test_an_epoch_maps_unlike_seeds_to_unlike_seeds() -> None:
    seeds = torch.cat([count(), count() << 32, -count() - 1])
    for epoch in (0, 1, 2**31 - 1):
        mixed = mix_epoch(seeds, torch.tensor(epoch, dtype=torch.int32))
        assert len(set(mixed.tolist())) == len(set(seeds.tolist()))
