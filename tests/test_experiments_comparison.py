"""Reports over several runs: tables, LaTeX, two folders against each other, flags."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import figures, latex, report, tables
from experiments.comparison import match_runs
from experiments.overview import build_overview
from experiments.tables import RANDOM_FLAG, RANDOM_NOTE
from specdec.analysis import load
from specdec.errors import ConfigError
from tests.test_experiments_report import ARMS, Page, write_run
from tests.test_specdec_analysis import write_finished

NEW, OLD = {"commit": "a1" * 20, "dirty": False}, {"commit": "b2" * 20, "dirty": False}


def flag_prompts(folder: Path) -> None:
    """Say of a run that its prompts are random tokens."""
    entries = json.loads((folder / "arms.json").read_text())
    told = [entry | {"random_tokens": True} for entry in entries]
    (folder / "arms.json").write_text(json.dumps(told))


def scale_times(folder: Path, factor: float, arms: tuple[str, ...]) -> None:
    """Multiply the wall times of some arms."""
    timings = pd.read_parquet(folder / "timings.parquet")
    timings.loc[timings["arm"].isin(arms), "wall_s"] *= factor
    timings.to_parquet(folder / "timings.parquet", index=False)


def called(*arguments: Path | str) -> int:
    return report.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module", autouse=True)
def coarse_images() -> Iterator[None]:
    """Draw quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 40)
        yield


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the same two runs, of two commits, equal in all their numbers."""
    for side, made in (("new", NEW), ("old", OLD)):
        write_finished(tmp_path / side / "one", **made)
        write_finished(tmp_path / side / "two", {"batch_size": 4}, **made)
    return tmp_path / "new", tmp_path / "old"


def test_runs_are_put_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_finished(tmp_path / "b1")
    write_finished(tmp_path / "b4", {"batch_size": 4})
    write_finished(tmp_path / "killed", duration_s=None)
    assert called(tmp_path) == 0
    shown = capsys.readouterr()
    table = pd.read_csv(tmp_path / "comparison.csv", keep_default_na=False, na_values=[""])
    assert list(table["run"].unique()) == ["b1", "b4"]
    expected = load(tmp_path).summary().drop(columns=["started", "verdict_note"])  # empty
    pd.testing.assert_frame_equal(table[list(expected)], expected, check_dtype=False)
    tex = (tmp_path / "comparison.tex").read_text()
    for text in (shown.out, tex.replace("\\", "")):
        assert "ngram K=4 batch_size=4" in text
        assert "none batch_size=4" not in text  # an autoregressive arm is 1 beside others
    assert str(tmp_path / "comparison.csv") in shown.out
    assert RANDOM_FLAG not in shown.out + tex


def test_the_overview_of_runs_is_rebuilt_too(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_finished(pair[0] / "killed", duration_s=None)
    assert called(pair[0]) == 0
    out = capsys.readouterr().out.splitlines()
    names = ("comparison.csv", "comparison.tex", "overview.html")
    assert out[-3:] == [f"report: {pair[0] / name}" for name in names]
    assert caplog.text.count("left out 1 of 3 runs") == 1  # the folder is read once
    page = (pair[0] / "overview.html").read_bytes()
    pictures = {path.name for path in (pair[0] / "overview").glob("*.png")}
    assert pictures
    # The very page of `python -m experiments.overview`.
    shutil.rmtree(pair[0] / "overview")
    (pair[0] / "overview.html").unlink()
    assert build_overview(pair[0]).read_bytes() == page
    assert {path.name for path in (pair[0] / "overview").glob("*.png")} == pictures


def test_an_overview_that_cannot_be_written_is_told_in_one_sentence(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (pair[0] / "overview").write_text("in the way")
    assert called(pair[0]) == 1
    message = capsys.readouterr().err
    assert "cannot be written" in message
    assert message.count("\n") == 1


def test_a_folder_without_runs_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(tmp_path) == 1
    message = capsys.readouterr().err
    assert "holds no finished run" in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_equal_runs_of_two_commits_do_not_differ(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(pair[0], "--against", pair[1]) == 0
    out = capsys.readouterr().out
    assert out.index(NEW["commit"]) < out.index("ngram K=4")  # the provenance is on top
    assert OLD["commit"] in out
    assert "] !" not in out
    assert not any(loud in out for loud in ("NO COMPARISON", "UNCOMMITTED", "COMMIT on", "UNKNOWN"))
    table = pd.read_csv(pair[0] / "against.csv")
    assert len(table) == 2 * 2 * 3  # runs, arms, measures
    assert (table["run"] == table["other_run"]).all()
    assert not table["differs"].any()
    assert table["only_commits_differ"].all()
    assert set(table["commit"]) == {NEW["commit"]}
    assert set(table["other_commit"]) == {OLD["commit"]}
    assert "\\textbf" not in (pair[0] / "against.tex").read_text()


def test_a_slower_commit_is_marked_and_a_slower_machine_cancels_in_the_speedup(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    scale_times(pair[0] / "one", 2.0, ("ngram K=4",))
    scale_times(pair[0] / "two", 2.0, ("none", "ngram K=4"))
    assert called(pair[0], "--against", pair[1]) == 0
    table = pd.read_csv(pair[0] / "against.csv").set_index(["run", "arm", "measure"])
    expected = {
        ("one", "none"): (1.0, 1.0),
        ("one", "ngram K=4"): (0.5, 0.5),
        ("two", "none"): (0.5, 1.0),
        ("two", "ngram K=4"): (0.5, 1.0),
    }
    for arm, (speed, speedup) in expected.items():
        for measure, value in (("tokens_per_s", speed), ("speedup", speedup)):
            line = table.loc[(*arm, measure)]
            assert [line[key] for key in ("value", "low", "high")] == pytest.approx([value] * 3)
            assert line["differs"] == (value != 1.0)
    marked = [line for line in capsys.readouterr().out.splitlines() if "!" in line][:-1]
    assert len(marked) == 3
    assert marked[0].count("0.500x [0.500, 0.500] !") == 2
    assert (pair[0] / "against.tex").read_text().count("\\textbf{0.500x") == 4


@pytest.mark.parametrize(
    ("change", "loud"),
    [
        (
            {"device": "GPU 100%"},
            "NO COMPARISON OF COMMITS ALONE: device is cpu <generic>, against",
        ),
        (
            {"dtype": "float32"},
            "NO COMPARISON OF COMMITS ALONE: dtype is bfloat16, against float32",
        ),
        (
            {"versions": {"python": "3.11.9", "torch": "2.12.0"}},
            "versions.torch is 2.11.0, against",
        ),
        ({"threads": 1}, "NO COMPARISON OF COMMITS ALONE: threads is 2, against 1"),
        ({"dirty": True}, "UNCOMMITTED CHANGES"),
        ({"commit": NEW["commit"]}, "THE SAME COMMIT on both sides"),
        ({"commit": None}, "UNKNOWN COMMIT"),
    ],
)
def test_what_else_differs_is_told_loudly(
    tmp_path: Path, change: dict[str, Any], loud: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_finished(tmp_path / "new" / "one", **NEW)
    write_finished(tmp_path / "old" / "one", **{**OLD, **change})
    assert called(tmp_path / "new", "--against", tmp_path / "old") == 0
    assert loud in capsys.readouterr().out
    assert not pd.read_csv(tmp_path / "new" / "against.csv")["only_commits_differ"].any()
    assert latex.escape(loud) in (tmp_path / "new" / "against.tex").read_text()


def test_arms_are_matched_by_name_and_configuration(tmp_path: Path) -> None:
    for run, batch_size in (("x", 1), ("y", 4), ("z", 8)):
        write_finished(tmp_path / "new" / run, {"batch_size": batch_size}, **NEW)
    write_finished(tmp_path / "old" / "p", {"batch_size": 4, "tracker": {"mode": "csv"}}, **OLD)
    # A key that the other version does not know is no obstacle.
    write_finished(tmp_path / "old" / "q", {"batch_size": 1, "later": {"key": 3}}, **OLD)
    write_finished(tmp_path / "old" / "r", {"batch_size": 16}, **OLD)
    found = match_runs(load(tmp_path / "new"), load(tmp_path / "old"))
    partners = found.lines.groupby("run")["other_run"].unique().map(list).to_dict()
    assert partners == {"x": ["q"], "y": ["p"]}
    assert len(found.unmatched) == 2
    assert all("of z: the other folder's differs in batch_size" in why for why in found.unmatched)


def test_repeats_are_paired_by_their_folders_and_an_arm_is_used_once(tmp_path: Path) -> None:
    for run in ("a", "b", "c"):
        write_finished(tmp_path / "new" / run, **NEW)
    for run in ("b", "d"):
        write_finished(tmp_path / "old" / run, **OLD)
    found = match_runs(load(tmp_path / "new"), load(tmp_path / "old"))
    partners = found.lines.groupby("run")["other_run"].unique().map(list).to_dict()
    assert partners["b"] == ["b"]
    assert sorted(run for runs in partners.values() for run in runs) == ["b", "d"]
    assert all("has fewer runs of it" in why for why in found.unmatched)


def test_another_drafter_setting_under_the_same_name_is_no_partner(tmp_path: Path) -> None:
    write_finished(tmp_path / "new" / "one", **NEW)
    folder = write_finished(tmp_path / "old" / "one", **OLD)
    entries = json.loads((folder / "arms.json").read_text())
    write_finished(tmp_path / "new" / "one", **NEW)
    for side, max_n in (("new", 3), ("old", 5)):
        for entry in entries:
            entry["drafter_config"] = {"name": entry["drafter"], "max_n": max_n}
        (tmp_path / side / "one" / "arms.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match=r"differs in drafter_config\.max_n"):
        match_runs(load(tmp_path / "new"), load(tmp_path / "old"))


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with its report, of two speculative arms that keep the output."""
    arms = (*ARMS[:2], ("oracle K=8", "oracle", 8, 0.8, "equal"))
    folder = write_run(tmp_path_factory.mktemp("reported"), arms)
    report.build_report(folder)
    return folder


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_compares_arms_in_pairs_and_states_the_formulas(reported: Path) -> None:
    page = page_of(reported)
    run = report.load_run(reported)
    changes = report.compare_arms(run.traces("ngram K=4"), run.traces("oracle K=8"))
    length = changes.set_index("measure").loc["accepted_length"]
    shown = f"{length['value']:+.2f} [{length['low']:+.2f}, {length['high']:+.2f}]"
    (line,) = [line for line in page.lines if shown in line]
    assert line[0] == "ngram K=4"
    assert line[2] == line[4] == "yes"
    assert line[5] == "9"
    text = " ".join(page.text.split())
    assert "against oracle K=8, the fastest that keeps the output" in text
    assert "sum(num_committed) / number of verify rows" in text
    assert "scipy.stats.bootstrap" in text
    assert RANDOM_FLAG not in text


def test_one_speculative_arm_is_compared_with_none() -> None:
    assert tables.paired_lines({}, "ngram K=4") is None


def test_random_tokens_are_flagged_in_every_table(
    reported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(reported, tmp_path / "run"))
    flag_prompts(folder)
    assert called(folder) == 0
    page = page_of(folder)
    names = {"ngram K=4", "oracle K=8"}  # "none" is a graph scope, too
    assert not names & {cell for line in page.lines for cell in line}
    told = " ".join(page.text.split()).lower().count(RANDOM_NOTE)
    # Headline, pairs, two of categories, positions, times, launches, idle, verdicts.
    assert told == 9
    for name in ("summary.csv", "categories.csv"):
        assert pd.read_csv(folder / name)["random_tokens"].all()
    out = capsys.readouterr().out
    assert out.count("(random") == 3 + 2  # arms, and headers of categories
    assert " ".join(out.split()).count(RANDOM_NOTE) == 2
    tex = (folder / "summary.tex").read_text()
    assert "oracle K=8$^{*}$" in tex
    assert RANDOM_NOTE in tex


def test_random_tokens_are_flagged_over_runs_too(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for side in pair:
        flag_prompts(side / "two")
    assert called(pair[0]) == 0
    assert called(pair[0], "--against", pair[1]) == 0
    assert " ".join(capsys.readouterr().out.split()).count(RANDOM_NOTE) == 2
    for name in ("comparison", "against"):
        table = pd.read_csv(pair[0] / f"{name}.csv")
        assert table.groupby("run")["random_tokens"].all().to_dict() == {"one": False, "two": True}
        assert "$^{*}$" in (pair[0] / f"{name}.tex").read_text()


def test_latex_letters_are_escaped_and_intervals_are_small() -> None:
    assert latex.escape("a_b 5% #1 &$ {x}") == "a\\_b 5\\% \\#1 \\&\\$ \\{x\\}"
    assert latex.escape("\\~^") == "\\textbackslash{}\\textasciitilde{}\\textasciicircum{}"
    cell = latex.with_interval("1.25x [1.00, 1.50]")
    assert cell == "1.25x {\\scriptsize {[}1.00, 1.50{]}}"
    assert latex.with_interval("17.0%") == "17.0\\%"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
def test_tables_compile(pair: tuple[Path, Path], tmp_path: Path) -> None:
    odd = write_run(
        tmp_path / "odd",
        (ARMS[0], ("a_b K=2 p=~/x\\y^2 [50%] {#&$}", "ngram", 2, 0.5, "not checked")),
        prompts_per_category=1,
    )
    flag_prompts(odd)
    flag_prompts(pair[0] / "two")
    latex.write_summary(odd / "summary.tex", load(odd, unfinished=True).summary(), "50% of a_b")
    assert called(pair[0]) == called(pair[0], "--against", pair[1]) == 0
    files = [odd / "summary.tex", pair[0] / "comparison.tex", pair[0] / "against.tex"]
    inputs = "\n".join(f"\\input{{{path}}}" for path in files)
    (tmp_path / "all.tex").write_text(
        "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
        f"{inputs}\n\\end{{document}}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_tables_are_whole_environments(pair: tuple[Path, Path]) -> None:
    assert called(pair[0]) == called(pair[0], "--against", pair[1]) == 0
    for name in ("comparison.tex", "against.tex"):
        text = (pair[0] / name).read_text()
        for word in ("toprule", "midrule", "bottomrule"):
            assert text.count(f"\\{word}") == 1
        for environment in ("table", "tabular"):
            assert text.count(f"\\begin{{{environment}}}") == 1
            assert text.count(f"\\end{{{environment}}}") == 1
        rows = [line for line in text.splitlines() if line.endswith("\\\\")]
        assert len(set(np.char.count(rows, "&"))) == 1
        assert text.count("{") == text.count("}")
