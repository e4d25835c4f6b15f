"""Reports of runs with odd names, and of runs that were cut before every arm had its turn."""

import io
import os
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from experiments import provenance, report, shadow_report
from experiments.overview import build_overview
from experiments.run import _latency_table
from experiments.shadow_texts import Text
from experiments.shadow_walk import TextOutcome
from specdec.latencies import latency_frame, summarise_latencies
from tests import run_folders
from tests.run_folders import write_run

TABLES = ("requests", "steps", "timings")


def keep(folder: Path, arm: str, category: str | None) -> None:
    """Leave of an arm one category, or nothing."""
    for name, column in zip(TABLES, ("label", None, "category"), strict=True):
        frame = pd.read_parquet(folder / f"{name}.parquet")
        gone = frame["arm"] == arm
        if category is not None:
            gone &= frame[column] != category if column else False
        frame.loc[~gone].to_parquet(folder / f"{name}.parquet", index=False)


def printed(folder: Path) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    for table in report.render_table(*report.read_tables(folder)):
        console.print(table)
    return stream.getvalue()


def test_a_dollar_in_a_name_is_no_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folders, "CATEGORIES", ("cost $x^{$", "$5_{$"))
    folder = write_run(tmp_path / "run", num_prompts=4)
    report.build_report(folder)
    build_overview(folder)
    assert "cost $x^{$" in printed(folder)


def test_a_shadow_plot_takes_a_drafter_named_with_dollars(tmp_path: Path) -> None:
    line = {"drafter": "ngram path=$x^{$", "k": 1, "category": shadow_report.ALL}
    line |= {"accepted_length": 1.5, "accepted_length_low": 1.2, "accepted_length_high": 1.8}
    shadow_report.draw(pd.DataFrame([line | {"acceptance_at_1": 0.5}]), tmp_path / "shadow.png")
    assert (tmp_path / "shadow.png").stat().st_size > 1000


def test_texts_without_a_start_pull_no_bound_of_a_prediction_to_one() -> None:
    ended = [(f"q{i}", 0, 0.0) for i in range(8)]
    texts, outcomes = [], []
    for prompt, committed, steps in [("a", 6, 2.0), ("b", 8, 2.0), *ended]:
        texts.append(Text(f"{prompt}/1", prompt, "qa", 0, [0] * (committed + 2), 1, 99))
        outcomes.append(TextOutcome(steps, committed, *np.zeros((3, 1))))
    prediction = shadow_report.Prediction("ngram", 1, "scored", outcomes)
    line = shadow_report.summarise([prediction], texts).iloc[0]
    names = [f"accepted_length{end}" for end in ("", "_low", "_high")]
    assert [line[name] for name in names] == [3.5, 3.0, 4.0]


def test_categories_that_look_like_numbers_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folders, "CATEGORIES", ("2023", "007"))
    folder = write_run(tmp_path / "run", num_prompts=4)
    report.build_report(folder)
    text = printed(folder)
    assert " 2023 " in text
    assert " 007 " in text
    assert "no category" not in text


def test_a_report_of_a_cut_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, duration_s in ((tmp_path / "whole", 3.0), (tmp_path / "cut", None)):
        write_run(folder, num_prompts=2, num_tokens=6, provenance={"duration_s": duration_s})
        assert report.main([str(folder)]) == 0
        page = (folder / "report.html").read_text(encoding="utf-8")
        for text in (page, capsys.readouterr().out):
            assert ("did not come to its end" in text) == (duration_s is None)


def test_a_category_that_the_baseline_alone_reached_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_prompts=4, drafts=run_folders.DRAFTS[:1])
    keep(folder, "ngram K=2", "writing")
    page = report.build_report(folder).read_text(encoding="utf-8")
    cells = page[page.index(">code<") :].split("</tr>")[0]
    assert ">2<" in cells
    assert ">-<" in cells
    assert "code" in printed(folder)


def test_a_category_that_the_baseline_lacks_has_a_dash_that_is_explained(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_prompts=4, drafts=run_folders.DRAFTS[:1])
    keep(folder, "none", "writing")
    page = report.build_report(folder).read_text(encoding="utf-8")
    assert "or not in both arms" in page
    assert "or not in both arms" in " ".join(printed(folder).split())


def test_an_arm_that_answered_nothing_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_prompts=4)
    keep(folder, "ngram K=2", None)
    report.build_report(folder)
    assert "ngram K=2" in printed(folder)


def test_latencies_that_were_not_measured_are_dashes() -> None:
    rows = [
        {"arm": "x path=[a]", "request_id": f"{i}/1", "num_tokens": 1, "e2e_s": 0.5, "ttft_s": 0.5}
        for i in range(2)
    ]
    frame = latency_frame([{"random_tokens": False, "queue_s": 0.0, **row} for row in rows])
    table = _latency_table(summarise_latencies(frame, [{"arm": "x path=[a]", "k": 2}]), "trace")
    stream = io.StringIO()
    Console(file=stream, width=120).print(table)
    assert "nan" not in stream.getvalue()
    assert "- / -" in stream.getvalue()
    assert "x path=[a]" in stream.getvalue()


def test_provenance_does_not_write_to_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status that refreshes the index and is killed would leave its lock behind."""
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    (tmp_path / "file").write_text("text")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "file"], check=True)
    os.utime(tmp_path / "file", (1, 1))
    before = (tmp_path / ".git" / "index").read_bytes()
    assert provenance._git("status", "--porcelain") == "A  file"
    assert (tmp_path / ".git" / "index").read_bytes() == before
