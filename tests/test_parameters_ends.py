"""The minimum length at the ends of texts: EOS, stop tokens and stop strings come late enough."""

import itertools
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from tests.models import byte_tokenizer, scripted_model, tiny_target

WORDS = ["Once", " the", " lamp", " was", " lit", " again"]
TOKENIZER = byte_tokenizer(WORDS)
EOS: int = TOKENIZER.eos_token_id
STORY = [*range(256, 256 + len(WORDS)), EOS]


def write(drafter: str, **fields: Any) -> Any:
    successor = list(range(len(TOKENIZER)))
    successor[ord("#")] = STORY[0]
    for token, following in itertools.pairwise(STORY):
        successor[token] = following
    target = tiny_target(scripted_model(successor, EOS), TOKENIZER)
    specs: Any = {
        "none": "none",
        "oracle": {"name": "oracle", "texts": [[ord("#"), *STORY]], "rates": [1.0, 1.0, 1.0]},
    }
    llm = LLM(target, specs[drafter], "sampled_match", 3, max_model_len=64)
    fields = {"temperature": 0.0, "max_tokens": 12, **fields}
    return llm.generate("#", SamplingParams(**fields))[0]


@pytest.mark.parametrize("drafter", ["none", "oracle"])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "text"),
    [
        (["lamp"], 0, "Once the "),
        (["lamp"], 2, "Once the "),
        (["lamp"], 3, "Once the lamp was lit again"),  # it is complete with the third token
        (["p w"], 3, "Once the lam"),  # begun before, completed behind
        (["p w"], 4, "Once the lamp was lit again"),
        (["lamp", "was lit"], 4, "Once the lamp "),
        (["amp", "lamp was lit"], 3, "Once the "),  # the shorter one is not found later
        (["Once"], 1, "Once the lamp was lit again"),
    ],
)
def test_stop_string_that_is_complete_too_early_is_let_be(
    stop: list[str], min_tokens: int, text: str, drafter: str
) -> None:
    output = write(drafter, stop=stop, min_tokens=min_tokens)
    assert output.text == text
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("drafter", ["none", "oracle"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_and_stop_tokens_are_not_drawn_before_the_minimum(
    drafter: str, ignore_eos: bool
) -> None:
    plain = write(drafter, ignore_eos=ignore_eos).token_ids
    assert plain[: len(STORY)] == STORY
    fields = {"ignore_eos": ignore_eos, "stop_token_ids": [STORY[2]]}
    for min_tokens in (1, 2, 3, 6, 7, 9, 12):
        output = write(drafter, min_tokens=min_tokens, **fields)
        early = output.token_ids[:min_tokens]
        assert len(early) == min_tokens
        assert EOS not in early
        assert STORY[2] not in early
    # Exactly as many new tokens as are asked for may stand before the end.
    assert write(drafter, min_tokens=6).token_ids == STORY
    assert write(drafter, min_tokens=2, stop_token_ids=[STORY[2]]).token_ids == STORY[:3]
    # More than any text can have is as much as one can.
    assert EOS not in write(drafter, min_tokens=2**40, max_tokens=2**40).token_ids
