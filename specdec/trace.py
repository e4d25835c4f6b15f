"""Step traces: what every metric is derived from, buffered as columns and written as Parquet.

The column `outcome` says what became of every draft position of a verification, one letter each:

    a  accepted
    r  rejected
    u  not reached: a draft before it was rejected
    e  a draft behind the end of the text: for nothing, whatever was said of it
    -  no draft (-1)

so num_accepted = count of a, num_drafted = count of a, r and u, num_positions - 1 = its length.
"""

from array import array
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

REQUEST_COLUMNS = (
    "request_id",  # str
    "label",  # the caller's mark: a prompt category
    "step",  # index of the engine's step
    "is_verify",  # False: the step ran prompt tokens (prefill, or resumed after preemption)
    "context_len",  # committed tokens before the step's run
    "num_positions",  # positions verified, drafts of -1 included
    "num_drafted",  # valid drafts judged, none behind the text's end
    "num_accepted",  # of them, accepted
    "num_committed",  # tokens kept of the run, after trimming
    "finish_reason",  # "" while the request goes on
    "sample_index",  # which of the request's `n` samples
    "outcome",  # str, a letter a draft position, see above; "" where the step verified nothing
)
STEP_COLUMNS = (
    "step",
    "num_reqs",
    "num_tokens",
    "num_computed_tokens",  # of them and of padding, what the target ran
    "num_committed",
    "inputs_ms",  # NaN, like the three below, where it ran inside a longer launch
    "target_ms",
    "verify_ms",
    "draft_ms",
    "launch_ms",  # inside launches that hold several phases
    "host_ms",  # the rest of the step: scheduling, enqueueing, trimming, detokenizing
    "step_ms",
    "num_verified",  # drafts that each request's verification was planned for
    "num_drafted",  # drafts that the step was to propose for each request
    # Steps of its launch: where there are several, launch_ms, host_ms and step_ms are equal shares
    # of the launch's.
    "num_launched",
)
# Tables written before have none of them.
OPTIONAL_COLUMNS = ("sample_index", "outcome", "num_launched")

# What is kept of a row: numbers alone, the names once a sample.
_KEPT = (
    "sample",  # index into the samples seen
    "step",
    "is_verify",
    "context_len",
    "num_positions",
    "num_valid",  # valid drafts judged, those behind the text's end, too
    "num_drafted",
    "num_accepted",
    "num_committed",
    "reason",  # index into the reasons seen
)
_FIRST_CAPACITY = 1024  # rows


class Traced(Protocol):
    """A sample of a request, as far as a trace looks at it."""

    request_id: str
    label: Any
    sample_index: int
    trace_key: tuple[Any, int] | None  # the trace that saw it last, and its number there


class StepTrace:
    """Collects one row per request and step, and one per step.

    A step costs the host a few array operations, however many requests it has: a batch that goes on
    as it was is looked up once.
    """

    def __init__(self) -> None:
        self._rows = np.empty((len(_KEPT), _FIRST_CAPACITY), dtype=np.int32)
        self._num_rows = 0
        self._samples: list[tuple[str, Any, int]] = []  # request id, label, sample index
        self._last_batch: tuple[Sequence[Traced], np.ndarray] = ((), np.empty(0, np.int32))
        self._reasons: dict[Hashable, int] = {"": 0}
        self._steps = array("d")

    def keys_of(self, requests: Sequence[Traced]) -> np.ndarray:
        """Return [R] int32, the number of each sample in this trace.

        Args:
            requests: of a step; a list that is given again must not have changed.
        """
        last, keys = self._last_batch
        if requests is not last:
            keys = np.array([self._key(request) for request in requests], dtype=np.int32)
            self._last_batch = requests, keys
        return keys

    def _key(self, request: Traced) -> int:
        known = request.trace_key
        if known is None or known[0] is not self:
            known = request.trace_key = self, len(self._samples)
            self._samples.append((request.request_id, request.label, request.sample_index))
        return known[1]

    def reason_of(self, finish_reason: str) -> int:
        """Return the number of a finish reason in this trace."""
        return self._reasons.setdefault(finish_reason, len(self._reasons))

    def add_requests(self, num_rows: int, columns: Sequence[np.ndarray | int]) -> None:
        """Append rows of a step.

        Args:
            num_rows: R.
            columns: [R] each, or one number for all: key, step, is_verify, context_len,
                num_positions, valid drafts judged, num_drafted, num_accepted, num_committed and
                number of the finish reason.
        """
        start, end = self._num_rows, self._num_rows + num_rows
        capacity = self._rows.shape[1]
        if end > capacity:
            rows = np.empty((len(_KEPT), max(2 * capacity, end)), dtype=np.int32)
            rows[:, :start] = self._rows[:, :start]
            self._rows = rows
        for column, values in zip(self._rows, columns, strict=True):
            column[start:end] = values
        self._num_rows = end

    def add_step(self, values: Sequence[float]) -> None:
        """Append one row in the order of STEP_COLUMNS."""
        assert len(values) == len(STEP_COLUMNS), f"{len(values)} values"
        self._steps.extend(values)

    def requests(self) -> "pd.DataFrame":
        """Return the rows per request and step, in the order of REQUEST_COLUMNS."""
        import pandas as pd  # here: an engine collects its trace on hosts that have no pandas

        kept = self._rows[:, : self._num_rows].astype(np.int64)
        by_name: dict[str, Any] = dict(zip(_KEPT, kept, strict=True))
        sample = by_name["sample"]
        names, labels, indices = zip(*self._samples, strict=True) if self._samples else ((),) * 3
        by_name["request_id"] = _objects(names)[sample]
        by_name["label"] = _objects(labels)[sample]
        by_name["sample_index"] = np.array(indices, dtype=np.int64)[sample]
        by_name["is_verify"] = by_name["is_verify"].astype(bool)
        by_name["finish_reason"] = _objects(list(self._reasons))[by_name["reason"]]
        by_name["outcome"] = _outcomes(by_name)
        return pd.DataFrame({name: by_name[name] for name in REQUEST_COLUMNS})

    def steps(self) -> "pd.DataFrame":
        """Return the rows per step."""
        import pandas as pd

        rows = np.array(self._steps).reshape(-1, len(STEP_COLUMNS))
        frame = pd.DataFrame(rows, columns=list(STEP_COLUMNS))
        return frame.astype({name: np.int64 for name in STEP_COLUMNS if not name.endswith("_ms")})

    def write(self, folder: Path, **constants: Any) -> None:
        """Write `requests.parquet` and `steps.parquet`, with constant columns (the arm, say)."""
        folder.mkdir(parents=True, exist_ok=True)
        self.requests().assign(**constants).to_parquet(folder / "requests.parquet", index=False)
        self.steps().assign(**constants).to_parquet(folder / "steps.parquet", index=False)


def outcome_text(num_positions: int, num_valid: int, num_drafted: int, num_accepted: int) -> str:
    """Return the outcome of a verification, a letter a draft position.

    Args:
        num_positions: verified, the last of them without a draft.
        num_valid: leading positions that held a draft.
        num_drafted: of them, those not behind the text's end.
        num_accepted: of these, the leading ones that were accepted.
    """
    refused = num_drafted - num_accepted
    text = "a" * num_accepted + "r" * min(refused, 1) + "u" * (refused - 1)
    return text + "e" * (num_valid - num_drafted) + "-" * (num_positions - 1 - num_valid)


def _outcomes(columns: dict[str, Any]) -> np.ndarray:
    """Return the outcome of every row; few differ, so each is written once."""
    names = ("is_verify", "num_positions", "num_valid", "num_drafted", "num_accepted")
    counts = np.stack([columns[name] for name in names], axis=1)
    counts[counts[:, 0] == 0] = 0  # a prompt's chunk is as long as it likes
    unlike, index = np.unique(counts, axis=0, return_inverse=True)
    texts = [outcome_text(*line[1:]) if line[0] else "" for line in unlike.tolist()]
    return _objects(texts)[index.reshape(-1)]


def _objects(values: Sequence[Any]) -> np.ndarray:
    """Return values as they are in an array."""
    found = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        found[i] = value
    return found
