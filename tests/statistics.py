"""Exact laws of short texts, and the chi-square test that holds counts to them.

House rule: bins with fewer than 5 expected are merged, the bound is df + 10 * sqrt(2 * df), seeds
are fixed and nothing is run again. A right law passes the bound by ten standard deviations; each
test has a sibling with an injected bug that must exceed it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sampler.noise import noise_gumbel, noise_key

MIN_EXPECTED = 5.0


@dataclass(frozen=True)
class ChiSquare:
    """A statistic, and the bound it must stay under."""

    value: float
    df: int

    @property
    def bound(self) -> float:
        """Return df + 10 standard deviations of a chi-square variable."""
        return self.df + 10 * (2 * self.df) ** 0.5

    @property
    def passes(self) -> bool:
        """Return whether the counts fit the law."""
        return self.value <= self.bound


def chi_square(counts: np.ndarray, law: np.ndarray) -> ChiSquare:
    """Compare counts with a law; impossible outcomes that occurred make the statistic infinite."""
    assert counts.shape == law.shape, f"{counts.shape} counts for {law.shape} outcomes"
    assert abs(law.sum() - 1) < 1e-4, f"the law sums to {law.sum()}"
    counts, law = counts.reshape(-1), law.reshape(-1)
    if counts[law == 0].any():
        return ChiSquare(float("inf"), 1)
    order = np.argsort(law)
    observed: list[float] = [0.0]
    expected: list[float] = [0.0]
    for outcome in order[law[order] > 0]:
        if expected[-1] >= MIN_EXPECTED:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += counts[outcome]
        expected[-1] += law[outcome] * counts.sum()
    assert len(expected) > 2, "too few bins to test anything"
    o, e = np.array(observed), np.array(expected)
    return ChiSquare(float(((o - e) ** 2 / e).sum()), len(e) - 1)


def processed_law(
    logits: np.ndarray, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> np.ndarray:
    """Return the law of one token, [..., V] float64: temperature, then top-k, then top-p."""
    scaled = logits.astype(np.float64) / temperature
    if top_k > 0:
        kth = np.sort(scaled, axis=-1)[..., -top_k, None]
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    law = np.exp(scaled - scaled.max(-1, keepdims=True))
    law /= law.sum(-1, keepdims=True)
    if top_p < 1:
        order = np.argsort(-law, axis=-1)
        ordered = np.take_along_axis(law, order, -1)
        kept = ordered.cumsum(-1) - ordered < top_p
        law = np.where(np.take_along_axis(kept, np.argsort(order, axis=-1), -1), law, 0)
        law /= law.sum(-1, keepdims=True)
    return law


def joint_law(
    next_law: Callable[[np.ndarray], np.ndarray], vocab_size: int, length: int
) -> np.ndarray:
    """Return the law of all texts of a length, [V] * length.

    Args:
        next_law: maps texts [n, t] to the law of their next token, [n, V]; t runs from 0.
        vocab_size: V.
        length: tokens of a text.
    """
    law = np.ones(1)
    for t in range(length):
        texts = np.indices((vocab_size,) * t).reshape(t, vocab_size**t).T
        law = (law[:, None] * next_law(texts)).reshape(-1)
    return law.reshape((vocab_size,) * length)


def window_law(law: np.ndarray, start: int, length: int) -> np.ndarray:
    """Return the law of tokens start .. start + length - 1 of a joint law."""
    others = tuple(i for i in range(law.ndim) if not start <= i < start + length)
    return law.sum(others)


def window_counts(
    texts: np.ndarray | Sequence[Sequence[int]], start: int, length: int, vocab_size: int
) -> np.ndarray:
    """Count the windows of texts [n, t], [V] * length."""
    columns = np.asarray(texts)[:, start : start + length].T
    flat = np.ravel_multi_index(tuple(columns), (vocab_size,) * length)
    return np.bincount(flat, minlength=vocab_size**length).reshape((vocab_size,) * length)


def dense_gumbel_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    stream: int,
) -> Tensor:
    """Draw as `sampler.gumbel.gumbel_sample` does, hashing every token: fast where V is small."""
    rows = idx_mapping.long().clamp(min=0)
    key = noise_key(seeds[rows], positions, stream)
    ids = torch.arange(logits.shape[1], dtype=torch.int32)
    noisy = logits + noise_gumbel((key[0][:, None], key[1][:, None]), ids)
    return torch.where((temperature[rows] > 0)[:, None], noisy, logits).argmax(1)
