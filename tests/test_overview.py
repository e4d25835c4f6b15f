"""The overview of made-up runs: complete, self-contained, and honest about what it leaves out."""

import html.parser
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from experiments import figures, model_plots, overview_plots, plots
from experiments.overview import build_overview, main
from experiments.overview_data import AUTOREGRESSIVE, differences, make_overview
from experiments.overview_plots import frontier, write_sections
from experiments.report import build_report
from specdec.analysis import load
from specdec.errors import ConfigError
from specdec.metrics import ms_per_token
from tests.run_folders import DRAFTS, write_run

RANDOM = "random tokens"


class Page(html.parser.HTMLParser):
    """Keeps tags, the cells of each table, and the text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._in_cell = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += " ".join(data.split()) + " "
        if self._in_cell:
            self.tables[-1][-1][-1] += " ".join(data.split()) + " "

    def table(self, first_header: str, *others: str) -> list[dict[str, str]]:
        """Return the first table with such headers, a mapping a line."""
        for head, *lines in self.tables:
            names = [name.strip() for name in head]
            if names[0] == first_header and set(others) <= set(names):
                return [
                    dict(zip(names, (cell.strip() for cell in line), strict=True)) for line in lines
                ]
        raise AssertionError(f"no table with {first_header}, {others}")


@pytest.fixture(scope="module", autouse=True)
def coarse_images() -> Iterator[None]:
    """Draw quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 40)
        yield


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafters, two K, two temperatures, two batch sizes."""
    folder = tmp_path_factory.mktemp("sweep")
    for size in (1, 4):
        for temperature in (0.0, 0.8):
            drafts = [(name, k, chance - temperature / 4) for name, k, chance in DRAFTS]
            run = folder / f"b{size}" / f"t{temperature}"
            write_run(run, drafts=drafts, batch_size=size, temperature=temperature)
    build_overview(folder)
    return folder


@pytest.fixture(scope="module")
def page(sweep: Path) -> Page:
    return Page(sweep / "overview.html")


def test_the_page_asks_for_nothing_outside(sweep: Path, page: Page) -> None:
    text = (sweep / "overview.html").read_text(encoding="utf-8")
    for outside in ("http://", "https://", "@import", "url("):
        assert outside not in text
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe")
        assert (attributes.get("src") or "data:").startswith("data:")


def test_every_image_is_written_and_inlined_with_words(sweep: Path, page: Page) -> None:
    names = {path.stem for path in (sweep / "overview").glob("*.png")}
    expected = ["accepted_length_by_k", "speedup_by_k", "speedup_by_batch_size", "pareto"]
    expected += ["acceptance_by_position", "categories", "time_split", "speedup_model"]
    assert {name.rstrip("_234567890") for name in names} == set(expected)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == len(names)
    for image in images:
        assert (image["src"] or "").startswith("data:image/png;base64,iVBOR")
        assert len(image["alt"] or "") > 20
    assert "Left out" not in page.text


def test_all_arms_are_in_the_table_and_in_the_csv(sweep: Path, page: Page) -> None:
    written = pd.read_csv(sweep / "overview.csv")
    assert len(written) == 4 * (1 + len(DRAFTS))
    lines = page.table("Drafter", "Ms per token")
    assert len(lines) == len(written)
    for row, line in zip(written.to_dict("records"), lines, strict=True):
        assert line["Drafter"] == row["series"]
        assert line["K"] == str(row["k"])
        assert line["Temperature"] == f"{row['temperature']:g}"
        assert line["Batch size"] == str(row["batch_size"])
        assert line["Speed-up"].startswith(f"{row['speedup']:.2f}x")
        assert line["Ms per token"].startswith(f"{row['ms_per_token']:.2f}")
        assert line["Run"] == row["run"]
    assert {row["series"] for row in written.to_dict("records")} == {
        AUTOREGRESSIVE,
        "ngram",
        "eagle3",
    }


def test_the_fastest_arm_leads(sweep: Path, page: Page) -> None:
    written = pd.read_csv(sweep / "overview.csv")
    best = written.loc[written["speedup"].idxmax()]
    assert f"Fastest: {best['series']} with K={best['k']}" in page.text
    assert f"at batch size {best['batch_size']}, at {best['speedup']:.2f}x" in page.text


def test_an_axis_of_one_value_has_no_plot_but_a_sentence(tmp_path: Path) -> None:
    write_run(tmp_path / "only", drafts=[("ngram", 4, 0.5)])
    page = Page(build_overview(tmp_path))
    names = {path.stem for path in (tmp_path / "overview").glob("*.png")}
    assert names == {"pareto", "acceptance_by_position", "categories", "time_split"}
    for sentence in (
        "Left out: the arms that draft have one K only (4)",
        "Left out: the arms that draft have one batch size only (1)",
        "Left out: it takes a drafter whose decode steps were measured",
    ):
        assert sentence in page.text


def test_the_page_explains_rates_by_position_and_facts_that_a_cpu_lacks(tmp_path: Path) -> None:
    made = {"linear_choices": None, "platform": None}
    write_run(tmp_path / "only", drafts=[("ngram", 4, 0.5)], num_prompts=2, provenance=made)
    page = Page(build_overview(tmp_path))
    assert "its rates cannot be read as one falling curve" in page.text
    facts = {line[0].strip(): line[1].strip() for table in page.tables for line in table if line}
    assert (facts["linear_choices"], facts["platform"]) == ("-", "unknown")


def test_images_of_an_older_overview_are_gone(tmp_path: Path) -> None:
    write_run(tmp_path / "only", drafts=[("ngram", 4, 0.5)])
    (tmp_path / "overview").mkdir()
    (tmp_path / "overview" / "speedup_by_k_4.png").write_bytes(b"old")
    build_overview(tmp_path)
    assert not (tmp_path / "overview" / "speedup_by_k_4.png").exists()


def test_random_tokens_are_flagged_in_every_table_of_arms(tmp_path: Path) -> None:
    drafts = [("ngram", 2, 0.5), ("ngram", 4, 0.5)]
    write_run(tmp_path / "text", drafts=drafts)
    write_run(tmp_path / "random", drafts=drafts, arm_extra={"random_tokens": True})
    page = Page(build_overview(tmp_path))
    tables = [table for table in page.tables if table[0][0].strip() == "Drafter"]
    assert len(tables) == 4  # arms, best K, the model's error, categories
    for _, *lines in tables:
        flagged = [line[0].strip().endswith(RANDOM) for line in lines]
        assert any(flagged)
        assert not all(flagged)
    assert "Prompts of random tokens are in use" in page.text
    one = Page(build_report(tmp_path / "random"))
    for _, *lines in [table for table in one.tables if table[0][0].strip() == "Drafter"]:
        assert all(line[0].strip().endswith(RANDOM) for line in lines)


def test_runs_of_different_devices_are_told(tmp_path: Path) -> None:
    drafts = [("ngram", 4, 0.5)]
    write_run(tmp_path / "a", drafts=drafts)
    write_run(tmp_path / "b", drafts=drafts)
    assert differences(load(tmp_path)) == []
    made = {"device": "Another", "versions": {"python": "3.11.9", "torch": "2.12.0"}}
    write_run(tmp_path / "c", drafts=drafts, provenance=made)
    text = Page(build_overview(tmp_path)).text
    assert "The runs were not made alike" in text
    assert "device: Another; CPU of a test" in text
    assert "versions.torch: 2.11.0; 2.12.0" in text
    assert "versions.python: 3.11.9 |" not in text


def test_axes_are_found_in_the_configurations(tmp_path: Path) -> None:
    for size in (1, 4):
        for top_p in (0.9, 1.0):
            write_run(
                tmp_path / f"b{size}-p{top_p}",
                drafts=[("ngram", 4, 0.5)],
                batch_size=size,
                config={"sampling": {"temperature": 0.0, "max_tokens": 24, "top_p": top_p}},
            )
    overview = make_overview(load(tmp_path))
    # engine.max_num_reqs differs, too, but it is the batch size's shadow.
    assert overview.axes == ["batch_size", "sampling.top_p"]
    assert set(overview.summary["setting"]) == {"sampling.top_p 0.9", "sampling.top_p 1.0"}


def test_parameters_of_drafters_tell_series_apart(tmp_path: Path) -> None:
    for max_n in (2, 5):
        write_run(
            tmp_path / f"n{max_n}",
            drafts=[("ngram", 4, 0.5)],
            arm_extra={"drafter_config": {"name": "ngram", "max_n": max_n}},
        )
    assert make_overview(load(tmp_path)).series == [
        AUTOREGRESSIVE,
        "ngram max_n=2",
        "ngram max_n=5",
    ]


def test_the_frontier_by_hand() -> None:
    latency, throughput = [1.0, 2.0, 2.0, 3.0, 3.0], [10.0, 20.0, 15.0, 20.0, 30.0]
    found = frontier(latency, throughput)
    # The fourth waits longer than the second for the same.
    assert found.tolist() == [True, True, False, False, True]


def test_no_point_beats_one_of_the_frontier() -> None:
    points = np.random.default_rng(0).integers(0, 12, (60, 2)).tolist()
    on = frontier(*zip(*points, strict=True))
    for (x, y), is_on in zip(points, on, strict=True):
        beaten = any(a <= x and b >= y and (a, b) != (x, y) for a, b in points)
        assert is_on == (not beaten)


def test_ms_per_token_by_hand() -> None:
    # Step 0 runs prompts; b waits in step 2 while c's prompt runs, and is not in step 4.
    steps = pd.DataFrame({"step": range(5), "step_ms": [50.0, 10.0, 30.0, 12.0, 8.0]})
    rows = [("a/1", 0, False, 1), ("b/1", 0, False, 1), ("a/1", 1, True, 3), ("b/1", 1, True, 1)]
    rows += [("c/1", 2, False, 1), ("b/1", 3, True, 2), ("c/1", 3, True, 2), ("c/1", 4, True, 1)]
    names = ["request_id", "step", "is_verify", "num_committed"]
    requests = pd.DataFrame(rows, columns=names).assign(turn=1)
    found = ms_per_token(requests, steps)
    # a: 10 ms, 3 tokens; b: 10 + 30 + 12 ms, 3 tokens; c: 12 + 8 ms, 3 tokens
    assert found.value == pytest.approx((10 + 52 + 20) / 9)
    assert 10 / 3 <= found.low <= found.value <= found.high <= 52 / 3


def test_ms_per_token_leaves_out_requests_whose_steps_were_lost(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_prompts=3, num_tokens=8)
    requests, steps = (pd.read_parquet(folder / f"{n}.parquet") for n in ("requests", "steps"))
    own, taken = (frame.loc[frame["arm"] == "ngram K=2"] for frame in (requests, steps))
    lost = own.loc[own["request_id"] == "2/1"]
    value = ms_per_token(own, taken.loc[~taken["step"].isin(lost["step"])]).value
    assert value == ms_per_token(own.drop(lost.index), taken).value
    assert np.isnan(ms_per_token(own, taken.iloc[:0]).value)


def test_unfinished_runs_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafts = [("ngram", 4, 0.5)]
    write_run(tmp_path / "done", drafts=drafts)
    write_run(tmp_path / "killed", drafts=drafts, provenance={"duration_s": None})
    with caplog.at_level(logging.WARNING):
        build_overview(tmp_path)
    assert set(pd.read_csv(tmp_path / "overview.csv")["run"]) == {"done"}
    assert "killed" in caplog.text


def test_a_folder_without_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        build_overview(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_letters_of_figures_are_large_enough_on_a_phone(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure fills 366 pixels there: those of the page's width less its margins."""
    seen: list[Figure] = []

    def look(path: Path, heading: str, alt: str, figure: Figure) -> Any:
        seen.append(figure)
        assert figure.get_figwidth() == figures.WIDTH_IN
        for text in figure.findobj(Text):
            pixels = text.get_fontsize() * 366 / (72 * figures.WIDTH_IN)
            assert pixels >= 11 or not text.get_text(), (path.name, text.get_text())
        return figures.Plot(path.stem, heading, alt, 1, 1, "")

    for module in (overview_plots, plots, model_plots):
        monkeypatch.setattr(module, "write_plot", look)
    overview = make_overview(load(sweep))
    overview_plots.write_sections(tmp_path, overview)
    model_plots.model_section(tmp_path, overview)
    assert len(seen) > 10


def test_drafters_that_do_not_fit_a_figure_are_told(tmp_path: Path) -> None:
    drafts = [(f"drafter{i}", k, 0.4) for i in range(10) for k in (1, 2)]
    write_run(tmp_path / "run", drafts=drafts, num_prompts=2, num_tokens=6)
    sections = write_sections(tmp_path / "images", make_overview(load(tmp_path)))
    told = [s.heading for s in sections if "The first 8 of 10 drafters" in " ".join(s.notes)]
    assert told[:2] == ["Mean accepted length by K (bonus included)", "Speed-up by K"]


def test_question_files_of_one_name_are_no_common_setting(tmp_path: Path) -> None:
    for run in ("one", "two"):
        prompts = {"path": f"{run}/questions.jsonl", "per_category": 1}
        write_run(tmp_path / run, num_prompts=2, num_tokens=6, config={"prompts": prompts})
    found = make_overview(load(tmp_path))
    assert "prompts" in found.axes
    assert set(found.summary["prompts"]) == {
        "one/questions.jsonl per_category=1",
        "two/questions.jsonl per_category=1",
    }
