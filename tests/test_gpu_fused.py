"""The fused target on a GPU: parity with transformers' modules, and choices that hold.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from runner.attention import single_request_metadata
from runner.models.hf import HFModel
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


def test_equal_shapes_give_equal_bits_and_top1_is_the_argmax() -> None:
    model = copy.deepcopy(models()["wide"]).to(torch.bfloat16).cuda()
    ids = token_ids(WIDE["vocab_size"])
    fused = HFModel(model)
    first, second = (our_logits(fused, ids, 5) for _ in range(2))
    assert torch.equal(first, second)
    with torch.inference_mode():
        hidden = torch.randn(7, WIDE["hidden_size"], device="cuda").to(torch.bfloat16)
        assert torch.equal(fused.top1(hidden), fused.compute_logits(hidden).argmax(1))
