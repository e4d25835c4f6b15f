"""EAGLE-style heads in real CUDA graphs: what a step replays is what it computes eager.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from specdec import Engine
from tests.head_cases import CASES, HeadFiles
from tests.models import VOCAB_SIZE, tiny_model
from tests.schedules import draw_schedule, run_schedule
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


def end_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return every state tensor and every key and value that the head cached."""
    tensors = {name: t.cpu() for name, t in state_tensors(engine.runner.state).items()}
    kv = engine.runner.draft_kv
    assert kv is not None
    cells = kv.num_blocks * kv.block_size
    return {**tensors, "keys": kv.keys[0][:cells].cpu(), "values": kv.values[0][:cells].cpu()}


@pytest.mark.parametrize("sampling", ["argmax", "gumbel"])
@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "EAGLE-3, SpecForge"])
def test_scopes_give_the_same_tokens_state_and_kv_bit_for_bit(
    name: str, sampling: str, tmp_path: Path
) -> None:
    model = tiny_model("llama", vocab_size=VOCAB_SIZE, num_hidden_layers=6)
    files = HeadFiles(CASES[name], model, tmp_path)
    runnable = HFModel(copy.deepcopy(model).to(SIZES["device"]))
    drafter = {"name": files.case.method, "path": files.path, "sampling": sampling}
    verifier = "rejection" if sampling == "gumbel" else "sampled_match"
    arrivals = draw_schedule(1, num_requests=12, max_tokens=40)
    results = {}
    for scope in ("none", "draft", "step"):
        target = LoadedTarget("tiny", runnable, None)
        engine = Engine(target, drafter, verifier, K, **{**SIZES, "graph_scope": scope})
        outputs = run_schedule(engine, arrivals).outputs
        launches = engine.runner.graphs.launches
        assert (launches[scope] > 10) == (scope != "none")
        assert (launches["propose"] > 0) == (scope != "none")
        results[scope] = ({k: v.token_ids for k, v in outputs.items()}, end_state(engine))
    for scope in ("draft", "step"):
        assert results[scope][0] == results["none"][0], scope
        for key, tensor in results["none"][1].items():
            assert torch.equal(results[scope][1][key], tensor), (scope, key)
