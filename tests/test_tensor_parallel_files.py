"""A rank's part of a model: what is read of files, what is refused, and how both are told."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from runner.loader import eos_token_ids, load_model
from runner.models.hf import HFModel
from runner.models.sharding import plan_splits, split_model
from runner.rank_weights import load_part
from runner.tensor_parallel import TensorParallel
from specdec.errors import ConfigError, SpecdecError, UnsupportedError, WeightsError
from tests.models import FAMILIES, SIZES, randomized, tiny_model
from tests.tensor_parallel_cases import biased_model

CPU, F32 = torch.device("cpu"), torch.float32
SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def place(rank: int, size: int = 2) -> TensorParallel:
    """Return a rank's place; what is tested here tells the others nothing."""
    return TensorParallel(rank, size, None)


def read_part(folder: Path, config: Any, rank: int, size: int = 2) -> tuple[Any, int]:
    model, missing, num_bytes = load_part(str(folder), config, F32, CPU, place(rank, size))
    assert missing == []
    return model, num_bytes


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
def test_a_part_that_is_read_is_the_part_of_the_whole(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    whole = biased_model(family, **changes)
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    for rank in range(2):
        expected = copy.deepcopy(whole)
        split_model(expected, place(rank))
        given, _ = read_part(tmp_path, whole.config, rank)
        assert state(given).keys() == state(expected).keys()
        for name, tensor in state(expected).items():
            assert torch.equal(state(given)[name], tensor), name
        inv_freq = given.get_decoder().rotary_emb.inv_freq
        assert torch.equal(inv_freq, whole.get_decoder().rotary_emb.inv_freq)
        head, table = given.get_output_embeddings().weight, given.get_input_embeddings().weight
        shared = head.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
        assert shared == bool(changes)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_part_of_the_bytes(size: int, tmp_path: Path) -> None:
    whole = tiny_model(num_key_value_heads=4, vocab_size=96)
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    sizes = {name: tensor.nbytes for name, tensor in state(whole).items()}
    divided = sum(n for name, n in sizes.items() if any(part in name for part in SPLIT))
    rest = sum(sizes.values()) - divided
    assert divided > 10 * rest
    for rank in range(size):
        model, num_bytes = read_part(tmp_path, whole.config, rank, size)
        assert num_bytes == divided // size + rest
        held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in state(model).values()}
        assert sum(storage.nbytes() for storage in held.values()) == num_bytes  # no file is kept


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_the_rest_of_a_whole_model_is_freed(dtype: torch.dtype) -> None:
    whole = tiny_model(num_key_value_heads=4, vocab_size=96, tie_word_embeddings=True).to(dtype)
    weights = state(whole)
    table, total = (
        weights["model.embed_tokens.weight"].nbytes,
        sum(t.nbytes for t in weights.values()),
    )
    divided = sum(t.nbytes for n, t in weights.items() if "proj" in n)
    rest = total - table - divided  # all but the head, which is tied
    split_model(whole, place(1, 4))
    held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in state(whole).values()}
    assert sum(storage.nbytes() for storage in held.values()) == divided // 4 + rest


def test_kv_heads_that_several_ranks_need_are_read_by_each(tmp_path: Path) -> None:
    whole = biased_model("qwen2")
    whole.save_pretrained(tmp_path)
    for rank in range(4):
        model, _ = read_part(tmp_path, whole.config, rank, 4)
        attention, full = (m.get_decoder().layers[0].self_attn for m in (model, whole))
        kv, query = slice(rank // 2 * 16, rank // 2 * 16 + 16), slice(rank * 16, rank * 16 + 16)
        assert torch.equal(attention.k_proj.weight, full.k_proj.weight[kv])
        assert torch.equal(attention.v_proj.bias, full.v_proj.bias[kv])
        assert torch.equal(attention.q_proj.bias, full.q_proj.bias[query])
        assert torch.equal(attention.o_proj.weight, full.o_proj.weight[:, query])


@pytest.mark.parametrize("equal", [True, False])
def test_files_with_both_of_a_tied_pair_say_whether_they_are_one(
    equal: bool, tmp_path: Path
) -> None:
    whole = tiny_model(tie_word_embeddings=True)
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone() if equal else -table}, file)
    head = read_part(tmp_path, whole.config, 1)[0].lm_head.weight
    assert torch.equal(head, table[49:] if equal else -table[49:])


def test_a_tied_table_is_found_under_the_name_of_the_head(tmp_path: Path) -> None:
    whole = tiny_model(tie_word_embeddings=True)
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file)
    model, _ = read_part(tmp_path, whole.config, 0)
    assert torch.equal(model.get_input_embeddings().weight, tensors["lm_head.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"][:49])


def drop(name: str) -> Callable[[Path], None]:
    """Return what leaves a tensor out of a folder's file."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({n: t for n, t in load_file(file).items() if name not in n}, file)

    return damage


def cut(folder: Path) -> None:
    """Cut a folder's file short."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_file(folder: Path) -> None:
    """Take a folder's file away."""
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("damage", [drop("1.mlp.down_proj"), drop("embed"), cut, no_file])
def test_damage_is_told_as_without_ranks(damage: Callable[[Path], None], tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    damage(tmp_path)
    told = []
    for parallel in (None, place(1)):
        with pytest.raises(WeightsError) as raised:
            load_model(str(tmp_path), F32, CPU, parallel)
        told.append(str(raised.value))
    assert told[0] == told[1]


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"intermediate_size": 256}
    path.write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"mlp.*\[128, 64\].*\[256, 64\]"):
        load_model(str(tmp_path), F32, CPU, place(0))


def test_what_ends_a_text_is_read_beside_the_weights(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [5, 7]
    model.save_pretrained(tmp_path)
    assert eos_token_ids(load_model(str(tmp_path), F32, CPU, place(0)), None) == {5, 7}


@pytest.mark.parametrize(
    ("size", "changes", "error", "says"),
    [
        (3, {}, ConfigError, "=3 does not divide layers of 4 query heads, .* give one of 1, 2, 4$"),
        (
            4,
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6},
            ConfigError,
            "=4 does not divide .* 6 KV heads .* give one of 1, 2$",
        ),
        (2, {"intermediate_size": 129}, ConfigError, "intermediate_size 129; give one of 1$"),
        (4, {"vocab_size": 6}, ConfigError, "=4 leaves a rank none of 6 tokens"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    size: int,
    changes: dict[str, Any],
    error: type[SpecdecError],
    says: str,
    tmp_path: Path,
) -> None:
    model = tiny_model("llama", **changes)
    model.save_pretrained(tmp_path)
    with pytest.raises(error, match=says):
        load_model(str(tmp_path), F32, CPU, place(0, size))
    with pytest.raises(error, match=says):
        HFModel(model, tensor_parallel=place(0, size))
    assert model.lm_head.out_features == model.config.vocab_size  # nothing was changed


def test_what_is_not_fused_is_refused_with_the_reason(tmp_path: Path) -> None:
    options = {**SIZES, "sliding_window": None, "num_attention_heads": 4}
    model = randomized(lambda: Starcoder2ForCausalLM(Starcoder2Config(**options)))
    model.save_pretrained(tmp_path)
    says = "'starcoder2' cannot be shared by ranks, for it is not fused: LayerNorm is no RMSNorm"
    with pytest.raises(UnsupportedError, match=says):
        HFModel(model, tensor_parallel=place(0))
    with pytest.raises(UnsupportedError, match=says):
        load_model(str(tmp_path), F32, CPU, place(0))
    with pytest.raises(UnsupportedError, match="fused model alone"):
        HFModel(tiny_model(), fuse=False, tensor_parallel=place(0))


def test_one_rank_is_no_split() -> None:
    model = HFModel(tiny_model(), tensor_parallel=place(0, 1))
    assert model.tensor_parallel is None
    assert type(model.head) is nn.Linear
    assert model.num_kv_heads == 2


def test_parts_are_planned_alike_on_all_ranks() -> None:
    plans = [plan_splits(tiny_model(vocab_size=97), place(rank, 4)) for rank in range(4)]
    assert len(plans[0]) == 3 * 7 + 1
    for name in plans[0]:
        ranges = [plan[name].part for plan in plans]
        ends = [part.stop for part in ranges]
        if not name.endswith(("k_proj", "v_proj")):  # of two heads, each on two ranks
            assert [part.start for part in ranges] == [0, *ends[:-1]]
        assert [plan[name].keeps_bias for plan in plans].count(True) == (
            1 if name.endswith(("o_proj", "down_proj")) else 4
        )
    assert [len(plan["lm_head"].part) for plan in plans] == [25, 25, 25, 22]
