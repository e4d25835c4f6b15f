"""Tiny random models by family, and their greedy text by transformers' own generate."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

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


def _decode_by_table(hidden_size: int, vocab_size: int, **changes: Any) -> PreTrainedModel:
    """Build a Llama whose layers add nothing: the logits are a function of the last token."""
    model = tiny_model(
        "llama",
        scale=1.0,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=8,
        num_hidden_layers=1,
        **changes,
    )
    layer: Any = model.get_decoder().layers[0]
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()
    return model


def bigram_model(logits: torch.Tensor) -> PreTrainedModel:
    """Build a model whose logits after token i are `logits[i]`, [V, V] float32, up to rounding."""
    vocab_size = len(logits)
    hidden_size = 8 * -(-vocab_size // 8)
    model = _decode_by_table(hidden_size, vocab_size, head_dim=8)
    one_hot = torch.eye(vocab_size, hidden_size)
    model.get_input_embeddings().weight.data.copy_(one_hot)
    # The last norm turns a one-hot vector of length H into sqrt(H) times itself.
    table = torch.zeros(vocab_size, hidden_size)
    table[:, :vocab_size] = logits.T / hidden_size**0.5
    model.get_output_embeddings().weight.data.copy_(table)
    return model


def scripted_model(successor: Sequence[int], eos_token_id: int | None = None) -> PreTrainedModel:
    """Build a model whose greedy text follows token i by `successor[i]`."""
    vocab_size = len(successor)
    model = _decode_by_table(64, vocab_size, head_dim=16, eos_token_id=eos_token_id)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(vocab_size, 64, generator=generator)
    vectors /= vectors.norm(dim=1, keepdim=True)
    # One token may follow several: its row adds up what they look like.
    head = torch.zeros(vocab_size, 64).index_add_(0, torch.tensor(list(successor)), vectors)
    model.get_input_embeddings().weight.data.copy_(vectors)
    model.get_output_embeddings().weight.data.copy_(head)
    return model


def byte_tokenizer(pieces: Sequence[str | bytes] = ()) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer: ids 0..255 are bytes, then `pieces`, then <eos> and <turn>.

    A string is encoded byte by byte; the pieces only appear in what a model writes.
    """
    symbols = bytes_to_unicode()
    words = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    vocab = {symbols[byte]: byte for byte in range(256)}
    for i, word in enumerate(words):
        vocab["".join(symbols[byte] for byte in word)] = 256 + i
    assert len(vocab) == 256 + len(words), "pieces must be unlike and longer than a byte"
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<eos>", "<turn>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    wrapped.chat_template = (
        "{% for message in messages %}<turn>{{ message.role }}:{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<turn>{% endif %}"
    )
    return wrapped
