"""Families of models: the text is transformers' own, whatever the drafter, batch and memory."""

import functools
from typing import Any

import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from runner.loader import LoadedTarget
from specdec import LLM, RequestOutput, SamplingParams
from specdec.errors import UnsupportedError
from tests.models import (
    FAMILIES,
    SIZES,
    WINDOW,
    random_prompts,
    randomized,
    reference_greedy,
    tiny_model,
    tiny_target,
)

# Shorter and longer than the window and a block; the texts cross both.
PROMPT_LENGTHS = (5, 33, 3, 17, 9, 21)
NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
PREEMPTING = {"num_kv_blocks": 10, "block_size": 6}

Case = tuple[LoadedTarget, list[list[int]], list[list[int]]]


def make_case(model: PreTrainedModel) -> Case:
    """Return a target, prompts and the texts that transformers writes after them."""
    prompts = random_prompts(PROMPT_LENGTHS)
    texts = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    return tiny_target(model), prompts, texts


@functools.cache
def family_case(family: str) -> Case:
    """Return the case of a proven family, built once for all tests."""
    return make_case(tiny_model(family))


def drafter_spec(name: str, case: Case) -> Any:
    """Return a drafter; the oracle knows the texts but errs now and then."""
    _, prompts, texts = case
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    specs: dict[str, Any] = {
        "none": "none",
        "ngram": "ngram",
        "draft_model": {"name": "draft_model", "model": "target"},
        "oracle": {"name": "oracle", "texts": whole, "rates": [0.9, 0.6]},
    }
    return specs[name]


def run(case: Case, drafter: str, count: int = 6, **options: Any) -> list[RequestOutput]:
    """Write the first texts of a case in one engine, and hold them to transformers' texts."""
    target, prompts, texts = case[0], case[1][:count], case[2][:count]
    llm = LLM(target, drafter_spec(drafter, case), "greedy", 4, max_model_len=80, **options)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == texts
    return outputs


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "oracle"])
@pytest.mark.parametrize("family", FAMILIES)
class TestProvenFamily:
    """Every family with every drafter."""

    def test_greedy_text_alone_is_that_of_transformers(self, family: str, drafter: str) -> None:
        run(family_case(family), drafter, count=3, max_num_reqs=1)

    def test_greedy_text_in_a_batch_is_that_of_transformers(
        self, family: str, drafter: str
    ) -> None:
        run(family_case(family), drafter, max_num_reqs=8)

    def test_greedy_text_survives_chunked_prefill(self, family: str, drafter: str) -> None:
        run(family_case(family), drafter, max_num_batched_tokens=11)

    def test_greedy_text_survives_preemption(self, family: str, drafter: str) -> None:
        outputs = run(family_case(family), drafter, **PREEMPTING)
        assert sum(output.stats.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "oracle"])
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_greedy_text_survives_steps_in_flight(family: str, drafter: str) -> None:
    outputs = run(
        family_case(family),
        drafter,
        max_steps_in_flight=2,
        max_num_batched_tokens=16,
        **PREEMPTING,
    )
    assert sum(output.stats.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_window_changes_the_text(family: str) -> None:
    # Without this the tests above could not tell an honoured window from an ignored one.
    _, prompts, windowed = family_case(f"{family}_window")
    _, _, full = family_case(family)
    longer = [i for i, prompt in enumerate(prompts) if len(prompt) > WINDOW]
    assert all(windowed[i] != full[i] for i in longer)


def test_prompt_longer_than_the_window_is_cut_by_chunks_without_effect() -> None:
    model = tiny_model("mistral_window", seed=1)
    prompts = random_prompts((60, 45), seed=1)
    texts = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    for chunk in (5, WINDOW, 64):
        llm = LLM(
            tiny_target(model), "ngram", "greedy", max_model_len=90, max_num_batched_tokens=chunk
        )
        outputs = llm.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == texts


UNKNOWN_FINE = {
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config, {"sliding_window": None}),
}
REFUSED = {
    # Attention scores pass a softcap, and every other layer has a window.
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {}, "uses a sliding window"),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": WINDOW}, "uses a sliding window"),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, {"num_experts": 2}, "layers of type"),
    # Does not hand our arguments down to its attention.
    "stablelm": (StableLmForCausalLM, StableLmConfig, {}, "cannot run through our attention"),
    # Squashes its logits behind the head, which the head alone does not show.
    "nanochat": (NanoChatForCausalLM, NanoChatConfig, {}, "gives other logits"),
    # Have attention code of their own: right for a lone first pass, wrong from then on.
    "falcon": (FalconForCausalLM, FalconConfig, {}, "gives other logits"),
    "diffllama": (DiffLlamaForCausalLM, DiffLlamaConfig, {}, "gives other logits"),
}


def build(model_cls: Any, config_cls: Any, changes: dict[str, Any]) -> PreTrainedModel:
    """Build a tiny random model of any class."""
    return randomized(lambda: model_cls(config_cls(**{**SIZES, **changes})))


@pytest.mark.parametrize("kind", UNKNOWN_FINE)
def test_family_that_was_never_proven_runs_once_parity_holds(kind: str) -> None:
    case = make_case(build(*UNKNOWN_FINE[kind]))
    run(case, "ngram", **PREEMPTING)
    run(case, "draft_model", max_num_batched_tokens=11)


@pytest.mark.parametrize("kind", REFUSED)
def test_family_that_would_be_wrong_is_refused_with_the_reason(kind: str) -> None:
    model_cls, config_cls, changes, reason = REFUSED[kind]
    model = build(model_cls, config_cls, changes)
    with pytest.raises(UnsupportedError, match=f"model type '{kind}' .*{reason}"):
        tiny_target(model)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 32,
}


def test_scaled_positions_are_honoured() -> None:
    run(make_case(tiny_model("llama", rope_parameters=LLAMA3_ROPE)), "draft_model")


def test_positions_that_depend_on_the_batch_are_refused() -> None:
    # Scales by the longest text so far: a long request would change a short one beside it.
    with pytest.raises(UnsupportedError, match="longrope"):
        tiny_target(tiny_model("llama", rope_parameters=LONG_ROPE))


def test_proven_family_is_not_run_when_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Loading a known family must not cost two forwards of a large model.
    model = tiny_model("llama")

    def forbidden(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a proven family was run")

    monkeypatch.setattr(type(model), "forward", forbidden)
    tiny_target(model)
