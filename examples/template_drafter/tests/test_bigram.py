"""The drafter keeps to the rules of the runner, and drafts what it says."""

from typing import ClassVar

import pytest

from specdec import LLM, SamplingParams
from specdec.errors import ConfigError
from specdec.testing import DrafterConformance, tiny_target


class TestBigram(DrafterConformance):
    drafter: ClassVar = {"name": "bigram"}


class TestBigramOfTwo(DrafterConformance):
    drafter: ClassVar = {"name": "bigram", "min_count": 2}


def test_what_most_often_followed_is_drafted() -> None:
    # Whatever the target samples, the pairs 5 6 and 6 7 of the prompt are the most frequent ones.
    llm = LLM(tiny_target(), "bigram", "sampled_match", 2, device="cpu", max_model_len=64)
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, allowed_token_ids=[5], seed=0
    )
    llm.engine.add_request("a", [5, 6, 7, 5, 9, 5, 6, 7, 8, 5, 6], params)
    llm.engine.step()  # the prompt: 5 is sampled
    assert llm.engine.runner.state.read_draft_tokens()[0].tolist() == [6, 7]


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_count=0 is not allowed"):
        LLM(tiny_target(), {"name": "bigram", "min_count": 0})
