"""CUDA graphs: what is captured, for which shapes, from which pool, and what it costs.

A shape is (padded requests, drafts verified, drafts proposed); both numbers are K, unless a policy
of the draft length chooses them step by step: then every pair that it can choose is captured. What
runs the target is captured twice: with the kernels for logits processors and log-probabilities, and
plain, for steps in which no request asks for any. Of a uniform step, in which every request
verifies the same number of positions, these parts can be captured:

    step      all of it: inputs, target, verification, state update, draft passes, outcome
    target    inputs, target, verification, state update   (for a drafter that is not graph-safe)
    draft     all of the drafter's passes, the one over the verified tokens included
    propose   the passes behind that first one: they have one token a request whatever the step
              ran, so a step that also runs prompt tokens launches this graph after an eager first
              pass

A step that repeats itself (`steps_per_launch`) is captured once more, as many times over: every
repetition reads the state that the one before has left.

All graphs share one memory pool: they run one after another in one stream, and what one leaves for
the next step lies in state tensors outside. Shapes are captured from the largest on, so that the
smaller ones fit into the pool that is there.

A CPU has no graphs. There the function is kept and called, so the fixed shapes and addresses that
a graph relies on are exercised by the same code.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

Part = Literal["step", "target", "draft", "propose"]
_LARGEST_DEFAULT = 256


@dataclass(frozen=True)
class GraphKey:
    """A captured part of a step, and its shape."""

    part: Part
    num_reqs: int  # padded
    num_verified: int  # drafts verified by each request
    num_drafted: int  # drafts proposed for each request
    plain: bool = False  # captured without logits processors and log-probabilities
    num_steps: int = 1  # repetitions of the part "step"

    @property
    def label(self) -> str:
        """Return what launches are counted by: the part, and how many steps it holds."""
        return self.part if self.num_steps == 1 else f"{self.part} x {self.num_steps}"

    @classmethod
    def of(
        cls, part: Part, num_reqs: int, num_verified: int, num_drafted: int, plain: bool = False
    ) -> "GraphKey":
        """Return the key of a part in a step of that shape, whatever of it the part depends on.

        The number that a part does not depend on repeats the other one; drafter's passes know
        nothing of the sampler's parameters.
        """
        if part == "target":
            num_drafted = num_verified
        if part == "propose":
            num_verified = num_drafted
        plain = plain and part in ("step", "target")
        return cls(part, num_reqs, num_verified, num_drafted, plain)


@dataclass(frozen=True)
class CaptureCost:
    """What capturing took."""

    num_graphs: int
    seconds: float
    num_bytes: int  # device memory that the shared pool grew by


@dataclass
class _Captured:
    label: str  # see GraphKey
    replay: Callable[[], None]
    outputs: Any


def capture_sizes(configured: list[int] | None, most_reqs: int) -> list[int]:
    """Return the numbers of requests to capture: those configured, else powers of two.

    Args:
        configured: rising, or None.
        most_reqs: requests that a uniform step can have at all; a larger size becomes this one.
    """
    sizes = configured or [1 << i for i in range(_LARGEST_DEFAULT.bit_length())]
    return sorted({min(size, most_reqs) for size in sizes})


class CUDAGraphManager:
    """Captures parts of uniform steps, and launches them.

    Args:
        device: a CUDA device, or a CPU (see the module).
        sizes: padded numbers of requests, rising, by the drafts that each of them verifies.
    """

    def __init__(self, device: torch.device, sizes: dict[int, list[int]]) -> None:
        self.device = device
        self.sizes = sizes
        self.cost = CaptureCost(0, 0.0, 0)
        self.launches: Counter[str] = Counter()  # what was launched, or ran eager and why
        self._on_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        # Torch's own capture stream is on the device of the process's first capture.
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._captured: dict[GraphKey, _Captured] = {}

    @property
    def keys(self) -> list[GraphKey]:
        """Return what was captured, in the order of capture."""
        return list(self._captured)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def padded(self, num_reqs: int, num_verified: int) -> int | None:
        """Return the smallest captured size that holds a step, None where there is none."""
        sizes = self.sizes.get(num_verified, ())
        return next((size for size in sizes if size >= num_reqs), None)

    def capture(self, key: GraphKey, function: Callable[[], Any]) -> None:
        """Capture a function whose kernels were compiled before, and keep what it returns.

        The function may depend on the key alone: it reads and writes fixed addresses and takes no
        decision by what lies there.
        """
        started = time.perf_counter()
        before = self._reserved()
        if self._on_gpu:
            graph = torch.cuda.CUDAGraph()
            # A thread of the process groups asks for events meanwhile, which "global" forbids.
            mode = "thread_local" if dist.is_initialized() else "global"
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode=mode
            ):
                outputs = function()
            self._captured[key] = _Captured(key.label, graph.replay, outputs)
        else:
            self._captured[key] = captured = _Captured(key.label, lambda: None, None)

            def replay() -> None:
                captured.outputs = function()

            captured.replay = replay
        after = self._reserved()
        self.cost = CaptureCost(
            self.cost.num_graphs + 1,
            self.cost.seconds + time.perf_counter() - started,
            self.cost.num_bytes + after - before,
        )

    def _reserved(self) -> int:
        """Return the bytes that torch holds, free blocks outside of graphs not counted."""
        if not self._on_gpu:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def release(self) -> None:
        """Let go of everything that was captured; nothing can be launched any more."""
        self._captured.clear()

    def launch(self, key: GraphKey) -> Any:
        """Launch a captured part; returns what its function returned, at the same addresses."""
        captured = self._captured[key]
        captured.replay()
        self.launches[captured.label] += 1
        return captured.outputs

    def count_eager(self, part: Part, reason: str) -> None:
        """Count a part of a step that ran eager, and why: nothing falls back unseen."""
        self.launches[f"{part} eager: {reason}"] += 1

    def log_cost(self) -> None:
        """Log what was captured, its memory and its time."""
        parts = Counter(key.label for key in self._captured)
        logger.info(
            "%s %s for %s requests and %s drafts: %.1f MiB, %.1f s",
            "captured" if self._on_gpu else "fixed shapes, no graphs on a CPU:",
            ", ".join(f"{n} {part}" for part, n in parts.items()) or "nothing",
            sorted({size for sizes in self.sizes.values() for size in sizes}),
            list(self.sizes),
            self.cost.num_bytes / 2**20,
            self.cost.seconds,
        )
