"""What scale costs: time and memory of a step as batch, context and K grow, beside their law.

    time    a + law, where law = max(bytes / read rate, operations / rate of a matrix product) of
            the target, plus the same of the drafter; a is fitted over an axis: the launch, the
            kernels' own latencies, and the host where the step waits for it. Along K a draft pass
            has such a latency of its own, and along the batch kernels of more rows take longer,
            though they read the same: there the fit is a + b * K + law or a + b * batch + law.
    memory  what an engine allocates beside the target: KV caches by formula, the rows' tables
            (`state_bytes`) and the weights of a head. Pools of captured graphs stand apart.

Rows are made long by running their prompts in large chunks.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from experiments.e2e_cases import NUM_DRAFTS, RATES, Case, ShapeSet
from experiments.e2e_floors import StepCost, head_elements, kv_elements, step_cost
from experiments.e2e_models import ModelStore, text_of
from experiments.e2e_run import BLOCK_SIZE, collect, empty, fill, make_load, running, time_repeat
from specdec.errors import ConfigError

_CHUNK_TOKENS = 16384  # of prompts, a step


@dataclasses.dataclass(frozen=True)
class Point:
    """One row: where on which axis."""

    axis: str
    value: int
    drafter: str
    batch: int
    context: int
    num_drafts: int


@dataclasses.dataclass(frozen=True)
class _ScaleCase(Case):
    """A case with a K of its own."""

    k: int = 0

    @property
    def num_drafts(self) -> int:
        """Return K."""
        return self.k

    @property
    def verifier(self) -> Any:
        """Return what decides over drafts: of two, both are kept, whatever K is."""
        rates = [*RATES[:2], *[0.0] * self.k][: self.k]
        return {"name": "synthetic", "rates": rates} if self.k else "greedy"

    @property
    def tokens_per_step(self) -> float:
        """Return tokens a request commits a step."""
        return 1.0 + min(self.k, 2)


def list_points(shapes: ShapeSet) -> list[Point]:
    """Return the rows of all axes."""
    axes, prompt_len = shapes.axes, shapes.prompt_len
    return [
        *(Point("batch", n, "eagle3", n, prompt_len, NUM_DRAFTS) for n in axes.batches),
        *(Point("K eagle3", k, "eagle3", axes.batch, prompt_len, k) for k in axes.drafts),
        *(Point("K ngram", k, "ngram", axes.batch, prompt_len, k) for k in axes.drafts),
        *(Point("context", n, "none", axes.batch, n, 0) for n in axes.contexts),
    ]


def state_bytes(num_rows: int, max_model_len: int, vocab_size: int, k: int) -> int:
    """Return the bytes of N rows, by formula: what grows with the batch beside the KV cache.

    Token ids and block table, [N, L] and [N, L / 16] int32; drafts on the device and from the host,
    [N, K] of 8 and 4 bytes; counts of tokens and the prompt's mask, [N, V] of 4 bytes and of a bit,
    and two more masks of allowed tokens.
    """
    row = 4 * max_model_len + 4 * -(-max_model_len // BLOCK_SIZE) + 12 * k
    return num_rows * (row + 4 * vocab_size + 3 * vocab_size // 8)


def expected_bytes(point: Point, model: str, shapes: ShapeSet, blocks: int, itemsize: int) -> int:
    """Return what an engine allocates beside the target, by formula.

    Args:
        point: the row.
        model: name of the target.
        shapes: with the lengths of this engine.
        blocks: of each KV cache.
        itemsize: bytes of an element.
    """
    shape = shapes.models[model]
    slots = blocks * BLOCK_SIZE + 2
    elements = kv_elements(shape) * slots
    if point.drafter == "eagle3":
        once, each = head_elements(shape, shapes.head_rows)
        elements += kv_elements(shape) // shape.num_layers * slots + once + each
    state = state_bytes(point.batch, shapes.max_model_len, shape.vocab_size, point.num_drafts)
    return elements * itemsize + state


def law_ms(cost: StepCost, kv_share: float, ceilings: dict[str, float]) -> float:
    """Return the milliseconds that a step's bytes or operations take, whichever is more.

    Args:
        cost: of the step.
        kv_share: of the cached bytes, those of the target.
        ceilings: measured in the same run.
    """
    read, product = ceilings["read_gb_per_s"] * 1e6, ceilings["matmul_tflop_per_s"] * 1e9
    target = cost.target_bytes + kv_share * cost.kv_bytes
    drafter = cost.drafter_bytes + (1 - kv_share) * cost.kv_bytes
    return max(target / read, cost.target_flops / product) + max(
        drafter / read, cost.drafter_flops / product
    )


def run_scale(
    store: ModelStore,
    models: list[str],
    ceilings: dict[str, float],
    rows: list[dict[str, Any]],
    allow: Callable[[float], str | None],
) -> None:
    """Measure every point; a row that fails or is left out says why.

    Args:
        store: the models.
        models: names of targets.
        ceilings: measured in the same run.
        rows: the record's, appended to.
        allow: given seconds, says why a point that may take so long is left out, or None.
    """
    for model in models:
        seconds = 0.0
        for point in list_points(store.shapes):
            row = {"model": model, **dataclasses.asdict(point), "status": "not run"}
            rows.append(row)
            # A prompt of twice the length takes up to four times as long.
            reason = allow(4 * seconds if point.axis == "context" else 0.0)
            if reason is not None:
                row["reason"] = reason
                continue
            started = time.monotonic()
            try:
                row |= _measure(store, model, point, ceilings) | {"status": "measured"}
            except Exception as error:  # whatever it is, the other points still count
                row |= {"status": "failed", "reason": " ".join(str(error).split())[:300]}
                collect(store.device)
            seconds = time.monotonic() - started if point.axis == "context" else 0.0
        fit_rows([row for row in rows if row["model"] == model])


def _chunk_tokens(point: Point) -> int:
    """Return how many tokens of prompts a step takes."""
    return min(_CHUNK_TOKENS, max(2048, point.batch * point.context))


def _fill_steps(point: Point) -> int:
    """Return the steps that run the prompts; the first request decodes in all but its own."""
    return -(-point.batch * point.context // _chunk_tokens(point))


def _shapes_of(point: Point, model: str, shapes: ShapeSet, itemsize: int) -> ShapeSet:
    """Return shapes whose lengths and KV cache are those of a point."""
    num_steps = shapes.axes.num_steps
    growth = (num_steps + _fill_steps(point) + 24) * (point.num_drafts + 1)
    max_len = max(shapes.max_model_len, -(-(point.context + growth) // BLOCK_SIZE) * BLOCK_SIZE)
    token_bytes = kv_elements(shapes.models[model]) * itemsize
    blocks = point.batch * -(-(point.context + growth) // BLOCK_SIZE) + 16
    return dataclasses.replace(
        shapes,
        prompt_len=point.context,
        output_len=round((num_steps + 7) * (1 + min(point.num_drafts, 2))),
        max_model_len=max_len,
        kv_bytes={model: blocks * BLOCK_SIZE * token_bytes},
    )


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _measure(
    store: ModelStore, model: str, point: Point, ceilings: dict[str, float]
) -> dict[str, Any]:
    """Return the figures of a point."""
    target, itemsize = store.target(model), store.dtype.itemsize
    drafter = store.drafter(model, point.drafter)
    shapes = _shapes_of(point, model, store.shapes, itemsize)
    case = _ScaleCase(model, point.drafter, point.batch, k=point.num_drafts)
    if shapes.max_model_len > target.model.max_position_embeddings:
        raise ConfigError(f"a context of {point.context} exceeds the model's")
    load = make_load(case, shapes, target, point.context)
    meanwhile = _fill_steps(point) * (point.num_drafts + 1)
    load = dataclasses.replace(load, max_tokens=load.max_tokens + meanwhile)
    before = _allocated(store.device)
    tokens = max(_chunk_tokens(point), point.batch * (point.num_drafts + 1))
    options = {"max_num_batched_tokens": tokens}
    text = text_of(point.drafter, target.model)
    with text, running(case, shapes, target, drafter, **options) as engine:
        after = _allocated(store.device)
        times = []
        for _ in range(1 if point.axis == "context" else 3):
            fill(engine, load)
            times.append(time_repeat(engine, load)["ms"])
            empty(engine)
        blocks = engine.runner.num_kv_blocks
        graph_bytes = engine.runner.graphs.cost.num_bytes
    length = point.context + case.tokens_per_step * load.num_steps / 2
    cost = step_cost(
        store.shapes, model, point.drafter, point.batch, length, point.num_drafts, itemsize
    )
    alone = step_cost(store.shapes, model, "none", point.batch, length, 0, itemsize)
    return {
        "ms": float(np.median(times)),
        "ms_min": min(times),
        "ms_max": max(times),
        "law_ms": law_ms(cost, min(1.0, alone.kv_bytes / cost.kv_bytes), ceilings),
        "bytes": None if before is None or after is None else after - before,
        "expected_bytes": expected_bytes(point, model, shapes, blocks, itemsize),
        "graph_bytes": graph_bytes,
    }


def fit_rows(rows: list[dict[str, Any]]) -> None:
    """Add `expected_ms` to the measured rows of one model: an axis has its fitted constants."""
    for axis in dict.fromkeys(row["axis"] for row in rows):
        own = [row for row in rows if row["axis"] == axis and row["status"] == "measured"]
        if not own:
            continue
        rest = np.array([row["ms"] - row["law_ms"] for row in own])
        a, b, grows = float(np.median(rest)), 0.0, axis.split()[0]  # "K eagle3" is an axis, too
        if grows in ("batch", "K") and len(own) > 2:
            b, a = (float(value) for value in np.polyfit([row["value"] for row in own], rest, 1))
        slope = f" + {b:.3f} ms * {grows}" if b else ""
        for row in own:
            row["expected_ms"] = a + b * row["value"] + row["law_ms"]
            row["fit"] = f"{a:.3f} ms{slope} + law"
