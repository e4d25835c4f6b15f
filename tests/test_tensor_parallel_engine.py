"""Two ranks on a CPU that share an engine's layers: texts, what they agree on, what they notice."""

from pathlib import Path
from typing import Any

import pytest

from specdec.parallel.launch import launch
from tests.rank_pairs import shared_pair
from tests.tensor_parallel_engine_cases import PLANTS, PROMPTS, QUICK, quick_checks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank of one pair saw."""

    def start(folder: Path) -> None:
        launch(quick_checks, 2, (str(folder),))

    return shared_pair(tmp_path_factory, "two_shares", start)


@pytest.mark.parametrize("name", [*(f"{name}, sampled_match" for name in QUICK), "eagle3, greedy"])
def test_texts_are_those_of_one_rank(found: list[dict[str, Any]], name: str) -> None:
    entries = [rank["drafters"][name] for rank in found]
    assert entries[0] == entries[1]
    assert entries[0]["differences"] == []
    assert len(entries[0]["outputs"]) == 5
    assert (entries[0]["num_drafted"] > 0) == (not name.startswith("none"))


def test_some_were_preempted(found: list[dict[str, Any]]) -> None:
    assert sum(entry["num_preemptions"] for entry in found[0]["drafters"].values()) > 0


def test_generate_returns_the_same_on_every_rank(found: list[dict[str, Any]]) -> None:
    assert found[0]["generate"] == found[1]["generate"]
    generated = found[0]["generate"]
    assert len(generated["tokens"]) == len(PROMPTS)
    assert generated["tokens"] == generated["expected"]
    assert generated["seeds_equal"]
    assert generated["steps"][0] == generated["steps"][1]


def test_a_whole_target_becomes_the_ranks_part(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["target"]["num_kv_heads"] == [2, 1, 1]
        assert rank["target"]["rows"] == [2 * 16 + 2 * 16] * 2  # two of four heads, one of two
        assert rank["target"]["refused"].startswith(
            "ConfigError: the layers of target 'tiny' are shared by 2 ranks already, and "
            "tensor_parallel_size=1"
        )


def test_a_whole_target_that_is_packed_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["packed"].startswith(
            "UnsupportedError: target 'tiny' was loaded whole and has packed weights"
        )


def test_all_ranks_have_the_kv_blocks_of_the_poorest(found: list[dict[str, Any]]) -> None:
    assert [rank["blocks"] for rank in found] == [20, 20]


def test_a_policy_of_the_clock_goes_by_the_first_ranks(found: list[dict[str, Any]]) -> None:
    assert found[0]["clock"] == found[1]["clock"]
    assert len(found[0]["clock"]["counts"]) > 1
    assert len(found[0]["clock"]["texts"]) == 5


def test_drafts_of_the_host_are_those_of_the_first_rank(found: list[dict[str, Any]]) -> None:
    assert found[0]["host"] == found[1]["host"]
    assert sum(found[0]["host"]["drafted"].values()) > 0
    assert found[0]["host"]["texts"] == found[0]["clock"]["texts"]


def test_the_first_ranks_value_is_shared(found: list[dict[str, Any]]) -> None:
    assert [rank["shared"] for rank in found] == [{"from": 0}] * 2


@pytest.mark.parametrize(
    ("kind", "step"), [("kernel choices", 0), ("drafts", 3), ("tokens", 2), ("requests", 0)]
)
def test_a_disagreement_is_named(found: list[dict[str, Any]], kind: str, step: int) -> None:
    assert kind in PLANTS
    for rank in found:
        told, later = rank["planted"][kind]
        assert told.startswith(f"RankError: ranks 0, 1 disagree in {kind} at step {step}:")
        assert later.startswith("RankError: the ranks go no further, for a step failed: RankError")


def test_ranks_that_were_built_unlike_are_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for what in ("options", "verifiers"):
            assert rank[what].startswith("RankError: ranks 0, 1 disagree in options at step 0")
        text = "RankError: ranks 0, 1 disagree in kernel choices at step 0"
        assert rank["captured"].startswith(text)


def test_ranks_that_loaded_unlike_models_are_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["loaded"]["equal"] == "nothing was refused"
        for what, text in {
            "norm": "the target's weights (model.layers.1.input_layernorm.weight): ranks",
            "config": "the target's config (rms_norm_eps, 1e-06 on rank 0, 1e-05 on rank 1): ranks",
            "draft model": "the drafter's weights (drafter.model.",
            "head, among others": "the drafter's weights (drafter.children.1.head.",
        }.items():
            assert rank["loaded"][what].startswith(f"RankError: ranks 0, 1 disagree in {text}")


def test_the_order_in_which_requests_are_ended_does_not_count(found: list[dict[str, Any]]) -> None:
    for rank in found:
        texts = [rank["ended"]["texts"][f"later {i}"] for i in range(len(PROMPTS))]
        assert texts == rank["ended"]["expected"]


def test_a_step_that_failed_is_the_last(found: list[dict[str, Any]]) -> None:
    for rank in found:
        first, later = rank["failed"]
        assert first == "planted"
        assert "for a step failed: ZeroDivisionError: planted" in later
