"""Requests with every sampling parameter, alone and side by side, and what an oracle writes."""

import functools
from typing import Any

from specdec import SamplingParams
from tests.models import random_prompts, tiny_model
from tests.parameter_oracle import decode, spell

V = 17  # so few that texts repeat themselves, and prompt lookup often finds something
EOS = 3
MAX_LEN = 80
NUM_TOKENS = 14
PROMPTS = random_prompts((5, 33, 3, 17, 9, 21, 12, 40, 7), seed=2, vocab_size=V)

# Each parameter alone, greedy and sampled where it means something for both.
ALONE: dict[str, list[dict[str, Any]]] = {
    "repetition": [
        {"temperature": 0.0, "repetition_penalty": 1.8},
        {"temperature": 0.9, "repetition_penalty": 0.6},
    ],
    "frequency": [
        {"temperature": 0.0, "frequency_penalty": 1.3},
        {"temperature": 1.0, "frequency_penalty": -0.4},
    ],
    "presence": [
        {"temperature": 0.0, "presence_penalty": 2.0},
        {"temperature": 1.0, "presence_penalty": -1.5},
    ],
    "logit_bias": [
        {"temperature": 0.0, "logit_bias": {1: 2.5, 7: -100.0, 9: 1.0}},
        {"temperature": 0.8, "logit_bias": {0: 1.5, 16: -3.0}},
    ],
    "allowed_token_ids": [
        {"temperature": 0.0, "allowed_token_ids": [1, 2, 5, 16]},
        {"temperature": 1.0, "allowed_token_ids": [0, 4, 8, 11, 12]},
    ],
    "bad_words": [
        {"temperature": 0.0, "bad_words": ["WORDS OF THE TEXT"]},
        {"temperature": 0.7, "bad_words": ["WORDS OF THE TEXT"]},
    ],
    "min_tokens": [
        {"temperature": 0.0, "min_tokens": 8, "stop_token_ids": [5, 9, 11, 12, 14]},
        {"temperature": 1.0, "min_tokens": 11, "stop_token_ids": [1, 2, 4, 10]},
    ],
    "min_p": [
        {"temperature": 1.5, "min_p": 0.3},
        {"temperature": 0.9, "min_p": 0.02, "top_k": 9},
    ],
    "all": [
        {
            "temperature": temperature,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": -0.2,
            "logit_bias": {2: 0.7, 6: -0.5},
            "allowed_token_ids": [i for i in range(V) if i != 8],
            "bad_words": ["WORDS OF THE TEXT"],
            "min_tokens": 6,
            "stop_token_ids": [4, 10],
            "min_p": 0.05,
            "top_k": 12,
            "top_p": 0.95,
        }
        for temperature in (0.0, 1.1)
    ],
}


@functools.cache
def model() -> Any:
    return tiny_model("llama", vocab_size=V)


def oracle(prompt: list[int], params: SamplingParams) -> list[int]:
    return decode(model(), prompt, params, EOS, MAX_LEN)


def make_params(fields: dict[str, Any], prompt: list[int], seed: int) -> SamplingParams:
    """Fill in bad words that the text would really hold."""
    fields = {"max_tokens": NUM_TOKENS, "seed": seed, **fields}
    if "bad_words" in fields:
        plain = {k: v for k, v in fields.items() if k in ("temperature", "seed")}
        text = oracle(prompt, SamplingParams(max_tokens=8, ignore_eos=True, **plain))
        words = [text[1:3], text[3:6], text[:7], [text[4], text[4], text[4]], [*prompt[-1:], 2]]
        fields["bad_words"] = [spell(word) for word in ([text[7]], *words)]
    return SamplingParams(**fields)


@functools.cache
def requests(name: str) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Return prompts, parameters and the oracle's texts of a group."""
    if name == "mixed":
        fields = [entry for entries in ALONE.values() for entry in entries] + [{}]
    else:
        fields = ALONE[name] * 2
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(fields))]
    params = [make_params(f, prompts[i], 100 + i) for i, f in enumerate(fields)]
    return prompts, params, [oracle(p, q) for p, q in zip(prompts, params, strict=True)]
