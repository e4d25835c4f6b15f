"""Watching a drafter at work: its calls, its buffers, and what it asks of torch."""

import dataclasses
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runner.input_batch import padding_plan
from specdec.engine import Engine
from specdec.testing.rule import RuleBroken

POISON = -777_777_777
_GUARD = 64  # elements before and behind a guarded buffer

# Given the method's name and its context, yields the context that the drafter sees.
Around = Callable[[str, Any], AbstractContextManager[Any]]


def watch(engine: Engine, around: Around) -> None:
    """Put something around every call of the drafter that a step makes."""
    drafter: Any = engine.drafter
    for name in ("first_pass", "propose", "observe"):
        if not hasattr(drafter, name):
            continue

        setattr(drafter, name, partial(_call, around, name, getattr(drafter, name)))


def _call(around: Around, name: str, inner: Callable[[Any], None], ctx: Any) -> None:
    with around(name, ctx) as seen:
        inner(seen)


def run_padding(engine: Engine) -> None:
    """Run the empty step, in which every place is padding."""
    plan = padding_plan(2, engine.num_speculative_tokens + 1)
    engine.runner.execute_model(plan).output.wait()


def rows_of(ctx: Any) -> list[int]:
    """Return the rows of a context's places."""
    return [row for row in ctx.idx_mapping.tolist() if row >= 0]


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class GuardedBuffers:
    """Replaces an engine's draft buffers by views into poisoned memory.

    Args:
        engine: at rest, without graphs. Its drafter is bound anew, as after the memory profile.
    """

    def __init__(self, engine: Engine) -> None:
        runner: Any = engine.runner
        state = runner.state
        self._memory: dict[str, tuple[Tensor, int]] = {}
        state.draft_tokens = self._guard("draft_tokens", state.draft_tokens)
        state.draft_kind = self._guard("draft_kind", state.draft_kind)
        if runner.draft_logits is not None:
            runner.draft_logits = self._guard("draft_logits", runner.draft_logits)
            runner._step._draft_logits = runner.draft_logits
        if runner.draft_confidence is not None:
            runner.draft_confidence = self._guard("draft_confidence", runner.draft_confidence)
            runner._step.confidence = runner.draft_confidence, runner._step.confidence[1]
        # A row that never took part holds poison: a write to it shows.
        state.draft_tokens.fill_(POISON)
        runner._bind_drafter()

    def _guard(self, name: str, tensor: Tensor) -> Tensor:
        memory = torch.full((tensor.numel() + 2 * _GUARD,), _poison_of(tensor), dtype=tensor.dtype)
        memory = memory.to(tensor.device)
        view = memory[_GUARD:-_GUARD].view_as(tensor)
        view.copy_(tensor)
        self._memory[name] = memory, tensor.numel()
        return view

    def overwritten(self) -> str | None:
        """Return the name of a buffer that was written before its start or behind its end."""
        for name, (memory, size) in self._memory.items():
            outside = torch.cat([memory[:_GUARD], memory[_GUARD + size :]])
            if not same(outside, torch.full_like(outside, _poison_of(memory))):
                return name
        return None


def _poison_of(tensor: Tensor) -> int | float:
    if tensor.is_floating_point():
        return -7.5e30
    return -77 if tensor.dtype == torch.int8 else POISON


def views_of(engine: Engine, ctx: Any) -> dict[str, Tensor]:
    """Return every tensor that a drafter may read and not write, by name."""
    state = engine.runner.state.view()
    found = {f"state.{f.name}": getattr(state, f.name) for f in dataclasses.fields(state)}
    for field in dataclasses.fields(ctx):
        value = getattr(ctx, field.name)
        if isinstance(value, Tensor):
            found[f"ctx.{field.name}"] = value
    for i, (keys, values) in enumerate(
        zip(engine.runner.kv.keys, engine.runner.kv.values, strict=True)
    ):
        # Behind the blocks lies a slot that takes the writes of padding.
        cells = engine.runner.kv.num_blocks * engine.config.block_size
        found[f"target KV of layer {i}"] = torch.stack([keys[:cells], values[:cells]])
    return found


def random_states() -> list[Any]:
    """Return the states of all global random generators."""
    states: list[Any] = [torch.get_rng_state(), random.getstate(), repr(np.random.get_state())]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return [s.numpy().tobytes() if isinstance(s, Tensor) else s for s in states]


# --- what reads the device ------------------------------------------------------------------------

_READS = {
    name: f"Tensor.{name.strip('_')}()"
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
}
_READS["__array__"] = "numpy.asarray(tensor)"
_MAKES = {"tensor", "as_tensor", "from_numpy"}
_SHAPES = {"nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive"}
_READ_FIX = "keep values in tensors (torch.where, gather, comparisons), or declare graph_safe=False"


def _inside_twin() -> bool:
    """Return whether a torch twin is at work: on a GPU its launcher takes the kernel instead."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name.endswith("_ref"):
            return True
        frame = frame.f_back
    return False


def _where() -> str:
    """Return the line of the drafter, or of what it called, that torch was called from."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("torch", __name__, "contextlib", "functools")):
            return f"{module}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class _RefusedFunctions(TorchFunctionMode):
    """Refuses what reads a value, or ships one, by the name that the drafter calls it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        reads = name in _READS or (name == "to" and "cpu" in (*args[1:2], kwargs.get("device")))
        if reads and not _inside_twin():
            raise RuleBroken(
                f"{_READS.get(name, 'Tensor.to(cpu)')} reads a value on the host, at {_where()}",
                _READ_FIX,
            )
        if name in _MAKES and not _inside_twin():
            raise RuleBroken(
                f"torch.{name} makes a tensor of host data, at {_where()}",
                "make constants once, in load() or bind()",
            )
        return func(*args, **kwargs)


class _RefusedOperations(TorchDispatchMode):
    """Refuses operations that wait for the device, or whose shape depends on what tensors hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense" and not _inside_twin():
            raise RuleBroken(f"a value is read on the host, at {_where()}", _READ_FIX)
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            isinstance(t, Tensor) and t.dtype == torch.bool for t in args[1]
        )
        free = name == "repeat_interleave" and kwargs.get("output_size") is None
        if (name in _SHAPES or by_mask or free) and not _inside_twin():
            raise RuleBroken(
                f"the shape of {name} depends on what a tensor holds, at {_where()}",
                "use shapes that depend on ctx.num_reqs alone (torch.where and clamped indices "
                "instead of boolean masks), or declare graph_safe=False",
            )
        return func(*args, **kwargs)


@contextmanager
def refuse_host_reads() -> Iterator[None]:
    """Raise `RuleBroken` where torch is asked for what a CUDA graph cannot hold."""
    with _RefusedFunctions(), _RefusedOperations():
        yield
