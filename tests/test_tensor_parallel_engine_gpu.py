"""Two GPUs that share an engine's layers, over NCCL, in float32; run by `pytest -m gpu`."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.parallel.launch import RankFailedError, launch
from tests.rank_pairs import shared_pair
from tests.tensor_parallel_engine_cases import die_in_generate
from tests.tensor_parallel_gpu_cases import CASES, gpu_checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a rank takes each"),
]
SECONDS_TO_END = 20  # of a job, once one of its ranks died


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank of one pair saw."""
    return shared_pair(tmp_path_factory, "two_gpus", lambda f: launch(gpu_checks, 2, (str(f),)))


@pytest.mark.parametrize("name", [f"{name}, {scope}" for name, scope in CASES])
def test_texts_and_launches_are_those_of_one_gpu(found: list[dict[str, Any]], name: str) -> None:
    entries = [rank["drafters"][name] for rank in found]
    assert entries[0] == entries[1]
    assert entries[0]["differences"] == []
    two, one, *others = entries[0]["launches"]
    assert two == one
    assert others[0] == others[1]
    if name.endswith("step"):
        assert sum(n for what, n in two.items() if what in ("step", "target")) > 0


def test_launches_of_several_steps_give_the_texts_of_one_gpu(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["launches"]["differences"] == []
        two, one, *others = rank["launches"]["launches"]
        assert (two, others[0]) == (one, others[1])
        assert two.get("step x 3", 0) + others[0].get("step x 3", 0) > 0


def test_a_steady_step_is_one_launch_that_holds_the_collectives(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        steady = rank["steady"]
        assert steady["of_prompts"] > 0  # the counter counts
        assert steady["launches"] == {"step": 8}
        assert steady["of_steps"] == 0


def test_both_have_the_kv_blocks_of_the_poorer(found: list[dict[str, Any]]) -> None:
    assert found[0]["blocks"] == found[1]["blocks"] > 0


def test_a_disagreement_ends_both(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "ranks 0, 1 disagree in tokens at step 2" in rank["planted"][0]
        assert rank["planted"][1].startswith("the ranks go no further")


def test_a_policy_of_the_clock_chooses_alike(found: list[dict[str, Any]]) -> None:
    assert found[0]["goodput"] == found[1]["goodput"]
    assert sum(found[0]["goodput"]["counts"].values()) > 0


def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 was ended by SIGKILL"):
        launch(die_in_generate, 2, (str(tmp_path), "kill", "cuda"))
    seconds = time.time() - float((tmp_path / "died_at").read_text())
    assert seconds < SECONDS_TO_END
    assert (tmp_path / "finished0").read_text().count("[") >= 1
