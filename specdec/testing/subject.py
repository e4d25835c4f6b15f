"""The drafter under test: how the kit builds engines around it, and what it declares."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from runner.loader import LoadedTarget, load_target, resolve_device, resolve_dtype
from specdec.engine import Engine
from specdec.protocols import DrafterCapabilities
from specdec.testing.target import tiny_target

# A drafter's specification, or what makes one for a target (weights that fit it, for instance).
DrafterSpec = str | Mapping[str, Any] | Callable[[LoadedTarget], str | Mapping[str, Any]]
TargetSpec = str | Callable[[torch.device], LoadedTarget]

# Verifier of rules about what was rejected: it accepts at random, whatever was drafted, so that a
# perfect drafter is rejected and a hopeless one accepted.
MEAN_LENGTH = 2.2


class Subject:
    """A drafter and the small world it is run in.

    Args:
        drafter: registered name, mapping with a key "name", or a function of the target.
        num_speculative_tokens: K of every engine.
        device: "cpu" or "cuda".
        target: None for the kit's own; a folder, or a hub id, which is run in float32; or a
            function of the device that loads one.
    """

    def __init__(
        self,
        drafter: DrafterSpec,
        num_speculative_tokens: int = 3,
        device: str = "cpu",
        target: TargetSpec | None = None,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.device = resolve_device(device)
        if target is None:
            self.target = tiny_target(self.device)
        elif callable(target):
            self.target = target(self.device)
        else:
            self.target = load_target(target, resolve_dtype("float32", self.device), self.device)
        self.drafter = drafter(self.target) if callable(drafter) else drafter
        self.texts: dict[Any, dict[str, list[int]]] = {}  # autoregressive, by schedule

    def engine(
        self, verifier: Any = "sampled_match", drafter: Any | None = None, **options: Any
    ) -> Engine:
        """Build an engine of the kit's usual sizes around the drafter, or around another one.

        Args:
            verifier: as `Engine` takes it; "random" accepts at random.
            drafter: instead of the one under test.
            options: fields of `EngineConfig` that differ from the usual, and `draft_length`. One
                step in flight is all that a drafter on the host allows.
        """
        k = self.num_speculative_tokens
        usual: dict[str, Any] = {
            "device": str(self.device),
            "dtype": "float32",
            "max_model_len": 64,
            "max_num_batched_tokens": max(48, 2 * (k + 1)),
            "max_num_reqs": 5,
            "block_size": 4,
            "num_kv_blocks": 160,
            "max_steps_in_flight": 1,
            "graph_scope": "none",
            "graph_num_reqs": [2, 5],
        }
        if verifier == "random":
            verifier = {"name": "synthetic", "mean_length": min(MEAN_LENGTH, k + 1)}
        spec = self.drafter if drafter is None else drafter
        many = options.get("max_steps_in_flight", 1) > 1
        if many and drafter is None and self.capabilities.on_cpu:
            options["max_steps_in_flight"] = 1
        return Engine(self.target, spec, verifier, k, **{**usual, **options})

    def random_lengths(self, seed: int) -> dict[str, Any]:
        """Return a draft length that asks for K drafts, one or none, drawn for every step."""
        wants, k = self.capabilities, self.num_speculative_tokens
        # Without a first pass of its own a KV cache cannot follow a step that drafts nothing.
        least = 1 if wants.kv is not None and not wants.splits_first_pass else 0
        lengths = sorted({least, 1, k})
        return {"name": "specdec.testing.lengths:RandomLength", "seed": seed, "lengths": lengths}

    def with_confidence(self, threshold: float) -> dict[str, Any]:
        """Return options that make the drafter tell how probable its drafts are, if it can."""
        if not self.capabilities.offers_confidence:
            return {}
        return {"draft_length": {"name": "confidence", "threshold": threshold}}

    @cached_property
    def probe(self) -> Engine:
        """Return an engine to look at; nothing is run on it."""
        return self.engine()

    @property
    def capabilities(self) -> DrafterCapabilities:
        """Return what the drafter declares once it is loaded."""
        return self.probe.drafter.capabilities

    @property
    def never_drafts(self) -> bool:
        """Return whether the drafter declares to propose nothing."""
        return self.probe.num_speculative_tokens == 0

    @property
    def vocab_size(self) -> int:
        """Return the target's vocabulary size."""
        return self.target.model.vocab_size
