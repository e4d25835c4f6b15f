"""How many steps the launches of an engine may hold: one, unless nothing needs the host between."""

import logging
from dataclasses import dataclass
from typing import Protocol

from runner.async_output import StepHandle
from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.log import warn_once
from specdec.protocols import Drafter
from specdec.scheduler import ScheduledStep

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LaunchInFlight:
    """A launch whose outcomes were not read yet: a step, or several that are alike."""

    handle: StepHandle
    scheduled: ScheduledStep
    step: int  # the next one that is read
    started: float
    num_steps: int
    seconds: float = 0.0  # of a step, once the first was read


class LengthPolicy(Protocol):
    """A policy of the draft length, as far as it matters here."""

    by_num_reqs: bool


def steps_per_launch(
    config: EngineConfig,
    graph_scope: str,
    drafter: Drafter,
    draft_length: LengthPolicy,
    num_speculative_tokens: int,
) -> int:
    """Return the most steps of a launch; where it is less than asked for, say why.

    Args:
        config: what is asked for.
        graph_scope: what "auto" came to.
        drafter: not loaded yet.
        draft_length: its policy.
        num_speculative_tokens: K.

    Raises:
        ConfigError: the scope has no graph of a whole step.
    """
    asked = config.steps_per_launch
    if asked == 1:
        return 1
    if graph_scope != "step":
        raise ConfigError(
            f"steps_per_launch={asked} repeats the graph of a whole step, and graph_scope is "
            f"{graph_scope!r}; set graph_scope='step', or leave steps_per_launch out"
        )
    wants, name = drafter.capabilities, type(drafter).__name__
    reason = None
    if num_speculative_tokens and wants.on_cpu:
        reason = f"drafter {name} runs on the host"
    elif num_speculative_tokens and not wants.graph_safe:
        reason = f"drafter {name} is not graph-safe"
    elif not draft_length.by_num_reqs:
        reason = f"{type(draft_length).__name__} may choose another draft length for every step"
    if reason is not None:
        warn_once(logger, f"steps_per_launch={asked} has no effect: {reason}")
        return 1
    return asked
