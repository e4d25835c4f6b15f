"""The rules of the runner that only a GPU can show: one launch a step, no wait, no race.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.base import DrafterBase, DrafterConfig
from experiments.device_trace import DeviceTrace, read_trace
from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from runner.rows import scatter_rows
from specdec import Engine, SamplingParams
from specdec.errors import ConfigError, UnsupportedError
from specdec.protocols import DraftContext, DrafterCapabilities
from specdec.registry import register_drafter
from tests.models import random_prompts, tiny_model
from tests.schedules import Arrival, draw_schedule, run_schedule
from tests.strategies import state_tensors

pytestmark = pytest.mark.gpu

K = 4
SIZES: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 96,
    "max_num_batched_tokens": 48,
    "max_num_reqs": 6,
    "block_size": 4,
    "num_kv_blocks": 24,
    "graph_num_reqs": [1, 4, 6],
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
    target: LoadedTarget, drafter: Any, verifier: str = "sampled_match", **options: Any
) -> Engine:
    return Engine(target, drafter, verifier, K, **{**SIZES, **options})


def end_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return every state tensor and every cached key and value."""
    tensors = {name: t.cpu() for name, t in state_tensors(engine.runner.state).items()}
    for i, kv in enumerate(engine.runner.kv_caches):
        cells = kv.num_blocks * kv.block_size
        for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
            tensors[f"keys {i}.{layer}"] = keys[:cells].cpu()
            tensors[f"values {i}.{layer}"] = values[:cells].cpu()
    return tensors


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_scopes_give_the_same_tokens_state_and_kv_bit_for_bit(
    target: LoadedTarget, drafter: Any, seed: int
) -> None:
    verifier = "rejection" if isinstance(drafter, dict) and "sampling" in drafter else None
    arrivals = draw_schedule(seed, num_requests=12, max_tokens=40)
    results = {}
    for scope in ("none", "draft", "step"):
        engine = make_engine(target, drafter, verifier or "sampled_match", graph_scope=scope)
        texts = run_schedule(engine, arrivals)
        results[scope] = ({k: v.token_ids for k, v in texts.outputs.items()}, end_state(engine))
        if scope == "step":
            assert engine.runner.graphs.launches["step"] > 10
            assert texts.num_preemptions > 0
    expected_texts, expected_state = results["none"]
    for scope in ("draft", "step"):
        assert results[scope][0] == expected_texts, scope
        for name, tensor in expected_state.items():
            assert torch.equal(results[scope][1][name], tensor), (scope, name)


def test_text_does_not_depend_on_the_drafter_under_random_schedules(target: LoadedTarget) -> None:
    for seed in range(3):
        arrivals = draw_schedule(seed)
        whole = [Arrival(a.step, a.prompt, a.params, None) for a in arrivals]
        plain = make_engine(target, "none", num_kv_blocks=400, graph_scope="none")
        expected = run_schedule(plain, whole).texts()
        for drafter in DRAFTERS[1:3]:
            result = run_schedule(make_engine(target, drafter, graph_scope="step"), arrivals)
            for name, out in result.outputs.items():
                assert out.token_ids == expected[name][: len(out.token_ids)], (drafter, name)
            for name, text in result.texts().items():
                assert text == expected[name], (drafter, name)


def test_text_stays_while_the_draft_length_changes_between_replays(target: LoadedTarget) -> None:
    arrivals = draw_schedule(5, num_requests=12, max_tokens=40)
    whole = [Arrival(a.step, a.prompt, a.params, None) for a in arrivals]
    plain = make_engine(target, "none", num_kv_blocks=400, graph_scope="none")
    expected = run_schedule(plain, whole).texts()
    policies: list[Any] = [
        {"name": "specdec.testing.lengths:RandomLength", "lengths": [0, 1, 4]},
        {"name": "goodput", "choices": [0, 2, 4], "explore_steps": 1},
        {"name": "confidence", "threshold": 0.2},
    ]
    for drafter in DRAFTERS[1:3]:
        for policy in policies[: 2 if drafter == "ngram" else 3]:
            engine = make_engine(target, drafter, graph_scope="step", draft_length=policy)
            result = run_schedule(engine, arrivals)
            for name, out in result.outputs.items():
                assert out.token_ids == expected[name][: len(out.token_ids)], (policy, name)
            assert engine.runner.graphs.launches["step"] > 10
            assert not any("unlike" in what for what in engine.runner.graphs.launches)


def test_cpu_state_overwritten_after_each_enqueue_changes_nothing(target: LoadedTarget) -> None:
    arrivals = draw_schedule(3, num_requests=14)
    synchronous = make_engine(target, "ngram", max_steps_in_flight=1)
    expected = run_schedule(synchronous, arrivals, lambda _: torch.cuda.synchronize()).texts()

    def scribble(engine: Engine) -> None:
        runner = engine.runner
        ring, depth = runner._tables._ring, runner.outputs.depth
        # What a CPU may do at any time: all places but those of steps in flight are rubbish.
        in_flight = {step % depth for step in runner.outputs._unread}
        assert len(in_flight) < depth
        for place, buffer in enumerate(ring):
            if place not in in_flight and buffer is not None:
                buffer.numpy().fill(0x7F7F7F7F7F7F)
                runner.outputs.tensor.numpy()[place].fill(-7)

    engine = make_engine(target, "ngram", max_steps_in_flight=2)
    result = run_schedule(engine, arrivals, scribble)
    for name, text in result.texts().items():
        assert text == expected.get(name, text), name
    assert len(result.texts()) > 8


def steady_trace(engine: Engine, num_reqs: int, num_steps: int = 24) -> DeviceTrace:
    """Profile steps in which no request joins or leaves."""
    params = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    for i, prompt in enumerate(random_prompts([9] * num_reqs)):
        engine.add_request(str(i), prompt, params)
    for _ in range(6):
        engine.step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            with torch.profiler.record_function("specdec.step"):
                engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path, "specdec.step")


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_a_steady_step_is_one_graph_launch_and_waits_for_one_event(
    target: LoadedTarget, drafter: Any
) -> None:
    options = {"max_model_len": 512, "num_kv_blocks": 3000, "graph_num_reqs": [4]}
    engine = make_engine(target, drafter, "rejection", graph_scope="step", **options)
    trace = steady_trace(engine, 4)
    per_step = trace.per_step()
    assert per_step["graph_launches"] == 1
    assert per_step["kernel_launches"] <= 1  # the staged writes of new blocks
    assert per_step["forbidden_calls"] == {}
    assert per_step["pageable_copies"] == 0
    assert per_step["runtime_calls"]["cudaEventSynchronize"] == 1
    assert per_step["early_waits"] == 0
    copies = [n for n in per_step["runtime_calls"] if "Memcpy" in n]
    assert not copies, copies


def test_steps_in_flight_run_to_the_very_end_of_max_model_len(target: LoadedTarget) -> None:
    prompts = random_prompts([31, 95, 3, 94])
    params = SamplingParams(temperature=0.7, max_tokens=500, seed=5)
    arrivals = [Arrival(0, prompt, params, None) for prompt in prompts]
    plain = make_engine(target, "none", num_kv_blocks=400, graph_scope="none")
    expected = run_schedule(plain, arrivals).texts()
    for scope in ("none", "draft", "step"):
        for drafter in DRAFTERS[1:3]:
            engine = make_engine(target, drafter, num_kv_blocks=400, graph_scope=scope)
            result = run_schedule(engine, arrivals)
            assert result.texts() == expected
            for name, prompt in enumerate(prompts):
                assert len(prompt) + len(expected[str(name)]) == SIZES["max_model_len"]


def test_pinned_token_table_gives_the_same_text(target: LoadedTarget) -> None:
    arrivals = draw_schedule(2)
    texts = []
    for table in ("device", "pinned"):
        engine = make_engine(target, "ngram", token_table=table)
        tokens = engine.runner.state.all_token_ids.tensor
        assert tokens.is_pinned() == (table == "pinned")
        texts.append(run_schedule(engine, arrivals).texts())
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match="token_table='device'"):
        make_engine(target, {"name": "oracle", "texts": [[1, 2, 3]]}, token_table="pinned")


@register_drafter("gpu_test_last_token", DrafterConfig)
class LastTokenDrafter(DrafterBase):
    """Repeats the last token; graph-safe."""

    capabilities = DrafterCapabilities(variable_length=True)

    def propose(self, ctx: DraftContext) -> None:
        rows = ctx.idx_mapping.long().clamp(min=0)
        run = ctx.state.last_sampled_tokens[rows].expand(-1, K)
        scatter_rows(self.buffers.draft_tokens, ctx.idx_mapping, run)


@register_drafter("gpu_test_reads_host", DrafterConfig)
class ReadingDrafter(LastTokenDrafter):
    """The same, but it looks at a value on the host."""

    def propose(self, ctx: DraftContext) -> None:
        if int(ctx.num_sampled.sum()) >= 0:
            super().propose(ctx)


@register_drafter("gpu_test_unsafe", DrafterConfig)
class UnsafeDrafter(ReadingDrafter):
    """The same, and it says so."""

    capabilities = DrafterCapabilities(variable_length=True, graph_safe=False)


def test_a_plugin_runs_in_the_graph_and_an_unsafe_one_beside_it(target: LoadedTarget) -> None:
    arrivals = draw_schedule(4)
    safe = make_engine(target, "gpu_test_last_token", graph_scope="step")
    unsafe = make_engine(target, "gpu_test_unsafe", graph_scope="step")
    expected, texts = run_schedule(safe, arrivals), run_schedule(unsafe, arrivals)
    assert texts.texts() == expected.texts()
    assert sum(out.stats.num_drafted for out in expected.outputs.values()) > 100
    assert safe.runner.graphs.launches["step"] > 0
    assert unsafe.runner.graphs.launches["target"] > 0
    assert unsafe.runner.graphs.launches["draft eager: the drafter is not graph-safe"] > 0


def test_a_drafter_that_breaks_its_promise_is_refused_by_name(target: LoadedTarget) -> None:
    with pytest.raises(UnsupportedError, match="ReadingDrafter"):
        make_engine(target, "gpu_test_reads_host", graph_scope="step")
