"""Bench `step`: launches, host time and idle time of a steady decode loop, on a GPU.

A model of the embedded target's shape with random weights decodes; every request verifies K drafts
a step, whatever becomes of them. For each drafter, graph scope and batch size:

    step_us          median wall time of a step, two steps in flight
    host_us          of it, what the host worked: all but the wait for the last step's outcome
    launches         kernel launches and graph launches a step, counted by the profiler
    device_us        the step's graph launched back to back, nothing else in between
    idle_share       (step_us - device_us) / step_us: the device waited for the host

and from a profiled run (which slows every node, so its times stand for themselves only): the idle
time between the last node of a launch and the first of the next, the gaps between the nodes inside
a launch, and every runtime call of a step by name. Where a launch holds several steps
(`steps_per_launch`, in scope "step" alone), times are of one step, and what is profiled is of one
launch. Needs torch, triton, transformers and numpy:

    python -m experiments.bench_step --out step.json --steps-per-launch 1 2 4 8
"""

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.bench_drafters import DRAFTERS, bench_drafters
from experiments.device_trace import DeviceTrace, read_trace
from experiments.provenance import collect_provenance, shown_command
from runner.buffers import StagedTables
from runner.input_batch import InputBatch, InputBuffers, padding_plan
from runner.loader import LoadedTarget, resolve_device, resolve_dtype
from runner.models.hf import HFModel
from runner.prepare import prepare_inputs
from runner.states import NewRow, RequestState
from specdec.engine import Engine
from specdec.errors import ConfigError, SpecdecError
from specdec.types import SamplingParams

# The shape of SmolLM2-135M; the draft model has its width and fewer layers.
TARGET_SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}
_SCOPES = ("step", "draft", "none")
_WARM_STEPS = 20
_GRAPH_BLOCKS, _GRAPH_LAUNCHES = 3, 30  # of a step's graph alone
_BLOCK_SIZE = 16


@dataclass
class StepBenchConfig:
    """What `bench=step` runs.

    Args:
        device: a CUDA device; there is nothing to launch on a CPU.
        dtype: of the models.
        drafters: names of `experiments.bench_drafters`.
        scopes: graph scopes.
        num_reqs: batch sizes.
        num_speculative_tokens: K.
        draft_layers: layers of the draft model.
        prompt_len: tokens of each prompt.
        num_steps: steps timed in scope "step"; a fifth of them in the others, which take long.
        num_profiled: steps under the profiler.
        steps_per_launch: steps that a launch holds in scope "step"; the others launch one.
    """

    name: str = "step"
    device: str = "auto"
    dtype: str = "bfloat16"
    drafters: list[str] = field(default_factory=lambda: ["none", "ngram", "draft_model"])
    scopes: list[str] = field(default_factory=lambda: ["step", "draft", "none"])
    num_reqs: list[int] = field(default_factory=lambda: [1, 8, 64])
    num_speculative_tokens: int = 4
    draft_layers: int = 4
    prompt_len: int = 128
    num_steps: int = 100
    num_profiled: int = 20
    steps_per_launch: list[int] = field(default_factory=lambda: [1])

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("num_steps", "num_profiled", "prompt_len", "draft_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"bench.{name}={getattr(self, name)} is not allowed; give >= 1")
        if self.num_speculative_tokens < 0:
            raise ConfigError(
                f"bench.num_speculative_tokens={self.num_speculative_tokens} is not allowed; "
                "give >= 0"
            )
        for name in ("num_reqs", "steps_per_launch"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(
                    f"bench.{name}={getattr(self, name)} is not allowed; give integers >= 1"
                )
        for name, allowed in (("drafters", DRAFTERS), ("scopes", _SCOPES)):
            for value in getattr(self, name):
                if value not in allowed:
                    raise ConfigError(
                        f"bench.{name} holds {value!r}; allowed are {', '.join(allowed)}"
                    )
        limit = TARGET_SHAPE["max_position_embeddings"]
        if self.max_model_len > limit:
            raise ConfigError(
                f"bench.num_steps={self.num_steps}, bench.num_profiled={self.num_profiled} and "
                f"bench.prompt_len={self.prompt_len} could make a request {self.max_model_len} "
                f"tokens long, of at most {limit}; give less"
            )

    @property
    def max_model_len(self) -> int:
        """Return tokens a request may hold: what it could grow to while it is measured, or more."""
        graphs = _GRAPH_BLOCKS * _GRAPH_LAUNCHES
        num_steps = _WARM_STEPS + 2 * self.num_steps + self.num_profiled + graphs
        num_steps += 8 * (max(self.steps_per_launch, default=1) - 1)  # launches are whole, too
        longest = self.prompt_len + num_steps * (self.num_speculative_tokens + 1)
        return max(2048, -(-longest // _BLOCK_SIZE) * _BLOCK_SIZE)


def random_model(num_layers: int, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """Build a model of the target's width with random weights from a fixed seed."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        config = LlamaConfig(**{**TARGET_SHAPE, "num_hidden_layers": num_layers})
        model: Any = LlamaForCausalLM(config)
        return model.to(dtype).eval()


class _TimedEvent:
    """Stands in for a step's event and adds up what the host waits for it."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self.waited_s = 0.0

    def record(self, stream: Any) -> None:
        self._event.record(stream)

    def synchronize(self) -> None:
        started = time.perf_counter()
        self._event.synchronize()
        self.waited_s += time.perf_counter() - started


@contextmanager
def _running(
    config: StepBenchConfig, target: LoadedTarget, drafter: Any, line: dict[str, Any]
) -> Iterator[Engine]:
    """Give an engine in which `num_reqs` requests decode and none joins or leaves.

    Raises:
        RuntimeError: one left all the same.
    """
    max_model_len, num_reqs = config.max_model_len, line["num_reqs"]
    engine = Engine(
        target,
        drafter,
        "rejection",
        config.num_speculative_tokens,
        device=str(target.model.device),
        max_num_reqs=num_reqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(2048, num_reqs * config.prompt_len),
        num_kv_blocks=num_reqs * max_model_len // _BLOCK_SIZE + 16,
        block_size=_BLOCK_SIZE,
        graph_scope=line["scope"],
        steps_per_launch=line["steps_per_launch"],
        graph_num_reqs=[num_reqs],
    )
    rng = np.random.default_rng(0)
    room = max_model_len - config.prompt_len
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    for i in range(num_reqs):
        prompt = rng.integers(0, TARGET_SHAPE["vocab_size"], config.prompt_len).tolist()
        engine.add_request(str(i), prompt, params)
    for _ in range(2 + _launches(engine, _WARM_STEPS - 2)):
        engine.step()
    engine.runner.graphs.launches.clear()
    try:
        yield engine
        if len(engine.unfinished_ids) != num_reqs:
            raise RuntimeError(f"of {num_reqs} requests some ended while they were measured")
    finally:
        for request_id in list(engine.unfinished_ids):
            engine.discard(request_id)
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def _launches(engine: Engine, num_steps: int) -> int:
    """Return how many launches hold so many steps."""
    return -(-num_steps // engine.steps_per_launch)


def _time_steps(engine: Engine, num_steps: int) -> dict[str, float]:
    """Return median wall and host microseconds of a step."""
    ring: Any = engine.runner.outputs
    ring.events = events = [_TimedEvent(event) for event in ring.events]
    walls, hosts = [], []
    for _ in range(_launches(engine, num_steps)):
        waited = sum(event.waited_s for event in events)
        started = time.perf_counter()
        engine.step()
        wall = time.perf_counter() - started
        walls.append(wall)
        hosts.append(wall - (sum(event.waited_s for event in events) - waited))
    us = 1e6 / engine.steps_per_launch
    return {
        "step_us": float(np.median(walls)) * us,
        "host_us": float(np.median(hosts)) * us,
        "host_us_p10": float(np.quantile(hosts, 0.1)) * us,
        "host_us_p90": float(np.quantile(hosts, 0.9)) * us,
    }


def _host_parts(engine: Engine, num_steps: int) -> dict[str, float]:
    """Return median host microseconds of a step's parts; the wrappers cost a little each."""
    runner = engine.runner
    spent: dict[str, float] = {}
    for owner, name in (
        (engine.scheduler, "schedule"),
        (engine._planner, "prepare"),
        (runner, "execute_model"),
        (runner, "execute_steps"),
        (runner.graphs, "launch"),
        (runner.outputs, "end_step"),
        (runner.outputs, "end_steps"),
        (engine, "_read"),
        (runner.outputs, "read"),
    ):
        _time_calls(owner, name, spent)
    columns: dict[str, list[float]] = {}
    for _ in range(_launches(engine, num_steps)):
        spent.clear()
        engine.step()
        for name, seconds in spent.items():
            columns.setdefault(name, []).append(seconds * 1e6 / engine.steps_per_launch)
    return {name: float(np.median(values)) for name, values in columns.items()}


def _time_calls(owner: Any, name: str, spent: dict[str, float]) -> None:
    """Replace a method by itself, adding the seconds of each call to `spent[name]`."""
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

    setattr(owner, name, timed)


def _profile_steps(engine: Engine, num_steps: int) -> DeviceTrace:
    """Return what the device and the runtime did in some steps."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(_launches(engine, num_steps)):
            with torch.profiler.record_function("specdec.step"):
                engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path, "specdec.step")


def _device_us(engine: Engine) -> float | None:
    """Return microseconds of the step's graph launched back to back; the engine ends with it."""
    runner, per_launch = engine.runner, engine.steps_per_launch
    # The plain one: what the timed steps, in which no request asks for more, were launched as.
    keys = (
        k for k in runner.graphs.keys if k.part == "step" and k.plain and k.num_steps == per_launch
    )
    key, num_launches = next(keys, None), _launches(engine, _GRAPH_LAUNCHES)
    if key is None:
        return None
    times = []
    for _ in range(_GRAPH_BLOCKS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(num_launches):
            runner.graphs.launch(key)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (num_launches * per_launch))
    return float(np.median(times))


def bench_steps(
    config: StepBenchConfig, device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Return one line for each drafter, scope and batch size.

    All are timed before the first is profiled: once the profiler was on, launching a graph costs
    the host hundreds of microseconds for the rest of the process.
    """
    layers = TARGET_SHAPE["num_hidden_layers"]
    target = LoadedTarget("random-135m", HFModel(random_model(layers, dtype, device)), None)
    lines: list[dict[str, Any]] = [
        {"drafter": name, "scope": scope, "num_reqs": num_reqs, "steps_per_launch": steps}
        for name in config.drafters
        for scope in config.scopes
        for num_reqs in config.num_reqs
        for steps in (config.steps_per_launch if scope == "step" else [1])
    ]
    with tempfile.TemporaryDirectory() as folder:
        k, small = config.num_speculative_tokens, random_model(config.draft_layers, dtype, device)
        drafters = bench_drafters(target.model, Path(folder), k, small.save_pretrained)
        for measure in (_measure, _profile):
            for line in lines:
                drafter = drafters[line["drafter"]]
                with _running(config, target, drafter, line) as engine:
                    line |= measure(engine, config)
    return lines


def _measure(engine: Engine, config: StepBenchConfig) -> dict[str, Any]:
    """Time and count the steps of an engine, then its graph alone."""
    graphs = engine.runner.graphs
    num_steps = config.num_steps
    if engine.graph_scope != "step":
        num_steps = -(-num_steps // 5)
    line: dict[str, Any] = _time_steps(engine, num_steps)
    line["parts"] = {name: n / num_steps for name, n in graphs.launches.items()}
    line["capture"] = asdict(graphs.cost)
    line["host_parts_us"] = _host_parts(engine, num_steps)
    line["device_us"] = device_us = _device_us(engine)
    if device_us is not None:
        line["idle_share"] = max(0.0, 1 - device_us / line["step_us"])
    return line


def _profile(engine: Engine, config: StepBenchConfig) -> dict[str, Any]:
    """Count launches and runtime calls of an engine's steps."""
    return _profile_steps(engine, config.num_profiled).per_step()


def uniform_batch(
    device: torch.device, num_reqs: int, k: int
) -> tuple[InputBatch, RequestState, StagedTables]:
    """Return a step of a fixed shape whose rows hold prompts, its columns on the device."""
    state = RequestState(num_reqs, 2048, 128, k, device)
    buffers = InputBuffers(num_reqs, num_reqs * (k + 1), num_reqs * (k + 1), device)
    tables = StagedTables([*state.tables, buffers.columns], device, ring_depth=2)
    rng = np.random.default_rng(0)
    for _ in range(num_reqs):
        length = int(rng.integers(64, 1024))
        tokens = rng.integers(0, 49152, length).tolist()
        row = state.add_request(NewRow(tokens, length, 2048, k))
        state.block_table.stage_write(row, 0, rng.permutation(8192)[:128])
        state.num_computed_tokens.stage_write(row, 0, length - 1)
    plan = padding_plan(num_reqs, k + 1, max_seq_len=2048)
    plan.rows_np[:] = rng.permutation(num_reqs)
    buffers.stage(plan, num_reqs, k + 1)
    tables.apply(0)
    return buffers.fixed_batch(num_reqs, k + 1, 2048), state, tables


def bench_kernels(device: torch.device, num_reqs: int = 64, k: int = 4) -> dict[str, float]:
    """Return device microseconds of input preparation and of staged writes at `num_reqs`."""
    batch, state, tables = uniform_batch(device, num_reqs, k)
    step = torch.zeros(1, device=device).int()
    prepare_inputs(batch, state, _BLOCK_SIZE, step)
    graph, repeats = torch.cuda.CUDAGraph(), 100
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            prepare_inputs(batch, state, _BLOCK_SIZE, step)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return {
        "num_reqs": num_reqs,
        "prepare_inputs_us": float(np.median(times)),
        **_staged_writes(state, tables, num_reqs),
    }


def _staged_writes(state: RequestState, tables: StagedTables, num_reqs: int) -> dict[str, float]:
    """Return launches and device time of applying one write to each of `num_reqs` rows."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    repeats = 20
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for i in range(repeats):
            with torch.profiler.record_function("specdec.writes"):
                for row in range(num_reqs):
                    state.block_table.stage_write(row, i, [row * i])
                tables.apply(0)
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = read_trace(path, "specdec.writes")
    kernels = trace.kernel_us("apply_writes")
    return {
        "staged_writes_us": float(np.median(kernels)),
        "staged_writes_launches": len(kernels) / repeats,
    }


def run_step_bench(config: StepBenchConfig) -> dict[str, Any]:
    """Run the bench and return its record.

    Raises:
        ConfigError: there is no GPU.
    """
    device = resolve_device(config.device)
    if device.type != "cuda":
        raise ConfigError("bench=step measures launches on a GPU; give a CUDA device")
    dtype = resolve_dtype(config.dtype, device)
    with torch.cuda.device(device):
        lines = bench_steps(config, device, dtype)
        with torch.inference_mode():
            kernels = bench_kernels(device)
    for line in lines:
        print(_line_text(line))
    for line in lines:
        if line["scope"] == "step":
            calls = ", ".join(f"{name} {n:.2f}" for name, n in line["runtime_calls"].items())
            print(f"{line['drafter']} R={line['num_reqs']}: runtime calls a step: {calls}")
    print(", ".join(f"{name} {value:.1f}" for name, value in kernels.items()))
    return {"bench": config.name, "config": asdict(config), "kernels": kernels, "lines": lines}


def _line_text(line: dict[str, Any]) -> str:
    calls = Counter(line["runtime_calls"])
    device_us = math.nan if line["device_us"] is None else line["device_us"]
    idle = line.get("idle_share", math.nan)
    return (
        f"{line['drafter']:<12} {line['scope']:<6} R={line['num_reqs']:<3} "
        f"steps a launch {line['steps_per_launch']} "
        f"step {line['step_us']:7.0f} us  host {line['host_us']:6.0f} us  "
        f"device {device_us:7.0f} us  idle {idle:6.1%}  "
        f"kernels launched {line['kernel_launches']:6.1f}  graphs {line['graph_launches']:4.1f}  "
        f"event waits {calls['cudaEventSynchronize']:3.1f}  nodes {line['num_nodes']:6.1f}"
    )


def main() -> int:
    """Run the bench without Hydra and write its record; returns 1 after one sentence on stderr."""
    parser = argparse.ArgumentParser(description="launches, host time and idle time of a step")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON record goes")
    parser.add_argument("--drafters", nargs="+", default=None)
    parser.add_argument("--scopes", nargs="+", default=None)
    parser.add_argument("--num-reqs", nargs="+", type=int, default=None)
    parser.add_argument("--steps-per-launch", nargs="+", type=int, default=None)
    given = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    out: Path = given.pop("out")
    try:
        config = StepBenchConfig(**given)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        command = shown_command("experiments.bench_step", sys.argv[1:])
        provenance = collect_provenance(command, 0, device, dtype)
        record = run_step_bench(config)
        out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"provenance": provenance, **record}, indent=2)
        out.write_text(text + "\n", encoding="utf-8")
    except (SpecdecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
