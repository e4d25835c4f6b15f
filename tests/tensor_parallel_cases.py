"""What ranks that share a model's layers run in the tests; see `tests.parallel_cases`."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runner.loader import load_model
from runner.models.hf import HFModel
from runner.models.sharding import RowParallel
from runner.tensor_parallel import TensorParallel
from specdec.parallel.groups import ParallelConfig, init_groups
from tests.models import FAMILIES, VOCAB_SIZE, tiny_model
from tests.parallel_cases import leave
from tests.test_runner_fused import our_logits, relative, token_ids

LAYERS = (2, 0)
IDS = torch.arange(VOCAB_SIZE).flip(0)  # stand for the rows of a head
# Changes of the tiny models, each an uneven or unusual split.
SHAPES: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one KV head": {"num_key_value_heads": 1},
    "two tokens more on the first rank": {"vocab_size": 99},
    "tied": {"tie_word_embeddings": True},
}


def join(size: int) -> TensorParallel:
    """Set up the ranks of a job."""
    groups = init_groups(ParallelConfig(tensor_parallel_size=size))
    return TensorParallel(groups.tp_rank, size, groups.tp)


def biased_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Build a tiny model whose biases, if any, are no zeros."""
    model = tiny_model(family, **changes)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def with_head_bias(model: Any) -> PreTrainedModel:
    """Give a model's output head a bias."""
    head = nn.Linear(64, VOCAB_SIZE)
    head.weight = model.lm_head.weight
    head.bias = nn.Parameter(torch.linspace(-2, 2, VOCAB_SIZE))
    model.lm_head = head
    return model


def hidden_states(model: HFModel) -> Tensor:
    """Return what stands before the output head, of the text of the tests."""
    kept: list[Tensor] = []
    compute_logits = model.compute_logits
    with patch.object(model, "compute_logits", lambda h: kept.append(h) or compute_logits(h)):
        our_logits(model, token_ids())
    return torch.cat(kept)


def compare(model: PreTrainedModel, place: TensorParallel) -> dict[str, Any]:
    """Return how far a shared model is from the model on one rank."""
    one = HFModel(copy.deepcopy(model))
    return differences(one, HFModel(model, tensor_parallel=place))


def differences(one: HFModel, two: HFModel) -> dict[str, Any]:
    """Return how far two models are apart in what they give."""
    (logits, kept), (shared, shared_kept) = (our_logits(m, token_ids(), LAYERS) for m in (one, two))
    first = [our_logits(m.first_layers(2), token_ids())[0] for m in (one, two)]
    hidden = hidden_states(two)
    ids = IDS[: one.vocab_size]
    return {
        "logits": relative(shared, logits),
        "kept": relative(shared_kept.float(), kept.float()),
        "first_layers": relative(first[1], first[0]),
        "shape": list(shared.shape) == list(logits.shape),
        "top1": torch.equal(two.top1(hidden), two.compute_logits(hidden).argmax(1)),
        "top1_of_one": float((two.top1(hidden) == logits.argmax(1)).float().mean()),
        "top1_ids": len(ids) < one.vocab_size
        or torch.equal(two.top1(hidden, ids), ids[two.top1(hidden)]),
        "kv_heads": two.num_kv_heads,
    }


def check_rows(place: TensorParallel) -> dict[str, Any]:
    """Return whether rows of the output head come from whoever has them."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = tiny_model().to(dtype)
        weight = model.lm_head.weight.detach().clone()
        shared = HFModel(model, tensor_parallel=place)
        wanted = torch.tensor([96, 0, 48, 49, 50, 0])
        name = str(dtype).removeprefix("torch.")
        found[name] = torch.equal(shared.head_rows(wanted), weight[wanted])
        head = shared.head_of(wanted)
        found[f"{name}_head"] = torch.equal(head.weight, weight[wanted])
    return found


def check_shared_head(place: TensorParallel) -> dict[str, Any]:
    """Return whether a whole draft model computes with the output head of a shared target."""
    target, draft = tiny_model(), tiny_model(seed=1)
    for model in (target, draft):
        model.set_output_embeddings(tiny_model(seed=2).get_output_embeddings())
    one = HFModel(copy.deepcopy(draft))
    draft.set_output_embeddings(HFModel(target, tensor_parallel=place).head)
    return differences(one, HFModel(draft))


def check_collectives(place: TensorParallel) -> dict[str, Any]:
    """Return what the collectives give, beside what they have to."""
    rank, size = place.rank, place.size
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(3, 7, generator=generator)
    part = place.part_of(7)
    uneven = place.all_gather_columns(whole[:, part.start : part.stop], 7)
    pairs = torch.randn(3, 2 * size, generator=generator)
    even = place.all_gather_columns(pairs[:, 2 * rank : 2 * rank + 2])
    given = torch.full((2, 3), float(rank + 1))
    inf = float("inf")
    values = torch.tensor(
        [[1.0, 2.0, -3.0, 0.0, -inf, 5.0, -1e-40], [1.0, 1.5, -2.0, -0.0, -inf, inf, 0]]
    )
    index = torch.tensor([[9, 3, 4, 6, 1, 2, 2**31 - 2], [5, 7, 8, 2, 0, 3, 2**31 - 1]])
    own = rank % 2
    return {
        "uneven": torch.equal(uneven, whole),
        "even": torch.equal(even, pairs),
        "sum": place.all_reduce(given) is given and bool((given == size * (size + 1) / 2).all()),
        "top1": place.top1(values[own], index[own]).tolist(),
    }


def plant(model: Callable[[], PreTrainedModel], place: TensorParallel) -> dict[str, float]:
    """Return the difference in logits when a sum over the ranks is left out, by where it is."""
    found = {}
    parts = RowParallel.parts
    for which in ("out", "down"):
        one, two = HFModel(model()), HFModel(model(), tensor_parallel=place)
        assert two.fused is not None
        left_out = [
            layer.attention.out if which == "out" else layer.mlp.down for layer in two.fused.layers
        ]

        def skip(layer: Any, x: Tensor, left_out: Any = left_out) -> Tensor:
            return layer.linear.parts(x) if layer in left_out else parts(layer, x)

        with patch.object(RowParallel, "parts", skip):
            found[which] = differences(one, two)["logits"]
    return found


def check_files(folder: str, place: TensorParallel) -> dict[str, Any]:
    """Return how far a model that each rank read its part of is from the whole one."""
    found = {}
    for name in ("llama", "qwen3"):
        for dtype in (torch.float32, torch.bfloat16):
            path, cpu = f"{folder}/{name}", torch.device("cpu")
            one, two = (load_model(path, dtype, cpu, p) for p in (None, place))
            key = f"{name} {dtype}".replace("torch.", "")
            found[key] = differences(one, two)
            found[key]["num_parameters"] = [one.num_parameters, two.num_parameters]
    return found


def check_bf16(place: TensorParallel) -> dict[str, list[float]]:
    """Return how far bf16 models are from the float32 one: on one rank, and shared."""
    found = {}
    for family in ("llama", "qwen3"):
        truth = our_logits(HFModel(tiny_model(family)), token_ids())[0]
        found[family] = []
        for parallel in (None, place):
            model = HFModel(tiny_model(family).to(torch.bfloat16), tensor_parallel=parallel)
            found[family].append(relative(our_logits(model, token_ids())[0], truth))
    return found


def check_fp8(place: TensorParallel) -> dict[str, Any]:
    """Return how far a shared model with 8-bit weights is from such a model on one rank."""
    one, two = HFModel(tiny_model()), HFModel(tiny_model(), tensor_parallel=place)
    effects = [model.quantize(torch.arange(40)) for model in (one, two)]
    found = differences(one, two)
    return found | {"effects": [effect.relative_error for effect in effects]}


def two_ranks(folder: str, files: str) -> None:
    """Run what two ranks can check in seconds."""
    place = join(2)
    leave(
        folder,
        {
            "families": {family: compare(biased_model(family), place) for family in FAMILIES},
            "shapes": {
                name: compare(biased_model(**changes), place) for name, changes in SHAPES.items()
            },
            "head_bias": compare(with_head_bias(tiny_model()), place),
            "rows": check_rows(place),
            "shared_head": check_shared_head(place),
            "collectives": check_collectives(place),
            "planted": plant(tiny_model, place),
            "files": check_files(files, place),
            "bf16": check_bf16(place),
            "fp8": check_fp8(place),
        },
    )


def four_ranks(folder: str) -> None:
    """Run four ranks over two KV heads, each of which two ranks have."""
    place = join(4)
    found = {family: compare(biased_model(family), place) for family in FAMILIES}
    leave(folder, {"families": found, "collectives": check_collectives(place)})
