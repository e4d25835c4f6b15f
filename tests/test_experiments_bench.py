"""The benches' options, tables and records; the timing itself is run by `make bench`."""

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console

from experiments import bench, bench_attention, bench_generate, bench_sampler, bench_step
from experiments.bench import BENCHES, Bench, bench_questions, load_bench, plain, register_benches
from experiments.bench_drafters import DRAFTERS, bench_drafters
from experiments.bench_generate import GenerateBenchConfig, summarise_generate_bench
from experiments.bench_step import StepBenchConfig
from experiments.bench_tables import (
    attention_tables,
    generate_tables,
    line_tables,
    step_tables,
)
from experiments.cli import CONF_DIR, VERSION_BASE
from experiments.provenance import shown_command, shown_path
from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from specdec import LLM, SamplingParams
from specdec.errors import CapacityError, ConfigError
from tests.models import byte_tokenizer, tiny_model, tiny_target


def bench_rows() -> pd.DataFrame:
    """Two prompts; the n-gram arm needs half the seconds of the others."""
    rows = []
    for question in ("a/1", "a/2"):
        for arm, wall_s, steps in (
            ("transformers", 2.0, None),
            ("none", 2.0, 9),
            ("ngram", 1.0, 5),
        ):
            rows.append(
                {
                    "arm": arm,
                    "category": "a",
                    "question_id": question,
                    "num_tokens": 10,
                    "wall_s": wall_s,
                    "num_steps": steps,
                    "num_verify_tokens": steps and 9,
                    "same_text": True,
                }
            )
    return pd.DataFrame(rows)


def test_factors_compare_summed_tokens_over_summed_seconds() -> None:
    summary = summarise_generate_bench(bench_rows(), num_resamples=50).set_index("arm")
    assert summary.loc["ngram", "tokens_per_s"] == 10.0
    assert summary.loc["ngram", "over_none"] == 2.0
    assert summary.loc["ngram", "over_none_low"] == 2.0
    assert summary.loc["ngram", "over_transformers_high"] == 2.0
    assert summary.loc["ngram", "accepted_length"] == 18 / 10
    assert pd.isna(summary.loc["transformers", "accepted_length"])
    assert summary.loc["none", "num_prompts"] == 2


def test_same_ids_of_two_files_stay_apart(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.jsonl"
        line = {"question_id": 1, "category": "", "turns": ["Name a colour."]}
        path.write_text(json.dumps(line) + "\n")
        files.append(str(path))
    questions = bench_questions(files, per_category=4)
    assert [q.question_id for q in questions] == ["one/1", "two/1"]
    assert [q.category for q in questions] == ["one", "two"]


def test_two_files_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="holds 2 files of the name 'question'"):
        bench_questions(["mt_bench/question.jsonl", "humaneval/question.jsonl"], per_category=4)


def test_an_interval_draws_every_prompt_of_an_arm() -> None:
    rows = bench_rows().assign(question_id="a/1")  # ids that two files share
    assert summarise_generate_bench(rows, num_resamples=50)["num_prompts"].tolist() == [2, 2, 2]


def test_no_file_takes_the_projects_questions() -> None:
    assert len(bench_questions([], per_category=2)) == 12


def test_count_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bench\.max_tokens=0"):
        GenerateBenchConfig(max_tokens=0)


def test_steps_that_no_request_can_hold_are_refused() -> None:
    assert StepBenchConfig().max_model_len == 2048
    assert StepBenchConfig(num_steps=300).max_model_len == 3792  # 128 + 730 * 5, in whole blocks
    with pytest.raises(ConfigError, match=r"bench\.num_steps=900.*of at most 8192"):
        StepBenchConfig(num_steps=900)
    with pytest.raises(ConfigError, match=r"bench\.prompt_len=8000"):
        StepBenchConfig(prompt_len=8000)


def test_questions_that_are_all_too_long_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tiny_model("llama", vocab_size=len(byte_tokenizer())), byte_tokenizer())
    monkeypatch.setattr(bench_generate, "load_target", lambda *_: target)
    config = GenerateBenchConfig(max_model_len=50, dtype="float32", device="cpu")
    with pytest.raises(CapacityError, match=r"none of the 12 questions fits .*max_model_len=50"):
        bench_generate.run_generate_bench(config, bench_questions([], per_category=2))


@pytest.mark.parametrize("module", [bench_attention, bench_sampler, bench_step])
def test_a_bench_without_hydra_ends_with_a_sentence_where_there_is_no_gpu(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", str(tmp_path / "out.json")])
    assert module.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("error: bench=")
    assert said.count("\n") == 1
    assert "GPU" in said


@pytest.mark.parametrize(
    ("options", "part"), [(["--shapes", "8c"], "'8c'"), (["--batches", "0"], ">= 1")]
)
def test_the_attention_bench_checks_its_command_line_as_its_configuration(
    options: list[str],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *options])
    assert bench_attention.main() == 1
    assert part in capsys.readouterr().err


def test_the_fixed_step_that_is_timed_is_prepared() -> None:
    with torch.inference_mode():
        batch, state, tables = bench_step.uniform_batch(torch.device("cpu"), num_reqs=4, k=2)
        bench_step.prepare_inputs(batch, state, 16, torch.zeros(1, dtype=torch.int32))
        tables.apply(0)
    assert sorted(batch.idx_mapping.tolist()) == [0, 1, 2, 3]
    assert batch.query_start_loc.tolist() == [0, 3, 6, 9, 12]
    assert (batch.slot_mapping >= 0).all()


def test_a_step_loop_is_timed_and_no_request_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("vocab_size", 64), ("hidden_size", 36), ("intermediate_size", 32)):
        monkeypatch.setitem(bench_step.TARGET_SHAPE, name, value)
    device = torch.device("cpu")
    model = HFModel(bench_step.random_model(1, torch.float32, device))
    target = LoadedTarget("tiny", model, None)
    config = StepBenchConfig(num_steps=3, prompt_len=8, num_speculative_tokens=2)
    line: dict[str, Any] = {"scope": "step", "num_reqs": 2, "steps_per_launch": 1}
    for steps in (1, 2):
        line["steps_per_launch"] = steps
        with bench_step._running(config, target, "ngram", line) as engine:
            assert bench_step._time_steps(engine, 3)["step_us"] > 0
            assert bench_step._host_parts(engine, 3)["launch"] > 0
            launches = {1: {"step": 6}, 2: {"step x 2": 4}}
            assert engine.runner.graphs.launches == launches[steps]
    with (
        pytest.raises(RuntimeError, match="of 2 requests some ended"),
        bench_step._running(config, target, "ngram", line) as engine,
    ):
        engine.discard("0")


def compose_bench(*overrides: str) -> tuple[Bench, Any]:
    register_benches()
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE):
        found, config, _ = load_bench(compose("bench", overrides=list(overrides)))
    return found, config


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_is_an_option_with_the_defaults_of_its_module(name: str) -> None:
    found, config = compose_bench(f"bench={name}")
    assert found is BENCHES[name]
    assert config == found.config_cls()
    assert (CONF_DIR / "bench" / f"{name}.yaml").is_file()


def test_no_bench_is_generate_and_values_reach_it() -> None:
    found, config = compose_bench("bench.arms=[ngram 3]", "files=[a.jsonl]")
    assert found is BENCHES["generate"]
    assert config == GenerateBenchConfig(arms=["ngram 3"])
    assert compose_bench("bench=step", "bench.num_reqs=[2,4]")[1].num_reqs == [2, 4]


def run_app(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, record: Path | None = None
) -> int:
    given = [*overrides, f"hydra.run.dir={folder}"] + ([f"record={record}"] if record else [])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["bench.py", *given])
    return bench.main()


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["bench=stp"], ["bench=stp", "'step'", "generate"]),
        (["bench.max_tokns=3"], ["bench.max_tokns", "'max_tokens'"]),
        (["bench.max_tokens=0"], ["bench.max_tokens=0", ">= 1"]),
        (["bench.arms=[ngram -1]"], ["bench.arms", "K >= 1"]),
        (["bench.arms=[{drafter:ngram}]"], ["bench.arms", "num_speculative_tokens"]),
        (["bench.arms=[ngram 2,ngram 2]"], ["an arm twice", "ngram K=2"]),
        (["bench.arms=x"], ["bench.arms='x'", "a list"]),
        (["+bench.foo=1"], ["bench.foo", "max_tokens"]),
        (["bench.name=stp"], ["'stp'", "'step'"]),
        (["bench.name=step"], ["bench.target", "num_reqs"]),
        (["bench=step", "bench.num_steps=many"], ["bench.num_steps='many'", "an integer"]),
        (["bench=step", "bench.num_steps=0"], ["bench.num_steps=0", ">= 1"]),
        (["bench=step", "files=[a.jsonl]"], ["files=['a.jsonl']", "bench=step"]),
        (["bench=attention"], ["bench=attention", "GPU"]),
        (["bench=attention", "bench.shapes=[8c]"], ["bench.shapes", "'8c'", "known: 8b, 135m"]),
        (["bench=attention", "bench.batches=[1,0]"], ["bench.batches=[1, 0]", ">= 1"]),
        (["bench=attention", "bench.query_lens=[600]"], ["bench.query_lens=[600]", "shortest"]),
        (["bench=attention", "bench.bound=9"], ["bench.bound=9", ">= 32768"]),
        (["bench=sampler"], ["bench=sampler", "GPU"]),
        (["bench=sampler", "bench.kernels=[gumble]"], ["bench.kernels", "'gumble'", "gumbel_t0"]),
        (["bench=sampler", "bench.dtypes=[half]"], ["bench.dtypes", "'half'", "bfloat16"]),
        (["bench=sampler", "bench.num_reqs=[0]"], ["bench.num_reqs=[0]", ">= 1"]),
        (["bench=host", "bench.batch_sizes=[]"], ["bench.batch_sizes=[]", ">= 1"]),
        (["files=[nowhere.jsonl]"], ["nowhere.jsonl", "no such file"]),
        (["bench=step"], ["bench=step", "GPU"]),
        (["bench=step", "bench.device=cpu"], ["bench=step", "GPU"]),
        (["bench=step", "bench.device=cuda"], ["device='cuda'", "no GPU"]),
        (["bench=step", "bench.dtype=auto"], ["bench=step", "GPU"]),
        (["bench=step", "bench.num_reqs=[0]"], ["bench.num_reqs=[0]", ">= 1"]),
    ],
    ids=lambda value: " ".join(value) if value and "=" in value[0] else "",
)
def test_a_mistake_is_one_sentence(
    overrides: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_app(monkeypatch, tmp_path, *overrides) == 1
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert said.startswith("error: ")
    for part in parts:
        assert part in said


def step_line(drafter: str, scope: str, num_reqs: int) -> dict[str, Any]:
    """A line as `experiments.bench_step` gives it."""
    graph = scope == "step"
    calls = {"cudaEventSynchronize": 1.0, "cudaEventRecord": 3.0}
    line = {
        "drafter": drafter,
        "scope": scope,
        "num_reqs": num_reqs,
        "step_us": 1234.4,
        "host_us": 321.0,
        "runtime_calls": calls | ({"cudaGraphLaunch": 1.0} if graph else {"cudaLaunchKernel": 9.5}),
        "kernel_launches": 1.0 if graph else 9.5,
        "graph_launches": float(graph),
        "num_nodes": 456.0,
        "pageable_copies": 0.0,
        "early_waits": 0.25,
        "profiled_gaps_inside_launch_us": 77.7 if graph else None,
        "device_us": 1111.0 if graph else None,
    }
    return line | ({"idle_share": 0.1} if graph else {})


def step_record() -> dict[str, Any]:
    lines = [
        step_line(drafter, scope, num_reqs)
        for drafter in ("none", "ngram", "draft_model")
        for scope in ("step", "draft", "none")
        for num_reqs in (1, 8, 64)
    ]
    kernels = {"num_reqs": 64, "prepare_inputs_us": 5.43, "staged_writes_launches": 1.0}
    return {"bench": "step", "kernels": kernels, "lines": lines}


def shown(tables: list[Any]) -> list[str]:
    console = Console(width=120, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 120
    assert not any("\u2026" in line for line in lines)  # nothing is cut
    return [" ".join(line.split()) for line in lines]


def test_step_tables_show_figures_and_runtime_calls() -> None:
    lines = shown(step_tables(step_record()))
    assert "ngram step 8 1234 321 1111 10.0% 1.0 1.0 1.0 456.0 78" in lines
    assert "ngram none 8 1234 321 - - 9.5 0.0 1.0 456.0 -" in lines
    assert f"cudaGraphLaunch{' 1.00' * 9}" in lines
    assert f"cudaEventRecord{' 3.00' * 9}" in lines
    assert not any(line.startswith("cudaLaunchKernel") for line in lines)  # not of scope step
    assert f"waits before the launch{' 0.25' * 9}" in lines
    assert "prepare_inputs_us 5.43" in lines


def test_step_tables_without_a_scope_step() -> None:
    record = step_record()
    record["lines"] = [line for line in record["lines"] if line["scope"] == "none"]
    assert not any("runtime calls" in line for line in shown(step_tables(record)))


def test_generate_table_has_a_dash_for_what_was_not_measured() -> None:
    summary = summarise_generate_bench(bench_rows(), num_resamples=50).to_dict("records")
    lines = shown(generate_tables(plain({"summary": summary})))
    assert "transformers 5.0 - 1.00 [1.00, 1.00] 1.00 [1.00, 1.00] 2/2" in lines
    assert "ngram 10.0 1.80 2.00 [2.00, 2.00] 2.00 [2.00, 2.00] 2/2" in lines


def test_attention_table_shows_rates_and_launches() -> None:
    line = {
        "shape": "8b",
        "batch": 8,
        "context": 4096,
        "query_len": 5,
        "bound": None,
        "dtype": "bfloat16",
        "us": 45.06,
        "read_bytes": 134217728,
        "gb_per_s": 2978.7,
        "of_ceiling": 0.745,
        "launch": {"block_m": 32, "block_n": 64, "max_splits": 16, "num_warps": 4, "num_stages": 3},
    }
    lines = shown(attention_tables({"read_ceiling_gb_per_s": 3998.2, "lines": [line]}))
    assert any("the device reads 3998 GB/s" in text for text in lines)
    figures = "8b 8 4096 5 45.1 134.2 2979 74.5%"
    assert any(text.startswith(f"{figures} block_m=32 block_n=64") for text in lines)


def test_lines_are_shown_as_they_are() -> None:
    lines: list[dict[str, Any]] = [
        {"num_reqs": 8, "kind": "decode", "us": 12.345, "split": {"read": True, "plan": None}},
        {"num_reqs": 64, "kind": "decode", "us": 12345.6, "ratio": 0.91},
    ]
    text = shown(line_tables({"bench": "host", "lines": lines}))
    assert "kind num reqs us split read split plan ratio" in text
    assert "decode 8 12.3 yes - -" in text
    assert "decode 64 12346 - - 0.910" in text


def test_a_record_is_json_without_nan() -> None:
    value = {"a": float("nan"), "b": [np.float32(0.5), np.int64(3)], "c": ("x", None, np.inf)}
    assert plain(value) == {"a": None, "b": [0.5, 3], "c": ["x", None, None]}
    assert plain({1: np.array([1.0, np.nan])}) == {"1": [1.0, None]}


def test_the_app_writes_the_record_and_prints_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: StepBenchConfig, files: list[str], folder: Path) -> dict[str, Any]:
        return {"config": dataclasses.asdict(config), **step_record()}

    monkeypatch.setitem(BENCHES, "step", dataclasses.replace(BENCHES["step"], run=run))
    record = tmp_path / "records" / "step.json"
    assert run_app(monkeypatch, tmp_path, "bench=step", record=record) == 0
    written = json.loads(record.read_text())
    assert written == json.loads((tmp_path / "bench.json").read_text())
    assert list(written) == ["bench", "provenance", "config", "kernels", "lines"]
    assert written["bench"] == "step"
    assert written["provenance"]["dtype"] == "bfloat16"
    assert written["provenance"]["duration_s"] is not None
    assert written["lines"] == step_record()["lines"]
    out = capsys.readouterr().out
    assert "cudaGraphLaunch" in out
    assert str(record) in out
    command = written["provenance"]["command"]
    assert command == "python -m experiments.bench bench=step record=step.json"


def test_a_record_names_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: GenerateBenchConfig, questions: list[Any]) -> pd.DataFrame:
        assert config.target == str(target)
        return bench_rows()

    monkeypatch.setattr(bench, "run_generate_bench", run)
    target, questions = tmp_path / "a model", tmp_path / "own.jsonl"
    questions.write_text('{"question_id": 1, "category": "", "turns": ["Name a colour."]}\n')
    options = [f"bench.target='{target}'", f"files=[{questions}]"]
    assert run_app(monkeypatch, tmp_path / "out", *options, record=tmp_path / "a.json") == 0
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["config"]["target"] == "a model"
    assert str(tmp_path) not in json.dumps(written)
    assert "files=[own.jsonl]" in written["provenance"]["command"]


def test_paths_outside_the_current_folder_lose_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path("an/id") == "an/id"
    assert shown_path(f"{tmp_path}/here/sub/x.json") == "sub/x.json"
    assert [shown_path(p) for p in ("../x.json", "/a/b/x", "~/x/", "..x")] == [
        "x.json",
        "x",
        "x",
        "..x",
    ]
    arguments = [
        "--out",
        "../up/x.json",
        "hydra.run.dir=/a/b",
        "files=[/a/b,c/d]",
        "u=s://h/x",
        "~k",
    ]
    said = "python -m m --out x.json hydra.run.dir=b 'files=[b,c/d]' u=s://h/x '~k'"
    assert shown_command("m", arguments) == said


def test_an_interrupted_bench_promises_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(BENCHES, "host", dataclasses.replace(BENCHES["host"], run=run))
    assert run_app(monkeypatch, tmp_path, "bench=host") == 130
    assert capsys.readouterr().err == "interrupted; a bench records nothing before its end\n"


def test_the_host_bench_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["bench.batch_sizes=[2]", "bench.num_blocks=1", "bench.steps_a_block=2"]
    assert run_app(monkeypatch, tmp_path, "bench=host", *options) == 0
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["lines"]
    assert all(line["step_us"] > 0 for line in written["lines"])
    assert "step us" in capsys.readouterr().out


def test_the_trace_bench_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["bench.num_reqs=[1,3]", "bench.num_pairs=2", "bench.steps_a_block=2"]
    options += ["bench.device=cpu"]
    assert run_app(monkeypatch, tmp_path, "bench=trace", *options) == 0
    lines = json.loads((tmp_path / "bench.json").read_text())["lines"]
    cases = [(load, num_reqs) for load in ("stub", "model") for num_reqs in (1, 3)]
    assert [(line["load"], line["num_reqs"]) for line in lines] == cases
    assert all(line["on_us"] > 0 and line["off_us"] > 0 for line in lines)
    assert "cost share" in capsys.readouterr().out


def test_drafters_of_the_step_bench_fit_its_target(tmp_path: Path) -> None:
    target = tiny_target(tiny_model("llama", num_hidden_layers=6))
    small = tiny_model("llama", seed=1)
    drafters = bench_drafters(target.model, tmp_path, 3, small.save_pretrained)
    assert tuple(drafters) == DRAFTERS
    for name, drafter in drafters.items():
        llm = LLM(target, drafter, num_speculative_tokens=3, max_model_len=32, num_kv_blocks=8)
        params = SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True)
        stats = llm.generate([[3, 1, 4, 1, 5]], params)[0].stats
        assert (stats.num_drafted > 0) == (name not in ("none", "suffix", "ngram")), name
