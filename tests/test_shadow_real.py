"""On the real target, predictions equal real runs, verification by verification."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.arms import choose_questions, play
from experiments.schemas import PromptsConfig
from experiments.shadow_texts import record_turns, text_of
from experiments.shadow_walk import StepOutcome, walk
from experiments.training.config import FitConfig
from experiments.training.frozen_target import FrozenTarget
from experiments.training.trainee import method_class
from runner.loader import LoadedTarget, load_target
from specdec import Engine, SamplingParams
from specdec.trace import StepTrace
from tests.shadow_cases import score

pytestmark = pytest.mark.slow

K = 4
MAX_TOKENS = 32
MAX_MODEL_LEN = 512
RULES = {"greedy": 0.0, "sampled_match": 0.8}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target("smollm2-135m-instruct", torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def drafters(target: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return drafters that start as the target's own layers, untrained."""
    found: dict[str, Any] = {"ngram": {"name": "ngram"}}
    for method in ("draft_model", "eagle3", "medusa"):
        folder: Path = tmp_path_factory.mktemp(method)
        config = FitConfig(method=method, unroll=K, data="none", copied_layers=[0, 1, -2, -1])
        trainee = method_class(method)(config, FrozenTarget(target), None)
        trainee.save(folder, trainee.state_dict(), target.name)
        found[method] = trainee.drafter(folder)
    return found


def engine_of(target: LoadedTarget, drafter: Any, rule: str, k: int) -> Engine:
    trace = StepTrace()
    return Engine(
        target, drafter, rule, k, trace=trace, device="cpu", max_num_reqs=1,
        max_model_len=MAX_MODEL_LEN,
    )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_a_real_run(
    target: LoadedTarget, drafters: dict[str, Any], rule: str
) -> None:
    params = SamplingParams(temperature=RULES[rule], max_tokens=MAX_TOKENS, seed=11)
    questions = choose_questions(PromptsConfig(path=None, limit=2))
    turns = record_turns(engine_of(target, "none", rule, 0), questions, 1, lambda name: params)
    texts = [text_of(turn, MAX_TOKENS, MAX_MODEL_LEN) for turn in turns]
    lengths, seconds = {}, {}
    for name, drafter in drafters.items():
        started = time.perf_counter()
        scores = score(target, drafter, rule, K, params, texts, 64, MAX_MODEL_LEN)
        seconds[f"{name} scored"] = round(time.perf_counter() - started, 2)
        engine = engine_of(target, drafter, rule, K)
        started = time.perf_counter()
        played = play(engine, questions, lambda name: params).turns
        seconds[f"{name} run"] = round(time.perf_counter() - started, 2)
        assert engine.trace is not None
        rows = engine.trace.requests()
        rows = rows[rows["is_verify"].astype(bool)]
        answers = {turn.request_id: turn.token_ids for turn in played}
        steps = 0
        for text, own in zip(texts, scores, strict=True):
            assert answers[text.request_id] == text.token_ids[text.prompt_len :]
            mine = rows[rows["request_id"] == text.request_id]
            columns = [mine[column].tolist() for column in StepOutcome._fields]
            real = [StepOutcome(*values) for values in zip(*columns, strict=True)]
            assert walk(own, K).steps == real, (name, text.request_id)
            steps += len(real)
        lengths[name] = round(sum(text.num_starts for text in texts) / steps, 3)
    print(rule, lengths, seconds)  # shown by -s: what scoring costs beside running
    assert max(lengths.values()) > 1.0
