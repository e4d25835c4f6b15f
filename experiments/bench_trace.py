"""Bench `trace`: what step traces cost, tracing on and off in turns, in one process.

Blocks of steps of one running engine take turns: without a trace, with one, and so on, each second
pair the other way round, so that drift of the machine hits both alike. For each number of requests:

    off_us, on_us    median over blocks of the mean wall time of a step
    cost_us          median over pairs of blocks of the difference, and cost_share of off_us
    host_us          the same difference in CPU time of the thread that drives the engine; it holds
                     what a wait for the device hides, and is the surer figure where steps are long

The load `model` runs a target: on a GPU one of the embedded target's shape with random weights, on
a CPU a tiny one. The load `stub` has no model: an outcome is there at once, so that its steps are
host work alone and their difference shows in full (`experiments.bench_host`); its share means
little. `events` (model, GPU) are steps with `phase_events`, compared with steps without a trace of
the same engine, so they hold the cost of the trace, too; what the events themselves cost is
`events` against `model`. Needs no Hydra: `python -m experiments.bench_trace`.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.bench_host import MAX_MODEL_LEN, make_engine
from experiments.bench_step import TARGET_SHAPE, random_model
from runner.loader import LoadedTarget, resolve_device, resolve_dtype
from runner.models.hf import HFModel
from runner.step_timer import StepTimer
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.trace import StepTrace
from specdec.types import SamplingParams

NUM_DRAFTS = 4
PROMPT_LEN = 32
_WARM_STEPS = 10
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 14,
    "eos_token_id": None,
}


@dataclass
class TraceBenchConfig:
    """What `bench=trace` runs.

    Args:
        device: where the load `model` runs.
        num_reqs: requests of a step.
        num_pairs: pairs of blocks, one with a trace and one without.
        steps_a_block: steps a block.
    """

    name: str = "trace"
    device: str = "auto"
    num_reqs: list[int] = field(default_factory=lambda: [1, 8, 64])
    num_pairs: int = 20
    steps_a_block: int = 10

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("num_reqs", "num_pairs", "steps_a_block"):
            value = getattr(self, name)
            if min(value if isinstance(value, list) else [value], default=0) < 1:
                raise ConfigError(f"bench.{name}={value} is not allowed; give >= 1")
        limit = TARGET_SHAPE["max_position_embeddings"]
        if self.max_model_len > limit:
            raise ConfigError(
                f"bench.num_pairs={self.num_pairs} and bench.steps_a_block={self.steps_a_block} "
                f"could make a request {self.max_model_len} tokens long, of at most {limit}; "
                "give less"
            )

    @property
    def max_model_len(self) -> int:
        """Return tokens a request may hold: what it could grow to while it is measured."""
        num_steps = _WARM_STEPS + 2 * self.num_pairs * (self.steps_a_block + 1) + 2
        return PROMPT_LEN + num_steps * (NUM_DRAFTS + 1)


def _target(device: torch.device) -> LoadedTarget:
    """Build a target with random weights."""
    if device.type == "cuda":
        dtype = resolve_dtype("bfloat16", device)
        model: Any = random_model(TARGET_SHAPE["num_hidden_layers"], dtype, device)
        return LoadedTarget("random-135m", HFModel(model), None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**_TINY)).eval()
    return LoadedTarget("tiny", HFModel(model), None)


def _model_engine(
    config: TraceBenchConfig, target: LoadedTarget, num_reqs: int, **options: Any
) -> Engine:
    """Build an engine in which nothing ends while it is measured."""
    blocks = -(-config.max_model_len // 16) + 1
    return Engine(
        target,
        "ngram",
        "greedy",
        NUM_DRAFTS,
        device=str(target.model.device),
        dtype=str(target.model.dtype).removeprefix("torch."),
        max_num_reqs=num_reqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=max(2048, num_reqs * PROMPT_LEN),
        num_kv_blocks=num_reqs * blocks,
        graph_num_reqs=[num_reqs],
        **options,
    )


def _stub_engine(num_reqs: int) -> Engine:
    """Build an engine over the stub runner, whose steps have a timer that was never waited for."""
    engine = make_engine(num_reqs, None)
    runner: Any = engine.runner
    answer: Callable[..., Any] = runner.execute_model

    def execute_model(plan: Any, timed: bool = False) -> Any:
        handle = answer(plan)
        if timed:
            handle.timer = timer = StepTimer(on_gpu=False)
            timer.end("step")
        return handle

    runner.execute_model = execute_model
    return engine


def _fill(engine: Engine, num_reqs: int, max_model_len: int) -> None:
    """Let requests decode that do not end."""
    params = SamplingParams(temperature=0, max_tokens=max_model_len, ignore_eos=True)
    for i in range(num_reqs):
        engine.add_request(str(i), [(7 * i + j) % 500 for j in range(PROMPT_LEN)], params, "bench")
    for _ in range(_WARM_STEPS):
        engine.step()


def measure(engine: Engine, num_pairs: int, steps_a_block: int) -> dict[str, float]:
    """Time blocks with and without a trace in turns.

    Args:
        engine: it decodes, and no request of it ends meanwhile.
        num_pairs: pairs of blocks.
        steps_a_block: steps a block.
    """
    trace = StepTrace()
    walls: dict[bool, list[float]] = {False: [], True: []}
    hosts: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(num_pairs):
        for on in (False, True) if pair % 2 else (True, False):
            engine.trace = trace if on else None
            engine.step()  # reads a step that was enqueued before
            wall, host = time.perf_counter(), time.thread_time()
            for _ in range(steps_a_block):
                engine.step()
            hosts[on].append((time.thread_time() - host) / steps_a_block * 1e6)
            walls[on].append((time.perf_counter() - wall) / steps_a_block * 1e6)
    engine.trace = None
    off_us, cost_us = statistics.median(walls[False]), _median_difference(walls)
    return {
        "off_us": off_us,
        "on_us": statistics.median(walls[True]),
        "cost_us": cost_us,
        "cost_share": cost_us / off_us,
        "host_us": _median_difference(hosts),
    }


def _median_difference(figures: dict[bool, list[float]]) -> float:
    pairs = zip(figures[True], figures[False], strict=True)
    return statistics.median(on - off for on, off in pairs)


def run_trace_bench(config: TraceBenchConfig) -> list[dict[str, Any]]:
    """Return one line for each load and number of requests."""
    device = resolve_device(config.device)
    target = _target(device)
    loads: list[tuple[str, Callable[[int], Engine], int]] = [
        ("stub", _stub_engine, MAX_MODEL_LEN),
        ("model", partial(_model_engine, config, target), config.max_model_len),
    ]
    if device.type == "cuda":
        events = partial(_model_engine, config, target, phase_events=True)
        loads.append(("events", events, config.max_model_len))
    lines: list[dict[str, Any]] = []
    for load, build, max_model_len in loads:
        for num_reqs in config.num_reqs:
            engine = build(num_reqs)
            _fill(engine, num_reqs, max_model_len - PROMPT_LEN)
            name = "none" if load == "stub" else target.name
            line = {"load": load, "target": name, "num_reqs": num_reqs}
            lines.append(line | measure(engine, config.num_pairs, config.steps_a_block))
            for request_id in list(engine.unfinished_ids):
                engine.discard(request_id)
    return lines


if __name__ == "__main__":
    for found in run_trace_bench(TraceBenchConfig()):
        print(json.dumps(found))
