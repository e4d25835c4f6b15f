"""What ranks tell one another of loaded models, without ranks: checksums, and how they differ."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runner.models import fingerprint
from runner.models.fingerprint import checksum, weight_checksums
from runner.models.hf import HFModel
from runner.models.packed_linear import can_pack
from runner.models.sharding import split_model
from runner.tensor_parallel import TensorParallel
from specdec import Engine
from specdec.parallel import weight_check
from specdec.parallel.rank_check import describe_loaded
from tests.models import tiny_model, tiny_target

OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_reqs": 2}
LARGE = 3 * fingerprint._MAX_SAMPLES + 5


def test_any_entry_of_a_small_weight_counts() -> None:
    weight = torch.randn(31, 5)
    first = checksum(weight)
    assert checksum(weight.clone()) == checksum(weight.T.contiguous().T) == first
    for index in range(weight.numel()):
        other = weight.clone()
        other.view(-1)[index] += 1e-3
        assert checksum(other) != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_of_a_large_weight_every_stretch_is_read(dtype: torch.dtype) -> None:
    weight = torch.ones(LARGE).to(dtype)
    first = checksum(weight)
    for start in range(0, LARGE - 8, LARGE // 50):
        other = weight.float()
        other[start : start + 8] = 2
        assert checksum(other.to(dtype)) != first


def test_every_column_of_a_large_weight_is_read() -> None:
    weight = torch.zeros(LARGE // 64, 64)
    for column in range(64):
        other = weight.clone()
        other[:, column] = 1
        assert checksum(other) != checksum(weight)


def test_shape_and_dtype_count() -> None:
    weights = [torch.zeros(4, 6), torch.zeros(6, 4), torch.zeros(4, 6, dtype=torch.float16)]
    weights += [torch.zeros(4, 12, dtype=torch.float16), torch.zeros(0), torch.zeros(())]
    assert len({checksum(weight) for weight in weights}) == len(weights)


def _stored(kind: str, seed: int) -> HFModel:
    torch.manual_seed(seed)
    model: Any = tiny_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    adapter = HFModel(model.to(torch.bfloat16) if kind == "packed" else model)
    if kind == "8-bit":
        adapter.quantize(torch.arange(8))
    return adapter


@pytest.mark.parametrize("kind", ["plain", "packed", "8-bit"])
def test_every_weight_of_a_model_is_read_however_it_is_stored(kind: str) -> None:
    if kind == "packed" and not can_pack(torch.zeros(16, 32, dtype=torch.bfloat16)):
        pytest.skip("oneDNN packs no bf16 weights here")
    names = {name for name, _ in tiny_model().named_parameters(remove_duplicate=False)}
    found, again, other = (weight_checksums(_stored(kind, seed).model) for seed in (1, 1, 2))
    assert names <= found.keys()
    assert found == again
    assert all(found[name] != other[name] for name in found)


def test_of_a_part_what_is_whole_on_every_rank_is_read() -> None:
    parts = []
    for rank in (0, 1):
        model: Any = tiny_model()
        part = split_model(model, TensorParallel(rank, 2, None))
        parts.append(weight_checksums(model, part.splits))
    assert parts[0] == parts[1]
    norms = {f"model.layers.{i}.{n}_layernorm.weight" for i in range(3) for n in _NORMS}
    assert parts[0].keys() == norms | {"model.norm.weight", "model.embed_tokens.weight"}


_NORMS = ("input", "post_attention")


def test_what_a_drafter_takes_from_the_target_is_left_out() -> None:
    target = tiny_model()
    head = torch.nn.ModuleDict({"table": target.get_input_embeddings()})
    head["view"] = torch.nn.Linear(1, 1, bias=False)
    output_head: Any = target.get_output_embeddings()
    view: Tensor = output_head.weight[3:9]
    head["view"].weight = torch.nn.Parameter(view, requires_grad=False)
    head["own"] = torch.nn.Linear(2, 2, bias=False)
    assert weight_checksums(head, shared=target).keys() == {"own.weight"}


@pytest.mark.parametrize(
    ("told", "tells", "text"),
    [
        (
            [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}],
            False,
            "rank 6 and the rest of 3 ranks disagree in weights (b): ranks",
        ),
        (
            [{"a": 1, "b": 2, "c": 1}, {"a": 1, "b": 3, "c": 2}],
            False,
            "ranks 4, 5 disagree in weights (b; and 1 more of 3): ranks",
        ),
        (
            [{"a": "x"}, {}],
            True,
            "ranks 4, 5 disagree in weights (a, x on rank 4, None on rank 5): ranks",
        ),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], False, "ranks 4, 5 disagree in weights (the order"),
    ],
)
def test_the_ranks_and_the_entry_that_differ_are_named(
    told: list[dict[str, Any]], tells: bool, text: str
) -> None:
    ranks = [4, 5, 6][: len(told)]
    assert describe_loaded(ranks, "weights", told, tells).startswith(text)


def test_one_rank_reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("weight_checksums", "compare_loaded", "read_config", "plain_config"):
        monkeypatch.setattr(weight_check, name, None)
    engine = Engine(
        tiny_target(tiny_model()), {"name": "draft_model", "model": "target"}, **OPTIONS
    )
    assert engine.runner.target.tensor_parallel is None
