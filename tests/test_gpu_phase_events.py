"""Timing events captured in a step's graph: known phases, inside the time of the launch.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy
import math
from collections.abc import Sequence

import pytest
import torch

from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from runner.step_timer import PHASES
from specdec import LLM, SamplingParams
from specdec.trace import STEP_COLUMNS, StepTrace
from tests.models import random_prompts, tiny_model

pytestmark = pytest.mark.gpu

SIZES = {"device": "cuda", "max_model_len": 200, "graph_num_reqs": [1, 8]}
PROMPTS = random_prompts((5, 17, 40, 3, 9, 12, 33, 21))
PARAMS = SamplingParams(temperature=0, max_tokens=40)
DRAFTER = {"name": "draft_model", "model": "target"}


class ListTrace(StepTrace):
    """Keeps the steps as they come: a GPU host may lack pandas."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    def add_step(self, values: Sequence[float]) -> None:
        self.lines.append(dict(zip(STEP_COLUMNS, values, strict=True)))


def cuda_target(model: torch.nn.Module) -> LoadedTarget:
    return LoadedTarget("tiny", HFModel(copy.deepcopy(model).cuda()), None)


def test_captured_events_split_the_launch_and_change_no_text() -> None:
    target = cuda_target(tiny_model("llama"))
    found = {}
    for events in (False, True):
        trace = ListTrace()
        llm = LLM(target, DRAFTER, "greedy", 4, trace, phase_events=events, **SIZES)
        texts = [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]
        launches = llm.engine.runner.graphs.launches["step"]
        split = [
            line
            for line in trace.lines
            if not any(math.isnan(line[f"{phase}_ms"]) for phase in PHASES)
        ]
        found[events] = texts, launches, split, trace.lines
    assert found[True][0] == found[False][0]
    texts, launches, split, lines = found[True]
    assert launches > 5
    assert len(split) == len(lines)  # in prompt steps, which run eager, they are known anyway
    # All prompts fit the first step; every other is one launch, whose inside nobody timed.
    assert [line["step"] for line in found[False][2]] == [0]
    for line in split:
        phases = [line[f"{phase}_ms"] for phase in PHASES]
        assert min(phases[1:]) > 0, line
        # The marks around the launch hold those inside it.
        assert sum(phases) + line["launch_ms"] <= line["step_ms"] * 1.05, line
    # Replays are timed anew: no two hundred microseconds are the same to the last digit.
    assert len({line["target_ms"] for line in split}) > len(split) // 2
