"""Typed configuration of the engine. The experiments' root schemas build on it."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from specdec.errors import ConfigError

T = TypeVar("T")

_LEAST_PREFIX = 3  # characters from which the beginning of a name stands for it


@dataclass(frozen=True)
class EngineConfig:
    """Device, sizes and seed of an engine.

    Args:
        device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:<index>".
        dtype: "auto" (bf16 where the device is fast at it, else fp32), or a dtype's name.
        weight_dtype: of the target's layers: "auto" takes dtype; "fp8" rounds their weights to 8
            bits when the target is loaded by name, half the bytes that a step reads. The log and
            `HFModel.weight_effect` say what that did to the law of the next token over a text;
            drafts are verified against the rounded target (docs/fusion.md).
        seed: source of the seeds of unseeded requests.
        max_num_reqs: rows of the state; None takes 1024 on a GPU and 64 on a CPU.
        max_model_len: tokens a request may hold, prompt included.
        max_num_batched_tokens: tokens a step at most.
        num_kv_blocks: KV blocks; None takes the memory profile on a GPU, and on a CPU what all rows
            could need, at most 2 GiB.
        block_size: tokens a KV block.
        max_steps_in_flight: steps enqueued before an outcome is read; None takes 2 on a GPU, 1 on a
            CPU (where nothing can overlap, and the drafts are known before a step is scheduled) and
            where the drafter runs on the host. With steps_per_launch it counts launches.
        steps_per_launch: steps that one launch holds while the batch stays as it is; needs
            graph_scope "step". Where a request runs prompt tokens, waits and could be admitted, or
            needs the host in every step (structured output), where KV blocks are short, and where
            no request can use the last of the steps, a launch holds one. Texts do not depend on
            it; what they wait for does: an arrival, an abort and the tokens of a step wait for the
            launches that were enqueued, up to max_steps_in_flight times so many steps, and a
            request that ends early in a launch keeps its row until that launch was read.
        graph_scope: what of a uniform step is one CUDA graph: "step" all of it, "draft" the
            drafter's passes, "none" nothing; "auto" takes "step" on a GPU and "none" on a CPU. A
            CPU has no graphs: there the fixed shapes of the scope are run as they are.
        graph_num_reqs: requests of the captured shapes, rising; None takes powers of two up to 256
            and max_num_reqs. A step is padded to the next of them; a larger one runs eager.
        token_table: "device", or "pinned": the token ids of all rows stay in pinned host memory and
            kernels read them in place (refused where the drafter scans them by torch operations).
        logprobs_mode: "raw" takes log-probabilities from the target's own logits, "processed" from
            those that tokens are drawn from; prompts' are always raw.
        logits_processors: plug-ins that change logits, in their order behind our own: names, or
            mappings with a key "name".
        phase_events: record events between the phases inside the graph of a whole step, so that
            traces tell their times apart; they cost device time, and one step is in flight at most.
        data_parallel_size: replicas of the engine, each in a process of its own, that share the
            requests (docs/parallel.md).
        tensor_parallel_size: processes that share the layers of each replica (docs/parallel.md).
        exchange_every: steps after which replicas exchange results; more of them cost less waiting
            for one another, and bring what is new later.
        check_ranks_every: steps after which the ranks of a replica compare checksums.
        penalties: keep what repetition, frequency and presence penalties need, a count for each
            row and token; without it they are refused.
    """

    device: str = "auto"
    dtype: str = "auto"
    weight_dtype: str = "auto"
    seed: int = 0
    max_num_reqs: int | None = None
    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    num_kv_blocks: int | None = None
    block_size: int = 16
    max_steps_in_flight: int | None = None
    steps_per_launch: int = 1
    graph_scope: str = "auto"
    graph_num_reqs: list[int] | None = None
    token_table: str = "device"
    logprobs_mode: str = "raw"
    logits_processors: list[Any] = dataclasses.field(default_factory=list)
    penalties: bool = True
    phase_events: bool = False
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    exchange_every: int = 1
    check_ranks_every: int = 64

    def __post_init__(self) -> None:
        """Check every type."""
        check_types(type(self), vars(self), "engine option")

    @property
    def num_ranks(self) -> int:
        """Return the processes that all replicas take together."""
        return self.data_parallel_size * self.tensor_parallel_size

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
            ("steps_per_launch", 1),
            ("data_parallel_size", 1),
            ("tensor_parallel_size", 1),
            ("exchange_every", 1),
            ("check_ranks_every", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"{name}={value} is not allowed; give an integer >= {lowest}")
        for name, allowed in (
            ("weight_dtype", ("auto", "fp8")),
            ("graph_scope", ("auto", "step", "draft", "none")),
            ("token_table", ("device", "pinned")),
            ("logprobs_mode", ("raw", "processed")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"{name}={value!r} is not allowed; give one of {', '.join(allowed)}"
                )
        self._check_pairs()
        sizes = self.graph_num_reqs
        if sizes is not None and (sizes != sorted(set(sizes)) or not sizes or sizes[0] < 1):
            raise ConfigError(
                f"graph_num_reqs={sizes} is not allowed; give rising integers >= 1, or null"
            )
        if self.max_num_batched_tokens < num_speculative_tokens + 1:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot hold a verification "
                f"of num_speculative_tokens={num_speculative_tokens}; give at least "
                f"{num_speculative_tokens + 1}"
            )

    def _check_pairs(self) -> None:
        """Refuse options that exclude one another.

        Raises:
            ConfigError: names both.
        """
        if self.phase_events and (self.max_steps_in_flight or 1) > 1:
            raise ConfigError(
                f"max_steps_in_flight={self.max_steps_in_flight} does not go with phase_events: a "
                "graph's events are read before it is launched again; set it to 1, or leave it out"
            )
        if self.phase_events and self.steps_per_launch > 1:
            raise ConfigError(
                f"steps_per_launch={self.steps_per_launch} does not go with phase_events: the "
                "events of a graph mark one step; set it to 1, or leave phase_events out"
            )
        if self.data_parallel_size > 1 and self.steps_per_launch > 1:
            raise ConfigError(
                f"steps_per_launch={self.steps_per_launch} does not go with "
                f"data_parallel_size={self.data_parallel_size}: replicas make a step each in turn; "
                "set one of them to 1"
            )


def from_mapping(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build a config dataclass from keyword values.

    Raises:
        ConfigError: an unknown key (the message lists the allowed ones and the nearest), or a value
            of the wrong type.
    """
    check_keys(values, [f.name for f in dataclasses.fields(cls)], what)  # pyright: ignore[reportArgumentType]
    check_types(cls, values, what)
    return cls(**values)


def check_keys(values: Iterable[str], allowed: Sequence[str], what: str) -> None:
    """Check that keys are known.

    Raises:
        ConfigError: one is not; the message lists the allowed ones and the nearest.
    """
    for key in values:
        if key not in allowed:
            hint = did_you_mean(key, allowed)
            raise ConfigError(f"unknown {what} {key!r}; {hint}allowed: {', '.join(allowed)}")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return "did you mean ...? " with the nearest known name, or nothing where none is near."""
    longer = [other for other in known if len(name) >= _LEAST_PREFIX and other.startswith(name)]
    near = longer if len(longer) == 1 else difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def check_types(cls: type, values: Mapping[str, Any], what: str) -> None:
    """Check that values have the types of a dataclass's fields.

    Raises:
        ConfigError: one has another type; the message names the key, the value and the type.
    """
    hints = _type_hints(cls)
    for key, value in values.items():
        if not _fits(value, hints[key]):
            kind = hints[key].__name__ if isinstance(hints[key], type) else hints[key]
            raise ConfigError(f"{what} {key}={value!r} is not allowed; give a value of type {kind}")


@functools.cache
def _type_hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a type, a list its entries' too; a Literal is its owner's."""
    if hint is Any:
        return True
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    kind = get_origin(hint) or hint
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if kind is list and isinstance(value, list):
        return all(_fits(entry, part) for part in get_args(hint) for entry in value)
    return isinstance(value, kind) if isinstance(kind, type) else True
