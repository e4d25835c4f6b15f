"""Measure how linear layers of few rows are computed best, and write what `runner` chooses from.

    python -m experiments.tune_linears --out choices.json                 # the shapes we ship
    python -m experiments.tune_linears --target my/model                  # those of one model

For each layer and range of tokens the library (cuBLAS) and launches of our kernel are timed in one
CUDA graph over so many weights that the L2 cache holds none of them, each layer followed by the
kernel that follows it in a model. Compiling is done first, by several processes. Needs torch,
triton, transformers and numpy. Without `--out` the file goes to `linears/` of the cache folder,
where what it held of other layers and ranges stays.
"""

import argparse
import gc
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.bench_attention import measure_read_ceiling
from experiments.linear_candidates import candidates, with_prefetch
from experiments.provenance import collect_provenance, shown_command
from runner.dispatch import on_device
from runner.loader import read_config, resolve_device, resolve_dtype
from runner.models.glu import silu_mul
from runner.models.linear import compile_linear, glu_linear, split_linear
from runner.models.linear_choices import TOKEN_LIMITS, file_name, read_choices, shape_of
from runner.models.linear_launch import LinearLaunch, LinearShape
from runner.models.norm import add_rms_norm
from runner.weights import cache_dir
from specdec.errors import ConfigError, SpecdecError

# Tokens that a range is measured at: what a step of K = 4 has with 1, 4, 8, 32 and 64 requests.
_MEASURED_AT = {16: 5, 32: 20, 64: 40, 160: 160, 320: 320}
_MORE_THAN_L2 = 160 * 2**20  # bytes of weights in a graph
_REPEATS = 5


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder whose layers are measured."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    draft_vocab: int = 0  # output head of an EAGLE-3 head for it, 0 = none

    def shapes(self) -> list[LinearShape]:
        """Return the layers: those of the model, then those of its head."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_size
        found = [
            LinearShape(qkv, self.hidden),
            LinearShape(self.hidden, self.heads * self.head_size),
            LinearShape(self.ffn, self.hidden, glu=True),
            LinearShape(self.hidden, self.ffn),
            LinearShape(self.vocab, self.hidden),
        ]
        if self.draft_vocab:
            found.append(LinearShape(qkv, 2 * self.hidden))
            found.append(LinearShape(self.hidden, 3 * self.hidden))
            found.append(LinearShape(self.draft_vocab, self.hidden))
        return found

    def share(self, ranks: int) -> "ModelShape":
        """Return what one of so many ranks has of it; a head for it runs whole on every rank.

        Raises:
            ConfigError: the query heads or the inner width cannot be divided.
        """
        if ranks < 1 or self.heads % ranks or self.ffn % ranks:
            raise ConfigError(
                f"ranks={ranks} is not allowed; give a divisor of {self.heads} heads and {self.ffn}"
            )
        return replace(
            self,
            ffn=self.ffn // ranks,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            vocab=-(-self.vocab // ranks),
            draft_vocab=0 if ranks > 1 else self.draft_vocab,
        )


SHIPPED_MODELS = {
    "llama-8b": ModelShape(4096, 14336, 32, 8, 128, 128256, 32000),
    "llama-1b": ModelShape(2048, 8192, 32, 8, 64, 128256),
    "smollm2-135m": ModelShape(576, 1536, 9, 3, 64, 49152, 32000),
}


def model_shape(name: str) -> ModelShape:
    """Return the sizes of a model by name.

    Raises:
        ConfigError: its config lacks one.
        WeightsError: its config cannot be found or read.
    """
    config = read_config(name)
    try:
        head_size = getattr(config, "head_dim", None)
        return ModelShape(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_size or config.hidden_size // config.num_attention_heads,
            config.vocab_size,
            min(32000, config.vocab_size),
        )
    except AttributeError as error:
        raise ConfigError(f"model {name!r} cannot be tuned: {error}") from error


def wanted_models(names: str, target: str | None) -> dict[str, ModelShape]:
    """Return the models that are measured, by name.

    Args:
        names: of shipped ones, with commas between.
        target: a model's name, which stands in for them.

    Raises:
        ConfigError: there is no such model, or its config lacks a size.
    """
    if target is not None:
        return {target: model_shape(target)}
    for name in names.split(","):
        if name not in SHIPPED_MODELS:
            raise ConfigError(
                f"models={name!r} is not allowed; give {', '.join(SHIPPED_MODELS)}, or a target"
            )
    return {name: SHIPPED_MODELS[name] for name in names.split(",")}


def wanted_limits(limits: str) -> list[int]:
    """Return the ranges of tokens that are measured, by their ends.

    Raises:
        ConfigError: the runner has no such range.
    """
    allowed = {str(limit): limit for limit in TOKEN_LIMITS}
    for limit in limits.split(","):
        if limit not in allowed:
            raise ConfigError(f"limits={limit!r} is not allowed; give of {', '.join(allowed)}")
    return [allowed[limit] for limit in limits.split(",")]


def read_earlier(path: Path) -> dict[str, Any] | None:
    """Return the record that a new one of the cache folder takes in, None where there is none.

    Raises:
        ConfigError: the file is no record.
    """
    if not path.is_file():
        return None
    read_choices(path)
    return json.loads(path.read_text(encoding="utf-8"))


def merge_records(record: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return a record with what an earlier one holds of other layers and ranges, and whence."""
    if earlier is None:
        return record

    def key(line: dict[str, Any]) -> tuple[Any, ...]:
        return shape_of(line), line["max_tokens"]

    measured = {key(line) for line in record["choices"]}
    kept = [line for line in earlier["choices"] if key(line) not in measured]
    before = [*earlier.get("earlier", ()), earlier.get("provenance"), *record.get("earlier", ())]
    return record | {"choices": [*record["choices"], *kept], "earlier": before}


def run_layer(x: Tensor, weight: Tensor, glu: bool, launch: LinearLaunch | None) -> Tensor:
    """Compute a layer by the library (None) or by a launch; returns parts [S, T, N]."""
    if launch is None:
        product = F.linear(x, weight)
        return (silu_mul(product) if glu else product)[None]
    if glu:
        return glu_linear(x, weight, launch)[None]
    dtype = torch.float32 if launch.splits > 1 else x.dtype
    return split_linear(x, weight, None, launch, dtype)


class LayerTimer:
    """Times one layer at one number of tokens.

    Args:
        shape: of the layer.
        num_tokens: T.
        dtype: of weight and input.
        device: a GPU.
    """

    def __init__(
        self, shape: LinearShape, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        rows = shape.rows * (2 if shape.glu else 1)
        self.num_bytes = rows * shape.columns * dtype.itemsize
        copies = max(2, min(160, -(-_MORE_THAN_L2 // self.num_bytes)))
        self.weights = [
            torch.randn(rows, shape.columns, dtype=dtype, device=device) * 0.02
            for _ in range(copies)
        ]
        self.x = torch.randn(num_tokens, shape.columns, dtype=dtype, device=device)
        # The kernel behind reads what a norm or an activation would: the parts.
        self.follows = shape.rows <= 16384
        like = torch.empty(num_tokens, shape.rows, dtype=dtype, device=device)
        self._normed, self._residual = torch.empty_like(like), torch.randn_like(like)
        self._norm_weight = torch.ones(shape.rows, dtype=dtype, device=device)

    def _chain(self, launch: LinearLaunch | None) -> None:
        for weight in self.weights:
            parts = run_layer(self.x, weight, self.shape.glu, launch)
            if self.follows:
                self._follow(parts)

    def _follow(self, parts: Tensor) -> None:
        add_rms_norm(parts, self._residual, self._norm_weight, 1e-5, self._normed)

    def time_us(self, launch: LinearLaunch | None) -> float:
        """Return microseconds of the layer and the kernel behind it."""
        return _graph_us(lambda: self._chain(launch), len(self.weights))

    def follower_us(self) -> float:
        """Return microseconds of the kernel behind, over one part."""
        if not self.follows:
            return 0.0
        parts = torch.randn_like(self._residual)[None]

        def run() -> None:
            for _ in range(50):
                self._follow(parts)

        return _graph_us(run, 50)

    def error(self, launch: LinearLaunch) -> float:
        """Return the relative difference between a launch and the library."""
        expected = run_layer(self.x, self.weights[0], self.shape.glu, None).float().sum(0)
        given = run_layer(self.x, self.weights[0], self.shape.glu, launch).float().sum(0)
        return float((given - expected).norm() / expected.norm())


@contextmanager
def settled() -> Iterator[None]:
    """Keep what is alive from being searched for garbage at every capture of a graph."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _graph_us(run: Callable[[], None], count: int) -> float:
    """Return the median microseconds of one of `count` calls in a captured graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return sorted(times)[_REPEATS // 2]


def _compile_some(
    job: tuple[list[tuple[LinearShape, LinearLaunch]], torch.dtype],
) -> list[tuple[LinearShape, LinearLaunch]]:
    """Compile launches into Triton's cache; returns those that cannot be built."""
    failed = []
    for shape, launch in job[0]:
        try:
            compile_linear(shape, launch, job[1])
        except Exception:  # whatever the compiler raises, the launch is out
            failed.append((shape, launch))
    return failed


class Compilers:
    """Processes that compile launches into Triton's cache, side by side; a context.

    Args:
        num_processes: that compile.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._pool = multiprocessing.get_context("spawn").Pool(num_processes)

    def __enter__(self) -> "Compilers":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self._pool.terminate()

    def compile(
        self, wanted: Sequence[tuple[LinearShape, LinearLaunch]], dtype: torch.dtype
    ) -> set[tuple[LinearShape, LinearLaunch]]:
        """Compile launches; returns those that cannot be built."""
        jobs = [(list(wanted[i :: self._num_processes]), dtype) for i in range(self._num_processes)]
        return {pair for failed in self._pool.map(_compile_some, jobs) for pair in failed}


def tune_layer(
    shape: LinearShape,
    limit: int,
    launches: Sequence[LinearLaunch],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Return the line of one layer and range: the choice, and what was measured for it."""
    timer = LayerTimer(shape, _MEASURED_AT[limit], dtype, device)
    library = timer.time_us(None)
    timed: dict[LinearLaunch, float] = {}
    for launch in launches:
        if timer.error(launch) < 2e-2:
            timed[launch] = timer.time_us(launch)
    fastest = sorted(timed, key=lambda launch: timed[launch])[:2]
    for launch in [other for one in fastest for other in with_prefetch(one, shape)]:
        timed[launch] = timer.time_us(launch)
    best = min(timed, key=lambda launch: timed[launch], default=None)
    if best is not None and timed[best] >= library:
        best = None
    follower = timer.follower_us()
    return {
        **asdict(shape),
        "max_tokens": limit,
        "launch": None if best is None else asdict(best),
        "measured_tokens": _MEASURED_AT[limit],
        "library_us": round(library, 2),
        "kernel_us": round(min(timed.values()), 2) if timed else None,
        "follower_us": round(follower, 2),
        "weight_bytes": timer.num_bytes,
    }


def tune(
    shapes: Sequence[LinearShape],
    limits: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    num_processes: int,
) -> list[dict[str, Any]]:
    """Return a line for each layer and range of tokens."""
    wanted = [
        (shape, launch) for shape in shapes for n in limits for launch in candidates(shape, n)
    ]
    started = time.perf_counter()
    with Compilers(num_processes) as compilers:
        failed = compilers.compile(wanted, dtype)
    print(f"compiled {len(wanted)} in {time.perf_counter() - started:.0f} s, {len(failed)} failed")
    lines = []
    for shape, limit in itertools.product(shapes, limits):
        launches = [one for one in candidates(shape, limit) if (shape, one) not in failed]
        line = tune_layer(shape, limit, launches, dtype, device)
        lines.append(line)
        print(json.dumps(line), flush=True)
        torch.cuda.empty_cache()
    return lines


def tuning_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of what every way of choosing takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", default=None, help="file; default: linears/ of the cache folder")
    parser.add_argument("--target", default=None, help="a model's name; default: the shipped ones")
    parser.add_argument("--limits", default=",".join(map(str, TOKEN_LIMITS)))
    parser.add_argument("--models", default=",".join(SHIPPED_MODELS), help="of the shipped ones")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    return parser


def resolve_gpu(arguments: argparse.Namespace) -> tuple[torch.device, torch.dtype, Path]:
    """Return device, dtype, and the file of one's own that holds the choices for them.

    Raises:
        ConfigError: the device is no GPU, or the dtype is none.
    """
    device = resolve_device(arguments.device)
    if device.type != "cuda":
        raise ConfigError(f"device={arguments.device!r} is not allowed; give a GPU")
    dtype = resolve_dtype(arguments.dtype, device)
    name = file_name(torch.cuda.get_device_name(device), dtype)
    return device, dtype, cache_dir() / "linears" / name


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a file of choices, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def main() -> int:
    """Measure and write."""
    parser = tuning_parser("Choose how linear layers are computed.")
    parser.add_argument("--ranks", type=int, default=1, help="that share the layers")
    arguments = parser.parse_args()
    try:
        device, dtype, own = resolve_gpu(arguments)
        models = wanted_models(arguments.models, arguments.target)
        models = {name: shape.share(arguments.ranks) for name, shape in models.items()}
        limits = wanted_limits(arguments.limits)
        earlier = None if arguments.out else read_earlier(own)
    except SpecdecError as error:
        print(error, file=sys.stderr)
        return 2
    provenance = collect_provenance(
        shown_command("experiments.tune_linears", sys.argv[1:]), 0, device, dtype
    )
    shapes = list(dict.fromkeys(shape for model in models.values() for shape in model.shapes()))
    with on_device(device), settled():
        lines = tune(shapes, limits, dtype, device, arguments.processes)
        read_rate = measure_read_ceiling(device)
    path = Path(arguments.out or own)
    record = {
        "provenance": provenance,
        "device": torch.cuda.get_device_name(device),
        "read_gb_s": round(read_rate, 1),
        "choices": lines,
    }
    write_record(path, merge_records(record, earlier))
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
