"""Empty steps inside graphs, and two replicas on two GPUs; run by `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch

from specdec import Engine, SamplingParams
from specdec.parallel.launch import launch
from specdec.parallel.replicas import DataParallelEngine
from tests.models import random_prompts, tiny_model, tiny_target
from tests.parallel_cases import K, many_schedules, read

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scope", ["step", "draft", "none"])
def test_empty_steps_alternate_with_work_on_a_gpu(scope: str) -> None:
    target = tiny_target(tiny_model().cuda())
    options = {"max_model_len": 96, "max_num_reqs": 3, "graph_scope": scope}
    engine = DataParallelEngine(target, "ngram", "greedy", K, exchange_every=4, **options)
    plain = Engine(target, "ngram", "greedy", K, **options)
    prompts = random_prompts((4, 9, 2))
    for turn in range(3):
        texts = []
        for own in (engine, plain):
            for i, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0, max_tokens=5 + 4 * i + turn)
                own.add_request(str(i), prompt, params)
            found = {}
            while own.has_requests:
                for increment in own.step():
                    if increment.output is not None:
                        found[increment.request_id] = increment.output.token_ids
            texts.append(found)
        assert texts[0] == texts[1]
        for _ in range(turn):
            engine.engine.run_empty_step()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a rank takes each")
def test_schedules_end_on_two_gpus(tmp_path: Path) -> None:
    launch(many_schedules, 2, (str(tmp_path), 30, 400, "cuda"))
    ranks = read(tmp_path)
    assert ranks[0]["differences"] == []
    assert ranks[0]["told"] == ranks[1]["told"]
