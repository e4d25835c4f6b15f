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
cache folder, which keeps what it held; a file named by `--out` holds the shipped choices, too. It
is written behind every layer.
"""

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from experiments.bench_attention import measure_read_ceiling
from experiments.e2e_cases import SHAPE_SETS
from experiments.e2e_models import random_model
from experiments.e2e_run import time_forward
from experiments.linear_candidates import candidates, with_prefetch
from experiments.provenance import collect_provenance, shown_command
from experiments.tune_linears import (
    SHIPPED_MODELS,
    Compilers,
    ModelShape,
    merge_records,
    model_shape,
    read_earlier,
    resolve_gpu,
    settled,
    tuning_parser,
    wanted_limits,
    wanted_models,
    write_record,
)
from runner.attention import single_request_metadata
from runner.dispatch import on_device
from runner.loader import load_target
from runner.models.hf import HFModel
from runner.models.linear_choices import (
    SHIPPED,
    load_choices,
    replace_choice,
    rule,
    shape_of,
)
from runner.models.linear_launch import LinearLaunch, LinearShape
from specdec.errors import ConfigError, SpecdecError

# Requests and tokens of each of the pass that stands for a range.
FORWARDS = {16: (1, 5), 32: (32, 1), 64: (8, 5), 160: (32, 5), 320: (64, 5)}
CONTEXT, BOUND = 256, 512  # tokens of a request, and what the host knows of them
_SHORTLIST = 3  # launches of which variants are tried
_LEAST_GAIN = 0.003  # of the pass: less is not worth another order of sums
_ROUNDS = 5  # in which the best and the present launch take turns
_MOST_ERROR = 0.2  # of a pass, relative: other orders of sums give a tenth of it, nonsense more
_PREFETCH = (0, 256)

Forward = Callable[[], float]
Place = Callable[[LinearLaunch | None], None]
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
    place: Place,
    forward: Forward,
    error: Callable[[], float],
) -> dict[LinearLaunch | None, float]:
    """Return ms of the pass by the launch of one layer; the present one is in place at the end.

    Args:
        present: its launch so far, which is timed, too.
        options: launches to try; None is the library. One that asks for more than a multiprocessor
            has, or whose pass says something else, takes for ever.
        place: makes a launch that of the layer.
        forward: returns ms of the pass as it is placed.
        error: relative difference of what the pass returns.
    """
    timed = {present: forward()}
    for option in options:
        if option not in timed:
            place(option)
            try:
                timed[option] = forward() if error() < _MOST_ERROR else math.inf
            except OutOfResources:
                timed[option] = math.inf
    place(present)
    return timed


def compare(
    present: LinearLaunch | None, best: LinearLaunch | None, place: Place, forward: Forward
) -> tuple[bool, float, float]:
    """Time two launches in turns: the least of many single times is mostly luck.

    Args:
        present: the launch so far.
        best: what was fastest.
        place: makes a launch that of the layer; the better one is in place at the end.
        forward: returns ms of the pass as it is placed.

    Returns:
        Whether `best` was faster in every turn and by enough, and the medians of both.
    """
    pairs = []
    for _ in range(_ROUNDS):
        times = []
        for launch in (present, best):
            place(launch)
            times.append(forward())
        pairs.append(times)
    before, ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    wins = all(b < a for a, b in pairs) and ms < (1 - _LEAST_GAIN) * before
    place(best if wins else present)
    return wins, before, ms


class ForwardTuner:
    """Goes through the layers of one model.

    Args:
        model: on a GPU.
        shapes: of its layers.
        compilers: that build what is tried.
        may_begin: whether there is time for one more layer.

    Raises:
        ConfigError: the model does not ask for choices.
    """

    def __init__(
        self,
        model: HFModel,
        shapes: Sequence[LinearShape],
        compilers: Compilers,
        may_begin: Callable[[], bool],
    ) -> None:
        if model.fused is None:
            raise ConfigError(
                f"the target runs unfused ({model.unfused_reason}): its layers have no choices"
            )
        self.model, self.shapes = model, shapes
        self._compilers, self._may_begin = compilers, may_begin
        self._device_name = torch.cuda.get_device_name(model.device)
        self._choices = load_choices(self._device_name, model.dtype)

    def tune(self, limits: Sequence[int]) -> Iterator[tuple[int, Found]]:
        """Choose for ranges of tokens; gives what was found layer by layer."""
        layers = list(itertools.product(limits, self.shapes))
        wanted = {(limit, shape): list(candidates(shape, limit)) for limit, shape in layers}
        built = self._build(wanted)
        for limit, shape in layers:
            if not self._may_begin():
                print(f"{shape} up to {limit} tokens: no time left, its choice stays")
                continue
            found = self._choose(limit, shape, built[limit, shape])
            print(f"up to {limit} tokens: {found}", flush=True)
            yield limit, found

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

        present, expected = self._choices.get((shape, limit), by_rule), self._states(limit)

        def error() -> float:
            return float((self._states(limit) - expected).norm() / expected.norm())

        timed = time_options(present, [None, by_rule, *launches], place, forward, error)
        ranked = [one for one in sorted(timed, key=lambda one: timed[one]) if one is not None]
        others = [one for best in ranked[:_SHORTLIST] for one in variants(best, shape)]
        others = self._build({(limit, shape): others})[limit, shape]
        timed = time_options(present, others, place, forward, error) | timed
        best = min(timed, key=lambda launch: timed[launch])
        if best == present:
            return Found(shape, present, timed[present], timed[present])
        wins, before, ms = compare(present, best, place, forward)
        return Found(shape, best, before, ms) if wins else Found(shape, present, before, before)

    @torch.inference_mode()
    def _states(self, limit: int) -> torch.Tensor:
        """Return what a pass of one request says, float32."""
        num_tokens = math.prod(FORWARDS[limit])
        kv = self.model.make_kv_cache(1, num_tokens)
        positions = torch.arange(num_tokens, device=self.model.device)
        metadata = single_request_metadata(kv, positions, num_tokens)
        return self.model.forward(positions + 1, positions, metadata).float()

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
) -> Iterator[tuple[int, Found]]:
    """Give what was found for the layers of each model, by the ends of the ranges."""
    is_target = arguments.target is not None
    deadline = time.monotonic() + 60 * arguments.max_minutes
    for name in wanted_models(arguments.models, arguments.target):
        shape = model_shape(name) if is_target else SHIPPED_MODELS[name]
        layers = layers_of(shape, arguments.weight_dtype)
        model = build_model(name, is_target, dtype, device, arguments.weight_dtype)
        tuner = ForwardTuner(model, layers, compilers, lambda: time.monotonic() < deadline)
        with settled():
            yield from tuner.tune(wanted_limits(arguments.limits))
        del model, tuner
        torch.cuda.empty_cache()


def main() -> int:
    """Measure and write."""
    parser = tuning_parser("Choose linear layers' launches in a whole pass.")
    parser.add_argument("--weight-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--max-minutes", type=float, default=30.0, help="layers begun later stay")
    arguments = parser.parse_args()
    try:
        device, dtype, own = resolve_gpu(arguments)
        wanted_limits(arguments.limits)
        wanted_models(arguments.models, arguments.target)
        # A file of one's own holds no copies of what is shipped: those would outlive an update.
        earlier = known_choices(own) if arguments.out else read_earlier(own)
        command = shown_command("experiments.tune_forward", sys.argv[1:])
        provenance = collect_provenance(command, 0, device, dtype)
        record = {"provenance": provenance, "device": torch.cuda.get_device_name(device)}
        path, found = Path(arguments.out or own), []
        with on_device(device), Compilers(arguments.processes) as compilers:
            record["read_gb_s"] = round(measure_read_ceiling(device), 1)
            for one in tune_models(arguments, dtype, device, compilers):
                found.append(one)
                record["choices"] = new_lines(found, known_choices(own) or {})
                write_record(path, merge_records(record, earlier))
    except SpecdecError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {path}" if found else "nothing was found: no time for a single layer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
