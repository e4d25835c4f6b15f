"""Choose how linear layers are launched by the time of a whole forward pass.

    python -m experiments.tune_forward --models smollm2-135m --limits 16,32,64
    python -m experiments.tune_forward --target my/model
    python -m experiments.tune_forward --models llama-8b --weight-dtype fp8

A layer that is timed alone (`experiments.tune_linears`) has other neighbours than in a model: how
soon they let it begin, and what they left in the L2 cache, moves the best launch of a small layer.
This starts from the choices there are and goes through the layers of a model. For each it tries
launches in a CUDA graph of the whole pass, then variants of the best, and keeps what shortens it.

A choice belongs to a shape: models that share a shape share the choice, the last one measured wins.
Needs torch, triton, transformers and numpy. Without `--out` the file goes to `linears/` of the
cache folder; either way it holds all choices that there were before.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from experiments.e2e_cases import SHAPE_SETS
from experiments.e2e_models import random_model
from experiments.e2e_run import time_forward
from experiments.provenance import collect_provenance, shown_command
from experiments.tune_linears import (
    SHIPPED_MODELS,
    Compilers,
    ModelShape,
    candidates,
    merge_records,
    model_shape,
    read_earlier,
    settled,
    wanted_limits,
    wanted_models,
    with_prefetch,
)
from runner.dispatch import on_device
from runner.loader import load_target, resolve_device, resolve_dtype
from runner.models.hf import HFModel
from runner.models.linear_choices import (
    SHIPPED,
    file_name,
    load_choices,
    replace_choice,
    rule,
    shape_of,
)
from runner.models.linear_launch import LinearLaunch, LinearShape
from runner.weights import cache_dir
from specdec.errors import ConfigError, SpecdecError

# Requests and tokens of each of the pass that stands for a range.
FORWARDS = {16: (1, 5), 32: (32, 1), 64: (8, 5), 160: (32, 5), 320: (64, 5)}
CONTEXT, BOUND = 256, 512  # tokens of a request, and what the host knows of them
_SHORTLIST = 3  # launches of which variants are tried
_LEAST_GAIN = 0.002  # of the pass: less is noise
_PREFETCH = (0, 256)

Forward = Callable[[], float]
# Launches by upper end of the tokens and layer.
Options = dict[tuple[int, LinearShape], list[LinearLaunch]]


@dataclass(frozen=True)
class Found:
    """What came out for a layer: its launch, and ms of the pass before and with it."""

    shape: LinearShape
    launch: LinearLaunch | None
    ms_before: float
    ms: float


def variants(launch: LinearLaunch, shape: LinearShape) -> list[LinearLaunch]:
    """Return a launch with what it may prefetch, and with each start of the next kernel."""
    return [one for one in with_prefetch(launch, shape) if one.prefetch in _PREFETCH]


def time_options(
    present: LinearLaunch | None,
    options: Iterable[LinearLaunch | None],
    place: Callable[[LinearLaunch | None], None],
    forward: Forward,
) -> dict[LinearLaunch | None, float]:
    """Return ms of the pass by the launch of one layer; the present one is in place at the end.

    Args:
        present: its launch so far, which is timed, too.
        options: launches to try; None is the library.
        place: makes a launch that of the layer.
        forward: returns ms of the pass as it is placed.
    """
    timed = {present: forward()}
    for option in options:
        if option not in timed:
            place(option)
            try:
                timed[option] = forward()
            except OutOfResources:  # more of a multiprocessor than there is
                timed[option] = math.inf
    place(present)
    return timed


def fastest(
    timed: dict[LinearLaunch | None, float], present: LinearLaunch | None
) -> LinearLaunch | None:
    """Return the launch of the shortest pass; the present one where the gain may be noise."""
    best = min(timed, key=lambda launch: timed[launch])
    return best if timed[best] < (1 - _LEAST_GAIN) * timed[present] else present


class ForwardTuner:
    """Goes through the layers of one model.

    Args:
        model: on a GPU.
        shapes: of its layers.
        compilers: that build what is tried.
        may_begin: whether there is time for one more layer.
    """

    def __init__(
        self,
        model: HFModel,
        shapes: Sequence[LinearShape],
        compilers: Compilers,
        may_begin: Callable[[], bool],
    ) -> None:
        self.model, self.shapes = model, shapes
        self._compilers, self._may_begin = compilers, may_begin
        self._device_name = torch.cuda.get_device_name(model.device)
        self._choices = load_choices(self._device_name, model.dtype)

    def tune(self, limits: Sequence[int]) -> list[tuple[int, Found]]:
        """Choose for ranges of tokens."""
        layers = list(itertools.product(limits, self.shapes))
        wanted = {(limit, shape): list(candidates(shape, limit)) for limit, shape in layers}
        built = self._build(wanted)
        found = []
        for limit, shape in layers:
            if not self._may_begin():
                print(f"{shape} up to {limit} tokens: no time left, its choice stays")
                continue
            found.append((limit, self._choose(limit, shape, built[limit, shape])))
            print(f"up to {limit} tokens: {found[-1][1]}", flush=True)
        return found

    def _build(self, wanted: Options) -> Options:
        """Compile launches; returns those that could be built."""
        pairs = [(shape, one) for (_, shape), launches in wanted.items() for one in launches]
        failed = self._compilers.compile(list(dict.fromkeys(pairs)), self.model.dtype)
        return {
            (limit, shape): [one for one in launches if (shape, one) not in failed]
            for (limit, shape), launches in wanted.items()
        }

    def _choose(self, limit: int, shape: LinearShape, launches: Sequence[LinearLaunch]) -> Found:
        """Choose for one layer: first among launches, then among variants of the fastest."""
        name, dtype, by_rule = self._device_name, self.model.dtype, rule(shape, limit)

        def place(launch: LinearLaunch | None) -> None:
            replace_choice(name, dtype, shape, limit, launch)

        def forward() -> float:
            return self._forward_ms(limit)

        present = self._choices.get((shape, limit), by_rule)
        timed = time_options(present, [None, by_rule, *launches], place, forward)
        ranked = [one for one in sorted(timed, key=lambda one: timed[one]) if one is not None]
        others = [one for best in ranked[:_SHORTLIST] for one in variants(best, shape)]
        others = self._build({(limit, shape): others})[limit, shape]
        timed |= time_options(present, others, place, forward)
        best = fastest(timed, present)
        place(best)
        return Found(shape, best, timed[present], timed[best])

    def _forward_ms(self, limit: int) -> float:
        num_reqs, query_len = FORWARDS[limit]
        # The least: what disturbs a pass makes it longer, never shorter.
        return time_forward(self.model, num_reqs, query_len, CONTEXT, BOUND, num_calls=6)[0]


def new_lines(found: Iterable[tuple[int, Found]], earlier: dict[str, Any]) -> list[dict[str, Any]]:
    """Return lines of a file of choices; what was measured of a layer alone is kept beside.

    Args:
        found: for ranges of tokens, by their ends.
        earlier: the file before.
    """
    lines = []
    for limit, one in found:
        known = [
            line
            for line in earlier.get("choices", ())
            if (shape_of(line), line["max_tokens"]) == (one.shape, limit)
        ]
        num_reqs, query_len = FORWARDS[limit]
        lines.append(
            {
                **(known[0] if known else {**asdict(one.shape), "max_tokens": limit}),
                "launch": None if one.launch is None else asdict(one.launch),
                "forward": {
                    "num_reqs": num_reqs,
                    "query_len": query_len,
                    "ms_before": round(one.ms_before, 4),
                    "ms": round(one.ms, 4),
                },
            }
        )
    return lines


def known_choices(own: Path) -> dict[str, Any] | None:
    """Return the record of what a device takes so far: one's own file, then the shipped one."""
    shipped, mine = read_earlier(SHIPPED / own.name), read_earlier(own)
    return shipped if mine is None else merge_records(mine, shipped)


def build_model(
    name: str, is_target: bool, dtype: torch.dtype, device: torch.device, weight_dtype: str
) -> HFModel:
    """Load a target by name, or build a shipped shape with random weights."""
    if is_target:
        return load_target(name, dtype, device, weight_dtype=weight_dtype).model
    full = SHAPE_SETS["full"]
    shapes = {
        "llama-8b": full.models["8b"],
        "llama-1b": full.draft_model,
        "smollm2-135m": full.models["135m"],
    }
    model = random_model(shapes[name], 0, dtype, device)
    if weight_dtype == "fp8":
        model.quantize(torch.arange(128))
    return model


def layers_of(shape: ModelShape, weight_dtype: str) -> list[LinearShape]:
    """Return the layers of a target; with 8-bit weights those that have them: not the head."""
    layers = replace(shape, draft_vocab=0).shapes()
    if weight_dtype != "fp8":
        return layers
    return [replace(layer, eight_bit=True) for layer in layers if layer.rows != shape.vocab]


def tune_models(
    arguments: argparse.Namespace, dtype: torch.dtype, device: torch.device, compilers: Compilers
) -> list[tuple[int, Found]]:
    """Return what was found for the layers of each model, by the ends of the ranges."""
    is_target = arguments.target is not None
    deadline = time.monotonic() + 60 * arguments.max_minutes
    found = []
    for name in wanted_models(arguments.models, arguments.target):
        shape = model_shape(name) if is_target else SHIPPED_MODELS[name]
        layers = layers_of(shape, arguments.weight_dtype)
        model = build_model(name, is_target, dtype, device, arguments.weight_dtype)
        tuner = ForwardTuner(model, layers, compilers, lambda: time.monotonic() < deadline)
        with settled():
            found += tuner.tune(wanted_limits(arguments.limits))
        del model, tuner
        torch.cuda.empty_cache()
    return found


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Choose linear layers' launches in a whole pass.")
    parser.add_argument("--out", default=None, help="file; default: linears/ of the cache folder")
    parser.add_argument("--target", default=None, help="a model's name; default: the shipped ones")
    parser.add_argument("--limits", default=",".join(map(str, FORWARDS)))
    parser.add_argument("--models", default=",".join(SHIPPED_MODELS), help="of the shipped ones")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weight-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--max-minutes", type=float, default=30.0, help="layers begun later stay")
    arguments = parser.parse_args()
    try:
        device = resolve_device(arguments.device)
        if device.type != "cuda":
            raise ConfigError(f"device={arguments.device!r} is not allowed; give a GPU")
        dtype = resolve_dtype(arguments.dtype, device)
        wanted_limits(arguments.limits)
        wanted_models(arguments.models, arguments.target)
        name = torch.cuda.get_device_name(device)
        own = cache_dir() / "linears" / file_name(name, dtype)
        earlier = known_choices(own)
        command = shown_command("experiments.tune_forward", sys.argv[1:])
        provenance = collect_provenance(command, 0, device, dtype)
        with on_device(device), Compilers(arguments.processes) as compilers:
            found = tune_models(arguments, dtype, device, compilers)
    except SpecdecError as error:
        print(error, file=sys.stderr)
        return 2
    lines = new_lines(found, earlier or {})
    record = {"provenance": provenance, "device": name, "choices": lines}
    path = Path(arguments.out or own)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(merge_records(record, earlier), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
