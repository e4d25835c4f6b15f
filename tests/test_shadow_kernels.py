"""Scoring through the kernels: pages of one token, shared and then forked."""

from typing import Any

import pytest
import torch

from experiments.shadow_texts import Text
from specdec import SamplingParams
from tests.models import random_prompts, reference_greedy, tiny_model, tiny_target
from tests.shadow_cases import score

K = 3


@pytest.mark.interpreter
@pytest.mark.parametrize("num_rows", [3, 8])
def test_the_target_itself_is_right_at_every_start(num_rows: int) -> None:
    model = tiny_model("llama", vocab_size=40, num_hidden_layers=2)
    (prompt,) = random_prompts([5], vocab_size=40)
    token_ids = [*prompt, *reference_greedy(model, prompt, 9)]
    text = Text("0/1", "0", "any", 0, token_ids, len(prompt), len(token_ids))
    drafter: Any = {"name": "draft_model", "model": "target"}
    (own,) = score(
        tiny_target(model), drafter, "greedy", K, SamplingParams(temperature=0), [text], num_rows
    )
    left = torch.arange(8, 0, -1)  # tokens that a start can commit
    assert own.num_drafts.tolist() == (left - 1).clamp(max=K).tolist()
    for i in range(K):
        assert own.accept[: 7 - i, i].tolist() == [1.0] * (7 - i)
