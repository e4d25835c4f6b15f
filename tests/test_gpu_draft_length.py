"""Steps whose number of drafts changes, in real CUDA graphs: every pair of lengths has its own.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from tests.drafter_folders import save_drafters
from tests.models import tiny_model
from tests.schedules import draw_schedule, run_schedule
from tests.test_gpu_graphs import SIZES, end_state, make_engine

pytestmark = pytest.mark.gpu

ITSELF = {"name": "draft_model", "model": "target"}
SAMPLING = {**ITSELF, "sampling": "gumbel"}
BEST = {"name": "mixed", "policy": "best", "explore_every": 3}
CHANGING = {"name": "specdec.testing.lengths:RandomLength", "lengths": [0, 1, 4]}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    model = copy.deepcopy(tiny_model("llama")).to(SIZES["device"])
    return LoadedTarget("tiny", HFModel(model), None)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["itself", "q", "block_parallel", "best", "cut"])
def test_scopes_give_the_same_tokens_and_state_while_the_length_changes(
    target: LoadedTarget, tmp_path: Path, name: str, seed: int
) -> None:
    drafters: dict[str, Any] = {
        "itself": ITSELF,
        "q": SAMPLING,
        "block_parallel": save_drafters(tmp_path)["block_parallel"],
        "best": {**BEST, "drafters": ["ngram", SAMPLING]},
        "cut": SAMPLING,
    }
    verifier = "block" if name in ("q", "best", "cut") else "sampled_match"
    length = {"name": "confidence", "threshold": 0.2} if name == "cut" else CHANGING
    arrivals = draw_schedule(seed, num_requests=12, max_tokens=40)
    results = {}
    for scope in ("none", "draft", "step"):
        options = {"graph_scope": scope, "draft_length": length}
        engine = make_engine(target, drafters[name], verifier, **options)
        outputs = run_schedule(engine, arrivals).outputs
        results[scope] = ({k: out.token_ids for k, out in outputs.items()}, end_state(engine))
        if scope == "step":
            assert engine.runner.graphs.launches["step"] > 10
    for scope in ("draft", "step"):
        assert results[scope][0] == results["none"][0], scope
        for key, tensor in results["none"][1].items():
            assert torch.equal(results[scope][1][key], tensor), (scope, key)
