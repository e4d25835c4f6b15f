"""Every sampling parameter inside the captured step: the texts of an oracle that decodes by hand.

Run on a GPU machine with `pytest -m gpu`.
"""

import copy
from typing import Any

import pytest
import torch

from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from specdec import LLM
from tests.parameter_cases import EOS, MAX_LEN, V, model, requests
from tests.parameter_oracle import letter_tokenizer
from tests.test_parameters_plugin import PARAMS, PROMPTS, decode

pytestmark = pytest.mark.gpu

DRAFTERS: dict[str, Any] = {
    "none": "none",
    "ngram": {"name": "ngram", "min_n": 1, "max_n": 2},
    "target": {"name": "draft_model", "model": "target"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "step": {"graph_scope": "step"},
    "none": {"graph_scope": "none"},
    "pinned": {"graph_scope": "step", "token_table": "pinned"},
    "preempted": {"graph_scope": "step", "num_kv_blocks": 14, "block_size": 6},
}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    moved: Any = copy.deepcopy(model()).cuda()
    return LoadedTarget("tiny", HFModel(moved), letter_tokenizer(V, EOS))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_of_unlike_requests_are_the_oracles(
    target: LoadedTarget, drafter: str, options: str
) -> None:
    sizes = {"max_model_len": MAX_LEN, "max_num_reqs": 20, **OPTIONS[options]}
    llm = LLM(target, DRAFTERS[drafter], "sampled_match", 4, device="cuda", **sizes)
    prompts, params, texts = requests("mixed")
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == texts
    if options == "preempted":
        assert sum(output.stats.num_preemptions for output in outputs) > 0
    if options == "step":
        launches = llm.engine.runner.graphs.launches
        assert launches["step"] > 0


@pytest.mark.parametrize("scope", ["step", "none"])
def test_plugin_works_inside_the_captured_step(target: LoadedTarget, scope: str) -> None:
    llm = LLM(
        target,
        DRAFTERS["target"],
        "sampled_match",
        3,
        device="cuda",
        max_model_len=80,
        graph_scope=scope,
        logits_processors=[{"name": "tests.toy_processors:NoEcho", "strength": 6.0}],
    )
    outputs = llm.generate(PROMPTS, PARAMS)
    expected = [decode(p, q, 6.0) for p, q in zip(PROMPTS, PARAMS, strict=True)]
    for output, text in zip(outputs, expected, strict=True):
        end = text.index(EOS) + 1 if EOS in text else len(text)
        assert output.token_ids == text[:end]
    torch.cuda.synchronize()
