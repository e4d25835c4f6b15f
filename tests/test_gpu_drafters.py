"""Drafters with weights on a GPU: their passes as graphs compute what they compute eager.

Run on a GPU machine with `pytest -m gpu`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from tests.drafter_folders import NAMES, save_drafters
from tests.models import tiny_model
from tests.schedules import draw_schedule, run_schedule
from tests.test_gpu_graphs import end_state, make_engine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return LoadedTarget("tiny", HFModel(tiny_model("llama").cuda()), None)


@pytest.mark.parametrize("sampling", ["argmax", "gumbel"])
@pytest.mark.parametrize("name", NAMES)
def test_scopes_give_the_same_tokens_state_and_kv_bit_for_bit(
    target: LoadedTarget, tmp_path: Path, name: str, sampling: str
) -> None:
    drafter: Any = {**save_drafters(tmp_path)[name], "sampling": sampling}
    verifier = "sampled_match" if sampling == "argmax" else "rejection"
    arrivals = draw_schedule(0, num_requests=12, max_tokens=40)
    results = {}
    for scope in ("none", "draft", "step"):
        engine = make_engine(target, drafter, verifier, graph_scope=scope)
        outputs = run_schedule(engine, arrivals).outputs
        results[scope] = ({k: out.token_ids for k, out in outputs.items()}, end_state(engine))
        if scope == "step":
            # All passes of a step lie in its one graph, and those of a mixed one behind the first.
            assert engine.runner.graphs.launches["step"] > 10
            assert engine.runner.graphs.launches["propose"] > 0
    expected_texts, expected_state = results["none"]
    for scope in ("draft", "step"):
        assert results[scope][0] == expected_texts, scope
        for key, tensor in expected_state.items():
            assert torch.equal(results[scope][1][key], tensor), (scope, key)
