"""Two ranks on a CPU: replicas, the router's agreement, checks between ranks, ranks that die."""

import ast
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from specdec.parallel.launch import RankFailedError, launch
from tests.parallel_cases import (
    PROMPTS,
    die_in_generate,
    end_before_joining,
    end_one_by_one,
    many_schedules,
    quick_checks,
    read,
)
from tests.rank_pairs import shared_pair
from tests.run_cases import QUESTIONS, save_tiny_target

ROOT = Path(__file__).resolve().parent.parent
SECONDS_TO_END = 20  # of a job, once one of its ranks died


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank of one pair saw."""

    def start(folder: Path) -> None:
        launch(quick_checks, 2, (str(folder),))

    return shared_pair(tmp_path_factory, "two_ranks", start)


@pytest.mark.parametrize("verifier", ["greedy", "sampled_match"])
def test_replicas_return_what_one_engine_does_on_every_rank(
    found: list[dict[str, Any]], verifier: str
) -> None:
    ranks = [rank["generate"][verifier] for rank in found]
    assert len(ranks) == 2
    for rank in ranks:
        assert len(rank["tokens"]) == len(PROMPTS)
        assert rank["tokens"] == rank["expected"]
        assert rank["seeds_equal"]
        assert rank["has_logprobs"] == [bool(i % 3) for i in range(len(PROMPTS))]
        assert rank["num_own_steps"] > 0  # both had work


def test_replicas_agree_on_texts_stops_and_samples(found: list[dict[str, Any]]) -> None:
    for rank in found:
        texts = rank["texts"]
        assert texts["equal"] == [True] * 5
        assert texts["pieces_equal"]
        assert texts["num_texts"] == 7
        assert texts["stopped"]


def test_messages_of_any_length_reach_every_rank(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["exchange"] == {"sound": [True] * 4, "shared": {"from": 0, "t": 0.1}}


def test_a_disagreement_is_named_with_its_first_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        (first, tokens), (second, drafts) = rank["rank_check"]["told"]
        assert (first, second) == (8, 12)  # compared every four steps
        assert tokens.startswith("ranks 0, 1 disagree in tokens at step 6")
        assert drafts.startswith("ranks 0, 1 disagree in drafts at step 12")


def test_ranks_have_their_places(found: list[dict[str, Any]]) -> None:
    assert [rank["groups"]["dp"] for rank in found] == [[0, 0, 3, True], [1, 0, 3, True]]
    assert [rank["groups"]["tp"] for rank in found] == [[0, 0, 3, True], [0, 1, 3, True]]


def test_replicas_built_unlike_are_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for what in ("options", "verifiers"):
            assert rank[what].startswith("ranks 0, 1 disagree in options at step 0")


def test_replicas_that_loaded_unlike_models_are_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["loaded"]["equal"] == "nothing was refused"
        for what, text in {
            "norm": "the target's weights (model.layers.1.input_layernorm.weight): ranks",
            "storage": "how the target's layers are stored (packed, False on rank 0, True on",
            "config": "the target's config (rms_norm_eps, 1e-06 on rank 0, 1e-05 on rank 1): ranks",
        }.items():
            assert rank["loaded"][what].startswith(f"ranks 0, 1 disagree in {text}")


def test_replicas_that_are_asked_for_different_things_say_so(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "rank 1 was asked for other requests than rank 0" in rank["calls"]


def test_a_step_that_fails_on_one_rank_is_told_to_the_others(found: list[dict[str, Any]]) -> None:
    assert found[0]["failure"] == "rank 1 failed in a step: ZeroDivisionError: planted"
    assert "a step failed: ZeroDivisionError: planted" in found[1]["failure"]


def check_schedules(ranks: list[dict[str, Any]]) -> None:
    """Check that replicas gave the texts of one engine, and took as many steps as each other."""
    assert ranks[0]["differences"] == []
    assert ranks[0]["told"] == ranks[1]["told"]
    own, all_steps = zip(*(zip(*rank["steps"], strict=True) for rank in ranks), strict=True)
    assert all_steps[0] == all_steps[1]  # executed, empty ones included
    assert all(n > 0 for counts in own for n in counts)
    assert own[0] != all_steps[0] or own[1] != all_steps[1]  # some were empty


def test_a_few_schedules_end_on_both_ranks(found: list[dict[str, Any]]) -> None:
    check_schedules([rank["schedules"] for rank in found])


@pytest.mark.slow
def test_two_hundred_schedules_end_on_both_ranks(tmp_path: Path) -> None:
    launch(many_schedules, 2, (str(tmp_path), 200, 480))
    ranks = read(tmp_path)
    check_schedules(ranks)
    assert len(ranks[0]["told"]) == 200
    assert ranks[0]["num_aborted"] > 10
    assert ranks[0]["num_preemptions"] > 0


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("kill", "was ended by SIGKILL"), ("raise", "failed: ValueError: planted")],
)
def test_a_rank_that_dies_ends_the_job(tmp_path: Path, how: str, reason: str) -> None:
    with pytest.raises(RankFailedError) as raised:
        launch(die_in_generate, 2, (str(tmp_path), how))
    seconds = time.time() - float((tmp_path / "died_at").read_text())
    assert seconds < SECONDS_TO_END
    assert str(raised.value).startswith(f"rank 1 of 2 {reason};")
    assert raised.value.rank == 1
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    assert not any(map(is_alive, pids))
    for rank in (0, 1):  # what had finished was handed out on both
        lines = (tmp_path / f"finished{rank}").read_text().splitlines()
        assert [len(ast.literal_eval(line)) for line in lines] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["return", "exit", "exit at once", "kill"])
def test_a_rank_that_ends_before_it_joins_ends_the_job(tmp_path: Path, how: str) -> None:
    reason = "was ended by SIGKILL;"
    if how != "kill":
        reason = "ended with exit code 0 while other ranks waited for it;"
    with pytest.raises(RankFailedError) as raised:
        launch(end_before_joining, 2, (str(tmp_path), how))
    assert time.time() - float((tmp_path / "died_at").read_text()) < SECONDS_TO_END
    assert str(raised.value).startswith(f"rank 1 of 2 {reason}")
    assert raised.value.rank == 1
    assert not any(is_alive(int((tmp_path / f"pid{rank}").read_text())) for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("joins", [True, False])
def test_a_rank_may_end_before_the_others(joins: bool) -> None:
    launch(end_one_by_one, 2, (joins,))


_LAUNCHER = """
import sys
from specdec.parallel.launch import launch
from tests import parallel_cases
if __name__ == "__main__":
    launch(getattr(parallel_cases, sys.argv[2]), 2, (sys.argv[1],))
"""


@pytest.mark.slow
def test_no_rank_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(_LAUNCHER)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ignores = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    launcher = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), "wait_for_ever"],
        cwd=ROOT,
        env=env,
        preexec_fn=ignores,  # as a shell does with what it starts in the background
    )
    notes = [tmp_path / f"pid{rank}" for rank in (0, 1)]
    wait_until(lambda: all(note.is_file() for note in notes), 120)
    pids = [int(note.read_text()) for note in notes]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: not any(map(is_alive, pids)), SECONDS_TO_END)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "all"])  # as `kill` does, and a terminal
def test_an_interrupt_lets_ranks_write_down_what_they_have(tmp_path: Path, whom: str) -> None:
    script = tmp_path / "start.py"
    script.write_text(_LAUNCHER)
    # Whatever started the tests may ignore interrupts; a user's launcher does not.
    listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    launcher = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), "save_when_interrupted"],
        preexec_fn=listens,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    notes = [tmp_path / f"pid{rank}" for rank in (0, 1)]
    wait_until(lambda: all(note.is_file() for note in notes), 120)
    if whom == "all":
        os.killpg(launcher.pid, signal.SIGINT)
    else:
        launcher.send_signal(signal.SIGINT)
    told = launcher.communicate(timeout=SECONDS_TO_END)[1]
    assert launcher.returncode != 0
    assert told.count("KeyboardInterrupt") == 1  # the launcher's own, and none of a rank
    assert all((tmp_path / f"saved{rank}").is_file() for rank in (0, 1))
    assert not any(is_alive(int(note.read_text())) for note in notes)


def wait_until(holds: Any, seconds: float) -> None:
    """Wait for a condition, so long at most."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_on_two_ranks_leaves_the_folder_of_a_run_on_one(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)))
    texts = []
    for size in (1, 2):
        folder = tmp_path / f"run{size}"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "experiments.run", f"target.name={target}"),
                *("target.dtype=float32", "engine.device=cpu", "prompts=file"),
                *(f"prompts.path={questions}", "sampling.max_tokens=12", "warmup_tokens=2"),
                *(
                    "equality.max_tokens=8",
                    "batch_size=3",
                    "workload=poisson",
                    "workload.rate_per_s=50",
                ),
                *(f"engine.data_parallel_size={size}", f"hydra.run.dir={folder}"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("report   ") == 1  # the first rank alone prints
        lines = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
        texts.append({(t["arm"], t["request_id"]): t["token_ids"] for t in lines})
    assert texts[0] == texts[1]
    names = [{path.name for path in (tmp_path / f"run{size}").iterdir()} for size in (1, 2)]
    assert names[0] == names[1]
    for size in (1, 2):  # the traces of all replicas are there
        folder = tmp_path / f"run{size}"
        requests = pd.read_parquet(folder / "requests.parquet")
        committed = requests.groupby("arm")["num_committed"].sum().to_dict()
        for arm in {arm for arm, _ in texts[0]}:
            own = [tokens for (name, _), tokens in texts[0].items() if name == arm]
            assert committed[arm] == sum(map(len, own))
        steps = pd.read_parquet(folder / "steps.parquet")
        assert not steps.duplicated(["arm", "step"]).any()
        assert set(requests["step"]) <= set(steps["step"])
        assert (steps["step"].max() >= 10**9) == (size == 2)  # a block of numbers a replica
    verdicts = json.loads((tmp_path / "run2" / "arms.json").read_text())
    assert verdicts[1]["verdict"]["status"] == "equal"
