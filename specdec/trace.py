"""Step traces: what every metric is derived from, buffered as columns and written as Parquet."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
)
OPTIONAL_COLUMNS: tuple[str, ...] = ()  # of both: younger than the format, a table may lack them


class StepTrace:
    """Collects one row per request and step, and one per step."""

    def __init__(self) -> None:
        self._requests: dict[str, list[Any]] = {name: [] for name in REQUEST_COLUMNS}
        self._steps: dict[str, list[Any]] = {name: [] for name in STEP_COLUMNS}

    def add_request_step(self, values: tuple[Any, ...]) -> None:
        """Append one row in the order of REQUEST_COLUMNS."""
        for column, value in zip(self._requests.values(), values, strict=True):
            column.append(value)

    def add_step(self, values: tuple[Any, ...]) -> None:
        """Append one row in the order of STEP_COLUMNS."""
        for column, value in zip(self._steps.values(), values, strict=True):
            column.append(value)

    def requests(self) -> "pd.DataFrame":
        """Return the rows per request and step."""
        import pandas as pd  # here: an engine collects its trace on hosts that have no pandas

        return pd.DataFrame(self._requests)

    def steps(self) -> "pd.DataFrame":
        """Return the rows per step."""
        import pandas as pd

        return pd.DataFrame(self._steps)

    def write(self, folder: Path, **constants: Any) -> None:
        """Write `requests.parquet` and `steps.parquet`, with constant columns (the arm, say)."""
        folder.mkdir(parents=True, exist_ok=True)
        self.requests().assign(**constants).to_parquet(folder / "requests.parquet", index=False)
        self.steps().assign(**constants).to_parquet(folder / "steps.parquet", index=False)
