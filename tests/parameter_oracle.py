"""Decode by hand, one token at a time, with every sampling parameter.

Written from vLLM's definitions of the parameters, over transformers' own forward of the whole text:
nothing of the sampler is used but its noise, which is a function of seed, place and token.
"""

from collections import Counter
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sampler.noise import STREAM_TARGET, mix_seed, noise_gumbel, noise_key
from specdec.types import SamplingParams

NEG = float("-inf")
# Ours and transformers' logits differ by about 1e-5; a text with a closer call proves nothing.
MIN_GAP = 1e-4


def letter_tokenizer(vocab_size: int, eos_token_id: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer of letters: id 0 is "a", id 1 is "b"; a space adds no token."""
    letters = [spell([i]) for i in range(vocab_size)]
    tokenizer = Tokenizer(WordLevel({letter: i for i, letter in enumerate(letters)}))
    tokenizer.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex("."), "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[eos_token_id])


def spell(token_ids: list[int]) -> str:
    """Return the text of token ids."""
    return "".join(chr(ord("a") + i) for i in token_ids)


def unspell(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [ord(letter) - ord("a") for letter in text]


def mask(logits: Tensor, params: SamplingParams, new: list[int], eos: int) -> None:
    """Apply allowed ids, bad words, minimum length and bias."""
    if params.allowed_token_ids is not None:
        for token_id in range(len(logits)):
            if token_id not in params.allowed_token_ids:
                logits[token_id] = NEG
    for word in params.bad_words or ():
        *before, last = unspell(word)
        if not before or (len(new) >= len(before) and new[-len(before) :] == before):
            logits[last] = NEG
    if len(new) < params.min_tokens:
        for token_id in {eos, *(params.stop_token_ids or ())}:
            logits[token_id] = NEG
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias


def penalize(logits: Tensor, params: SamplingParams, prompt: list[int], new: list[int]) -> None:
    """Apply repetition, frequency and presence penalties."""
    for token_id in {*prompt, *new}:
        if logits[token_id] > 0:
            logits[token_id] /= params.repetition_penalty
        else:
            logits[token_id] *= params.repetition_penalty
    for token_id, count in Counter(new).items():
        logits[token_id] -= count * params.frequency_penalty
        logits[token_id] -= params.presence_penalty


def truncate(logits: Tensor, params: SamplingParams) -> None:
    """Apply min-p, top-k and top-p to logits that were divided by the temperature."""
    probs = logits.softmax(0)
    logits[probs < params.min_p * probs.max()] = NEG
    if 0 < params.top_k < len(logits):
        logits[logits < logits.topk(params.top_k).values[-1]] = NEG
    if params.top_p < 1:
        ordered, ids = logits.softmax(0).sort(descending=True)
        before = ordered.cumsum(0) - ordered
        logits[ids[before >= params.top_p]] = NEG


@torch.inference_mode()
def decode(
    model: Any, prompt: list[int], params: SamplingParams, eos: int, max_model_len: int
) -> list[int]:
    """Return the new tokens of a request.

    Args:
        model: transformers' own, float32 on a CPU.
        prompt: token ids.
        params: with a seed.
        eos: the id that ends a text.
        max_model_len: tokens at most, prompt included.
    """
    assert params.seed is not None
    new: list[int] = []
    while len(new) < params.max_tokens and len(prompt) + len(new) < max_model_len:
        logits = model(torch.tensor([prompt + new])).logits[0, -1].double()
        mask(logits, params, new, eos)
        penalize(logits, params, prompt, new)
        if params.temperature > 0:
            logits /= params.temperature
            truncate(logits, params)
            seed = torch.tensor(mix_seed(params.seed, 0))
            key = noise_key(seed, torch.tensor(len(prompt) + len(new)), STREAM_TARGET)
            logits += noise_gumbel(key, torch.arange(len(logits), dtype=torch.int32))
        best = logits.topk(min(2, len(logits))).values
        assert len(best) < 2 or best[0] - best[1] > MIN_GAP, "a near tie; choose another seed"
        new.append(int(logits.argmax()))
        if new[-1] in (params.stop_token_ids or ()):
            break
        if new[-1] == eos and not params.ignore_eos:
            break
    return new
