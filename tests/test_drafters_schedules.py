"""Drafters with weights under random arrival, abort and preemption: the text is the target's own.

The rows are fewer than the requests, so that each has several owners. What a scope is on a CPU says
tests/test_graph_scopes.py.
"""

from pathlib import Path
from typing import Any

import pytest

from drafters.medusa import MedusaHead, save_medusa
from runner.loader import LoadedTarget
from specdec import LLM, Engine, SamplingParams
from tests.drafter_folders import NAMES, save_drafters
from tests.models import scripted_model, tiny_model, tiny_target
from tests.schedules import Arrival, draw_schedule, run_schedule

K = 3
SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_num_reqs": 5,
    "block_size": 4,
    "num_kv_blocks": 18,
}
SCOPES: dict[str, dict[str, Any]] = {
    "step": {"graph_scope": "step", "graph_num_reqs": [1, 2, 4]},
    "draft": {"graph_scope": "draft", "graph_num_reqs": [2, 5]},
    "none": {"graph_scope": "none"},
}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(tiny_model("llama"))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return save_drafters(tmp_path_factory.mktemp("drafters"))


def make_engine(target: LoadedTarget, drafter: Any, verifier: str, **options: Any) -> Engine:
    return Engine(target, drafter, verifier, K, **{**SIZES, **options})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_text_is_that_of_plain_decoding_in_every_scope(
    target: LoadedTarget, drafters: dict[str, Any], name: str, seed: int
) -> None:
    arrivals = draw_schedule(seed)
    whole = [Arrival(a.step, a.prompt, a.params, None) for a in arrivals]
    plain = make_engine(target, "none", "sampled_match", num_kv_blocks=200)
    expected = run_schedule(plain, whole).texts()
    num_preemptions = num_drafted = 0
    for scope, options in SCOPES.items():
        options = {**options, "max_steps_in_flight": 1 + seed}
        engine = make_engine(target, drafters[name], "sampled_match", **options)
        result = run_schedule(engine, arrivals)
        num_preemptions += result.num_preemptions
        for request_id, output in result.outputs.items():
            assert output.token_ids == expected[request_id][: len(output.token_ids)], scope
            num_drafted += output.stats.num_drafted
        for request_id, text in result.texts().items():
            assert text == expected[request_id], (scope, request_id)
    assert num_preemptions > 0
    assert num_drafted > 0


@pytest.mark.parametrize("name", NAMES)
def test_scopes_draw_the_same_drafts_from_the_same_laws(
    target: LoadedTarget, drafters: dict[str, Any], name: str
) -> None:
    arrivals = draw_schedule(2)
    drafter = {**drafters[name], "sampling": "gumbel", "top_k": 11}
    results = {}
    for scope, options in SCOPES.items():
        engine = make_engine(target, drafter, "rejection", **options, num_kv_blocks=80)
        outputs = run_schedule(engine, arrivals).outputs
        results[scope] = {
            key: (out.token_ids, out.stats.accepted_per_position) for key, out in outputs.items()
        }
    assert results["step"] == results["draft"] == results["none"]
    assert sum(sum(accepted) for _, accepted in results["none"].values()) > 0


@pytest.mark.parametrize("name", NAMES)
def test_no_more_drafts_than_asked_for_are_computed(
    target: LoadedTarget, drafters: dict[str, Any], name: str
) -> None:
    arrivals = [Arrival(0, [3, 5, 7], SamplingParams(temperature=0, max_tokens=9), None)]
    engine = Engine(target, drafters[name], "greedy", 1, **SIZES)
    plain = make_engine(target, "none", "greedy")
    assert run_schedule(engine, arrivals).texts() == run_schedule(plain, arrivals).texts()


def test_medusa_heads_that_know_the_text_are_always_right(tmp_path: Path) -> None:
    successor = [(3 * i + 5) % 97 for i in range(97)]
    heads, ahead = [], successor
    for _ in range(K):
        ahead = [successor[i] for i in ahead]  # head i looks i + 2 tokens ahead of its own
        head = MedusaHead(64, 1, 97).requires_grad_(False)
        for parameter in head.blocks.parameters():
            parameter.zero_()
        assert head.projection is not None
        head.projection.weight.copy_(scripted_model(ahead).get_output_embeddings().weight)
        heads.append(head)
    save_medusa(tmp_path, heads)
    target = tiny_target(scripted_model(successor))
    drafter = {"name": "medusa", "path": str(tmp_path)}
    llm = LLM(target, drafter, "greedy", K, max_model_len=64, max_num_batched_tokens=8)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (17, 30, 9)]
    outputs = llm.generate([[1, 2, 3], [4] * 11, [5]], params)
    for output in outputs:
        assert output.stats.num_accepted == output.stats.num_drafted > 4
    assert outputs[2].token_ids[1:] == [successor[i] for i in outputs[2].token_ids[:-1]]
