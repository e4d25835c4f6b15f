"""Sampled match writes the autoregressive text, for any seed, temperature and drafter."""

import functools
from typing import Any

import pytest

from specdec import LLM, RequestOutput, SamplingParams
from tests.models import SIZES, random_prompts, tiny_model, tiny_target

NUM_TOKENS = 12
V = 17  # so few that prompt lookup often finds something, and is sometimes right
PROMPTS = random_prompts((5, 33, 3, 17, 9, 21, 12, 40), seed=2, vocab_size=V)
# Requests as unlike as they come, side by side in one batch; greedy rows among them.
PARAMS = [
    SamplingParams(temperature=t, top_p=p, top_k=k, seed=seed, max_tokens=NUM_TOKENS)
    for t, p, k, seed in (
        (1.0, 1.0, 0, 1),
        (0.8, 0.9, 0, 2),
        (0.0, 1.0, 0, 3),
        (1.5, 1.0, 5, 4),
        (0.3, 1.0, 0, -5),
        (1.0, 0.5, 0, 2**63 - 1),
        (0.8, 0.9, 9, 7),
        (0.6, 1.0, 1, -(2**63)),
    )
]
DRAFTERS = ["ngram", "target", "other", "other_sampled", "oracle"]
PREEMPTING = {"num_kv_blocks": 16, "block_size": 6}


@functools.cache
def target() -> Any:
    """Return the target behind the runner."""
    return tiny_target(tiny_model("llama", vocab_size=V))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a draft model that agrees with the target now and then: its last layer is missing."""
    model = tiny_model("llama", vocab_size=V)
    model.get_decoder().layers = model.get_decoder().layers[:-1]
    model.config.num_hidden_layers = SIZES["num_hidden_layers"] - 1
    path = tmp_path_factory.mktemp("draft")
    model.save_pretrained(path)
    return str(path)


def write(
    drafter: Any = "none", verifier: str = "sampled_match", **options: Any
) -> list[RequestOutput]:
    """Write all texts in one engine."""
    llm = LLM(target(), drafter, verifier, 4, max_model_len=80, **options)
    return llm.generate(PROMPTS, PARAMS)


@functools.cache
def autoregressive_texts() -> list[list[int]]:
    """Return the texts that each request writes alone, without drafts."""
    return [output.token_ids for output in write(max_num_reqs=1)]


def drafter_spec(name: str, folder: str) -> Any:
    """Return a drafter; the oracle errs with set rates."""
    texts = [p + text for p, text in zip(PROMPTS, autoregressive_texts(), strict=True)]
    specs: dict[str, Any] = {
        "ngram": {"name": "ngram", "min_n": 1, "max_n": 2},
        "target": {"name": "draft_model", "model": "target"},
        "other": {"name": "draft_model", "model": folder},
        "other_sampled": {"name": "draft_model", "model": folder, "sampling": "gumbel"},
        "oracle": {"name": "oracle", "texts": texts, "rates": [0.9, 0.7, 0.5]},
    }
    return specs[name]


def texts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """Return the tokens of each output."""
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_reqs": 1},
        {"max_num_reqs": 8},
        {"max_steps_in_flight": 2, "max_num_batched_tokens": 13},
        PREEMPTING,
        {"max_steps_in_flight": 2, **PREEMPTING},
    ],
    ids=["alone", "batch", "chunks in flight", "preempted", "preempted in flight"],
)
@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_text_is_the_autoregressive_one(drafter: str, options: Any, folder: str) -> None:
    spec = "none" if drafter == "none" else drafter_spec(drafter, folder)
    outputs = write(spec, **options)
    assert texts_of(outputs) == autoregressive_texts()
    if "num_kv_blocks" in options:
        assert sum(output.stats.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_judged_and_some_are_kept(drafter: str, folder: str) -> None:
    # Without this the equality above might hold because nothing was ever accepted.
    outputs = write(drafter_spec(drafter, folder))
    sampled = [o.stats for o, p in zip(outputs, PARAMS, strict=True) if p.temperature > 0]
    assert sum(stats.num_drafted for stats in sampled) > 0
    assert sum(stats.num_accepted for stats in sampled) > 0
    assert sum(stats.num_accepted for stats in sampled) < sum(s.num_drafted for s in sampled)


def test_texts_differ_by_seed_and_agree_for_equal_seeds() -> None:
    llm = LLM(target(), "ngram", "sampled_match", max_model_len=80)
    params = [SamplingParams(seed=seed, max_tokens=NUM_TOKENS) for seed in (1, 2, 1, 3)]
    first, second, again, third = texts_of(llm.generate([PROMPTS[0]] * 4, params))
    assert first == again
    assert len({tuple(text) for text in (first, second, third)}) == 3


@pytest.mark.parametrize("verifier", ["sampled_match", "rejection"])
def test_recorded_seed_of_an_unseeded_request_gives_its_text_again(verifier: str) -> None:
    unseeded = [SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS)] * 6
    outputs = LLM(target(), "ngram", verifier, max_model_len=80, seed=5).generate(
        [PROMPTS[0]] * 6, unseeded
    )
    assert len({output.seed for output in outputs}) == 6
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    seeded = [
        SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=output.seed)
        for output in reversed(outputs)
    ]
    # Other rows, another engine seed, the other order: only the request's own seed counts.
    llm = LLM(target(), "ngram", verifier, max_model_len=80, seed=6)
    again = llm.generate([PROMPTS[0]] * 6, seeded)
    assert texts_of(again) == texts_of(outputs)[::-1]
    assert [output.seed for output in again] == [output.seed for output in outputs][::-1]


def test_engine_seed_decides_the_seeds_of_unseeded_requests() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS)
    texts = [
        texts_of(
            LLM(target(), "none", "sampled_match", max_model_len=80, seed=seed).generate(
                PROMPTS[:3], params
            )
        )
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1]
    assert all(a != b for a, b in zip(texts[0], texts[2], strict=True))


def test_rejection_writes_the_autoregressive_text_for_greedy_rows_beside_sampled_ones(
    folder: str,
) -> None:
    expected = autoregressive_texts()
    for drafter in DRAFTERS:
        outputs = write(drafter_spec(drafter, folder), "rejection")
        for output, params, text in zip(outputs, PARAMS, expected, strict=True):
            if params.temperature == 0 or params.top_k == 1:
                assert output.token_ids == text
