"""Log-probabilities on a GPU: in a captured step, over a large vocabulary, in little memory.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from sampler.logprobs import topk_logprobs
from specdec import Engine, SamplingParams
from specdec.types import RequestOutput
from tests.models import tiny_model
from tests.schedules import draw_schedule, run_schedule
from tests.test_logprobs_engine import DRAFTERS, asking, check_output
from tests.test_sampler_logprobs import assert_equal, check_oracle, fresh_ring, make_case, run_twin

pytestmark = pytest.mark.gpu

V = 128256
SIZES: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_num_reqs": 5,
    "block_size": 4,
    "num_kv_blocks": 18,
    "graph_num_reqs": [1, 2, 5],
}
DEVICE = torch.device("cuda")


def launch(case: Any, ring: Tensor) -> None:
    step = torch.full((1,), 4, dtype=torch.int32, device=DEVICE)
    topk_logprobs(case.logits, case.lines, step, ring)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_takes_little_memory_and_replays_in_a_graph(dtype: torch.dtype) -> None:
    case = make_case(V, seed=9, dtype=dtype, lines=(5,) * 20, wanted=(20, 5, 0, -1) * 5)
    ring, there = fresh_ring(case, DEVICE), case.to(DEVICE)
    scratch = ring.clone().pin_memory()
    launch(there, scratch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    launch(there, scratch)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < there.logits.nbytes / 30
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(there, ring)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(ring, run_twin(case))
    check_oracle(case, ring)


def values(output: RequestOutput) -> list[Any]:
    """Return everything that an output says about its tokens."""
    return [output.token_ids, output.logprobs, output.prompt_logprobs]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_a_captured_step_says_what_an_eager_one_does(drafter: Any, mode: str) -> None:
    model: Any = tiny_model("llama")
    target = LoadedTarget("tiny", HFModel(copy.deepcopy(model).cuda()), None)
    arrivals = asking(draw_schedule(seed=2))
    outputs = []
    for scope in ("step", "none"):
        options = {**SIZES, "graph_scope": scope, "logprobs_mode": mode}
        engine = Engine(target, drafter, "sampled_match", 3, **options)
        outputs.append(run_schedule(engine, arrivals).outputs)
    for name, output in outputs[0].items():
        check_output(model, output, arrivals[int(name)].params, mode == "processed")
        assert values(output) == values(outputs[1][name]), "scopes compute the same bits"


def test_a_long_prompt_takes_little_memory() -> None:
    model: Any = tiny_model("llama", vocab_size=V, max_position_embeddings=33000)
    target = LoadedTarget("tiny", HFModel(model.cuda()), None)
    prompt = torch.randint(V, (32000,), generator=torch.Generator().manual_seed(0)).tolist()
    peaks, increments = [], []
    for wanted in (None, 5):
        engine = Engine(
            target,
            "none",
            "sampled_match",
            0,
            device="cuda",
            max_model_len=32100,
            max_num_batched_tokens=32100,
            max_num_reqs=1,
            num_kv_blocks=2100,
            graph_num_reqs=[1],
        )
        engine.add_request("long", prompt, SamplingParams(max_tokens=1, prompt_logprobs=wanted))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        while engine.has_requests:
            increments = engine.step()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] - peaks[0] < 0.5 * 2**30
    output = increments[-1].output
    assert output is not None
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
