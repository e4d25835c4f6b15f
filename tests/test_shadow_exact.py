"""What is predicted from recorded texts equals real runs, verification by verification."""

from pathlib import Path
from typing import Any

import pytest

from experiments.shadow_walk import outcome_of_steps, walk
from specdec import SamplingParams
from tests.shadow_cases import EOS, drafter_specs, make_target, play, score

K = 5
NAMES = (
    "ngram",
    "draft_model",
    "layer_skip",
    "target itself",
    "eagle3",
    "eagle",
    "medusa",
    "block_parallel",
    "mixed",
)
RULES = {
    "greedy": ("greedy", 0.0, "argmax"),
    "rejection, greedy rows": ("rejection", 0.0, "gumbel"),
    "sampled_match": ("sampled_match", 0.8, "argmax"),
    "sampled_match, drawn drafts": ("sampled_match", 0.8, "gumbel"),
    "coupled": ("coupled", 0.8, "gumbel"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a target, and drafters by how they choose."""
    model, target = make_target(eos_token_id=EOS)
    folder = tmp_path_factory.mktemp("drafters")
    kinds = {s: drafter_specs(model, folder / s, s) for s in ("argmax", "gumbel")}
    return target, kinds


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_a_real_run(made: Any, name: str, rule: str) -> None:
    target, kinds = made
    verifier, temperature, sampling = RULES[rule]
    drafter = kinds[sampling][name]
    params = SamplingParams(temperature=temperature, max_tokens=45)
    texts = play(target, "none", verifier, 0, params).texts
    scores = score(target, drafter, verifier, K, temperature, texts)
    for k in (1, 3, K):
        real = play(target, drafter, verifier, k, params)
        assert real.texts == texts, "the rule writes another text"
        for own, steps in zip(scores, real.steps, strict=True):
            predicted = walk(own, k)
            assert predicted.steps == steps
            expected = outcome_of_steps(steps, k)
            assert predicted.num_steps == expected.num_steps
            assert predicted.num_committed == expected.num_committed
            for column in ("drafted", "reached", "accepted"):
                assert getattr(predicted, column).tolist() == getattr(expected, column).tolist()
