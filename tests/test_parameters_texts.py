"""Every sampling parameter under speculation: the texts of an oracle that decodes by hand."""

import functools
import itertools
from typing import Any

import pytest

from specdec import LLM, RequestOutput, SamplingParams
from tests.models import SIZES, tiny_model, tiny_target
from tests.parameter_cases import ALONE, EOS, MAX_LEN, NUM_TOKENS, V, model, oracle, requests
from tests.parameter_oracle import letter_tokenizer

DRAFTERS = ["none", "ngram", "target", "other"]
OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {},
    "chunks in flight": {"max_steps_in_flight": 2, "max_num_batched_tokens": 13},
    "fixed shapes": {"graph_scope": "step", "max_steps_in_flight": 2},
    "preempted": {"num_kv_blocks": 14, "block_size": 6},
    "preempted in flight": {
        "num_kv_blocks": 14,
        "block_size": 6,
        "max_steps_in_flight": 2,
        "graph_scope": "step",
        "graph_num_reqs": [1, 4],
    },
}


@functools.cache
def target() -> Any:
    return tiny_target(model(), letter_tokenizer(V, EOS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a draft model that agrees with the target now and then: its last layer is missing."""
    draft: Any = tiny_model("llama", vocab_size=V)
    draft.get_decoder().layers = draft.get_decoder().layers[:-1]
    draft.config.num_hidden_layers = SIZES["num_hidden_layers"] - 1
    path = tmp_path_factory.mktemp("draft")
    draft.save_pretrained(path)
    letter_tokenizer(V, EOS).save_pretrained(path)
    return str(path)


def write(
    name: str, drafter: str, folder: str, verifier: str = "sampled_match", **options: Any
) -> list[RequestOutput]:
    specs: dict[str, Any] = {
        "none": "none",
        "ngram": {"name": "ngram", "min_n": 1, "max_n": 2},
        "target": {"name": "draft_model", "model": "target"},
        "other": {"name": "draft_model", "model": folder},
    }
    llm = LLM(target(), specs[drafter], verifier, 4, max_model_len=MAX_LEN, **options)
    prompts, params, _ = requests(name)
    return llm.generate(prompts, params)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", ALONE)
def test_text_of_a_parameter_alone_is_the_oracles(name: str, drafter: str, folder: str) -> None:
    outputs = write(name, drafter, folder)
    assert [output.token_ids for output in outputs] == requests(name)[2]


@pytest.mark.parametrize(
    ("drafter", "options"),
    [("none", "batch"), ("none", "preempted"), *itertools.product(DRAFTERS[1:], OPTIONS)],
)
def test_texts_of_unlike_requests_in_a_batch_are_the_oracles(
    drafter: str, options: str, folder: str
) -> None:
    outputs = write("mixed", drafter, folder, **OPTIONS[options])
    assert [output.token_ids for output in outputs] == requests("mixed")[2]
    if "num_kv_blocks" in OPTIONS[options]:
        assert sum(output.stats.num_preemptions for output in outputs) > 0
    if drafter != "none":  # else the equality might hold because nothing was ever accepted
        assert sum(output.stats.num_accepted for output in outputs) > 0


@pytest.mark.parametrize("name", ALONE)
def test_every_parameter_changes_the_oracles_text(name: str) -> None:
    prompts, params, texts = requests(name)
    for prompt, wanted, text in zip(prompts, params, texts, strict=True):
        plain = SamplingParams(
            temperature=wanted.temperature,
            seed=wanted.seed,
            max_tokens=NUM_TOKENS,
            top_k=wanted.top_k,
            stop_token_ids=wanted.stop_token_ids,
        )
        if oracle(prompt, plain) != text:
            return
    pytest.fail(f"{name} changes none of {len(texts)} texts")


@pytest.mark.parametrize("drafter", ["ngram", "other"])
def test_greedy_requests_under_rejection_are_the_oracles(drafter: str, folder: str) -> None:
    outputs = write("mixed", drafter, folder, "rejection")
    for output, params, text in zip(outputs, *requests("mixed")[1:], strict=True):
        if params.temperature == 0:
            assert output.token_ids == text
