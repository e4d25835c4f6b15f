"""Launches of several steps with real graphs: the bits of single steps, one launch, one wait.

Run on a GPU machine with `pytest -m gpu`. What needs no graph is in tests/test_multi_step.py.
"""

import copy
from collections import Counter
from typing import Any

import pytest
import torch

from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from specdec import Engine, SamplingParams
from tests.launch_schedules import draw_endings, rows_and_kv, run_steps
from tests.models import random_prompts, tiny_model
from tests.schedules import Arrival, draw_schedule, run_schedule
from tests.strategies import assert_same

pytestmark = pytest.mark.gpu

K, STEPS = 4, 4
SIZES: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 256,
    "max_num_batched_tokens": 128,
    "max_num_reqs": 6,
    "block_size": 4,
    "num_kv_blocks": 600,
    "graph_num_reqs": [1, 4, 6],
    "graph_scope": "step",
}
DRAFTERS: list[Any] = [
    "none",
    "ngram",
    {"name": "draft_model", "model": "target"},
    {"name": "draft_model", "model": "target", "sampling": "gumbel"},
]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return LoadedTarget("tiny", HFModel(copy.deepcopy(tiny_model("llama")).cuda()), None)


def make_engine(
    target: LoadedTarget, drafter: Any, steps: int, verifier: str = "sampled_match", **options: Any
) -> Engine:
    options = {**SIZES, **options, "steps_per_launch": steps}
    return Engine(target, drafter, verifier, K, **options)


def verifier_of(drafter: Any) -> str:
    return "rejection" if isinstance(drafter, dict) and "sampling" in drafter else "sampled_match"


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@pytest.mark.parametrize("num_reqs", [1, 3, 6])
def test_state_and_kv_are_those_of_single_steps_bit_for_bit(
    target: LoadedTarget, drafter: Any, num_reqs: int
) -> None:
    prompts = random_prompts([5, 19, 3, 30, 11, 8][:num_reqs])
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=200, ignore_eos=True)
        for i in range(num_reqs)
    ]
    found: list[tuple[int, dict[str, torch.Tensor]]] = []
    for steps in (STEPS, 1):
        engine = make_engine(target, drafter, steps, verifier_of(drafter))
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params[i])
        run_steps(engine, found[0][0] if found else 22)
        torch.cuda.synchronize()
        assert len(engine.unfinished_ids) == num_reqs, "one ended: its row is no longer compared"
        launches = engine.runner.graphs.launches
        assert launches[f"step x {STEPS}"] == (5 if steps > 1 else 0), launches
        found.append((engine.num_steps, rows_and_kv(engine)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_requests_that_come_and_end_get_the_same_tokens(
    target: LoadedTarget, drafter: Any, seed: int
) -> None:
    arrivals = draw_endings(seed, 97, num_requests=14)
    results, launches = {}, Counter[str]()
    for steps in (1, 2, STEPS):
        engine = make_engine(target, drafter, steps, verifier_of(drafter))
        results[steps] = run_schedule(engine, arrivals)
        launches += engine.runner.graphs.launches
    expected = results[1].outputs
    for steps in (2, STEPS):
        assert launches[f"step x {steps}"] > 2
        assert results[steps].outputs.keys() == expected.keys()
        for name, out in results[steps].outputs.items():
            other = expected[name]
            length = min(len(out.token_ids), len(other.token_ids))
            assert out.token_ids[:length] == other.token_ids[:length], (steps, name)
            if "abort" not in (out.finish_reason, other.finish_reason):
                assert out.token_ids == other.token_ids, (steps, name)
                assert out.finish_reason == other.finish_reason, (steps, name)
                assert out.stats == other.stats, (steps, name)


@pytest.mark.parametrize("drafter", DRAFTERS[:3], ids=str)
def test_texts_stay_where_requests_are_preempted(target: LoadedTarget, drafter: Any) -> None:
    options = {"num_kv_blocks": 24, "max_model_len": 96, "max_num_batched_tokens": 48}
    num_preemptions = num_launches = 0
    for seed in range(3):
        arrivals = draw_schedule(seed, num_requests=12, max_tokens=40)
        whole = [Arrival(a.step, a.prompt, a.params, None) for a in arrivals]
        plain = make_engine(target, "none", 1, max_model_len=96)
        expected = run_schedule(plain, whole).texts()
        engine = make_engine(target, drafter, STEPS, **options)
        result = run_schedule(engine, arrivals)
        for name, out in result.outputs.items():
            assert out.token_ids == expected[name][: len(out.token_ids)], (seed, name)
        for name, text in result.texts().items():
            assert text == expected[name], (seed, name)
        num_preemptions += result.num_preemptions
        num_launches += engine.runner.graphs.launches[f"step x {STEPS}"]
    assert num_preemptions > 0
    assert num_launches > 3


class _CountedEvent:
    """Stands in for a step's event and counts what the host waits for."""

    def __init__(self, event: Any, waits: list[int]) -> None:
        self._event, self._waits = event, waits

    def record(self, stream: Any) -> None:
        self._event.record(stream)

    def synchronize(self) -> None:
        self._waits.append(1)
        self._event.synchronize()


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@pytest.mark.parametrize("steps", [2, STEPS])
def test_steady_steps_are_one_graph_launch_and_one_wait_for_all_of_them(
    target: LoadedTarget, drafter: Any, steps: int
) -> None:
    options = {"max_model_len": 512, "num_kv_blocks": 3000, "graph_num_reqs": [4]}
    engine = make_engine(target, drafter, steps, "rejection", **options)
    params = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)
    for i, prompt in enumerate(random_prompts([9] * 4)):
        engine.add_request(str(i), prompt, params)
    for _ in range(4):
        engine.step()
    waits: list[int] = []
    ring: Any = engine.runner.outputs
    ring.events = [_CountedEvent(event, waits) for event in ring.events]
    engine.runner.graphs.launches.clear()
    before, num_launches = engine.num_steps, 10
    for _ in range(num_launches):
        increments = engine.step()
        assert len(increments) == 4 * steps
    assert engine.runner.graphs.launches == {f"step x {steps}": num_launches}
    assert engine.num_steps - before == num_launches * steps
    assert len(waits) == num_launches
    assert sum(flight.num_steps for flight in engine._in_flight) == steps


def test_logprobs_of_all_steps_of_a_launch_arrive(target: LoadedTarget) -> None:
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=50, ignore_eos=True, logprobs=2)
        for i in range(3)
    ]
    outputs = {}
    for steps in (1, STEPS):
        engine = make_engine(target, "ngram", steps)
        arrivals = [
            Arrival(0, prompt, own, None)
            for prompt, own in zip(random_prompts([5, 9, 3]), params, strict=True)
        ]
        outputs[steps] = run_schedule(engine, arrivals).outputs
        keys = [key for key in engine.runner.graphs.keys if key.num_steps > 1]
        assert any(not key.plain for key in keys) == (steps > 1)
    for name, out in outputs[STEPS].items():
        other = outputs[1][name]
        assert out.token_ids == other.token_ids
        assert out.logprobs is not None
        assert len(out.logprobs) == 50
        assert out.logprobs == other.logprobs


def test_graphs_of_several_steps_are_captured_beside_the_single_ones(target: LoadedTarget) -> None:
    engine = make_engine(target, "ngram", STEPS)
    shapes = {
        steps: {
            (key.num_reqs, key.num_verified, key.num_drafted, key.plain)
            for key in engine.runner.graphs.keys
            if key.part == "step" and key.num_steps == steps
        }
        for steps in (1, STEPS)
    }
    assert shapes[1] == shapes[STEPS]
    assert {shape[0] for shape in shapes[1]} == {1, 4, 6}
