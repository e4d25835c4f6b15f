"""Bench `attention`: the paged attention kernel on a GPU, beside the device's read rate.

For each model shape, batch, context and number of query tokens:

    us            median time of one layer's attention, in a CUDA graph over caches that together
                  exceed the device's L2
    read_bytes    K and V of every position of the contexts, once: what no kernel can avoid
    gb_per_s      read_bytes / us
    of_ceiling    gb_per_s over the rate at which a plain reduction reads 4 GiB

Outputs are held to the torch twin first, where its copies of the keys fit. Needs torch, triton and
numpy:

    python -m experiments.bench_attention --out attention.json
    python -m experiments.bench_attention --sweep          launches beside the chosen one
"""

# A launch gives plain integers to parameters annotated tl.constexpr, and options of the compiler.
# pyright: reportArgumentType=false, reportCallIssue=false

import argparse
import dataclasses
import gc
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from experiments.provenance import collect_provenance, shown_command
from runner.attention_launch import AttentionLaunch, AttentionShape, choose_launch
from runner.attention_metadata import AttentionMetadata
from runner.kv_cache import PagedKVCache
from runner.paged_attention import paged_attention_forward, paged_attention_forward_ref
from specdec.errors import ConfigError, SpecdecError

# Query heads, KV heads, head size.
SHAPES = {"8b": (32, 8, 128), "135m": (9, 3, 64)}
BATCHES = (1, 8, 32, 64)
CONTEXTS = (512, 4096, 32768)
QUERY_LENS = (1, 5)

_BLOCK_SIZE = 16
_CEILING_BYTES = 4 * 2**30
_COLD_BYTES = 400 * 10**6  # of distinct KV behind a graph: several times the L2 of an H200
_MAX_CHECK_BYTES = 2 * 10**9
_CALLS = 8  # of a graph at least, so that its launch does not count
_REPLAYS = 15
_READ_BLOCK = 16384
_SWEPT_SPLITS = (2, 3, 4, 5, 6, 8, 12, 16, 32)


@dataclass
class AttentionBenchConfig:
    """What `bench=attention` runs: every combination that fits the device's memory.

    Args:
        device: a CUDA device.
        dtype: of queries, keys and values.
        shapes: of the model's heads: 8b, 135m.
        batches: requests.
        contexts: tokens of each request.
        query_lens: query tokens of each request.
        bound: what the host knows of the contexts, as in a captured graph; None = them.
    """

    name: str = "attention"
    device: str = "auto"
    dtype: str = "bfloat16"
    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    batches: list[int] = field(default_factory=lambda: list(BATCHES))
    contexts: list[int] = field(default_factory=lambda: list(CONTEXTS))
    query_lens: list[int] = field(default_factory=lambda: list(QUERY_LENS))
    bound: int | None = None

    def __post_init__(self) -> None:
        """Check names and counts."""
        for shape in self.shapes:
            if shape not in SHAPES:
                known = ", ".join(SHAPES)
                raise ConfigError(f"bench.shapes: shape {shape!r} is not known; known: {known}")
        for name in ("batches", "contexts", "query_lens"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(f"bench.{name}={getattr(self, name)} is not allowed; give >= 1")
        longest = max(self.contexts, default=1)
        if max(self.query_lens, default=1) > min(self.contexts, default=1):
            raise ConfigError(
                f"bench.query_lens={self.query_lens} is not allowed; give at most the shortest of "
                f"bench.contexts={self.contexts}"
            )
        if self.bound is not None and self.bound < longest:
            raise ConfigError(f"bench.bound={self.bound} is not allowed; give >= {longest}")


@dataclass(frozen=True)
class AttentionBenchCase:
    """One row of the table; `bound` is what the host knows of the lengths, None = the context."""

    shape: str
    batch: int
    context: int
    query_len: int
    bound: int | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def read_bytes(self) -> int:
        """Return the bytes of keys and values in the contexts of one layer."""
        _, num_kv_heads, head_size = SHAPES[self.shape]
        elements = 2 * self.batch * self.context * num_kv_heads * head_size
        return elements * self.dtype.itemsize


def bench_cases(config: AttentionBenchConfig, dtype: torch.dtype) -> list[AttentionBenchCase]:
    """Return every combination of a configuration."""
    combinations = itertools.product(
        config.shapes, config.batches, config.contexts, config.query_lens
    )
    return [AttentionBenchCase(*values, config.bound, dtype) for values in combinations]


@triton.jit
def _read_kernel(
    x_ptr,  # [num_programs * BLOCK_SIZE] float32
    sums_ptr,  # [num_programs] float32, out
    BLOCK_SIZE: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE))
    tl.store(sums_ptr + pid, tl.sum(x, 0))


def time_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the median time of a call, all of them in one CUDA graph that is launched again."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A thread of process groups, where there are any, asks for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return float(np.median(times))


def measure_read_ceiling(device: torch.device) -> float:
    """Return the rate, in GB/s, at which a reduction reads a buffer much larger than any cache."""
    x = torch.empty(_CEILING_BYTES // 4, dtype=torch.float32, device=device).normal_()
    num_programs = len(x) // _READ_BLOCK
    sums = torch.empty(num_programs, dtype=torch.float32, device=device)

    def read() -> None:
        _read_kernel[(num_programs,)](x, sums, BLOCK_SIZE=_READ_BLOCK, num_warps=8)

    rate = x.numel() * x.element_size() / time_us([read] * 2) / 1e3
    expected = x.sum(dtype=torch.float64)  # no copy of the buffer
    assert torch.allclose(sums.double().sum(), expected, rtol=1e-3, atol=1.0), "not what was there"
    return rate


class _Pass:
    """A uniform pass over random caches.

    Args:
        case: what it is.
        device: where.
    """

    def __init__(self, case: AttentionBenchCase, device: torch.device) -> None:
        num_heads, num_kv_heads, head_size = SHAPES[case.shape]
        num_tokens = case.batch * case.query_len
        per_req = triton.cdiv(case.context, _BLOCK_SIZE)
        num_blocks = case.batch * per_req
        self.case = case
        self.num_layers = max(1, math.ceil(_COLD_BYTES / case.read_bytes))
        self.kv = PagedKVCache(
            self.num_layers, num_blocks, _BLOCK_SIZE, num_kv_heads, head_size, case.dtype, device
        )
        for tensor in (*self.kv.keys, *self.kv.values):
            tensor.normal_()
            tensor[self.kv.null_slot] = 0
        blocks = torch.from_numpy(np.random.default_rng(0).permutation(num_blocks))
        positions = torch.arange(case.context - case.query_len, case.context)
        self.metadata = AttentionMetadata(
            kv=self.kv,
            block_table=blocks.view(case.batch, per_req).int().to(device),
            idx_mapping=torch.randperm(case.batch).int().to(device),
            query_start_loc=torch.arange(case.batch + 1).mul(case.query_len).int().to(device),
            seq_lens=torch.full((case.batch,), case.context).int().to(device),
            positions=positions.repeat(case.batch).to(device),
            slot_mapping=torch.full((num_tokens,), -1).to(device),
            max_query_len=case.query_len,
            max_seq_len=case.bound or case.context,
        )
        query = torch.empty(num_tokens, num_heads, head_size, device=device).normal_()
        # Few keys then make up most of an output: an error in one of them shows.
        self.query = (3 * query).to(case.dtype)
        self.scaling = head_size**-0.5
        self.shape = AttentionShape(
            num_tokens=num_tokens,
            num_reqs=case.batch,
            max_query_len=case.query_len,
            num_kv_heads=num_kv_heads,
            num_packed=num_heads // num_kv_heads,
            head_size=head_size,
            itemsize=case.dtype.itemsize,
        )
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.chosen = choose_launch(self.shape, num_sms)

    def run(self, layer: int, launch: AttentionLaunch | None = None) -> Tensor:
        """Compute one layer."""
        return paged_attention_forward(self.query, self.metadata, layer, self.scaling, None, launch)

    def check(self, launch: AttentionLaunch | None = None) -> None:
        """Compare layer 0 with the torch twin.

        Raises:
            AssertionError: they differ.
        """
        if self.case.read_bytes > _MAX_CHECK_BYTES:
            return
        expected = paged_attention_forward_ref(self.query, self.metadata, 0, self.scaling, None)
        torch.testing.assert_close(self.run(0, launch), expected, rtol=2.0**-6, atol=2.0**-6)

    def time_us(self, launch: AttentionLaunch | None = None) -> float:
        """Return the median time of a layer, its keys not in L2."""
        num_calls = max(_CALLS, self.num_layers)
        layers = itertools.islice(itertools.cycle(range(self.num_layers)), num_calls)
        return time_us([lambda layer=layer: self.run(layer, launch) for layer in layers])


def run_attention_bench(
    cases: Sequence[AttentionBenchCase], device: torch.device, ceiling: float | None = None
) -> list[dict[str, Any]]:
    """Measure cases; those that do not fit the device's free memory are left out.

    Args:
        cases: what to measure.
        device: a GPU.
        ceiling: read rate in GB/s, None = measure it.
    """
    ceiling = ceiling or measure_read_ceiling(device)
    rows = []
    for case in cases:
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        if 1.2 * max(case.read_bytes, _COLD_BYTES) > min(free, 60e9):
            continue
        forward = _Pass(case, device)
        forward.check()
        us = forward.time_us()
        rate = case.read_bytes / us / 1e3
        rows.append(
            {
                **{key: value for key, value in asdict(case).items() if key != "dtype"},
                "dtype": str(case.dtype).removeprefix("torch."),
                "us": us,
                "read_bytes": case.read_bytes,
                "gb_per_s": rate,
                "of_ceiling": rate / ceiling,
                "launch": asdict(forward.chosen),
            }
        )
        print(_line(rows[-1]), flush=True)
        del forward
    return rows


def _line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    launch = row["launch"]
    return (
        f"{row['shape']:>5} batch {row['batch']:>3} context {row['context']:>6} "
        f"query {row['query_len']} {row['us']:>9.1f} us {row['gb_per_s']:>7.0f} GB/s "
        f"{row['of_ceiling']:>6.1%}  M {launch['block_m']} N {launch['block_n']} "
        f"splits {launch['max_splits']} warps {launch['num_warps']} stages {launch['num_stages']}"
    )


def sweep_launches(
    case: AttentionBenchCase, device: torch.device, ceiling: float
) -> list[dict[str, Any]]:
    """Measure a case under many launches, best first; the chosen one is among them."""
    gc.collect()
    torch.cuda.empty_cache()
    forward = _Pass(case, device)
    rows = []
    for launch in _launches(forward.chosen):
        try:
            forward.check(launch)
            us = forward.time_us(launch)
        except triton.runtime.errors.OutOfResources:  # more shared memory than there is
            continue
        rate = case.read_bytes / us / 1e3
        rows.append(
            {
                **{key: value for key, value in asdict(case).items() if key != "dtype"},
                "us": us,
                "gb_per_s": rate,
                "of_ceiling": rate / ceiling,
                "chosen": launch == forward.chosen,
                "launch": asdict(launch),
            }
        )
    return sorted(rows, key=lambda row: row["us"])


def _launches(chosen: AttentionLaunch) -> Iterator[AttentionLaunch]:
    """Yield the chosen launch and others around it."""
    yield chosen
    for max_splits in (1, *_SWEPT_SPLITS):
        if max_splits != chosen.max_splits:
            yield dataclasses.replace(chosen, max_splits=max_splits)
    splits = sorted({*_SWEPT_SPLITS, chosen.max_splits})
    for block_n, num_warps, num_stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4)):
        if (block_n, num_warps, num_stages) == (
            chosen.block_n,
            chosen.num_warps,
            chosen.num_stages,
        ):
            continue
        for max_splits in splits:
            yield dataclasses.replace(
                chosen,
                block_n=block_n,
                num_warps=num_warps,
                num_stages=num_stages,
                max_splits=max_splits,
            )


def main() -> int:
    """Run the bench and write its record; returns 1 after one sentence on what is wrong."""
    parser = argparse.ArgumentParser(description="paged attention beside the device's read rate")
    parser.add_argument("--out", type=Path, help="where the JSON record goes")
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--contexts", nargs="+", type=int)
    parser.add_argument("--query-lens", nargs="+", type=int, default=list(QUERY_LENS))
    parser.add_argument("--bound", type=int, help="of the lengths, as in a captured graph")
    parser.add_argument("--sweep", action="store_true", help="launches beside the chosen one")
    parser.add_argument("--top", type=int, default=8, help="launches of a sweep that are printed")
    args = parser.parse_args()
    try:
        config = AttentionBenchConfig(
            shapes=args.shapes or (["8b"] if args.sweep else list(SHAPES)),
            batches=args.batches or ([32] if args.sweep else list(BATCHES)),
            contexts=args.contexts or ([4096] if args.sweep else list(CONTEXTS)),
            query_lens=args.query_lens,
            bound=args.bound,
        )
        if not torch.cuda.is_available():
            raise ConfigError("bench=attention measures a kernel on a GPU, and torch finds none")
        record = _record(config, args)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except (SpecdecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _record(config: AttentionBenchConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Run what the command line asks for and return its record."""
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.bfloat16
    command = shown_command("experiments.bench_attention", sys.argv[1:])
    provenance = collect_provenance(command, 0, device, dtype)
    cases = bench_cases(config, dtype)
    ceiling = measure_read_ceiling(device)
    print(f"read ceiling {ceiling:.0f} GB/s", flush=True)
    if args.sweep:
        lines = []
        for case in cases:
            found = sweep_launches(case, device, ceiling)
            lines += found
            shown = [r for i, r in enumerate(found) if i < args.top or r["chosen"]]
            print(*(_line(r) + "  (chosen)" * r["chosen"] for r in shown), sep="\n", flush=True)
    else:
        lines = run_attention_bench(cases, device, ceiling)
    return {
        "bench": config.name,
        "provenance": provenance,
        "config": asdict(config),
        "read_ceiling_gb_per_s": ceiling,
        "lines": lines,
    }


if __name__ == "__main__":
    sys.exit(main())
