"""When requests arrive: all of a group at once, at random times, or at the times of a file.

Whatever the arrivals, at most `batch_size` conversations run together; the others wait, and their
latency counts from their arrival. Every arm of a run gets the same arrivals, so that arms stay
comparable; but where requests arrive more slowly than the slowest arm answers them, tokens per
second are those of the arrivals, every speed-up is near 1, and the latencies tell the arms apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import MISSING

from experiments.prompts import Question, read_text
from specdec.errors import ConfigError

_MAX_SEED = 2**32


@dataclass
class WorkloadConfig:
    """Questions in groups: those of a group arrive at once, the next group after the last answer.

    Args:
        name: "groups", "poisson" or "trace".
        group_size: questions a group; None takes batch_size here, and all questions in the other
            workloads. A group is the unit over which tokens per second have an interval, and in
            which arms take turns; it begins and ends with an engine that runs dry.
    """

    name: str = "groups"
    group_size: int | None = None

    def __post_init__(self) -> None:
        """Check the size."""
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError(
                f"workload.group_size={self.group_size} is not allowed; give an integer >= 1"
            )


@dataclass
class PoissonConfig(WorkloadConfig):
    """Arrivals at random: gaps are exponential and independent.

    Args:
        rate_per_s: arrivals a second, on average.
        seed: of the gaps; None takes the run's.
    """

    name: str = "poisson"
    rate_per_s: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check the rate and the seed."""
        super().__post_init__()
        if not (self.rate_per_s > 0 and math.isfinite(self.rate_per_s)):
            raise ConfigError(
                f"workload.rate_per_s={self.rate_per_s} is not allowed; give a number above 0"
            )
        if self.seed is not None and not 0 <= self.seed < _MAX_SEED:
            raise ConfigError(
                f"workload.seed={self.seed} is not allowed; give an integer in [0, 2^32)"
            )


@dataclass
class ArrivalTraceConfig(WorkloadConfig):
    """Arrivals at recorded times.

    Args:
        path: text file, one time a line in seconds, none before the one above it; blank lines and
            what follows a "#" are ignored. The n-th question arrives at the n-th time.
    """

    name: str = "trace"
    path: str = MISSING


@dataclass(frozen=True)
class Pace:
    """When the questions of a group may begin.

    Args:
        arrivals: seconds after the group's start, one a question, none before the one in front.
        most_running: conversations that run together.
    """

    arrivals: tuple[float, ...]
    most_running: int


@dataclass(frozen=True)
class Latency:
    """What an answered turn's user waited for; see `specdec.latencies`."""

    request_id: str
    turn: int
    category: str
    arrival_s: float
    queue_s: float
    ttft_s: float
    e2e_s: float
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str
    random_tokens: bool


def plan_paces(
    config: WorkloadConfig, num_questions: int, batch_size: int, seed: int
) -> list[Pace]:
    """Cut questions into groups, and give each group its arrivals.

    Args:
        config: the workload.
        num_questions: asked, in the order in which they arrive.
        batch_size: conversations that run together at most.
        seed: of the run.

    Raises:
        ConfigError: a file of arrival times that cannot be used.
    """
    at_once = not isinstance(config, PoissonConfig | ArrivalTraceConfig)
    size = config.group_size or (batch_size if at_once else max(num_questions, 1))
    times = np.zeros(num_questions)
    if isinstance(config, PoissonConfig):
        rng = np.random.default_rng(seed if config.seed is None else config.seed)
        times = rng.exponential(1 / config.rate_per_s, num_questions).cumsum()
    if isinstance(config, ArrivalTraceConfig):
        times = np.array(read_arrivals(config.path))
        if len(times) < num_questions:
            raise ConfigError(
                f"{config.path} holds {len(times)} arrival times for {num_questions} questions; "
                f"give as many, or set prompts.limit={len(times)}"
            )
    paces = []
    for start in range(0, num_questions, size):
        own = times[start : min(start + size, num_questions)]
        # A later group begins when the one before is answered, with the gap that it had.
        own = own - (times[start - 1] if start else 0.0)
        paces.append(Pace(tuple(own.tolist()), batch_size))
    return paces


def cut_groups(questions: Sequence[Question], paces: Sequence[Pace]) -> list[list[Question]]:
    """Return the questions of each group."""
    rest = iter(questions)
    return [[next(rest) for _ in pace.arrivals] for pace in paces]


def read_arrivals(path: str) -> list[float]:
    """Read a file of arrival times.

    Raises:
        ConfigError: names the line that is no time, or lies before the one above it.
    """
    times: list[float] = []
    for number, line in enumerate(read_text(Path(path), "a file of arrival times"), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            time_s = float(text)
        except ValueError:
            time_s = math.nan
        if not (time_s >= (times[-1] if times else 0.0) and math.isfinite(time_s)):
            raise ConfigError(
                f"{path} line {number}: {text[:40]!r} is no time in seconds that is at least "
                f"{times[-1] if times else 0.0:g}; give one rising time a line"
            )
        times.append(time_s)
    return times
