"""What `bench=e2e` counts: weights of shapes, bytes and operations of a step, and its cases."""

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.e2e_cases import KINDS, SHAPE_SETS, Case, list_cases
from experiments.e2e_floors import layer_elements, model_bytes, num_parameters, step_cost
from experiments.e2e_models import ModelStore

TINY, FULL = SHAPE_SETS["tiny"], SHAPE_SETS["full"]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(TINY, torch.float32, torch.device("cpu"), tmp_path)


def test_shapes_have_the_weights_of_their_models() -> None:
    assert num_parameters(FULL.models["8b"]) == 8_030_261_248
    assert num_parameters(FULL.models["135m"]) == 134_515_008
    assert num_parameters(FULL.draft_model) == 1_235_814_400


def test_a_floor_counts_weights_once_a_pass_and_the_context_once_a_cache() -> None:
    shape, sizes = FULL.models["8b"], (8, 200.0, 4, 2)
    plain = step_cost(FULL, "8b", "none", 8, 200.0, 0, 2)
    assert plain.target_bytes == 2 * (num_parameters(shape) - 128256 * 4096)
    assert plain.drafter_bytes == 0
    assert plain.kv_bytes == 131072 * (8 * 200 + 8)
    eagle = step_cost(FULL, "8b", "eagle3", *sizes)
    layer = layer_elements(shape, inputs=2) + 2 * 4096
    assert eagle.drafter_bytes == 2 * (3 * 4096**2 + 4 * (layer + 32000 * 4096))
    assert eagle.kv_bytes == 131072 * (8 * 200 + 40) + 4096 * (4 * 8 * 200 + 40 + 24)
    draft = step_cost(FULL, "8b", "draft_model", *sizes)
    assert draft.drafter_bytes == 4 * 2 * num_parameters(FULL.draft_model)
    assert step_cost(FULL, "8b", "ngram", *sizes).drafter_bytes == 0
    # Half of what a step of 8B takes at 4.6 TB/s is known: 15.0 GB of weights in 3.3 ms.
    assert 14.9e9 < plain.target_bytes < 15.1e9


def test_the_floor_of_8_bit_weights_counts_what_the_model_holds(store: ModelStore) -> None:
    model = store.target("8b_fp8").model
    fused: Any = model.fused
    read = [fused.norm.weight, model.model.lm_head.weight]
    for layer in fused.layers:
        read += [layer.input_norm.weight, layer.middle_norm.weight]
        for joint in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            assert joint.weight.dtype == torch.float8_e4m3fn
            read += [joint.weight, joint.scales]
    assert model_bytes(TINY.models["8b_fp8"], 4) == sum(tensor.nbytes for tensor in read)
    assert step_cost(TINY, "8b_fp8", "none", 1, 8.0, 0, 4).target_bytes < (
        0.6 * step_cost(TINY, "8b", "none", 1, 8.0, 0, 4).target_bytes
    )


def test_a_case_commits_what_is_set_and_cases_with_an_aim_come_first() -> None:
    cases = list_cases([1, 8, 32, 64], [])
    assert len(cases) == 4 * len(KINDS) - 2 * 2  # with 8-bit weights two batches are enough
    aims = [case.aim_ms is not None for case in cases]
    assert aims == sorted(aims, reverse=True)
    assert sum(aims) == 15
    assert cases[0] == Case("8b", "eagle3", 1)
    assert cases[0].peer == ("V2, median", 5.963)
    assert Case("135m", "ngram", 64).peer == ("V1, best", 4.70)
    assert Case("8b", "none", 16).peer is None
    assert [case.name for case in list_cases([2], ["8b none"])] == ["8b none batch 2"]
