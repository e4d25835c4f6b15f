"""What users wait for, request by request, and its summary by arm.

All times are the host's, in seconds: a token counts when the outcome of its step was read, as a
caller of `Engine.step` sees it. A request *arrives* when the workload says so, or, as a later turn
of a conversation, when the turn before was answered.

queue_s  from its arrival until it was handed to the engine
ttft_s   from its arrival until its first new token (time to first token)
e2e_s    from its arrival until its last token
tpot_s   (e2e_s - ttft_s) / (num_tokens - 1), the time per output token behind the first; NaN for a
         request of one token

The mean of an arm has a 95 % bootstrap interval over conversations (`specdec.intervals`), a
percentile has none. Latencies of arms compare only under the same arrivals, which a run sees to.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specdec.intervals import estimate, ratio

LATENCY_COLUMNS = (
    "arm",
    "k",
    "group",
    "request_id",
    "turn",
    "category",
    "arrival_s",  # after the start of its group
    "queue_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "num_prompt_tokens",
    "num_tokens",
    "finish_reason",
    "random_tokens",  # the prompt was drawn at random
)
MEASURES = ("queue_s", "ttft_s", "tpot_s", "e2e_s")
PERCENTILES = (50, 90, 99)


def latency_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a table, with the time per output token."""
    given = [name for name in LATENCY_COLUMNS if name != "tpot_s"]
    frame = pd.DataFrame(list(rows), columns=given)
    further = frame["num_tokens"] - 1
    decode_s = (frame["e2e_s"] - frame["ttft_s"]).astype(np.float64)
    frame["tpot_s"] = decode_s / further.astype(np.float64).where(further > 0)
    return pd.DataFrame(frame, columns=list(LATENCY_COLUMNS))


def summarise_latencies(latencies: pd.DataFrame, arms: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return one line per arm.

    Args:
        latencies: the columns of LATENCY_COLUMNS.
        arms: entries of arms.json.

    Returns:
        `arm`, `k`, `num_requests`, `random_tokens`, and for each of MEASURES its `_mean` with
        `_mean_low` and `_mean_high`, and `_p50`, `_p90`, `_p99`.
    """
    lines: list[dict[str, Any]] = []
    for arm in arms:
        own = latencies.loc[latencies["arm"] == arm["arm"]]
        line: dict[str, Any] = {"arm": arm["arm"], "k": arm["k"], "num_requests": len(own)}
        line["random_tokens"] = bool(own["random_tokens"].any())
        for name in MEASURES:
            values = np.asarray(own[name], dtype=np.float64)
            known = ~np.isnan(values)
            line |= _mean(own.loc[known, "request_id"], values[known], f"{name}_mean")
            for percentile in PERCENTILES:
                found = np.percentile(values[known], percentile) if known.any() else np.nan
                line[f"{name}_p{percentile}"] = float(found)
        lines.append(line)
    return pd.DataFrame(lines)


def _mean(request_ids: Any, values: np.ndarray, name: str) -> dict[str, float]:
    """Return a mean with its interval over conversations: a request id ends in "/<turn>"."""
    conversations = [str(request_id).rpartition("/")[0] for request_id in request_ids]
    frame = pd.DataFrame({"unit": conversations, "sum": values, "count": 1.0})
    sums = np.asarray(frame.groupby("unit")[["sum", "count"]].sum(), dtype=np.float64)
    result = estimate(sums, lambda s: ratio(s[:, 0], s[:, 1]))
    return dict(zip((name, f"{name}_low", f"{name}_high"), result, strict=True))
