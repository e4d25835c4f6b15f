"""What the log-probabilities of a long prompt cost in memory and time, on a GPU.

A model with random weights and a vocabulary of 128256 prefills one prompt of 32768 tokens with and
without `prompt_logprobs`, in one chunk and in chunks of 2048 tokens:

    peak_bytes        most memory allocated while the request ran, beside what was there before
    extra_bytes       with log-probabilities over without
    seconds           until the first token; of a second request of each kind

Whole logits of such a prompt would take 16.8 GB.
"""

import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from specdec.engine import Engine
from specdec.types import SamplingParams

_NUM_LOGPROBS = 5
_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


def bench_prompt_logprobs(
    device: torch.device, vocab_size: int, prompt_len: int = 32768, chunk: int = 2048
) -> list[dict[str, Any]]:
    """Return a line for a prompt in one chunk, and one for chunks.

    Args:
        device: a GPU, which is the current one.
        vocab_size: V of the random model.
        prompt_len: tokens.
        chunk: tokens a step, where the prompt is chunked.
    """
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        config = LlamaConfig(
            **_SHAPE, vocab_size=vocab_size, max_position_embeddings=prompt_len + 16
        )
        model: Any = LlamaForCausalLM(config)
    target = LoadedTarget("random", HFModel(model.to(torch.bfloat16).eval()), None)
    prompt = np.random.default_rng(0).integers(vocab_size, size=prompt_len).tolist()
    return [_compare(target, prompt, tokens) for tokens in dict.fromkeys((prompt_len, chunk))]


def _compare(target: LoadedTarget, prompt: list[int], chunk: int) -> dict[str, Any]:
    """Run a prompt without and with log-probabilities."""
    longest = len(prompt) + 16
    engine = Engine(
        target,
        num_speculative_tokens=0,
        max_num_reqs=2,
        max_model_len=longest,
        max_num_batched_tokens=chunk,
        num_kv_blocks=-(-longest // 16) + 2,
        graph_scope="none",
    )
    plain, with_logprobs = (_measure(engine, prompt, n) for n in (None, _NUM_LOGPROBS))
    return {
        "prompt_len": len(prompt),
        "chunk": chunk,
        "num_logprobs": _NUM_LOGPROBS,
        "peak_bytes_without": plain[0],
        "peak_bytes_with": with_logprobs[0],
        "extra_bytes": with_logprobs[0] - plain[0],
        "seconds_without": plain[1],
        "seconds_with": with_logprobs[1],
    }


def _measure(engine: Engine, prompt: list[int], num_logprobs: int | None) -> tuple[int, float]:
    """Return the peak memory of a request beside what was allocated, and its seconds when warm."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=num_logprobs
    )
    peak, seconds = 0, 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        engine.add_request("prompt", prompt, params)
        while engine.has_requests:
            engine.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() - before
    return peak, seconds
