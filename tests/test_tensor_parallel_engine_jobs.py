"""Jobs whose ranks share layers: every drafter, replicas of two ranks, ranks that die, an app."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from specdec.parallel.launch import RankFailedError, launch
from tests.parallel_cases import read
from tests.run_cases import QUESTIONS, save_tiny_target
from tests.tensor_parallel_engine_cases import all_drafters, die_in_generate, replicas_of_two

ROOT = Path(__file__).resolve().parent.parent
SECONDS_TO_END = 20  # of a job, once one of its ranks died

pytestmark = pytest.mark.slow


def test_texts_with_every_drafter_are_those_of_one_rank(tmp_path: Path) -> None:
    launch(all_drafters, 2, (str(tmp_path), (0, 1), 1500))
    ranks = read(tmp_path)
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 2 * 16  # drafters, by verifier
    for name, entry in ranks[0].items():
        assert entry["differences"] == [], name
        drafts = not name.startswith(("none", "record"))
        assert (entry["num_drafted"] > 0) == drafts, name
    preempted = [name for name, entry in ranks[0].items() if entry["num_preemptions"]]
    assert len(preempted) > len(ranks[0]) // 2
    for verifier in ("greedy", "sampled_match"):
        assert ranks[0][f"draft_model, target, {verifier}"]["num_accepted"] > 0


def test_replicas_of_two_ranks_give_the_texts_of_one_engine(tmp_path: Path) -> None:
    launch(replicas_of_two, 4, (str(tmp_path), 6, 500))
    ranks = read(tmp_path)
    assert [rank["place"] for rank in ranks] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    for rank in ranks:
        assert rank["differences"] == []
        assert rank["told"] == ranks[0]["told"]
        assert rank["num_steps"] > 0  # both replicas had work
    assert len(ranks[0]["told"]) == 6


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
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids)
    for rank in (0, 1):  # what had finished was handed out on both
        lines = (tmp_path / f"finished{rank}").read_text().splitlines()
        assert len(ast.literal_eval(lines[0])) == 2


def _run(target: Path, questions: Path, folder: Path, size: int) -> dict[Any, list[int]]:
    """Run the app on so many ranks; returns its texts by arm and request."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.run", f"target.name={target}"),
            *("target.dtype=float32", "engine.device=cpu", "prompts=file"),
            *(f"prompts.path={questions}", "sampling.max_tokens=12", "warmup_tokens=2"),
            *("equality.max_tokens=8", "batch_size=3", "workload=poisson"),
            *("workload.rate_per_s=50", f"engine.tensor_parallel_size={size}"),
            f"hydra.run.dir={folder}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report   ") == 1  # the first rank alone prints
    lines = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    return {(t["arm"], t["request_id"]): t["token_ids"] for t in lines}


def test_a_run_on_two_ranks_leaves_the_folder_of_a_run_on_one(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)))
    folders = [tmp_path / f"run{size}" for size in (1, 2)]
    texts = [_run(target, questions, folder, i + 1) for i, folder in enumerate(folders)]
    assert texts[0] == texts[1]
    names = [{path.name for path in folder.iterdir()} for folder in folders]
    assert names[0] == names[1]
    for folder in folders:  # a step of two ranks is told once
        requests = pd.read_parquet(folder / "requests.parquet")
        committed = requests.groupby("arm")["num_committed"].sum().to_dict()
        for arm in {arm for arm, _ in texts[0]}:
            own = [tokens for (name, _), tokens in texts[0].items() if name == arm]
            assert committed[arm] == sum(map(len, own))
        assert not pd.read_parquet(folder / "steps.parquet").duplicated(["arm", "step"]).any()
    verdicts = json.loads((folders[1] / "arms.json").read_text())
    assert verdicts[1]["verdict"]["status"] == "equal"
