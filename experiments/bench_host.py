"""Bench `host`: what Python does in a step of the engine, outside the runner's own work.

The runner is replaced by a stub that hands out made-up outcomes at once: every verification draws
three tokens. Times are CPU times of the thread over blocks of steps; a row gives the median block
and the best one, and the median split into schedule, prepare (the plan) and read (the commit).
Nothing here needs Hydra: `python -m experiments.bench_host`.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from runner.async_output import StepOutput
from runner.input_batch import StepPlan
from runner.loader import LoadedTarget
from runner.states import NewRow
from specdec.engine import Engine
from specdec.types import SamplingParams

VOCAB_SIZE = 32000
NUM_DRAFTS = 4
NUM_SAMPLED = 3
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 16
PROMPT_LEN = 64


class WordTokenizer:
    """Decodes every id to a word of its own; enough for text that grows token by token."""

    eos_token_id = 2

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the words of some ids."""
        return "".join([f" w{token_id}" for token_id in token_ids])


@dataclass
class _CannedHandle:
    """The outcome of a step that never ran."""

    plan: StepPlan
    output: Any
    generations: np.ndarray
    timer: Any = None
    num_computed_tokens: int = 0


class StubRunner:
    """Keeps rows and block tables, and answers every plan with an outcome made beforehand."""

    def __init__(self, max_num_reqs: int, num_kv_blocks: int) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.state = SimpleNamespace(generation_np=np.zeros(max_num_reqs, dtype=np.int64))
        self.graphs = SimpleNamespace(launches=Counter())
        self.block_table = np.zeros((max_num_reqs, MAX_MODEL_LEN // BLOCK_SIZE), dtype=np.int32)
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))
        # [R, K + 1] tokens no end is among.
        self._tokens = np.arange(max_num_reqs * (NUM_DRAFTS + 1), dtype=np.int64) % 1000 + 100
        self._tokens = self._tokens.reshape(max_num_reqs, NUM_DRAFTS + 1)
        self._last: tuple[StepPlan | None, Any, Any] = (None, None, None)

    def add_request(self, new: NewRow, params: Any, seed: int, sample_index: int = 0) -> int:
        """Give out a row."""
        row = self._free_rows.pop()
        self.state.generation_np[row] += 1
        return row

    def remove_request(self, row: int) -> None:
        """Take a row back."""
        self._free_rows.append(row)

    def add_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        """Write blocks to a row's block table."""
        self.block_table[row, start : start + len(block_ids)] = block_ids

    def execute_model(self, plan: StepPlan, timed: bool = False) -> _CannedHandle:
        """Return an outcome at once; one that is known already where the plan did not change."""
        last, output, generations = self._last
        if last is None or not plan.has_arrays_of(last):
            output = SimpleNamespace(wait=self._outcome(plan))
            generations = self.state.generation_np[plan.rows_np]
        self._last = (plan, output, generations)
        return _CannedHandle(plan, output, generations)

    def _outcome(self, plan: StepPlan) -> Callable[[], StepOutput]:
        prefill = plan.is_prefill_np
        num_sampled = np.where(prefill, plan.is_last_chunk_np, NUM_SAMPLED).astype(np.int32)
        judged = np.where(prefill, 0, NUM_DRAFTS).astype(np.int32)
        rejected = np.where(prefill, 0, plan.query_lens_np - num_sampled).astype(np.int32)
        drafts = np.full(len(prefill), NUM_DRAFTS, dtype=np.int32)
        outcome = StepOutput(self._tokens[: len(prefill)], num_sampled, rejected, judged, drafts)
        return lambda: outcome


class HostEngine(Engine):
    """An engine over the stub."""

    def _make_runner(self, max_num_reqs: int, target: LoadedTarget) -> Any:
        return StubRunner(max_num_reqs, self.config.num_kv_blocks or 1)


def make_engine(batch_size: int, tokenizer: Any | None, **options: Any) -> Engine:
    """Build an engine whose runner does nothing."""
    model: Any = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float32,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        tensor_parallel=None,
        model=SimpleNamespace(generation_config=None),
    )
    fixed: dict[str, Any] = {
        "device": "cpu",
        "max_num_reqs": batch_size,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 8192,
        "num_kv_blocks": batch_size * MAX_MODEL_LEN // BLOCK_SIZE,
        "block_size": BLOCK_SIZE,
        "max_steps_in_flight": 2,
        "graph_scope": "step",
    }
    target = LoadedTarget("stub", model, tokenizer)
    return HostEngine(target, "ngram", "rejection", NUM_DRAFTS, **{**fixed, **options})


class _Load:
    """Keeps a batch full: a request that ends makes room for the next."""

    def __init__(self, engine: Engine, batch_size: int, max_tokens: int) -> None:
        self.engine = engine
        self.num_added = 0
        self.prompt = list(range(100, 100 + PROMPT_LEN))
        self.params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        for i in range(batch_size):
            # Where they end, spread the ends, so that a step sees some of them and not all at once.
            first = max_tokens * (i + 1) // batch_size if max_tokens < MAX_MODEL_LEN else max_tokens
            self.add(SamplingParams(max_tokens=max(first, 1), ignore_eos=True))

    def add(self, params: SamplingParams) -> None:
        """Add a request with the next name."""
        self.engine.add_request(f"r{self.num_added}", self.prompt, params)
        self.num_added += 1

    def run(self, num_steps: int, read_text: bool) -> None:
        """Run some steps, and read what they add if asked to."""
        step = self.engine.step
        for _ in range(num_steps):
            for increment in step():
                if read_text:
                    increment.new_text  # noqa: B018
                if increment.output is not None:
                    self.add(self.params)


def _measure(load: _Load, num_blocks: int, steps_a_block: int, read_text: bool) -> list[float]:
    """Return the microseconds of CPU time a step, one figure a block."""
    figures = []
    for _ in range(num_blocks):
        started = time.thread_time()
        load.run(steps_a_block, read_text)
        figures.append((time.thread_time() - started) / steps_a_block * 1e6)
    return figures


def _measure_split(load: _Load, num_steps: int, read_text: bool) -> dict[str, float]:
    """Return the median microseconds a step of each part, and of the stub itself."""
    engine: Any = load.engine
    spent: dict[str, list[float]] = {}

    def timed(owner: Any, method: str, name: str) -> Callable[[], None]:
        inner, figures = getattr(owner, method), spent.setdefault(name, [])

        def outer(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = inner(*args, **kwargs)
            figures.append((time.perf_counter() - started) * 1e6)
            return result

        setattr(owner, method, outer)
        return lambda: delattr(owner, method)

    undo = [
        timed(engine.scheduler, "schedule", "schedule_us"),
        timed(engine._planner, "prepare", "prepare_us"),
        timed(engine.runner, "execute_model", "stub_us"),
        timed(engine, "_read", "read_us"),
    ]
    load.run(num_steps, read_text)
    for restore in undo:
        restore()
    return {name: statistics.median(figures) for name, figures in spent.items()}


def run_host_bench(
    batch_sizes: Sequence[int] = (1, 8, 32, 64), num_blocks: int = 40, steps_a_block: int = 50
) -> list[dict[str, Any]]:
    """Measure steps of a steady batch, and of one whose requests end and are replaced.

    Args:
        batch_sizes: requests a step.
        num_blocks: blocks of steps measured.
        steps_a_block: steps a block.

    Returns:
        One dictionary a case: batch_size, tokenizer, load, step_us (median), best_us, and the split
        schedule_us, prepare_us, read_us, stub_us (of step_us, the stub's own).
    """
    cases: list[tuple[str, Any | None, int, bool]] = [
        ("steady", None, MAX_MODEL_LEN, False),
        ("steady", WordTokenizer(), MAX_MODEL_LEN, False),
        ("streamed", WordTokenizer(), MAX_MODEL_LEN, True),
        ("replaced", WordTokenizer(), 96, False),
    ]
    rows = []
    for name, tokenizer, max_tokens, read_text in cases:
        for batch_size in batch_sizes:
            load = _Load(make_engine(batch_size, tokenizer), batch_size, max_tokens)
            load.run(2 * steps_a_block, read_text)  # prompts, caches
            figures = _measure(load, num_blocks, steps_a_block, read_text)
            row = {
                "load": name,
                "tokenizer": tokenizer is not None,
                "batch_size": batch_size,
                "step_us": statistics.median(figures),
                "best_us": min(figures),
            }
            rows.append(row | _measure_split(load, 4 * steps_a_block, read_text))
    return rows


def format_host_bench(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as aligned text."""
    columns = list(rows[0])
    cells = [
        columns,
        *[[f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows],
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


if __name__ == "__main__":
    print(format_host_bench(run_host_bench()))
