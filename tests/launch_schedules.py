"""Schedules for launches of several steps, and what of a run may not depend on how it was launched.

Ends of every kind fall anywhere: EOS, stop tokens, stop strings that only the host can see, and
lengths.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from specdec import Engine, SamplingParams
from specdec.trace import REQUEST_COLUMNS
from specdec.types import RequestOutput
from tests.schedules import Arrival, run_schedule
from tests.strategies import state_tensors

# Compared of a trace. `step` is left out: when a request is admitted depends on its neighbours.
_ROWS = [name for name in REQUEST_COLUMNS if name != "step"]


def draw_endings(
    seed: int, vocab_size: int, num_requests: int = 8, stop_strings: Sequence[str] = ()
) -> list[Arrival]:
    """Draw requests that come in groups, some aborted, most of which end before `max_tokens`.

    Args:
        seed: of the draw.
        vocab_size: prompts and stop tokens are below it.
        num_requests: how many.
        stop_strings: some of them end a third of the texts.
    """
    rng = np.random.default_rng(seed)
    arrivals, step = [], 0
    for i in range(num_requests):
        step += int(rng.choice([0, 0, 0, 2, 7]))
        stop = rng.choice(stop_strings, 8, replace=False).tolist() if len(stop_strings) else None
        ends = rng.integers(0, vocab_size, max(1, vocab_size // 20)).tolist()
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.8])),
            top_k=int(rng.choice([0, 7])),
            seed=i,
            max_tokens=int(rng.integers(1, 36)),
            stop=stop if rng.random() < 0.33 else None,
            stop_token_ids=ends if rng.random() < 0.5 else None,
            ignore_eos=bool(rng.random() < 0.3),
            num_speculative_tokens=None if rng.random() < 0.8 else int(rng.integers(0, 3)),
            logprobs=2 if rng.random() < 0.1 else None,
        )
        abort = int(rng.integers(1, 8)) if rng.random() < 0.15 else None
        prompt = rng.integers(0, vocab_size, int(rng.integers(1, 25))).tolist()
        arrivals.append(Arrival(step, prompt, params, abort))
    return arrivals


def without_temperature(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the same requests, all of them greedy."""
    return [
        dataclasses.replace(a, params=dataclasses.replace(a.params, temperature=0.0))
        for a in arrivals
    ]


@dataclass
class Played:
    """What a schedule gave."""

    outputs: dict[str, RequestOutput]
    rows: dict[str, list[Any]]  # of the trace, by request
    launches: dict[str, int]
    num_preemptions: int


def play(engine: Engine, arrivals: list[Arrival]) -> Played:
    """Run a schedule on an engine that keeps a trace."""
    assert engine.trace is not None
    result = run_schedule(engine, arrivals)
    requests = engine.trace.requests()
    # How a prompt is cut into chunks depends on the neighbours, too.
    requests.loc[~requests["is_verify"], "num_positions"] = 0
    rows = {
        str(name): own[_ROWS].to_numpy().tolist()
        for name, own in requests.groupby("request_id", sort=False)
    }
    launches = dict(engine.runner.graphs.launches)
    return Played(result.outputs, rows, launches, result.num_preemptions)


def assert_same_texts(actual: Played, expected: Played) -> int:
    """Compare texts, ends, statistics and traces; returns how many requests were compared whole.

    Where a request was aborted it has come as far as it has. One that was preempted verified other
    runs: what it wrote is compared, and not how.
    """
    assert actual.outputs.keys() == expected.outputs.keys()
    num_whole = 0
    for name, other in expected.outputs.items():
        own = actual.outputs[name]
        if "abort" in (own.finish_reason, other.finish_reason):
            length = min(len(own.token_ids), len(other.token_ids))
            assert own.token_ids[:length] == other.token_ids[:length], name
            continue
        assert own.token_ids == other.token_ids, name
        assert own.text == other.text, name
        assert own.finish_reason == other.finish_reason, name
        assert own.outputs[0].stop_reason == other.outputs[0].stop_reason, name
        assert (own.logprobs is None) == (other.logprobs is None), name
        assert len(own.logprobs or ()) == len(other.logprobs or ()), name
        if own.stats.num_preemptions or other.stats.num_preemptions:
            continue
        num_whole += 1
        assert own.stats == other.stats, name
        assert actual.rows[name] == expected.rows[name], name
    return num_whole


def run_steps(engine: Engine, num_steps: int) -> None:
    """Enqueue at least so many steps, and read all that was enqueued."""
    while engine.num_steps < num_steps:
        engine.step()
    engine._read_down_to(0)


def rows_and_kv(engine: Engine) -> dict[str, Tensor]:
    """Return the state of every row, and what every cache holds of it, position by position.

    Which block holds a position is left out: launches get their blocks earlier.
    """
    state = engine.runner.state
    tensors = {name: t.cpu().clone() for name, t in state_tensors(state).items()}
    block_table = tensors.pop("block_table").long()
    for request, (i, kv) in itertools.product(
        engine.scheduler.running, enumerate(engine.runner.kv_caches)
    ):
        assert request.row is not None
        length = int(tensors["num_computed_tokens"][request.row])
        slots = [
            int(block_table[request.row, position // kv.block_size]) * kv.block_size
            + position % kv.block_size
            for position in range(length)
        ]
        for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
            tensors[f"keys {request.request_id} {i}.{layer}"] = keys.cpu()[slots]
            tensors[f"values {request.request_id} {i}.{layer}"] = values.cpu()[slots]
    return tensors
