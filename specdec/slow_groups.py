"""Groups of prompts whose timing was disturbed, by their time per token."""

import numpy as np
import pandas as pd

SLOW_FACTOR = 5


def count_slow_groups(timings: pd.DataFrame) -> dict[str, int]:
    """Return how many of each arm's groups took too long, as `specdec.metrics` defines it.

    Args:
        timings: one row per arm and group of prompts, of one run.
    """
    known = timings.loc[timings["num_tokens"] > 0]
    if known.empty:
        return {}
    per_token = (known["wall_s"] / known["num_tokens"]).astype(np.float64)
    taken = known.assign(taken=per_token).pivot_table("taken", "group", "arm")
    # The lower of two middle ones, so that one slow group of two is seen.
    middle = taken.quantile(0.5, interpolation="lower")
    relative = taken / middle.where(middle > 0)
    counts: dict[str, int] = {}
    for arm in relative.columns:
        others = relative.drop(columns=arm).min(axis=1).reindex(relative.index)
        allowed = SLOW_FACTOR * others.fillna(1.0).clip(lower=1.0)
        counts[str(arm)] = int((relative[arm] > allowed).sum())
    return counts
