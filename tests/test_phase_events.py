"""The split of a step's time inside one launch: a variant, labelled, that changes no text.

A CPU has no graphs: the captured function is called, and marks host times where a graph would
record events. tests/test_gpu_phase_events.py has the events.
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.schemas import load_config, register_schemas
from runner.loader import LoadedTarget
from runner.step_timer import PHASES, StepTimer
from specdec import LLM, Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.trace import StepTrace
from tests.models import random_prompts, tiny_model, tiny_target
from tests.run_cases import run_tiny, save_tiny_target

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
    assert drafter == "none" or typical["draft_ms"] > 0.01
    assert typical["target_ms"] > typical["inputs_ms"]
    assert typical["launch_ms"] < typical[columns].sum()
    total = after[[*columns, "launch_ms", "host_ms"]].sum(axis=1)
    assert total.to_numpy() == pytest.approx(after["step_ms"].to_numpy())


def test_each_launch_is_marked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two durations of the real clock may be the same.
    clock = itertools.accumulate(itertools.count(1))
    monkeypatch.setattr("runner.step_timer.time.perf_counter", lambda: next(clock) / 1e3)
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


def test_an_arm_with_events_stands_beside_the_one_without(tmp_path: Path) -> None:
    tiny = save_tiny_target(tmp_path / "tiny")
    folder = run_tiny(
        tiny,
        tmp_path,
        "engine.graph_scope=step",
        "compare=[{drafter: ngram, phase_events: true}]",
        "equality.max_tokens=4",
    ).folder
    entries = json.loads((folder / "arms.json").read_text())
    flags = {entry["arm"]: entry["phase_events"] for entry in entries}
    assert flags == {"none": False, "ngram K=4": False, "ngram K=4 events": True}
    requests: Any = pd.read_parquet(folder / "requests.parquet")
    prompts = requests.loc[~requests["is_verify"], ["arm", "step"]].apply(tuple, axis=1)
    steps: Any = pd.read_parquet(folder / "steps.parquet")
    launches = steps[~steps[["arm", "step"]].apply(tuple, axis=1).isin(set(prompts))]
    assert set(launches.loc[launches["target_ms"].notna(), "arm"]) == {"ngram K=4 events"}
    accepted = requests.groupby("arm")["num_accepted"].sum()
    assert accepted["ngram K=4 events"] == accepted["ngram K=4"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Phase events change the time of a decode step of ngram K=4 events by" in page


def test_a_wrong_flag_is_refused() -> None:
    register_schemas()
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        cfg = compose("run", overrides=["compare=[{drafter: ngram, phase_events: 2}]"])
    with pytest.raises(ConfigError, match=r"compare\[0\]\.phase_events=2 .* true or false"):
        load_config(cfg)


def test_steps_in_flight_are_refused_or_brought_down(target: LoadedTarget) -> None:
    with pytest.raises(ConfigError, match=r"max_steps_in_flight=2 .* phase_events"):
        Engine(target, "ngram", "greedy", K, phase_events=True, max_steps_in_flight=2)
    engine = Engine(target, "ngram", "greedy", K, phase_events=True, max_model_len=64)
    assert engine.max_steps_in_flight == 1
    assert dataclasses.asdict(engine.config)["phase_events"] is True
