"""Bootstrap intervals of ratios of sums; needs numpy alone (`specdec.metrics` has the formulas)."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 20240

Array = npt.NDArray[np.float64]


class Estimate(NamedTuple):
    """A value and its 95 % interval; the bounds are NaN where there are fewer than two units."""

    value: float
    low: float
    high: float


def estimate(sums: Array, statistic: Callable[[Array], Array]) -> Estimate:
    """Take a statistic of column sums, with its bootstrap interval over the rows.

    Args:
        sums: [num_units, num_columns] float64, what each unit adds to each sum.
        statistic: maps totals [num_samples, num_columns] to values [num_samples].
    """
    value = float(statistic(sums.sum(axis=0, keepdims=True))[0])
    if len(sums) < 2:
        return Estimate(value, np.nan, np.nan)
    values = statistic(_resample_counts(len(sums)) @ sums)
    values = values[np.isfinite(values)]
    if not len(values):
        return Estimate(value, np.nan, np.nan)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def ratio(numerator: Array, denominator: Array, empty: float = np.nan) -> Array:
    """Divide elementwise, `empty` where the denominator is zero."""
    result = np.full(numerator.shape, empty)
    return np.divide(numerator, denominator, out=result, where=denominator != 0)


def share(numerator: Array, denominator: Array, empty: float = np.nan) -> Estimate:
    """Return a ratio of sums over units, with its interval.

    Where one unit alone has what is divided by, the resamples cannot differ: no interval is known.

    Args:
        numerator, denominator: [num_units] float64, what each unit adds.
        empty: the value where no unit has anything to divide by; a resample that drew only such
            units has no value.
    """
    sums = np.stack([numerator, denominator], axis=1)
    num_counting = np.count_nonzero(denominator)
    result = estimate(sums, lambda s: ratio(s[:, 0], s[:, 1], np.nan if num_counting else empty))
    return Estimate(result.value, np.nan, np.nan) if num_counting == 1 else result


@lru_cache(maxsize=1)  # all metrics of an arm have the same units
def _resample_counts(num_units: int) -> Array:
    """Return [NUM_RESAMPLES, num_units] float64: how often each resample draws each unit."""
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = rng.integers(num_units, size=(NUM_RESAMPLES, num_units))
    drawn += np.arange(NUM_RESAMPLES)[:, None] * num_units
    counts = np.bincount(drawn.ravel(), minlength=NUM_RESAMPLES * num_units)
    return counts.reshape(NUM_RESAMPLES, num_units).astype(np.float64)
