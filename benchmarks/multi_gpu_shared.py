"""Whole steps of a model whose layers several GPUs share, beside their floor.

    python benchmarks/multi_gpu_shared.py --ranks 2 --batch 32

A line of `experiments.bench_e2e` (random weights, a synthetic verifier that commits three tokens a
step, K = 4), run by as many ranks; and the sum over ranks alone, inside a CUDA graph, as often as a
step of it needs. With `r` ranks the floor is

    (weights and KV of the target) / r + those of the drafter, which every rank runs whole,
    over the rate at which memory is read, and two sums for each layer of the target

A line of JSON a measurement is appended to `--out`.
"""

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from experiments.e2e_cases import SHAPE_SETS, Case, ModelShape
from experiments.e2e_floors import floor_ms, measure_ceilings, step_cost
from experiments.e2e_models import ModelStore
from experiments.e2e_run import make_load, measure, running
from experiments.provenance import collect_provenance
from runner.loader import resolve_device, resolve_dtype
from runner.models.linear_choices import choose_linear
from runner.models.linear_launch import LinearShape
from runner.tensor_parallel import TensorParallel
from specdec.config import EngineConfig
from specdec.parallel.groups import is_first_rank
from specdec.parallel.launch import launch
from specdec.parallel.placement import check_host
from specdec.parallel.tensor_ranks import TensorRanks

_TOKENS = (5, 160)  # of steps of one request and of 32, K = 4
_SMALL = 2.0**-110  # numbers that can be doubled a hundred times and more
_REPLAYS, _BLOCKS = 20, 5


@dataclass(frozen=True)
class Measurement:
    """What is measured.

    Args:
        ranks: that share the layers.
        model, drafter: of a case of `experiments.e2e_cases`.
        batch: requests.
        repeats: batches of requests that are timed.
        shapes: "full" or "tiny".
        device: "auto", "cpu" or "cuda".
    """

    ranks: int = 2
    model: str = "8b"
    drafter: str = "eagle3"
    batch: int = 1
    repeats: int = 4
    shapes: str = "full"
    device: str = "auto"


@torch.inference_mode()
def time_all_reduce(
    shared: TensorParallel, numel: int, count: int, dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Return microseconds of a sum over the ranks, by blocks, rising; all ranks call it alike.

    Args:
        shared: the ranks.
        numel: numbers of each tensor.
        count: sums of one graph; on a CPU they are called one by one.
        dtype, device: of the tensors.
    """
    fresh = torch.rand(numel, dtype=dtype, device=device) * _SMALL
    tensor = torch.empty_like(fresh)

    def run() -> None:
        tensor.copy_(fresh)
        for _ in range(count):
            shared.all_reduce(tensor)

    run()
    if device.type != "cuda":
        return _blocks(run, 1, count)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    # A thread of the process groups asks for events meanwhile, which "global" forbids.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    graph.replay()

    def replay() -> None:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()

    found = _blocks(replay, _REPLAYS, count)
    graph.reset()  # NCCL waits for it before the ranks leave their groups
    return found


def _blocks(call: Callable[[], None], replays: int, count: int) -> list[float]:
    times = []
    for _ in range(_BLOCKS):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) / replays / count * 1e6)
    return sorted(times)


def floor_of(
    task: Measurement, context: float, itemsize: int, read_rate: dict[str, float], sum_us: float
) -> dict[str, float]:
    """Return the parts of a step's floor in ms, and all of it.

    Args:
        task: what is measured.
        context: tokens of a request.
        itemsize: bytes of a weight.
        read_rate: of `measure_ceilings`.
        sum_us: of a sum over the ranks of the hidden states of a step.
    """
    shapes, case = SHAPE_SETS[task.shapes], Case(task.model, task.drafter, task.batch)
    given = task.batch, context, case.num_drafts, itemsize
    cost = step_cost(shapes, task.model, task.drafter, *given)
    of_target = step_cost(shapes, task.model, "none", *given)
    shared = of_target.target_bytes + of_target.kv_bytes
    parts = {
        "target_ms": floor_ms(shared / task.ranks, read_rate),
        "drafter_ms": floor_ms(cost.num_bytes - shared, read_rate),
        "sums_ms": 2 * shapes.models[task.model].num_layers * sum_us / 1e3,
    }
    return parts | {"floor_ms": sum(parts.values())}


def sum_dtype(
    shape: ModelShape, ranks: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the dtype that hidden states of a step are added up in.

    The sum behind `down` stands for both of a layer. See `runner.models.sharding.RowParallel`.

    Args:
        shape: of the target.
        ranks: that share its layers.
        tokens: of a step.
        dtype, device: of the weights.
    """
    layer = LinearShape(shape.hidden_size, shape.intermediate_size // ranks)
    is_wide = device.type == "cpu" or choose_linear(layer, tokens, dtype, device) is not None
    return torch.float32 if is_wide else dtype


def nccl_state(device: torch.device) -> dict[str, Any] | None:
    """Return NCCL's version and what the environment tells it; None on a CPU."""
    if device.type != "cuda":
        return None
    told = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {"version": list(nccl.version()), "environment": told}


def measure_rank(task: Measurement, out: str) -> None:
    """Measure on this rank; the first one writes."""
    config = EngineConfig(device=task.device, tensor_parallel_size=task.ranks)
    ranks = TensorRanks(config)
    device = resolve_device(ranks.config.device)
    # A CPU packs bf16 layers, and what is packed cannot be divided any more.
    dtype = resolve_dtype("bfloat16" if device.type == "cuda" else "float32", device)
    shapes, case = SHAPE_SETS[task.shapes], Case(task.model, task.drafter, task.batch)
    shape = shapes.models[task.model]
    sums, sum_us = [], 0.0
    if ranks.tensor_parallel is not None:
        tokens = task.batch * (case.num_drafts + 1)
        own = tokens, sum_dtype(shape, task.ranks, tokens, dtype, device)
        for tokens, summed in dict.fromkeys([*((n, dtype) for n in _TOKENS), own]):
            numel, count = tokens * shape.hidden_size, 2 * shape.num_layers
            times = time_all_reduce(ranks.tensor_parallel, numel, count, summed, device)
            num_bytes = numel * summed.itemsize
            sums.append({"tokens": tokens, "bytes": num_bytes, "us": times})
            if (tokens, summed) == own:
                sum_us = times[len(times) // 2]
    rates = measure_ceilings(device, dtype)
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(shapes, dtype, device, Path(folder))
        # Saved from the whole target: this rank's part is cut out of it by its first engine.
        drafter = store.drafter(task.model, task.drafter)
        target = store.target(task.model)
        load = make_load(case, shapes, target, shapes.prompt_len)
        options = {"tensor_parallel_size": task.ranks}
        with running(case, shapes, target, drafter, **options) as engine:
            line = measure(engine, load, task.repeats)
    if not is_first_rank():
        return
    line |= dataclasses.asdict(task) | {"sums": sums, "read_gb_per_s": rates["read_gb_per_s"]}
    line["nccl"] = nccl_state(device)
    line |= floor_of(task, line["context"], dtype.itemsize, rates, sum_us)
    line["provenance"] = collect_provenance("benchmarks/multi_gpu_shared.py", 0, device, dtype)
    with Path(out).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{case.name}, {task.ranks} ranks: {line['ms']:.3f} ms, floor {line['floor_ms']:.3f} ms")


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Measurement):
        kind: Any = int if field.type in (int, "int") else str
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    parser.add_argument("--out", default="benchmarks/results/multi_gpu_shared.jsonl")
    given = vars(parser.parse_args())
    out = given.pop("out")
    task = Measurement(**given)
    check_host(EngineConfig(device=task.device, tensor_parallel_size=task.ranks))
    if task.ranks == 1:
        measure_rank(task, out)
    else:
        launch(measure_rank, task.ranks, (task, out))


if __name__ == "__main__":
    main()
