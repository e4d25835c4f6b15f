"""Ranks that share a model's layers, on a CPU: equal to one rank, to rounding."""

from pathlib import Path
from typing import Any

import pytest

from specdec.parallel.launch import launch
from tests.models import FAMILIES, tiny_model
from tests.parallel_cases import read
from tests.rank_pairs import shared_pair
from tests.tensor_parallel_cases import SHAPES, four_ranks, two_ranks

BOUND = 1e-5  # of the relative difference in float32; sums in another order give up to 2e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank of one pair saw."""

    def start(folder: Path) -> None:
        for name in ("llama", "qwen3"):
            tiny_model(name).save_pretrained(folder / name, max_shard_size="100KB")
        launch(two_ranks, 2, (str(folder), str(folder)))

    return shared_pair(tmp_path_factory, "two_tensor_parallel_ranks", start)


def check(rank: dict[str, Any], bound: float = BOUND) -> None:
    """Check what `differences` found."""
    assert rank["shape"]
    for name in ("logits", "kept", "first_layers"):
        assert rank[name] < bound, name
    assert rank["top1"]
    assert rank["top1_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_are_one(found: list[dict[str, Any]], family: str) -> None:
    for rank in found:
        check(rank["families"][family])
        assert rank["families"][family]["top1_of_one"] == 1
        assert rank["families"][family]["kv_heads"] == 1  # of two
    assert found[0]["families"] == found[1]["families"]  # to the bit


@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_are_one_in_any_shape(found: list[dict[str, Any]], shape: str) -> None:
    for rank in found:
        check(rank["shapes"][shape])
        assert rank["shapes"][shape]["top1_of_one"] == 1
        assert rank["shapes"][shape]["kv_heads"] == 1


def test_a_biased_head_is_shared(found: list[dict[str, Any]]) -> None:
    for rank in found:
        check(rank["head_bias"])


def test_a_sum_that_is_left_out_breaks_the_bound(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["planted"].keys() == {"out", "down"}
        assert min(rank["planted"].values()) > 1000 * BOUND


def test_a_draft_model_computes_with_the_shared_head(found: list[dict[str, Any]]) -> None:
    for rank in found:
        check(rank["shared_head"])


def test_rows_of_the_head_come_from_whoever_has_them(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["rows"] == dict.fromkeys(rank["rows"], True)
        assert len(rank["rows"]) == 4


def test_what_ranks_read_is_the_model(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(rank["files"]) == 4
        for name, differences in rank["files"].items():
            check(differences, BOUND if "float32" in name else 0.05)
            one, two = differences["num_parameters"]
            assert one == two  # of the whole model


def test_bf16_is_as_near_to_float32_as_on_one_rank(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for one, two in rank["bf16"].values():
            assert 1e-4 < two < 1.2 * one


def test_weights_in_8_bits_are_those_of_one_rank(found: list[dict[str, Any]]) -> None:
    for rank in found:
        check(rank["fp8"])
        one, two = rank["fp8"]["effects"]
        assert one > 1000 * BOUND  # they were rounded
        assert two == pytest.approx(one, rel=1e-3)


def check_collectives(ranks: list[dict[str, Any]]) -> None:
    """Check what `check_collectives` of the cases found."""
    for rank in ranks:
        collectives = rank["collectives"]
        assert collectives.pop("top1") == [5, 3, 8, 2, 0, 3, 2**31 - 1]
        assert collectives == {"uneven": True, "even": True, "sum": True}


def test_collectives(found: list[dict[str, Any]]) -> None:
    check_collectives(found)


@pytest.mark.slow
def test_four_ranks_over_two_kv_heads_are_one(tmp_path: Path) -> None:
    launch(four_ranks, 4, (str(tmp_path),))
    ranks = read(tmp_path)
    assert len(ranks) == 4
    for rank in ranks:
        for family in FAMILIES:
            check(rank["families"][family])
            assert rank["families"][family]["kv_heads"] == 1
