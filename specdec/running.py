"""What the scheduler knows of the running requests, in columns: one a request."""

import numpy as np

from specdec.request import Request

UNLIMITED = 2**30

_FIELDS = (
    "num_computed_tokens",
    "prefill_len",
    "total_len",
    "least_len",
    "max_total_len",
    "capacity",
    "verify_len",
    "full_len",
    "trim_len",
)


class RunningTable:
    """Columns in order of arrival; they close up where a request leaves.

    The CPU's `num_computed_tokens` is an optimistic bound, used for sizing: it takes every verified
    position as accepted until the step's outcome is read. The truth is in the state's row.

    Every field is a view of the columns in use, [n] int32. They are read as lists rather than
    reduced: that is several times as fast for one column, and no slower for a hundred.

    Args:
        max_num_reqs: columns at most.
    """

    num_computed_tokens: np.ndarray
    prefill_len: np.ndarray  # tokens known when the row was taken
    total_len: np.ndarray  # committed tokens, as far as outcomes were read
    least_len: np.ndarray  # and one for each step in flight that will commit some
    max_total_len: np.ndarray
    # Tokens its blocks hold, less the drafter's K; UNLIMITED where they hold max_total_len.
    capacity: np.ndarray
    verify_len: np.ndarray  # positions of its next verification
    full_len: np.ndarray  # the same with as many drafts as it can have at all
    trim_len: np.ndarray  # see Request.trim_len

    def __init__(self, max_num_reqs: int) -> None:
        self._columns = np.zeros((len(_FIELDS), max_num_reqs), dtype=np.int32)
        self.num_removed = 0  # columns found before the last removal are no longer right
        self._resize(0)

    def __len__(self) -> int:
        """Return n."""
        return len(self.total_len)

    @property
    def is_prefilling(self) -> np.ndarray:
        """Return [n] bool: whether prompt (or resumed) tokens are still to be run."""
        return self.num_computed_tokens < self.prefill_len

    def append(self, request: Request, capacity: int, full_len: int) -> None:
        """Add a request that starts."""
        num_columns, num_tokens = len(self), len(request.token_ids)
        self._columns[:, num_columns] = (
            0,
            num_tokens,
            num_tokens,
            num_tokens,
            request.max_total_len,
            capacity,
            full_len,
            full_len,
            request.trim_len,
        )
        self._resize(num_columns + 1)

    def remove(self, column: int) -> None:
        """Drop a column; those behind it move up."""
        num_columns = len(self)
        self._columns[:, column : num_columns - 1] = self._columns[:, column + 1 : num_columns]
        self.num_removed += 1
        self._resize(num_columns - 1)

    def clear(self) -> None:
        """Drop all columns."""
        self.num_removed += 1
        self._resize(0)

    def _resize(self, num_columns: int) -> None:
        for name, values in zip(_FIELDS, self._columns, strict=True):
            setattr(self, name, values[:num_columns])
