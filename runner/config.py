"""Sizes of a runner, and how it launches."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes of the runner, and how it launches; `specdec.config.EngineConfig` says what is what."""

    max_num_reqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    num_kv_blocks: int | None  # None: as many as the device's memory allows
    block_size: int
    max_steps_in_flight: int = 1  # launches, where these hold several steps
    graph_scope: str = "none"  # "step", "draft" or "none"
    graph_num_reqs: list[int] | None = None
    token_table: str = "device"
    draft_choices: tuple[int, ...] | None = None  # drafts that a step may propose; None: always K
    confidence_threshold: float | None = None  # see runner.confidence
    phase_events: bool = False  # mark the phases inside graphs of whole steps
    steps_per_launch: int = 1  # captured beside the single step where it is more
    # Gives the least of the numbers of all ranks that share the layers.
    least_of_ranks: Callable[[int], int] | None = None
