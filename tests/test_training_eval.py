"""The stage `eval`: accepted length as it is defined, over the requests that the engine ran."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from experiments.training.config import EvalConfig
from experiments.training.eval import (
    EvalPrompt,
    accepted_line,
    markdown,
    measure,
    read_prompts,
    run_eval,
    table_lines,
)
from experiments.training.stage import StageRun
from runner.loader import LoadedTarget, load_target, resolve_device, resolve_dtype
from specdec import metrics
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.trace import StepTrace
from specdec.types import RequestStats, SamplingParams
from tests.training_cases import NUM_USED, save_dataset, save_target

K = 3
NGRAM = {"name": "ngram", "min_n": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Save a target and a dataset."""
    folder = tmp_path_factory.mktemp("eval")
    return {"target": save_target(folder / "target"), "data": save_dataset(folder / "data")}


@pytest.fixture(scope="module")
def target(folders: dict[str, str]) -> LoadedTarget:
    """Load the target."""
    device = resolve_device("cpu")
    return load_target(folders["target"], resolve_dtype("float32", device), device)


def config(folders: dict[str, str], **changes: Any) -> EvalConfig:
    values: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "max_tokens": 24, "max_model_len": 128,
        "num_speculative_tokens": [K], "max_num_reqs": 4,
    }  # fmt: skip
    return EvalConfig(**{**folders, **values, **changes})


def some_prompts(num: int = 5) -> list[EvalPrompt]:
    lists = [[(7 * i + j * 3) % NUM_USED for j in range(6 + i)] for i in range(num)]
    return [EvalPrompt(ids, "a" if i < 2 else "b", f"c{i % 2}") for i, ids in enumerate(lists)]


def test_lengths_are_those_of_the_traces(folders: dict[str, str], target: LoadedTarget) -> None:
    own, prompts = config(folders, temperatures=[0.0, 1.0]), some_prompts()
    found = measure(target, NGRAM, prompts, own, K)
    for temperature, stats in found.items():
        trace = StepTrace()
        engine = Engine(
            target, NGRAM, "rejection", K, device="cpu", dtype="float32", trace=trace,
            max_model_len=64,
        )  # fmt: skip
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_tokens=24, seed=i)
            engine.add_request(str(i), prompt.token_ids, params)
        while engine.has_requests:
            engine.step()
        expected = metrics.accepted_length(trace.requests())
        line = accepted_line(stats)
        assert line["accepted_length"] == pytest.approx(expected.value)
        assert line["accepted_length_low"] == pytest.approx(expected.low)
        assert line["accepted_length_high"] == pytest.approx(expected.high)
    assert found[0.0] != found[1.0]


def test_a_table_pools_requests_and_not_their_means() -> None:
    prompts = some_prompts(4)
    stats = [
        RequestStats(n, n * (i + 1), 2 * n, n, [n, n], [n, 0]) for i, n in enumerate([1, 9, 2, 4])
    ]
    lines = table_lines(prompts, {0.0: stats})
    by_name = {(line["file"], line["category"]): line for line in lines}
    assert by_name["all", "all"]["accepted_length"] == pytest.approx((1 + 18 + 6 + 16) / 16)
    assert by_name["a", "all"]["accepted_length"] == pytest.approx(19 / 10)
    assert by_name["b", "c1"]["accepted_length"] == pytest.approx(4.0)
    assert by_name["b", "c1"]["accepted_length_low"] is None  # one prompt has no interval
    assert by_name["all", "all"]["acceptance_by_position"] == [1.0, 0.0]
    text = markdown([{"drafter": "x", "k": k, **line} for k in (1, 2) for line in lines])
    assert "| K=1 | K=2 |" in text
    assert text.count("\n") == 2 + len(lines)


def test_the_stage_writes_what_it_measured(folders: dict[str, str], tmp_path: Path) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    run = StageRun(tmp_path, "test", lambda values, step: logged.append((dict(values), step)))
    summary = run_eval(
        config(folders, drafters=["none", NGRAM], num_speculative_tokens=[1, K]), run
    )
    record = json.loads((tmp_path / "eval.json").read_text())
    assert {(line["drafter"], line["k"]) for line in record["lines"]} == {
        ("none", 1), ("none", K), ("ngram", 1), ("ngram", K),
    }  # fmt: skip
    assert summary["accept/length_none_k1_t0"] == 1.0
    assert summary["accept/length_ngram_k3_t0"] > 1.0
    assert logged == [(summary, 0)]
    assert record["config"]["max_tokens"] == 24
    assert "| ngram | 0.0 | all | all |" in (tmp_path / "eval.md").read_text()


def test_prompts_are_first_turns_of_files(
    folders: dict[str, str], target: LoadedTarget, tmp_path: Path, caplog: Any
) -> None:
    questions = [
        {"question_id": 1, "category": "x", "turns": ["short one", "later"]},
        {"question_id": 2, "category": "y", "turns": ["long " * 40]},
    ]
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    with caplog.at_level(logging.WARNING):
        (prompt,) = read_prompts(config(folders, files=[str(path)]), target)
    assert target.tokenizer is not None
    assert "user:short one" in target.tokenizer.decode(prompt.token_ids)
    assert (prompt.file, prompt.category) == ("some", "x")
    assert "left out" in caplog.text


def test_held_out_prompts_end_where_their_answers_begin(
    folders: dict[str, str], target: LoadedTarget
) -> None:
    prompts = read_prompts(config(folders, max_prompts=4), target)
    assert len(prompts) == 4
    assert all(2 <= len(prompt.token_ids) < 6 for prompt in prompts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "needs fitted="),
        ({"drafters": ["none"], "data": ""}, "files=.*or data="),
        ({"fitted": "nowhere"}, "holds no run"),
        ({"drafters": ["none"], "max_model_len": 25}, "no prompt fits"),
    ],
)
def test_what_is_missing_is_told(
    folders: dict[str, str], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_eval(config(folders, **changes), StageRun(tmp_path, "test"))


@pytest.mark.parametrize(
    "changes", [{"num_speculative_tokens": []}, {"temperatures": [-1.0]}, {"max_tokens": 0}]
)
def test_values_out_of_range_are_told(folders: dict[str, str], changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not allowed"):
        dataclasses.replace(config(folders), **changes)
