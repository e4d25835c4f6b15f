"""The embedded target in float32: every arm writes transformers' text, or its own AR text.

Minutes on two cores; the references are computed once.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.prompts import builtin_questions, select_questions
from runner.loader import LoadedTarget, load_target
from runner.weights import ensure_embedded_target
from specdec import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.slow

NAME = "smollm2-135m-instruct"
PER_CATEGORY = 4
NUM_TOKENS = 64
K = 4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
BATCHES: dict[str, dict[str, int]] = {
    "alone": {"max_num_reqs": 1},
    "batch": {"max_num_reqs": 8},
    # Eight prompts fit when they arrive; their texts do not.
    "preempted": {"max_num_reqs": 8, "num_kv_blocks": 40},
}


@dataclass(frozen=True)
class References:
    """Prompts and the texts that are expected after them."""

    prompts: list[list[int]]
    greedy: list[list[int]]

    @property
    def whole(self) -> list[list[int]]:
        """Return prompt and text in one, as the oracle knows them."""
        return [prompt + text for prompt, text in zip(self.prompts, self.greedy, strict=True)]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    """Load the target once."""
    return load_target(NAME, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def references(target: LoadedTarget) -> References:
    """Write every text by transformers' own generate, one prompt at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(ensure_embedded_target(), dtype=torch.float32)
    tokenizer: Any = target.tokenizer
    prompts, texts = [], []
    for question in select_questions(builtin_questions(), PER_CATEGORY, None):
        message = {"role": "user", "content": question.turns[0]}
        inputs = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        length = inputs["input_ids"].shape[1]
        prompts.append(output[0, :length].tolist())
        texts.append(output[0, length:].tolist())
    assert len(prompts) == 24
    return References(prompts, texts)


def make_llm(target: LoadedTarget, drafter: Any, verifier: str, batch: dict[str, int]) -> LLM:
    """Return an engine over the shared target."""
    return LLM(target, drafter, verifier, K, max_model_len=512, **batch)


def drafter_spec(name: str, texts: list[list[int]]) -> Any:
    """Return a drafter; the oracle knows the texts but errs now and then."""
    specs: dict[str, Any] = {
        "none": "none",
        "ngram": "ngram",
        "suffix": "suffix",
        "draft_model": "draft_model",
        "target itself": {"name": "draft_model", "model": "target"},
        "eagle3": "eagle3",
        "mixed": {"name": "mixed", "drafters": [{"name": "ngram", "min_n": 2}, "eagle3"]},
        "oracle": {"name": "oracle", "texts": texts, "rates": [0.95, 0.9]},
    }
    return specs[name]


def check_preempted(outputs: list[RequestOutput], batch: str) -> None:
    """Check that the small KV cache did what it is there for."""
    if batch == "preempted":
        assert sum(output.stats.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize(
    ("drafter", "batch"),
    [
        *itertools.product(("none", "ngram", "target itself", "oracle"), BATCHES),
        *itertools.product(("suffix", "draft_model", "eagle3", "mixed"), ("batch", "preempted")),
    ],
)
def test_greedy_text_is_that_of_transformers(
    target: LoadedTarget, references: References, drafter: str, batch: str
) -> None:
    llm = make_llm(target, drafter_spec(drafter, references.whole), "greedy", BATCHES[batch])
    outputs = llm.generate(references.prompts, GREEDY)
    different = [i for i, o in enumerate(outputs) if o.token_ids != references.greedy[i]]
    assert different == []
    check_preempted(outputs, batch)
    if drafter != "none":
        assert sum(o.stats.num_accepted for o in outputs) > 0
    if drafter == "target itself" and batch != "preempted":
        assert all(o.stats.num_accepted == o.stats.num_drafted > 0 for o in outputs)


def test_end_of_a_text_is_reached_by_some_prompts(references: References) -> None:
    # Both ways to end are then among the texts that are compared.
    lengths = [len(text) for text in references.greedy]
    assert min(lengths) < NUM_TOKENS == max(lengths)


def sampled_params() -> list[SamplingParams]:
    """Return parameters for each prompt, with a seed of its own."""
    return [
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=NUM_TOKENS, seed=seed)
        for seed in range(24)
    ]


@pytest.fixture(scope="module")
def sampled_texts(target: LoadedTarget, references: References) -> list[list[int]]:
    """Write every sampled text without drafts."""
    llm = make_llm(target, "none", "sampled_match", BATCHES["batch"])
    outputs = llm.generate(references.prompts, sampled_params())
    texts = [output.token_ids for output in outputs]
    assert sum(a != b for a, b in zip(texts, references.greedy, strict=True)) > 20
    return texts


@pytest.mark.parametrize(
    ("drafter", "batch"),
    [
        ("none", "preempted"),
        ("ngram", "batch"),
        ("ngram", "preempted"),
        ("target itself", "batch"),
        ("oracle", "alone"),
        ("oracle", "batch"),
    ],
)
def test_sampled_match_writes_the_text_of_the_autoregressive_arm(
    target: LoadedTarget,
    references: References,
    sampled_texts: list[list[int]],
    drafter: str,
    batch: str,
) -> None:
    whole = [p + text for p, text in zip(references.prompts, sampled_texts, strict=True)]
    llm = make_llm(target, drafter_spec(drafter, whole), "sampled_match", BATCHES[batch])
    outputs = llm.generate(references.prompts, sampled_params())
    different = [i for i, o in enumerate(outputs) if o.token_ids != sampled_texts[i]]
    assert different == []
    check_preempted(outputs, batch)
    if drafter != "none":
        assert sum(output.stats.num_accepted for output in outputs) > 0
