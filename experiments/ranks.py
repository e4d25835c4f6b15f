"""What ranks of a run do apart: each runs the whole app, and the first one alone writes."""

import io
import logging
from pathlib import Path

import pandas as pd

from specdec.log import setup_logging
from specdec.parallel.exchange import gather_bytes
from specdec.parallel.groups import ParallelGroups, is_first_rank
from specdec.trace import StepTrace

# Of the steps of one replica and those of the next: more than any of them runs.
_STEPS_APART = 10**9


def setup_rank_logging(level: int, log_file: Path) -> None:
    """Let the first rank log to the terminal and a file, the others warnings alone.

    Args:
        level: of the first rank.
        log_file: where Hydra would log, were it at work in this process.
    """
    setup_logging(level if is_first_rank() else logging.WARNING)
    root = logging.getLogger()
    if is_first_rank() and not any(isinstance(h, logging.FileHandler) for h in root.handlers):
        handler = logging.FileHandler(log_file)
        handler.setFormatter(
            logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")
        )
        root.addHandler(handler)


def gather_trace(groups: ParallelGroups, trace: StepTrace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of all replicas, per request and step, and per step; every rank takes part.

    Steps keep their order within a replica, and those of different replicas get unlike numbers.

    Args:
        groups: of this rank.
        trace: of this rank's replica.
    """
    frames = []
    for frame in (trace.requests(), trace.steps()):
        own = frame.assign(step=frame["step"] + groups.dp_rank * _STEPS_APART)
        if groups.control is not None:
            buffer = io.BytesIO()
            own.to_parquet(buffer, index=False)
            parts = gather_bytes(groups.control, buffer.getvalue())
            # The ranks of a replica ran the same steps: its first one tells them.
            parts = parts[:: groups.config.tensor_parallel_size]
            found = [pd.read_parquet(io.BytesIO(part)) for part in parts]
            filled = [part for part in found if len(part)] or [frame]
            own = pd.concat(filled, ignore_index=True)
        frames.append(own)
    return frames[0], frames[1]
