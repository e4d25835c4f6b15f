"""Drafters on the host and mixtures on a GPU: the same text from graphs and without them.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy
from typing import Any

import pytest

from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from specdec import Engine, SamplingParams
from tests.models import scripted_model, tiny_model
from tests.schedules import draw_schedule, run_schedule

pytestmark = pytest.mark.gpu

K = 4
HOST = "draft eager: the drafter runs on the host"
SIZES: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 96,
    "max_num_batched_tokens": 48,
    "max_num_reqs": 6,
    "block_size": 4,
    "num_kv_blocks": 24,
    "graph_num_reqs": [1, 4, 6],
}
ITSELF = {"name": "draft_model", "model": "target"}
SAMPLING = {**ITSELF, "sampling": "gumbel"}
DRAFTERS: dict[str, tuple[Any, str]] = {
    "suffix": ("suffix", "sampled_match"),
    "suffix, else itself": ({"name": "mixed", "drafters": ["suffix", ITSELF]}, "sampled_match"),
    "suffix, else q": ({"name": "mixed", "drafters": ["suffix", SAMPLING]}, "rejection"),
    "lookup, else q": ({"name": "mixed", "drafters": ["ngram", SAMPLING]}, "rejection"),
    "best": (
        {"name": "mixed", "drafters": ["ngram", ITSELF], "policy": "best", "explore_every": 3},
        "sampled_match",
    ),
}


def on_gpu(model: Any) -> LoadedTarget:
    return LoadedTarget("tiny", HFModel(copy.deepcopy(model).cuda()), None)


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return on_gpu(tiny_model("llama"))


@pytest.mark.parametrize("name", DRAFTERS)
def test_scopes_give_the_same_tokens(target: LoadedTarget, name: str) -> None:
    drafter, verifier = DRAFTERS[name]
    arrivals = draw_schedule(1, num_requests=12, max_tokens=40)
    texts = {}
    for scope in ("none", "draft", "step"):
        engine = Engine(target, drafter, verifier, K, **SIZES, graph_scope=scope)
        result = run_schedule(engine, arrivals)
        texts[scope] = {key: out.token_ids for key, out in result.outputs.items()}
        launches = engine.runner.graphs.launches
        assert (launches["step"] > 0) == (scope == "step")
        assert (launches[HOST] > 0) == engine.drafter.capabilities.on_cpu
        assert engine.max_steps_in_flight == (1 if engine.drafter.capabilities.on_cpu else 2)
    assert texts["none"] == texts["draft"] == texts["step"]


def test_drafts_of_the_host_are_verified_in_the_next_step() -> None:
    chain = on_gpu(scripted_model([(i + 1) % 100 for i in range(100)]))
    engine = Engine(chain, "suffix", "greedy", K, **SIZES)
    outputs = []
    for _ in range(2):
        engine.add_request("a", [3, 4, 5], SamplingParams(temperature=0, max_tokens=41))
        while engine.has_requests:
            outputs += [i.output for i in engine.step() if i.output is not None]
    first, again = outputs
    assert first.token_ids == again.token_ids == list(range(6, 47))
    assert first.stats.num_drafted == 0
    assert again.stats.num_accepted == again.stats.num_drafted > 25
