"""What is predicted from recorded texts equals real runs, verification by verification."""

import functools
from typing import Any

import pytest

from experiments.schemas import load_plugin
from experiments.shadow_play import PLAYED, RUN, PlaySetup, play_drafter
from experiments.shadow_walk import StepOutcome, TextOutcome, outcome_of_steps, walk
from specdec import SamplingParams
from specdec.config import EngineConfig
from tests.models import random_prompts
from tests.shadow_cases import (
    EOS,
    MAX_MODEL_LEN,
    Played,
    V,
    drafter_specs,
    make_target,
    play,
    score,
)

K = 5
RULES = {
    "greedy": ("greedy", 0.0, "argmax"),
    "rejection, greedy rows": ("rejection", 0.0, "gumbel"),
    "sampled_match": ("sampled_match", 0.8, "argmax"),
    "sampled_match, drawn drafts": ("sampled_match", 0.8, "gumbel"),
    "coupled": ("coupled", 0.8, "gumbel"),
}
NAMES = ["ngram", "draft_model", "eagle3", "medusa", "oracle", "layer_skip", "eagle"]
NAMES += ["block_parallel", "mixed", "target itself"]
QUICK = {
    *((name, rule) for name in NAMES[:4] for rule in ("greedy", "sampled_match")),
    ("oracle", "sampled_match, drawn drafts"),
    ("layer_skip", "sampled_match, drawn drafts"),
    ("eagle", "coupled"),
    ("block_parallel", "coupled"),
    ("mixed", "greedy"),
    ("target itself", "rejection, greedy rows"),
}
CASES = [
    pytest.param(name, rule, marks=() if (name, rule) in QUICK else pytest.mark.slow)
    for name in NAMES
    for rule in RULES
]
# The last prompts leave little room: a text ends at max_model_len there, not at max_tokens.
PROMPTS = random_prompts([5, 1, 14, *[MAX_MODEL_LEN - 6] * 2], seed=3, vocab_size=V)


class Made:
    """A target, drafters by how they choose, and what the target writes under each rule."""

    def __init__(self, folder: Any) -> None:
        model, self.target = make_target(eos_token_id=EOS)
        self._specs = {s: drafter_specs(model, folder / s, s) for s in ("argmax", "gumbel")}

    def params(self, rule: str) -> SamplingParams:
        return SamplingParams(temperature=RULES[rule][1], max_tokens=26)

    @functools.cache  # noqa: B019 (one object a module)
    def texts(self, rule: str) -> Played:
        """Let the target write by itself."""
        return play(self.target, "none", RULES[rule][0], 0, self.params(rule), PROMPTS)

    def drafter(self, name: str, rule: str) -> Any:
        if name == "oracle":  # it knows one text wrong, and errs in the others at times
            texts = [list(text.token_ids) for text in self.texts(rule).texts]
            texts[2][-2] = (texts[2][-2] + 1) % V
            return {"name": name, "texts": texts, "rates": [0.9, 0.7]}
        return self._specs[RULES[rule][2]][name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("drafters"))


def assert_same(predicted: TextOutcome, steps: list[StepOutcome], k: int) -> None:
    """Compare a prediction with the verifications of a real run."""
    assert predicted.steps == steps
    expected = outcome_of_steps(steps, k)
    assert predicted.num_steps == expected.num_steps
    assert predicted.num_committed == expected.num_committed
    for column in ("drafted", "reached", "accepted"):
        assert getattr(predicted, column).tolist() == getattr(expected, column).tolist()


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_steps_are_those_of_a_real_run(made: Made, name: str, rule: str) -> None:
    verifier = RULES[rule][0]
    texts, drafter = made.texts(rule).texts, made.drafter(name, rule)
    scores = score(made.target, drafter, verifier, K, made.params(rule), texts)
    for k in (2, K):
        real = play(made.target, drafter, verifier, k, made.params(rule), PROMPTS)
        assert real.texts == texts, "the rule writes another text"
        for own, steps in zip(scores, real.steps, strict=True):
            assert_same(walk(own, k), steps, k)
        outcomes = [step for steps in real.steps for step in steps]
        assert any(step.num_accepted for step in outcomes), "a test of nothing"
        assert any(step.num_accepted < step.num_drafted for step in outcomes) or "itself" in name


@pytest.mark.parametrize("name", ["ngram", "draft_model", "eagle3"])
def test_one_hot_drafts_leave_nothing_to_chance_given_the_text(made: Made, name: str) -> None:
    """Under rejection sampling each run has a text of its own, which tells what it accepted."""
    drafter, params = made.drafter(name, "sampled_match"), made.params("sampled_match")
    real = play(made.target, drafter, "rejection", K, params, PROMPTS)
    assert real.texts != made.texts("sampled_match").texts
    scores = score(made.target, drafter, "rejection", K, params, real.texts)
    for own, steps in zip(scores, real.steps, strict=True):
        assert_same(walk(own, K), steps, K)


def test_texts_end_in_every_way(made: Made) -> None:
    """The cases above hold texts that EOS, max_tokens and max_model_len ended."""
    played = [text for rule in ("greedy", "sampled_match") for text in made.texts(rule).texts]
    lengths = {len(text.token_ids) - text.prompt_len for text in played}
    assert any(text.token_ids[-1] == EOS for text in played)
    assert 26 in lengths
    assert any(len(text.token_ids) == MAX_MODEL_LEN for text in played)


def test_how_many_starts_a_call_scores_changes_nothing(made: Made) -> None:
    texts, drafter = made.texts("greedy").texts, made.drafter("eagle3", "greedy")
    few, many = (
        score(made.target, drafter, "greedy", K, made.params("greedy"), texts, num_rows=n)
        for n in (2, 200)
    )
    for a, b in zip(few, many, strict=True):
        assert a.num_drafts.tolist() == b.num_drafts.tolist()
        assert a.accept.tolist() == b.accept.tolist()


@pytest.mark.parametrize("rule", ["greedy", "sampled_match"])
def test_a_drafter_that_cannot_score_is_played(made: Made, rule: str) -> None:
    verifier = RULES[rule][0]
    texts = made.texts(rule).texts
    # Without the outputs of other requests, the order in which they run does not matter.
    drafter = {"name": "suffix", "use_global": False}
    config = EngineConfig(device="cpu", max_model_len=MAX_MODEL_LEN, block_size=4)
    setup = PlaySetup(made.target, load_plugin("verifier", verifier, ""), config, made.params(rule))
    outcomes, method = play_drafter(setup, load_plugin("drafter", drafter, ""), K, texts)
    real = play(made.target, drafter, verifier, K, made.params(rule), PROMPTS)
    assert method == PLAYED
    for own, steps in zip(outcomes, real.steps, strict=True):
        assert_same(own, steps, K)


def test_a_played_drafter_follows_a_text_that_the_target_would_not_write(made: Made) -> None:
    texts = made.texts("sampled_match").texts
    config = EngineConfig(device="cpu", max_model_len=MAX_MODEL_LEN, block_size=4)
    params = made.params("greedy")
    setup = PlaySetup(made.target, load_plugin("verifier", "greedy", ""), config, params)
    outcomes, _ = play_drafter(setup, load_plugin("drafter", "ngram", ""), K, texts)
    scores = score(made.target, "ngram", "greedy", K, params, texts)
    for own, scored in zip(outcomes, scores, strict=True):
        assert own.steps == walk(scored, K).steps


def test_drawn_drafts_that_cannot_score_are_run(made: Made) -> None:
    child = made.drafter("layer_skip", "coupled")
    drafter = {"name": "mixed", "policy": "best", "drafters": [{"name": "ngram"}, child]}
    config = EngineConfig(device="cpu", max_model_len=MAX_MODEL_LEN, block_size=4)
    params = made.params("coupled")
    setup = PlaySetup(made.target, load_plugin("verifier", "rejection", ""), config, params)
    texts = made.texts("coupled").texts
    outcomes, method = play_drafter(setup, load_plugin("drafter", drafter, ""), 2, texts[:2])
    assert method == RUN
    assert all(outcome.num_steps > 0 for outcome in outcomes)
