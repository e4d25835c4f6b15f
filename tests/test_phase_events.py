"""The split of a step's time inside one launch: a variant, labelled, that changes no text.

A CPU has no graphs: the captured function is called, and marks host times where a graph would
record events. tests/test_gpu_phase_events.py has the events.
"""

import dataclasses
from typing import Any

import pytest

from runner.loader import LoadedTarget
from runner.step_timer import PHASES, StepTimer
from specdec import LLM, Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.trace import StepTrace
from tests.models import random_prompts, tiny_model, tiny_target

K = 3
PROMPTS = random_prompts((5, 17, 9))
PARAMS = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(tiny_model("llama"))


def play(target: LoadedTarget, drafter: Any, **options: Any) -> tuple[list[list[int]], StepTrace]:
    trace = StepTrace()
    sizes: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_reqs": 4}
    k = 0 if drafter == "none" else K
    llm = LLM(target, drafter, "greedy", k, trace, **{"graph_scope": "step", **sizes, **options})
    return [out.token_ids for out in llm.generate(PROMPTS, PARAMS)], trace


def decode_steps(trace: StepTrace) -> Any:
    """Return the steps without prompt tokens: each is one launch."""
    rows: Any = trace.requests()
    prompts = rows.loc[~rows["is_verify"], "step"]
    steps = trace.steps()
    return steps[~steps["step"].isin(prompts)]


@pytest.mark.parametrize("drafter", ["none", "ngram", {"name": "draft_model", "model": "target"}])
def test_events_split_a_launch_and_change_no_text(target: LoadedTarget, drafter: Any) -> None:
    texts, plain = play(target, drafter)
    same, split = play(target, drafter, phase_events=True)
    assert same == texts
    assert plain.requests().equals(split.requests())
    columns = [f"{phase}_ms" for phase in PHASES]
    before, after = decode_steps(plain), decode_steps(split)
    assert len(after) > 3
    assert before[columns].isna().all(axis=None)
    assert (before["launch_ms"] > 0).all()
    assert not after[columns].isna().any(axis=None)
    assert (after[["inputs_ms", "target_ms", "verify_ms"]] > 0).all(axis=None)
    # Medians: the machine may be busy with something else in some step.
    typical = after.median()
    assert (typical["draft_ms"] > 0.01) == (drafter != "none")
    assert typical["target_ms"] > typical["inputs_ms"]
    assert typical["launch_ms"] < typical[columns].sum()
    total = after[[*columns, "launch_ms", "host_ms"]].sum(axis=1)
    assert total.to_numpy() == pytest.approx(after["step_ms"].to_numpy())


def test_each_launch_is_marked_anew() -> None:
    timer = StepTimer(on_gpu=False, in_graph=True)
    found = []
    for _ in range(3):
        timer.restart()
        timer.end("target")
        timer.end("draft")
        found.append(timer.phases_ms())
    assert len({phases["target"] for phases in found}) == 3
    outer = StepTimer(on_gpu=False)
    outer.end("step")
    outer.inside = timer
    assert outer.phases_ms() | {"inputs": 0.0, "verify": 0.0} == {
        **found[-1],
        "inputs": 0.0,
        "verify": 0.0,
    }


def test_a_timer_in_a_graph_starts_empty() -> None:
    timer = StepTimer(on_gpu=False, in_graph=True)
    timer.restart()
    timer.end("inputs, target, verify")
    assert timer.total_ms() >= 0
    assert all(ms != ms for ms in timer.phases_ms().values())  # NaN


def test_steps_in_flight_are_refused_or_brought_down(target: LoadedTarget) -> None:
    with pytest.raises(ConfigError, match=r"max_steps_in_flight=2 .* phase_events"):
        Engine(target, "ngram", "greedy", K, phase_events=True, max_steps_in_flight=2)
    engine = Engine(target, "ngram", "greedy", K, phase_events=True, max_model_len=64)
    assert engine.max_steps_in_flight == 1
    assert dataclasses.asdict(engine.config)["phase_events"] is True
