"""The bench's questions and its summary; the timing itself is run by `make bench`."""

import json
from pathlib import Path

import pandas as pd
import pytest

from experiments.bench import bench_questions
from experiments.bench_generate import GenerateBenchConfig, summarise_generate_bench
from specdec.errors import ConfigError


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


def test_no_file_takes_the_projects_questions() -> None:
    assert len(bench_questions([], per_category=2)) == 12


def test_count_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bench\.max_tokens=0"):
        GenerateBenchConfig(max_tokens=0)
