"""The run app end to end on a tiny random model: folder, arms, turns, batches, exit codes."""

import gc
import getpass
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerFast

import experiments.run
import experiments.run_folder
from experiments.arms import Arm, Played, encode, play
from experiments.run import RunResult
from experiments.run_folder import RunFolder
from specdec.errors import CapacityError
from specdec.trace import REQUEST_COLUMNS, STEP_COLUMNS
from tests.run_cases import run_tiny, save_tiny_target

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunResult]:
    """Return a function that runs the app's inside with overrides, in the test's own folder.

    Drawing the report takes longer than the run: it is left out unless it is asked for.
    """

    def no_report(run: Any) -> RunResult:
        return RunResult(run.folder.path, run.folder.path / "report.html", [], None)

    def run_with(*overrides: str, report: bool = False) -> RunResult:
        if not report:
            monkeypatch.setattr(experiments.run, "_report", no_report)
        return run_tiny(tiny_folder, tmp_path, *overrides)

    return run_with


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_recorder_sees_the_timed_requests_alone(
    run: Callable[..., RunResult], tmp_path: Path, mixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ["drafter=record", f"drafter.folder={tmp_path / 'texts'}"]
    if mixed:
        own = f"{{name:record,folder:{tmp_path / 'texts'}}}"
        overrides = ["drafter=mixed", f"drafter.drafters=[{own},{{name:ngram}}]"]
    result = run(*overrides)
    gc.collect()  # what was not written is, where its drafter ends
    assert len(list((tmp_path / "texts").glob("*.safetensors"))) == 4  # turns
    verdict = json.loads((result.folder / "arms.json").read_text())[1]["verdict"]
    assert verdict["status"] == "not checked"
    assert verdict["note"].startswith("a recorder")
    assert not [r for r in caplog.records if "recorded texts already" in r.getMessage()]


def test_a_run_leaves_the_whole_folder(run: Callable[..., RunResult]) -> None:
    result = run(
        "compare=[{drafter:{name:ngram,max_n:2},num_speculative_tokens:7}]",
        "tracker=csv",
        report=True,
    )
    folder = result.folder
    names = ["none", "ngram K=4", "ngram K=7"]

    arms = json.loads((folder / "arms.json").read_text())
    assert [arm["arm"] for arm in arms] == names
    assert [arm["k"] for arm in arms] == [0, 4, 7]
    assert arms[2]["drafter_config"] == {"name": "ngram", "min_n": 1, "max_n": 2}
    assert arms[0]["verdict"]["status"] == "reference"
    for arm in arms[1:]:
        assert arm["verdict"]["status"] == "equal"
        assert arm["verdict"]["dtype"] == "float32"
        assert arm["verdict"]["num_compared"] == arm["verdict"]["num_equal"] == 2
    assert all(arm["kv_bytes"] > 0 and arm["num_skipped"] == 0 for arm in arms)
    assert {(arm["device"], arm["graph_scope"]) for arm in arms} == {("cpu", "none")}
    assert all(arm["capture"]["num_graphs"] == 0 for arm in arms)

    requests = pd.read_parquet(folder / "requests.parquet")
    assert set(requests.columns) == {*REQUEST_COLUMNS, "arm", "k", "turn"}
    by_arm = requests.groupby("arm")["request_id"].unique()
    assert all(sorted(by_arm[name]) == ["1/1", "3/1", "two/1", "two/2"] for name in names)
    assert set(requests.loc[requests["request_id"] == "two/2", "turn"]) == {2}
    assert set(requests["label"]) == {"short", "other"}
    steps = pd.read_parquet(folder / "steps.parquet")
    assert set(steps.columns) == {*STEP_COLUMNS, "arm"}
    assert not steps.isna().any(axis=None)
    assert set(steps["launch_ms"]) == {0.0}
    assert (steps["num_computed_tokens"] == steps["num_tokens"]).all()
    for arm in arms:  # every step is counted, and none of the warm-up
        num_steps = (steps["arm"] == arm["arm"]).sum()
        assert arm["launches"]["target eager: graph_scope is none"] == num_steps
    timings = pd.read_parquet(folder / "timings.parquet")
    assert list(timings.groupby("arm")["num_prompts"].sum()) == [3, 3, 3]
    assert list(timings["group"].unique()) == [0, 1, 2]

    texts = read_lines(folder / "texts.jsonl")
    assert len(texts) == len(names) * 4
    # One wall clock and one text a turn: the totals of three files agree.
    for name in names:
        own = [line for line in texts if line["arm"] == name]
        num_tokens = sum(len(line["token_ids"]) for line in own)
        assert num_tokens == timings.loc[timings["arm"] == name, "num_tokens"].sum()
        assert num_tokens == requests.loc[requests["arm"] == name, "num_committed"].sum()
    assert {line["finish_reason"] for line in texts} <= {"length", "stop"}
    assert len(read_lines(folder / "texts_compared.jsonl")) == len(names) * 3 - len(names)

    metrics = pd.read_csv(folder / "metrics.csv")
    assert {"accept/length/ngram K=4", "speed/tokens_per_s/none"} <= set(metrics["name"])
    assert {"speed/speedup/ngram K=7", "time/target_ms/none"} <= set(metrics["name"])
    assert {"positions/padding_share/none", "positions/idle_share/ngram K=4"} <= set(
        metrics["name"]
    )
    assert OmegaConf.load(folder / "config.yaml").num_speculative_tokens == 4
    assert result.report.is_file()
    assert result.tables
    assert not list(folder.glob(".*.part"))


def test_a_run_with_graphs_counts_launches_and_padding(
    run: Callable[..., RunResult], caplog: pytest.LogCaptureFixture
) -> None:
    options = ["batch_size=3", "engine.graph_scope=step", "engine.graph_num_reqs=[2]"]
    with caplog.at_level(logging.INFO, logger="experiments.run"):
        folder = run(*options, "equality.enabled=false").folder
    steps = pd.read_parquet(folder / "steps.parquet")
    for arm in json.loads((folder / "arms.json").read_text()):
        own = steps.loc[steps["arm"] == arm["arm"]]
        launches = arm["launches"]
        assert arm["graph_scope"] == "step"
        # The step plain and with everything, and where drafts are made the passes behind the first.
        assert arm["capture"]["num_graphs"] == (2 if arm["k"] == 0 else 3)
        eager = [n for what, n in launches.items() if what.startswith("target eager: ")]
        assert launches["step"] + sum(eager) == len(own)
        launched = own.loc[own["target_ms"].isna()]
        assert len(launched) == launches["step"] > 0
        assert (launched["launch_ms"] > 0).all()
        assert set(launched["num_computed_tokens"]) == {2 * (arm["k"] + 1)}
        assert f"steps of {arm['arm']}: " in caplog.text
        assert f"{launches['step']} x step" in caplog.text


def test_a_run_tells_how_many_drafts_its_steps_proposed(run: Callable[..., RunResult]) -> None:
    result = run(
        "draft_length=goodput",
        "draft_length.explore_steps=1",
        "compare=[{drafter: ngram, draft_length: {name: by_batch_size, table: {1: 2, 8: 0}}}]",
        "batch_size=3",
        report=True,
    )
    arms = json.loads((result.folder / "arms.json").read_text())
    names = ["none", "ngram K=4 goodput", "ngram K=4 by_batch_size"]
    assert [arm["arm"] for arm in arms] == names
    assert {arm["verdict"]["status"] for arm in arms[1:]} == {"equal"}
    steps = pd.read_parquet(result.folder / "steps.parquet")
    for arm in arms:
        own = steps.loc[steps["arm"] == arm["arm"]]
        policy = arm["draft_length"]
        found = own["num_drafted"].value_counts().to_dict()
        assert {int(k): n for k, n in policy["counts"].items() if n} == found
    assert arms[0]["draft_length"]["counts"].keys() == {"0"}
    assert arms[1]["draft_length_config"]["explore_steps"] == 1
    assert len(arms[1]["draft_length"]["counts"]) == 4
    assert set(steps.loc[steps["arm"] == names[2], "num_drafted"]) == {0, 2}
    page = result.report.read_text()
    assert "Drafts of each request" in page
    assert "up to 1 requests: 2" in page


def test_provenance_names_code_and_device_but_no_person_or_machine(
    run: Callable[..., RunResult],
) -> None:
    folder = run("drafter=none").folder
    provenance = json.loads((folder / "provenance.json").read_text())
    assert set(provenance) == {
        *("commit", "dirty", "command", "started", "duration_s", "versions", "device", "dtype"),
        *("threads", "seed", "platform", "linear_choices"),
    }
    assert set(provenance["versions"]) == {"python", "torch", "transformers", "triton", "specdec"}
    assert provenance["duration_s"] > 0
    words = json.dumps(provenance).replace('"', " ").replace(",", " ").split()
    assert platform.node() not in words
    assert getpass.getuser() not in words


def test_a_later_turn_holds_the_arms_own_answer(
    run: Callable[..., RunResult], tiny_folder: Path
) -> None:
    texts = read_lines(run().folder / "texts.jsonl")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_folder)
    for name in ("none", "ngram K=4"):
        own = {line["request_id"]: line for line in texts if line["arm"] == name}
        said = tokenizer.decode(own["two/2"]["prompt_token_ids"])
        assert said.startswith(f"<|user|>one two one two<|end|><|assistant|>{own['two/1']['text']}")
        assert said.endswith("<|user|>and again<|end|><|assistant|>")


def test_a_batch_runs_together_and_writes_the_same_texts(run: Callable[..., RunResult]) -> None:
    options = ["target.dtype=float32", "equality.enabled=false"]
    alone = read_lines(run(*options).folder / "texts.jsonl")
    result = run(*options, "batch_size=2")
    assert [line["token_ids"] for line in sorted(alone, key=_order)] == [
        line["token_ids"] for line in sorted(read_lines(result.folder / "texts.jsonl"), key=_order)
    ]
    timings = pd.read_parquet(result.folder / "timings.parquet")
    assert list(timings.loc[timings["arm"] == "none", "num_prompts"]) == [2, 1]
    steps = pd.read_parquet(result.folder / "steps.parquet")
    assert steps["num_reqs"].max() == 2
    arms = json.loads((result.folder / "arms.json").read_text())
    assert [arm["verdict"]["status"] for arm in arms] == ["reference", "not checked"]


def test_a_group_of_several_categories_is_mixed(run: Callable[..., RunResult]) -> None:
    folder = run("batch_size=3", "equality.enabled=false").folder
    assert set(pd.read_parquet(folder / "timings.parquet")["category"]) == {None}


def _order(line: dict[str, Any]) -> tuple[str, str]:
    return line["arm"], line["request_id"]


@pytest.mark.parametrize(
    ("verifier", "status"),
    [("sampled_match", "equal"), ("rejection", "lossless in distribution")],
)
def test_above_temperature_zero_the_verdict_follows_the_rule(
    verifier: str, status: str, run: Callable[..., RunResult]
) -> None:
    folder = run(f"verifier={verifier}", "sampling=temp08", "sampling.max_tokens=12").folder
    arms = json.loads((folder / "arms.json").read_text())
    assert arms[1]["verdict"]["status"] == status
    # Seeds belong to turns, not to arms or the order of play.
    seeds = {}
    for line in read_lines(folder / "texts.jsonl"):
        seeds.setdefault(line["request_id"], set()).add(line["seed"])
    assert all(len(found) == 1 for found in seeds.values())
    assert len(set().union(*seeds.values())) == len(seeds)


@pytest.mark.parametrize(
    "given", [("target.dtype=bfloat16",), ("target.dtype=float32", "engine.weight_dtype=fp8")]
)
def test_texts_are_compared_in_float32_whatever_the_timed_runs_are_in(
    given: tuple[str, ...], run: Callable[..., RunResult]
) -> None:
    result = run("verifier=sampled_match", *given)
    verdict = json.loads((result.folder / "arms.json").read_text())[1]["verdict"]
    assert (verdict["status"], verdict["dtype"]) == ("equal", "float32"), verdict["note"]


def test_a_question_that_does_not_fit_is_named_and_skipped(
    run: Callable[..., RunResult], caplog: pytest.LogCaptureFixture
) -> None:
    # Question "two" fits at first, but not with its answer as history.
    result = run("engine.max_model_len=40", "engine.max_num_batched_tokens=40")
    arms = json.loads((result.folder / "arms.json").read_text())
    assert [arm["num_skipped"] for arm in arms] == [1, 1]
    assert "question 'two' turn 2 is skipped" in caplog.text
    assert "max_model_len=40" in caplog.text


def test_what_did_not_fit_is_told_below_the_table(
    run: Callable[..., RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["engine.max_model_len=40", "engine.max_num_batched_tokens=40"]
    experiments.run.show(run(*options, "equality.enabled=false", report=True))
    lines = capsys.readouterr().out.splitlines()
    (told,) = (i for i, line in enumerate(lines) if "did not fit" in line)
    assert "1 of 4 prompts did not fit and is not in these figures." in lines[told]
    assert told > max(i for i, line in enumerate(lines) if line.lstrip().startswith("ngram K=4"))


def test_a_run_in_which_nothing_fits_says_so(run: Callable[..., RunResult]) -> None:
    with pytest.raises(CapacityError, match="none of the 3 questions fits"):
        run("engine.max_model_len=4")


def test_the_order_of_arms_rotates(
    run: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int]] = []

    def add(arm: Arm, played: Played, group: int) -> None:
        order.append((arm.spec.name, group))
        original(arm, played, group)

    original = Arm.add
    monkeypatch.setattr(Arm, "add", add)
    run("equality.enabled=false")
    assert order == [
        ("none", 0), ("ngram K=4", 0), ("ngram K=4", 1), ("none", 1), ("none", 2), ("ngram K=4", 2),
    ]  # fmt: skip


def test_warm_up_leaves_no_trace(run: Callable[..., RunResult]) -> None:
    requests = pd.read_parquet(
        run("warmup_tokens=5", "equality.enabled=false").folder / "requests.parquet"
    )
    assert not requests["request_id"].str.contains("warm").any()


def test_what_a_killed_run_leaves_can_be_reported(
    run: Callable[..., RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiments.report import build_report

    calls = 0

    def die_late(*args: Any) -> Played:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise KeyboardInterrupt
        return play(*args)

    monkeypatch.setattr(experiments.run, "play", die_late)
    monkeypatch.setattr(experiments.run_folder, "_FLUSH_EVERY_S", 0.0)
    monkeypatch.setattr(experiments.run_folder, "_FLUSH_SHARE", float("inf"))
    with pytest.raises(KeyboardInterrupt):
        run()
    folder = tmp_path / "run"
    assert set(pd.read_parquet(folder / "timings.parquet")["group"]) == {0, 1}
    assert all(arm["launches"] for arm in json.loads((folder / "arms.json").read_text()))
    assert build_report(folder).is_file()


def test_an_interrupt_leaves_what_was_measured_since_the_last_writing(
    run: Callable[..., RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_inside(engine: Any, *given: Any) -> Played:
        nonlocal calls
        calls += 1
        if calls < 5:
            return play(engine, *given)
        engine.add_request("never", "x", given[1]("never"))
        engine.step()
        engine.step()
        raise KeyboardInterrupt

    calls = 0
    monkeypatch.setattr(experiments.run, "play", die_inside)
    monkeypatch.setattr(RunFolder, "flush_if_due", lambda *_: False)
    with pytest.raises(KeyboardInterrupt):
        run()
    folder = tmp_path / "run"
    assert list(pd.read_parquet(folder / "timings.parquet")["group"]) == [0, 1, 0, 1]
    assert all(arm["launches"] for arm in json.loads((folder / "arms.json").read_text()))
    # The question that was cut off is in no file.
    texts = {line["request_id"] for line in read_lines(folder / "texts.jsonl")}
    requests = set(pd.read_parquet(folder / "requests.parquet")["request_id"])
    assert texts == requests == {"1/1", "two/1", "two/2"}


def test_a_full_disk_is_one_sentence_and_older_files_stay(
    run: Callable[..., RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pd.DataFrame.to_parquet
    writes = 0

    def fill_up(frame: pd.DataFrame, path: Path, **options: Any) -> None:
        nonlocal writes
        writes += 1
        if writes > 6:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(frame, path, **options)

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fill_up)
    monkeypatch.setattr(RunFolder, "flush_if_due", RunFolder.flush)
    with pytest.raises(CapacityError, match=r"requests\.parquet cannot be written \(no space"):
        run()
    folder = tmp_path / "run"
    assert len(pd.read_parquet(folder / "requests.parquet"))
    assert not list(folder.glob(".*.part"))


def test_the_same_run_writes_the_same_texts(run: Callable[..., RunResult]) -> None:
    def texts() -> list[list[int]]:
        folder = run("sampling=temp08", "equality.enabled=false").folder
        return [line["token_ids"] for line in read_lines(folder / "texts.jsonl")]

    assert texts() == texts()


def test_a_target_without_chat_template_gets_plain_text(tiny_folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_folder)
    tokenizer.chat_template = None
    engine: Any = type("Engine", (), {"tokenizer": tokenizer})()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.decode(encode(engine, messages)) == "a\n\nb\n\n"


def run_app(*overrides: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("HYDRA_FULL_ERROR", "WANDB_API_KEY")}
    return subprocess.run(
        [sys.executable, "-m", "experiments.run", "debug=default", *overrides],
        cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_app_prints_tables_and_paths_and_ends_with_0(tiny_folder: Path, tmp_path: Path) -> None:
    done = run_app(f"target.name={tiny_folder}", f"hydra.run.dir={tmp_path}", "tracker=wandb")
    assert done.returncode == 0, done.stderr
    assert "ngram K=4" in done.stdout
    assert str(tmp_path / "report.html") in done.stdout
    assert "wandb sync" in done.stdout
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run.log").is_file()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["command"].startswith("python -m experiments.run debug=default target.name=")


def test_the_app_ends_with_1_and_one_sentence(tmp_path: Path) -> None:
    done = run_app(f"target.name={tmp_path}/nowhere", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    sentences = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1
    assert "nowhere" in sentences[0]
    assert "Traceback" not in done.stderr + done.stdout
