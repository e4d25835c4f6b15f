"""The fused target on a GPU: parity with transformers' modules, and choices that hold.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from runner.attention import single_request_metadata
from runner.models import fused as fused_module
from runner.models import layers, linear_choices
from runner.models.hf import HFModel
from runner.models.linear_choices import Choices, load_choices, replace_choice, token_limit
from runner.models.linear_launch import LinearLaunch, LinearShape
from tests.models import FAMILIES, randomized, tiny_model

pytestmark = pytest.mark.gpu

NUM_TOKENS = 40
# Wide enough that every layer takes our kernel where there are few tokens, with splits.
WIDE: dict[str, Any] = {
    "vocab_size": 2500,
    "hidden_size": 1024,
    "intermediate_size": 2304,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def token_ids(vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab_size, (NUM_TOKENS,), generator=generator).cuda()


@torch.inference_mode()
def reference_logits(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids[None], use_cache=False).logits[0].float()


@torch.inference_mode()
def our_logits(model: HFModel, ids: Tensor, last: int) -> Tensor:
    """Run a text in two passes, the second of `last` tokens."""
    kv = model.make_kv_cache(1, len(ids))
    logits = []
    for positions in torch.arange(len(ids), device="cuda").split(len(ids) - last):
        metadata = single_request_metadata(kv, positions, int(positions[-1]) + 1)
        logits.append(model.compute_logits(model.forward(ids[positions], positions, metadata)))
    return torch.cat(logits).float()


def relative(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).norm() / expected.norm())


def models() -> dict[str, Any]:
    wide = randomized(lambda: LlamaForCausalLM(LlamaConfig(**WIDE)), scale=1.5)
    return {name: tiny_model(name) for name in FAMILIES} | {"wide": wide}


@pytest.mark.parametrize("last", [1, 5, 18])
@pytest.mark.parametrize("name", [*FAMILIES, "wide"])
class TestParity:
    """Logits of both passes, the second of which is one of few rows."""

    def test_float32(self, name: str, last: int) -> None:
        model = copy.deepcopy(models()[name]).cuda()
        ids = token_ids(model.config.vocab_size)
        expected = reference_logits(model, ids)
        fused = HFModel(model)
        assert fused.unfused_reason is None
        assert relative(our_logits(fused, ids, last), expected) < 1e-5

    def test_bfloat16(self, name: str, last: int) -> None:
        model = copy.deepcopy(models()[name]).cuda()
        ids = token_ids(model.config.vocab_size)
        exact = reference_logits(model, ids)
        halved = model.to(torch.bfloat16)
        plain = relative(reference_logits(halved, ids), exact)
        fused = relative(our_logits(HFModel(halved), ids, last), exact)
        # No further from float32 than transformers' own bfloat16 is, give or take a third.
        assert fused < 1.33 * plain + 1e-4


LAUNCHES = {
    "streamed, next at once": (5, LinearLaunch(16, 64, 64, splits=2, prefetch=256, early=True)),
    "streamed": (150, LinearLaunch(128, 64, 64, splits=2, num_stages=3, more_t=32)),
    "tiled": (150, LinearLaunch(64, 128, 64, splits=2, more_t=16, tiled=True)),
    "tiled, next at once": (150, LinearLaunch(64, 64, 64, more_t=16, early=True, tiled=True)),
    "tiled, several tiles": (310, LinearLaunch(64, 128, 64, num_warps=8, tiled=True)),
}


@pytest.fixture
def choices() -> Iterator[Choices]:
    """Give the choices of the GPU, and set them back behind the test."""
    known = load_choices(torch.cuda.get_device_name(), torch.bfloat16)
    before = dict(known)
    yield known
    known.clear()
    known.update(before)
    linear_choices._choose.cache_clear()


def waiting(function: Any) -> Any:
    """Return a function that begins and ends with nothing on the way."""

    def wait(*arguments: Any, **options: Any) -> Any:
        torch.cuda.synchronize()
        found = function(*arguments, **options)
        torch.cuda.synchronize()
        return found

    return wait


@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_that_begin_early_read_nothing_too_early(
    name: str, choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, launch = LAUNCHES[name]
    model = copy.deepcopy(models()["wide"]).to(torch.bfloat16).cuda()
    ids = torch.randint(WIDE["vocab_size"], (num_tokens,)).cuda()
    expected = reference_logits(model, ids)
    fused, device_name = HFModel(model), torch.cuda.get_device_name()
    for rows, columns in ((1536, 1024), (1024, 1024), (1024, 2304)):
        limit = token_limit(num_tokens)
        assert limit is not None
        shape = LinearShape(rows, columns)
        replace_choice(device_name, torch.bfloat16, shape, limit, launch)
    gated = LinearShape(2304, 1024, glu=True)
    replace_choice(device_name, torch.bfloat16, gated, limit, replace(launch, splits=1))
    kv = fused.make_kv_cache(1, num_tokens)
    positions = torch.arange(num_tokens, device="cuda")
    metadata = single_request_metadata(kv, positions, num_tokens)

    @torch.inference_mode()
    def run() -> Tensor:
        return fused.forward(ids, positions, metadata)

    with monkeypatch.context() as patch:
        for module, names in (
            (layers, ("split_linear", "glu_linear")),
            (fused_module, ("add_rms_norm", "turn_heads")),
        ):
            for function in names:
                patch.setattr(module, function, waiting(getattr(module, function)))
        alone = run().clone()
    assert relative(fused.compute_logits(alone).float(), expected) < 0.05
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = run()
    for _ in range(20):
        with torch.inference_mode():
            hidden.zero_()
        for tensor in (*kv.keys, *kv.values):
            tensor.zero_()
        graph.replay()
        assert torch.equal(hidden, alone)


def test_equal_shapes_give_equal_bits_and_top1_is_the_argmax() -> None:
    model = copy.deepcopy(models()["wide"]).to(torch.bfloat16).cuda()
    ids = token_ids(WIDE["vocab_size"])
    fused = HFModel(model)
    first, second = (our_logits(fused, ids, 5) for _ in range(2))
    assert torch.equal(first, second)
    with torch.inference_mode():
        hidden = torch.randn(7, WIDE["hidden_size"], device="cuda").to(torch.bfloat16)
        assert torch.equal(fused.top1(hidden), fused.compute_logits(hidden).argmax(1))
