"""Typed configuration of the engine. The experiments' root schemas build on it."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from specdec.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class EngineConfig:
    """Device, sizes and seed of an engine.

    Args:
        device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:<index>".
        dtype: "auto" (bf16 where the device is fast at it, else fp32), or a dtype's name.
        seed: source of the seeds of unseeded requests.
        max_num_reqs: rows of the state; None takes 1024 on a GPU and 64 on a CPU.
        max_model_len: tokens a request may hold, prompt included.
        max_num_batched_tokens: tokens a step at most.
        num_kv_blocks: KV blocks; None takes the memory profile on a GPU, and on a CPU what all rows
            could need, at most 2 GiB.
        block_size: tokens a KV block.
        max_steps_in_flight: steps enqueued before an outcome is read; None takes 2 on a GPU, 1 on a
            CPU (where nothing can overlap, and the drafts are known before a step is scheduled).
    """

    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_num_reqs: int | None = None
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    num_kv_blocks: int | None = None
    block_size: int = 16
    max_steps_in_flight: int | None = None

    def check(self, num_speculative_tokens: int) -> None:
        """Check every range, and that a step can hold one verification.

        Raises:
            ConfigError: names the key, the value and what is allowed.
        """
        for name, lowest in (
            ("max_num_reqs", 1),
            ("max_model_len", 2),
            ("max_num_batched_tokens", 1),
            ("num_kv_blocks", 1),
            ("block_size", 1),
            ("max_steps_in_flight", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"{name}={value} is not allowed; give an integer >= {lowest}")
        if self.max_num_batched_tokens < num_speculative_tokens + 1:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot hold a verification "
                f"of num_speculative_tokens={num_speculative_tokens}; give at least "
                f"{num_speculative_tokens + 1}"
            )


def from_mapping(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build a config dataclass from keyword values.

    Raises:
        ConfigError: an unknown key; the message lists the allowed ones and the nearest.
    """
    allowed = [f.name for f in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"unknown {what} {key!r}; {hint}allowed: {', '.join(allowed)}")
    return cls(**values)
