"""How a case of `bench=e2e` is timed: engines in which nothing joins or leaves; a forward alone.

A repeat is a batch of fresh requests that all enter before the first step; what is timed are the
steps in which every request verifies, from a few behind the prompts on until each has committed the
wanted output, with as many steps in flight as the engine has. So a repeat sees the contexts of a
real batch, and its figure is wall time over steps.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from experiments.bench_step import _TimedEvent as TimedEvent
from experiments.e2e_cases import Case, ShapeSet
from experiments.prompts import builtin_questions
from runner.attention_metadata import AttentionMetadata
from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from runner.step_timer import PHASES
from specdec.engine import Engine
from specdec.intake import Prompt
from specdec.trace import STEP_COLUMNS, StepTrace
from specdec.types import SamplingParams

BLOCK_SIZE = 16
_WARM_STEPS, _COUNTED_STEPS, _DEVICE_BLOCKS = 4, 10, 3
_CONSTANT_TOKENS = 8  # of an n-gram case's prompts, at their start
_NO_GRAPH = "a CPU has no graphs"


@dataclass(frozen=True)
class Load:
    """What an engine is given to do.

    Args:
        prompts: one a request.
        prompt_len: tokens of each of them, about.
        num_steps: timed in a repeat.
        max_tokens: that a request asks for: more than it gets.
    """

    prompts: list[Prompt]
    prompt_len: int
    num_steps: int
    max_tokens: int


def make_load(case: Case, shapes: ShapeSet, target: LoadedTarget, prompt_len: int) -> Load:
    """Make the requests of a case: random tokens, or questions where the weights are trained."""
    per_step = case.tokens_per_step or 3.0
    num_steps = max(2, int((shapes.output_len - 1) / per_step) - _WARM_STEPS - 2)
    most_steps = num_steps + _WARM_STEPS + _COUNTED_STEPS + 6
    prompts: list[Prompt] = []
    if case.is_real and target.tokenizer is not None:
        questions = builtin_questions()
        chosen = (questions[i % len(questions)] for i in range(case.batch))
        prompts = [[{"role": "user", "content": question.turns[0]}] for question in chosen]
    else:
        rng = np.random.default_rng(0)
        vocab_size = shapes.models[case.model].vocab_size
        tokens = rng.integers(0, vocab_size, (case.batch, prompt_len))
        if case.drafter == "ngram":
            tokens[:, :_CONSTANT_TOKENS] = 0
        prompts = list(tokens.tolist())
    return Load(prompts, prompt_len, num_steps, most_steps * (case.num_drafts + 1))


@contextmanager
def running(
    case: Case, shapes: ShapeSet, target: LoadedTarget, drafter: Any, **options: Any
) -> Iterator[Engine]:
    """Give the engine of a case, with one captured size: its batch."""
    model = target.model
    kv_block = model.make_kv_cache(1, BLOCK_SIZE).bytes_per_block
    config: dict[str, Any] = {
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_num_reqs": case.batch,
        "max_model_len": shapes.max_model_len,
        "max_num_batched_tokens": max(2048, case.batch * shapes.prompt_len * 2),
        "num_kv_blocks": shapes.kv_bytes[case.model] // kv_block,
        "block_size": BLOCK_SIZE,
        "graph_num_reqs": [case.batch],
        **options,
    }
    engine = Engine(target, drafter, case.verifier, case.num_drafts, **config)
    if model.device.type == "cuda":
        ring: Any = engine.runner.outputs
        ring.events = [TimedEvent(event) for event in ring.events]
    try:
        yield engine
    finally:
        for request_id in list(engine.unfinished_ids):
            engine.discard(request_id)
        del engine
        collect(model.device)


def collect(device: torch.device) -> None:
    """Give a GPU's memory back."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def fill(engine: Engine, load: Load) -> None:
    """Let fresh requests decode: their prompts have run, and a few steps behind them."""
    params = SamplingParams(temperature=0, max_tokens=load.max_tokens, ignore_eos=True)
    for i, prompt in enumerate(load.prompts):
        engine.add_request(str(i), prompt, params)
    produced: set[str] = set()
    most_steps = 100 + 2 * load.prompt_len * len(load.prompts)
    for _ in range(most_steps):
        produced.update(increment.request_id for increment in engine.step())
        if len(produced) == len(load.prompts):
            break
    for _ in range(_WARM_STEPS):
        engine.step()


def empty(engine: Engine) -> None:
    """End what runs, and read what is in flight."""
    for request_id in list(engine.unfinished_ids):
        engine.discard(request_id)
    while engine.has_requests:
        engine.step()


def time_repeat(engine: Engine, load: Load) -> dict[str, float]:
    """Time the steps of a filled engine.

    Returns:
        ms a step, of it host_us (all but the wait for an outcome), and tokens a request and step.

    Raises:
        RuntimeError: a request ended meanwhile.
    """
    events: list[Any] = engine.runner.outputs.events
    waited, num_tokens = sum(event.waited_s for event in events), 0
    started = time.perf_counter()
    for _ in range(load.num_steps):
        for increment in engine.step():
            num_tokens += len(increment.new_token_ids)
    wall = time.perf_counter() - started
    waited = sum(event.waited_s for event in events) - waited
    num_reqs = len(load.prompts)
    if len(engine.unfinished_ids) != num_reqs:
        raise RuntimeError(f"of {num_reqs} requests some ended while they were timed")
    return {
        "ms": wall / load.num_steps * 1e3,
        "host_us": (wall - waited) / load.num_steps * 1e6,
        "tokens_per_step": num_tokens / load.num_steps / num_reqs,
    }


def measure(
    engine: Engine,
    load: Load,
    repeats: int,
    timed: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """Return what an engine does with a load; the engine ends with it on a GPU.

    Args:
        engine: empty.
        load: its requests.
        repeats: how often they run.
        timed: gives a context for each repeat's timed steps.
    """
    found: list[dict[str, float]] = []
    kept: list[tuple[Any, Any]] = []
    for i in range(repeats):
        fill(engine, load)
        if i == repeats - 1:
            kept = keep_rows(engine)
        with timed():
            found.append(time_repeat(engine, load))
        if i < repeats - 1:
            empty(engine)
    ends = engine.runner.state.total_len.tensor.float().mean() + kept[0][1].float().mean()
    times = [repeat["ms"] for repeat in found]
    line: dict[str, Any] = {
        "ms": float(np.median(times)),
        "ms_min": min(times),
        "ms_max": max(times),
        "ms_repeats": times,
        "host_us": float(np.median([repeat["host_us"] for repeat in found])),
        "tokens_per_step": float(np.median([repeat["tokens_per_step"] for repeat in found])),
        "num_steps": load.num_steps,
        "context": float(ends) / 2,  # tokens of a request, on average over the steps
        "launches_per_step": count_launches(engine),
    }
    line["tokens_per_s"] = len(load.prompts) * line["tokens_per_step"] / line["ms"] * 1e3
    device_times = time_graph(engine, kept, load.num_steps)
    line["device_ms"] = float(np.median(device_times)) if device_times else None
    line["device_ms_blocks"] = device_times
    line["gap_ms"] = line["ms"] - line["device_ms"] if device_times else None
    if not device_times:
        on_gpu = engine.runner.device.type == "cuda"
        line["device_reason"] = "the step is not one graph" if on_gpu else _NO_GRAPH
    return line


def count_launches(engine: Engine) -> dict[str, float]:
    """Return launches a step: graphs or what ran eager, by name, and Triton kernels beside them."""
    from triton import knobs

    launches = engine.runner.graphs.launches
    before, kernels = dict(launches), [0]

    def count(metadata: Any) -> None:
        kernels[0] += 1

    hook: Any = getattr(knobs.runtime, "launch_enter_hook", None)
    counts = engine.runner.device.type == "cuda" and hasattr(hook, "add")
    if counts:
        hook.add(count)
    try:
        for _ in range(_COUNTED_STEPS):
            engine.step()
    finally:
        if counts:
            hook.remove(count)
    found = {name: (n - before.get(name, 0)) / _COUNTED_STEPS for name, n in launches.items()}
    found = {name: n for name, n in found.items() if n}
    return found | ({"kernels outside": kernels[0] / _COUNTED_STEPS} if counts else {})


def keep_rows(engine: Engine) -> list[tuple[Any, Any]]:
    """Return what a step changes of the rows, with copies, so that they can be set back."""
    state = engine.runner.state
    tensors = [
        state.total_len.tensor,
        state.num_computed_tokens.tensor,
        state.last_sampled_tokens,
        state.draft_tokens,
        state.draft_kind,
        state.draft_limit,
    ]
    return [(tensor, tensor.clone()) for tensor in tensors]


@torch.inference_mode()
def time_graph(engine: Engine, kept: list[tuple[Any, Any]], num_launches: int) -> list[float]:
    """Return ms of the step's graph launched back to back; the engine ends with it.

    The rows are set back first, so that the launches run the very steps that were timed.
    """
    graphs = engine.runner.graphs
    keys = [key for key in graphs.keys if key.part == "step"]
    if engine.runner.device.type != "cuda" or not keys:
        return []
    # Steps that use no logits processor launch the plain graph.
    key = next((key for key in keys if key.plain), keys[0])
    times = []
    for _ in range(_DEVICE_BLOCKS):
        for tensor, copy in kept:
            tensor.copy_(copy)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(num_launches):
            graphs.launch(key)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / num_launches)
    return times


class ListTrace(StepTrace):
    """Keeps steps as they come: a GPU host may lack pandas."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    def add_step(self, values: Sequence[float]) -> None:
        """Keep one step."""
        self.lines.append(dict(zip(STEP_COLUMNS, values, strict=True)))


def measure_split(engine: Engine, load: Load) -> dict[str, float | None]:
    """Return median ms of the phases of an engine that was built with `phase_events`.

    It has one step in flight at a time, and its events are nodes of the graph: `step_ms` shows what
    that costs.
    """
    fill(engine, load)
    engine.trace = trace = ListTrace()
    engine.step()  # reads a step that was enqueued before
    trace.lines.clear()
    for _ in range(load.num_steps):
        engine.step()
    engine.trace = None
    names = [*(f"{phase}_ms" for phase in PHASES), "launch_ms", "host_ms", "step_ms"]
    found: dict[str, float | None] = {}
    for name in names:
        values = [line[name] for line in trace.lines if line[name] == line[name]]
        found[name] = float(np.median(values)) if values else None
    empty(engine)
    return found


def forward_inputs(
    model: HFModel, num_reqs: int, query_len: int, context: int, bound: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Return ids, positions and metadata of a uniform pass over a filled KV cache.

    Args:
        model: the target.
        num_reqs: R.
        query_len: tokens of each request.
        context: of each request, the pass's tokens included.
        bound: what the host knows of the contexts, as in a captured step.
    """
    device, per_req = model.device, -(-context // BLOCK_SIZE)
    kv = model.make_kv_cache(num_reqs * per_req, BLOCK_SIZE)
    for tensor in (*kv.keys, *kv.values):
        tensor[: kv.null_slot].normal_()
    order = np.random.default_rng(0).permutation(num_reqs * per_req).reshape(num_reqs, per_req)
    blocks = torch.from_numpy(order).to(device)
    positions = torch.arange(context - query_len, context, device=device)
    slots = blocks[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    ids = torch.arange(num_reqs * query_len, device=device) % model.vocab_size
    # As wide as the bound, as in an engine; behind the context it names block 0.
    table = torch.zeros(num_reqs, -(-bound // BLOCK_SIZE), dtype=torch.int32, device=device)
    table[:, :per_req] = blocks
    ends = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        kv=kv,
        block_table=table,
        idx_mapping=ends[:-1].clone(),
        query_start_loc=ends * query_len,
        seq_lens=torch.full((num_reqs,), context, dtype=torch.int32, device=device),
        positions=positions.repeat(num_reqs),
        slot_mapping=slots.reshape(-1),
        max_query_len=query_len,
        max_seq_len=bound,
    )
    return ids, metadata.positions, metadata


@torch.inference_mode()
def time_forward(
    model: HFModel,
    num_reqs: int,
    query_len: int,
    context: int,
    bound: int,
    num_calls: int = 20,
) -> list[float]:
    """Return ms of the target's forward, head included, by blocks of `num_calls`, rising.

    A call is the launch of a CUDA graph; on a CPU it is the call. See `forward_inputs`.
    """
    ids, positions, metadata = forward_inputs(model, num_reqs, query_len, context, bound)

    def run() -> torch.Tensor:
        return model.compute_logits(model.forward(ids, positions, metadata))

    for _ in range(2):
        run()
    if model.device.type != "cuda":
        return _sorted_ms(run, model.device, num_calls=2)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # A thread of process groups, where there are any, asks for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = run()
    found = _sorted_ms(graph.replay, model.device, num_calls)
    del logits, graph
    return found


def _sorted_ms(call: Callable[[], Any], device: torch.device, num_calls: int) -> list[float]:
    """Return ms a call of blocks of calls back to back, rising."""
    times = []
    for _ in range(5):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(num_calls):
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / num_calls)
        else:
            started = time.perf_counter()
            for _ in range(num_calls):
                call()
            times.append((time.perf_counter() - started) / num_calls * 1e3)
    return sorted(times)
