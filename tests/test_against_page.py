"""The page of two folders against each other: complete, self-contained, equal to its table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments import against_page, figures, report
from experiments.comparison import DRIFT_NOTE, match_runs
from experiments.tables import RANDOM_NOTE, change_text
from specdec.analysis import load
from tests.run_folders import write_run
from tests.test_overview import Page

NEW = {"commit": "a1" * 20, "started": "2026-01-31T12:00:00+00:00"}
OLD = {"commit": "b2" * 20, "started": "2026-01-30T12:00:00+00:00", "device": "CPU <old>"}
SIZES = (1, 4)


@pytest.fixture(scope="module", autouse=True)
def coarse_images() -> Iterator[None]:
    """Draw quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 40)
        yield


def write_pair(folder: Path, **new: Any) -> tuple[Path, Path]:
    """Write two runs of two commits; of the older one ngram is better and eagle3 the same."""
    for size in SIZES:
        for side, chance, made in (("new", 0.3, NEW | new), ("old", 0.9, OLD)):
            drafts = [("ngram", 4, chance), ("eagle3", 4, 0.7)]
            run = folder / side / f"b{size}"
            write_run(run, drafts=drafts, batch_size=size, provenance=made)
    return folder / "new", folder / "old"


def compared(new: Path, old: Path) -> Page:
    assert report.main([str(new), "--against", str(old)]) == 0
    return Page(new / "against.html")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def page(pair: tuple[Path, Path]) -> Page:
    return compared(*pair)


def test_the_page_is_named_and_written_into_the_first_folder(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    compared(*pair)
    shown = capsys.readouterr().out
    assert DRIFT_NOTE in " ".join(shown.split())
    out = shown.splitlines()
    names = ("against.csv", "against.tex", "against.html")
    assert out[-3:] == [f"report: {pair[0] / name}" for name in names]
    assert {path.name for path in pair[1].iterdir()} == {"b1", "b4"}


def test_every_difference_stands_in_the_table_with_its_interval(
    pair: tuple[Path, Path], page: Page
) -> None:
    written = pd.read_csv(pair[0] / "against.csv").to_dict("records")
    lines = page.table("Arm", "Difference or ratio")
    assert len(lines) == len(written) == len(SIZES) * 3 * 3  # runs, arms, measures
    for row, line in zip(written, lines, strict=True):
        assert line["Arm"] == row["name"]
        assert line["Difference or ratio"] == change_text(row)
        assert line["Shown"] == ("yes" if row["differs"] else "no")
        assert line["Drawn"] == str(row["num_units"])
        assert line["Run"] == row["run"]
        if row["measure"] == "speedup":
            assert line["This folder"] == f"{row['one']:.2f}x"
            assert line["Against"] == f"{row['other']:.2f}x"
    assert len({line["Arm"] for line in lines}) == len(SIZES) * 3
    counts = "higher in 0, lower in 2"  # the ngram arm of either run
    parts = (f"{name} {counts}" for name in ("(bonus included)", "tokens/s", "speed-up"))
    assert all(part in page.text for part in parts)


def test_what_was_compared_is_told_of_both_sides(page: Page) -> None:
    lines = {line["Provenance"]: line for line in page.table("Provenance", "Against")}
    device = "CPU of a test"
    for key, one, other in (
        ("commit", NEW["commit"], OLD["commit"]),
        ("device", device, OLD["device"]),
        ("dtype", "bfloat16", "bfloat16"),
        ("started", NEW["started"], OLD["started"]),
    ):
        assert (lines[key]["This folder"], lines[key]["Against"]) == (one, other)
    assert f"NO COMPARISON OF COMMITS ALONE: device is {device}, against CPU <old>" in page.text
    assert sum(tag == "strong" for tag, _ in page.tags) == 2 * 3  # dtype is the same


def test_runs_of_one_folder_tell_from_when_to_when_they_started(tmp_path: Path) -> None:
    for day in (30, 28, 29):
        made = {"started": f"2026-01-{day}T12:00:00+00:00"}
        for side in ("new", "old"):
            run = tmp_path / side / str(day)
            write_run(run, drafts=[("ngram", 4, 0.5)], num_prompts=2, provenance=made)
    found = match_runs(load(tmp_path / "new"), load(tmp_path / "old"))
    told = "2026-01-28T12:00:00+00:00 to 2026-01-30T12:00:00+00:00"
    assert found.provenance["started"] == (told, told)


def test_the_page_says_what_the_intervals_leave_out(pair: tuple[Path, Path], page: Page) -> None:
    assert "The interval is over prompts only" in DRIFT_NOTE
    assert page.text.index("Difference or ratio") < page.text.index(DRIFT_NOTE)
    assert DRIFT_NOTE in (pair[0] / "against.tex").read_text(encoding="utf-8")


def test_the_formulas_are_on_the_page(page: Page) -> None:
    assert "mean accepted length of the arm - that of the other" in page.text
    assert "Each resample draws the same prompts for both arms" in page.text


def test_the_page_asks_for_nothing_outside(pair: tuple[Path, Path], page: Page) -> None:
    text = (pair[0] / "against.html").read_text(encoding="utf-8")
    for outside in ("http://", "https://", "@import", "url("):
        assert outside not in text
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    pictures = {path.name for path in (pair[0] / "against").iterdir()}
    assert pictures == {"accepted_length.png", "tokens_per_s.png", "speedup.png"}
    assert len(images) == len(pictures)
    for image in images:
        assert (image["src"] or "").startswith("data:image/png;base64,iVBOR")
        assert "ngram K=4 batch_size=4 " in (image["alt"] or "")


def test_the_same_traces_give_the_same_page(pair: tuple[Path, Path], page: Page) -> None:
    before = (pair[0] / "against.html").read_bytes()
    compared(*pair)
    assert (pair[0] / "against.html").read_bytes() == before


def test_a_difference_is_filled_and_lies_on_its_side_of_the_line(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = match_runs(*map(load, pair))
    drawn: dict[str, list[tuple[float, float, bool]]] = {}

    def look(path: Path, heading: str, alt: str, figure: Figure) -> Any:
        (axes,) = figure.axes
        points = [line for line in axes.lines if line.get_marker() == "o"]
        drawn[path.stem] = [
            (
                *map(float, (*line.get_xdata(), *line.get_ydata())),  # pyright: ignore
                not same_color(line.get_markerfacecolor(), "white"),
            )
            for line in points
        ]
        low, high = axes.get_xlim()
        for text in figure.findobj(Text):  # a phone shows a figure 366 pixels wide
            assert text.get_fontsize() * 366 / (72 * figures.WIDTH_IN) >= 11 or not text.get_text()
        none = 0.0 if path.stem == "accepted_length" else 1.0
        assert low < none < high
        return figures.Plot(path.stem, heading, alt, 1, 1, "")

    monkeypatch.setattr(against_page, "write_plot", look)
    folder = tmp_path / "page"
    folder.mkdir()
    against_page.write_against_page(folder, pair[1], found)
    for measure, own in found.lines.groupby("measure"):
        rows = own.to_dict("records")
        expected = [(row["value"], float(i), row["differs"]) for i, row in enumerate(rows)]
        assert drawn[str(measure)] == expected
        assert sum(filled for *_, filled in drawn[str(measure)]) == 2


def test_what_is_left_out_is_told(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = write_pair(tmp_path)
    write_run(new / "b8", drafts=[("ngram", 4, 0.5)], batch_size=8, num_prompts=8)
    monkeypatch.setattr(against_page, "_MAX_ARMS", 2)
    page = compared(new, old)
    assert "ngram K=4 of b8: the other folder's differs in" in page.text
    assert "The first 2 of 6 arms are drawn" in page.text
    assert len(page.table("Arm", "Shown")) == 6 * 3


def test_runs_of_other_names_are_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, drafts=[("ngram", 4, 0.5)], num_prompts=2)
    page = compared(tmp_path / "one", tmp_path / "two")
    assert "2 arms are in both folders" in page.text
    assert "THE SAME COMMIT on both sides" in page.text
    for line in page.table("Arm", "Shown"):
        assert (line["Run"], line["Run of the other folder"]) == ("one", "two")
        assert line["Shown"] == "no"


def test_random_tokens_are_flagged(tmp_path: Path) -> None:
    new, old = write_pair(tmp_path)
    for side in (new, old):
        path = side / "b4" / "arms.json"
        entries = [entry | {"random_tokens": True} for entry in json.loads(path.read_text())]
        path.write_text(json.dumps(entries))
    page = compared(new, old)
    flagged = [line["Arm"].endswith("random tokens") for line in page.table("Arm", "Shown")]
    assert sum(flagged) == len(flagged) / 2
    assert RANDOM_NOTE.capitalize() in page.text


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = write_pair(tmp_path)
    (new / "against").write_text("in the way")
    assert report.main([str(new), "--against", str(old)]) == 1
    message = capsys.readouterr().err
    assert "cannot be written" in message
    assert message.count("\n") == 1
