"""Tiny random models by family, and their greedy text by transformers' own generate."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from runner.loader import LoadedTarget
from runner.models.hf import HFModel

VOCAB_SIZE = 97
WINDOW = 12
CONTEXT = 512
# Ours and transformers' logits differ by about 1e-5 here; a text with a closer call proves nothing.
MIN_GAP = 2e-4

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "head_dim": 16, **changes}))


def _mistral(**changes: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**SIZES, "sliding_window": None, **changes}))


def _mistral_window(**changes: Any) -> PreTrainedModel:
    return _mistral(**{"sliding_window": WINDOW, **changes})


def _qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes}))


def _qwen2_window(**changes: Any) -> PreTrainedModel:
    # The first layer sees everything, the others a window: layer_types differ inside one model.
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return _qwen2(**{**window, **changes})


def _qwen3(**changes: Any) -> PreTrainedModel:
    # A head size that is not hidden_size / num_attention_heads.
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 24, **changes}))


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mistral_window": _mistral_window,
    "qwen2": _qwen2,
    "qwen2_window": _qwen2_window,
    "qwen3": _qwen3,
}


def tiny_model(
    family: str = "llama", seed: int = 0, scale: float = 3.0, **changes: Any
) -> PreTrainedModel:
    """Build a random float32 model of a family.

    Args:
        family: a key of FAMILIES.
        seed: of the weights; the global generator is left as it was.
        scale: factor on all weights: at the usual initial size every text falls into a loop.
        changes: fields of the model's config.
    """
    return randomized(lambda: FAMILIES[family](**changes), seed, scale)


def randomized(
    build: Callable[[], PreTrainedModel], seed: int = 0, scale: float = 3.0
) -> PreTrainedModel:
    """Build a model with random float32 weights from a seed, scaled."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def tiny_target(model: PreTrainedModel, tokenizer: Any | None = None) -> LoadedTarget:
    """Put a copy of a model behind the runner; the model itself keeps transformers' attention."""
    return LoadedTarget("tiny", HFModel(copy.deepcopy(model)), tokenizer)


def random_prompts(
    lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> list[list[int]]:
    """Return one prompt of random token ids for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def reference_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation by transformers' generate, every choice of it a clear one."""
    output: Any = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    assert gap > MIN_GAP, f"the text holds a near tie ({gap:.1e}); choose another seed"
    return output.sequences[0, len(prompt) :].tolist()
