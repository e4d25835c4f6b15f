"""A logits processor of a stranger: in speculation, in the fixed-shape step, beside our own."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.errors import ConfigError
from specdec.registry import register_logits_processor
from tests.models import random_prompts, tiny_model, tiny_target
from tests.parameter_oracle import MIN_GAP, penalize
from tests.toy_processors import NoEchoConfig

V = 17
NAME = "tests.toy_processors:NoEcho"
PROMPTS = random_prompts((5, 21, 3, 17, 9), seed=4, vocab_size=V)
# The second does not use the plug-in, the third has a penalty of ours before it.
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14),
    SamplingParams(temperature=0.0, max_tokens=14, presence_penalty=1.0),
    SamplingParams(temperature=0.0, max_tokens=14, repetition_penalty=1.4),
    SamplingParams(temperature=0.0, max_tokens=14),
    SamplingParams(temperature=0.0, max_tokens=14, frequency_penalty=-0.2),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "ragged": {},
    "fixed shapes": {"graph_scope": "step", "max_steps_in_flight": 2},
    "preempted": {"num_kv_blocks": 10, "block_size": 6, "max_model_len": 60},
}


@functools.cache
def model() -> Any:
    return tiny_model("llama", vocab_size=V)


@functools.cache
def target() -> Any:
    return tiny_target(model())


@torch.inference_mode()
def decode(prompt: list[int], params: SamplingParams, strength: float) -> list[int]:
    """Decode greedily by hand."""
    new: list[int] = []
    for _ in range(params.max_tokens):
        logits = model()(torch.tensor([prompt + new])).logits[0, -1]
        penalize(logits, params, prompt, new)
        if params.presence_penalty == 0:
            logits[[*prompt, *new][-1]] -= strength
            for token, count in Counter(new).items():
                logits[token] -= 0.3 * count
        best = logits.topk(2).values
        assert best[0] - best[1] > MIN_GAP
        new.append(int(logits.argmax()))
    return new


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", ["none", "ngram", "target"])
@pytest.mark.parametrize("verifier", ["sampled_match", "rejection", "greedy"])
def test_plugin_by_dotted_path_works_in_speculation(
    drafter: str, options: str, verifier: str
) -> None:
    spec = {"name": "draft_model", "model": "target"} if drafter == "target" else drafter
    llm = LLM(
        target(),
        spec,
        verifier,
        3,
        logits_processors=[{"name": NAME, "strength": 6.0}],
        **{"max_model_len": 80, **OPTIONS[options]},
    )
    outputs = llm.generate(PROMPTS, PARAMS)
    expected = [decode(p, q, 6.0) for p, q in zip(PROMPTS, PARAMS, strict=True)]
    assert [output.token_ids for output in outputs] == expected
    if options == "preempted":
        assert sum(output.stats.num_preemptions for output in outputs) > 0
    changed = [decode(p, q, 0.0) for p, q in zip(PROMPTS, PARAMS, strict=True)]
    assert changed != expected


def test_step_without_a_row_that_uses_it_does_not_run_it() -> None:
    llm = LLM(target(), "none", "greedy", max_model_len=80, logits_processors=["no_echo"])
    processor = llm.engine._sampler.processors.processors[-1]
    llm.generate(PROMPTS[0], PARAMS[1])
    assert processor.num_commits == 0  # pyright: ignore[reportAttributeAccessIssue]
    llm.generate(PROMPTS[0], PARAMS[0])
    assert processor.num_commits > 0  # pyright: ignore[reportAttributeAccessIssue]


def test_plugin_refuses_a_request_in_its_own_words() -> None:
    llm = LLM(target(), "none", max_model_len=80, logits_processors=["no_echo"])
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    with pytest.raises(ConfigError, match="not both"):
        llm.generate(PROMPTS[0], params)
    assert not llm.engine.has_requests


class Lacking:
    """Has no method of a processor."""

    def __init__(self, config: NoEchoConfig, setup: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["no_ecko"], "did you mean 'no_echo'"),
        (["tests.nowhere:NoEcho"], "cannot import"),
        ([{"name": "no_echo", "strenght": 1.0}], "did you mean 'strength'"),
        ([{"name": "no_echo", "strength": -1.0}], "strength=-1.0 is not allowed"),
        ([{"strength": 1.0}], "no key 'name'"),
        ("no_echo", "logits_processors='no_echo' is not allowed"),
        (["lacking"], "'lacking' lacks methods"),
    ],
)
def test_wrong_plugins_are_refused(specs: Any, words: str) -> None:
    if specs == ["lacking"]:
        register_logits_processor("lacking", NoEchoConfig)(Lacking)
    with pytest.raises(ConfigError, match=words):
        LLM(target(), "none", max_model_len=80, logits_processors=specs)
