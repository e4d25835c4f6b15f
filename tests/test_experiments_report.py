"""The report of a made-up run: complete, self-contained, and equal to its own tables."""

import html.parser
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from experiments import report
from experiments.figures import place_label
from specdec import metrics
from specdec.errors import ConfigError
from specdec.trace import OPTIONAL_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS

CATEGORIES = ("writing", "code", "translation")
# (arm, drafter, k, chance that a draft is accepted, verdict)
ARMS = (
    ("none", "none", 0, 0.0, "reference"),
    ("ngram K=4", "ngram", 4, 0.45, "equal up to a tie"),
    ("oracle K=8", "oracle", 8, 0.8, "different"),
)
ALL_NONE = (ARMS[0], ("ngram K=4", "ngram", 4, 0.0, "not checked"))
LAUNCH_HEADERS = ("Ran as", "Times", "Why eager")
VOID = {"area", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


def write_run(
    folder: Path,
    arms: tuple[tuple[str, str, int, float, str], ...] = ARMS,
    prompts_per_category: int = 3,
    num_tokens: int = 30,
    launches: dict[str, int] | None = None,
) -> Path:
    """Write a run folder; an arm whose drafts are never accepted proposes none at all.

    With `launches` it is a GPU's, whose steps are one graph and padded to twice their size.
    """
    rng = np.random.default_rng(0)
    requests: list[tuple[Any, ...]] = []
    steps: list[tuple[Any, ...]] = []
    timings: list[tuple[Any, ...]] = []
    for arm, _, k, chance, _ in arms:
        step = 0
        for group, category in enumerate(CATEGORIES * prompts_per_category):
            first, rest = (f"{category}-{group}", category), (k, 1, arm)
            requests.append((*first, step, False, 12, 12, 0, 0, 1, "", *rest))
            steps.append((step, 1, 12, 12, 1, 0.3, 30.0, 0.2, 0.1, 0.0, 1.4, 32.0, k, k, 1, arm))
            made, wall_s = 1, 0.032
            while made < num_tokens:
                step += 1
                drafted = int(rng.integers(0, k + 1)) if chance else 0
                accepted = int((rng.random(drafted) < chance).cumprod().sum())
                kept = min(accepted + 1, num_tokens - made)
                drafted = min(drafted, kept) if kept <= accepted else drafted
                values = (k + 1, drafted, min(accepted, drafted), kept)
                reason = "length" if made + kept == num_tokens else ""
                requests.append((*first, step, True, 12 + made, *values, reason, *rest))
                phases = np.array([0.3, 18 + 0.4 * k, 0.2, 0.3 * k + 0.05, 0.0, 1.4])
                phases *= rng.uniform(0.9, 1.2)
                if launches is not None:
                    phases = np.array([*[0.0] * 4, phases[:4].sum(), phases[5]])
                shown = np.where(phases, phases, np.nan) if launches is not None else phases
                tokens = (k + 1, (k + 1) * (1 if launches is None else 2))
                steps.append((step, 1, *tokens, kept, *shown, phases.sum(), k, k, 1, arm))
                made, wall_s = made + kept, wall_s + phases.sum() / 1e3
            timings.append((arm, k, group, category, 1, made, wall_s))
            step += 1
    needed = [name for name in REQUEST_COLUMNS if name not in OPTIONAL_COLUMNS]
    columns = [*needed, "k", "turn", "arm"]
    folder.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(requests, columns=columns)
    frame.to_parquet(folder / "requests.parquet", index=False)
    frame = pd.DataFrame(steps, columns=[*STEP_COLUMNS, "arm"])
    frame.to_parquet(folder / "steps.parquet", index=False)
    columns = ["arm", "k", "group", "category", "num_prompts", "num_tokens", "wall_s"]
    frame = pd.DataFrame(timings, columns=columns)
    frame.to_parquet(folder / "timings.parquet", index=False)
    (folder / "arms.json").write_text(
        json.dumps([arm_entry(*arm) | launching(launches) for arm in arms])
    )
    provenance = {
        "commit": "0123abc",
        "dirty": True,
        "command": "python -m experiments.run drafter=ngram",
        "versions": {"python": "3.11.9", "torch": "2.11.0"},
        "device": "cpu <generic>",
        "duration_s": None,
        "dtype": "bfloat16",
        "threads": 2,
        "seed": 0,
    }
    (folder / "provenance.json").write_text(json.dumps(provenance))
    (folder / "config.yaml").write_text("drafter:\n  name: ngram\nnote: <b>&amp;</b>\n")
    return folder


def arm_entry(arm: str, drafter: str, k: int, _: float, status: str) -> dict[str, Any]:
    checked = 0 if status in ("not checked", "reference") else 9
    note = "first difference at position 17, gap 0.00004" if "tie" in status else ""
    return {
        "arm": arm,
        "drafter": drafter,
        "drafter_config": {"name": drafter},
        "k": k,
        "verifier": "greedy",
        "temperature": 0.0,
        "lossless": True,
        "verdict": {
            "status": status,
            "dtype": "float32",
            "num_compared": checked,
            "num_equal": checked,
            "note": note,
        },
    }


def launching(launches: dict[str, int] | None) -> dict[str, Any]:
    policy = {"name": "fixed", "counts": {"4": 130}, "why": []}
    if launches is not None:
        capture = {"num_graphs": 5, "seconds": 1.26, "num_bytes": 3 << 19}
        own = {"device": "cuda", "graph_scope": "step", "launches": launches, "capture": capture}
        return own | {"draft_length": policy}
    return {
        "draft_length": policy,
        "device": "cpu",
        "graph_scope": "none",
        "launches": {"target eager: graph_scope is none": 130},
        "capture": {"num_graphs": 0, "seconds": 0.0, "num_bytes": 0},
    }


class Page(html.parser.HTMLParser):
    """Parses a page, refuses tags that do not nest, and keeps what the tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def lines(self) -> list[list[str]]:
        """The rows of all tables, their cells with single blanks."""
        return [[" ".join(cell.split()) for cell in row] for row in self.rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("run"))
    assert report.build_report(path) == path / "report.html"
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_page_is_self_contained(folder: Path, page: Page) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "http://" not in text
    assert "https://" not in text
    for tag, attributes in page.attributes:
        assert tag not in ("script", "link", "iframe")
        assert "href" not in attributes
        assert (attributes.get("src") or "data:").startswith("data:")
    assert "@import" not in text
    assert "url(" not in text


def test_every_plot_is_written_and_inlined_with_words(folder: Path, page: Page) -> None:
    images = [attributes for tag, attributes in page.attributes if tag == "img"]
    names = sorted(path.stem for path in (folder / "plots").iterdir())
    assert names == [
        "acceptance_by_position",
        "accepted_length",
        "categories",
        "speed",
        "time_split",
    ]
    assert len(images) == len(names)
    for image in images:
        assert (image["src"] or "").startswith("data:image/png;base64,iVBOR")
        assert len(image["alt"] or "") > 20
    assert ("html", {"lang": "en"}) in page.attributes


def interval(row: dict[Any, Any], name: str, unit: str = "") -> str:
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.2f}{unit} [{low:.2f}, {high:.2f}]"


def test_page_shows_the_numbers_of_the_summary(folder: Path, page: Page) -> None:
    summary, categories = report.read_tables(folder)
    assert list(summary["arm"]) == [arm[0] for arm in ARMS]
    for row in summary.to_dict("records"):
        line = next(line for line in page.lines if line[:2] == [row["arm"], str(row["k"])])
        assert line[2:4] == [interval(row, "accepted_length"), interval(row, "speedup", "x")]
        assert any(cell.startswith(f"{row['tokens_per_s']:.1f} [") for cell in line)
        compared = ", float32 (9/9)" if row["verdict_num_compared"] else ""
        assert f"{row['verdict']}{compared}" in line
    for row in categories.to_dict("records"):
        lengths, speedups = (line for line in page.lines if line[0] == row["category"])
        if row["arm"] == "none":  # all ones: no column beside other arms
            continue
        place = 1 + list(summary["arm"]).index(row["arm"])
        assert lengths[place] == interval(row, "accepted_length")
        assert speedups[place] == interval(row, "speedup", "x")


def test_page_states_verdicts_provenance_and_config_escaped(page: Page) -> None:
    assert "compared in float32" in page.text
    assert "the timed run in bfloat16" in " ".join(page.text.split())
    assert "first difference at position 17" in page.text
    assert ["versions.torch", "2.11.0"] in page.lines
    assert ["device", "cpu <generic>"] in page.lines
    assert ["duration_s", "unknown"] in page.lines
    assert "note: <b>&amp;</b>" in page.text


def test_page_says_of_which_drafts_a_position_is_a_share(page: Page) -> None:
    text = " ".join(page.text.split())
    assert "Each position counts the drafts that were judged there." in text
    assert "its rates cannot be read as one falling curve" in text
    assert "Accepted at a position: of the drafts that were judged there." in text


def test_a_fact_that_a_cpu_lacks_is_a_dash(tmp_path: Path) -> None:
    write_run(tmp_path, ARMS[:1], prompts_per_category=1)
    path = tmp_path / "provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"linear_choices": None}))
    lines = Page(report.build_report(tmp_path).read_text(encoding="utf-8")).lines
    assert ["linear_choices", "-"] in lines
    assert ["duration_s", "unknown"] in lines


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("question_answering", "question_\nanswering"),
        ("a_b c_d", "a_b c_d"),
        ("draft_model-smollm2-135m K=4", "draft_model-\nsmollm2-135m K=4"),
        ("context_length_2048 (x)", "context_\nlength_2048\n(x)"),
        ("x" * 20, "x" * 16 + "\n" + "x" * 4),
        ("_" * 20, "_" * 16 + "\n" + "_" * 4),
        ("", ""),
    ],
)
def test_labels_of_bars_are_parted_at_underscores_first(name: str, label: str) -> None:
    assert place_label(name) == label


def test_page_says_what_ran_without_graphs(page: Page) -> None:
    assert page.lines.count(["Arm", "Graph scope", "Part of the step", *LAUNCH_HEADERS]) == 1
    for arm in ARMS:
        line = [arm[0], "none", "target", "eager", "130", "graph_scope is none"]
        assert line in page.lines
    idle = [line for line in page.lines if len(line) == 8 and line[5:] == ["-", "-", "-"]]
    assert [line[0] for line in idle] == [arm[0] for arm in ARMS]
    assert idle[0][2:5] == ["0.0%", "0.0%", "0.0%"]
    assert all(line[2] == "0.0%" and line[3] == line[4] != "0.0%" for line in idle[1:])
    header = next(line for line in page.lines if "Decode steps" in line)
    assert "target, ms" in header
    assert "launch, ms" not in header


def test_page_says_what_was_launched_and_what_ran_eager_and_why(tmp_path: Path) -> None:
    launches = {
        "propose": 9,
        "target eager: more than 4 requests": 2,
        "target eager: the step runs prompt tokens": 9,
        "step": 120,
    }
    folder = write_run(tmp_path, ALL_NONE, launches=launches)
    page = Page(report.build_report(folder).read_text(encoding="utf-8"))
    for arm in ALL_NONE:
        own = [line for line in page.lines if line[:2] == [arm[0], "step"]]
        assert [line[2:] for line in own] == [
            ["step", "one graph", "120", "-"],
            ["target", "eager", "9", "the step runs prompt tokens"],
            ["target", "eager", "2", "more than 4 requests"],
            ["propose", "one graph", "9", "-"],
        ]
    idle = [line for line in page.lines if line[5:] == ["5", "1.5", "1.3"]]
    assert [line[2:5] for line in idle] == [["50.0%", "0.0%", "50.0%"], ["50.0%", "40.0%", "90.0%"]]
    place, header = next((i, ln) for i, ln in enumerate(page.lines) if "Decode steps" in ln)
    times = page.lines[place + 1]
    assert times[header.index("target, ms")] == "-"
    assert times[header.index("launch, ms")].endswith("%)")
    assert "nan" not in " ".join(cell for row in page.lines for cell in row)


def test_page_tells_how_many_drafts_were_proposed_and_why(tmp_path: Path) -> None:
    write_run(tmp_path, ARMS[:2], prompts_per_category=1)
    arms = json.loads((tmp_path / "arms.json").read_text())
    report.build_report(tmp_path)
    assert "Drafts of each request" not in (tmp_path / "report.html").read_text()
    arms[1]["draft_length"] = {
        "name": "goodput",
        "counts": {"0": 30, "2": 0, "4": 90},
        "why": ["acceptance by position: 0.70", "up to 1 requests: 4"],
    }
    (tmp_path / "arms.json").write_text(json.dumps(arms))
    page = Page(report.build_report(tmp_path).read_text())
    found = [cells for cells in page.lines if "goodput" in cells]
    why = "acceptance by position: 0.70; up to 1 requests: 4"
    assert found == [[arms[1]["arm"], "goodput", "0: 30 (25%), 4: 90 (75%)", why]]


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("steps.parquet", "num_computed_tokens, launch_ms"), ("arms.json", "capture, device")],
)
def test_a_run_of_an_older_version_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, lacking: str
) -> None:
    write_run(tmp_path, ARMS[:1], prompts_per_category=1)
    if name == "steps.parquet":
        frame = pd.read_parquet(tmp_path / name)
        frame.drop(columns=["num_computed_tokens", "launch_ms"]).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_text(json.dumps([arm_entry(*ARMS[0])]))
    assert report.main([str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert f"{name} lacks {lacking}" in message
    assert "run it again with this version" in message
    assert message.count("\n") == 1


def test_rebuilding_gives_the_same_bytes(folder: Path) -> None:
    before = (folder / "report.html").read_bytes()
    report.build_report(folder)
    assert (folder / "report.html").read_bytes() == before


def shown(summary: pd.DataFrame, categories: pd.DataFrame) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    for table in report.render_table(summary, categories):
        console.print(table)
    return console.export_text()


def test_terminal_tables_keep_every_arm_and_category_on_a_line(folder: Path) -> None:
    summary, categories = report.read_tables(folder)
    lines = [" ".join(line.split()) for line in shown(summary, categories).splitlines()]
    for row in summary.to_dict("records"):
        line = next(line for line in lines if line.startswith(f"{row['arm']} {row['k']} "))
        assert f" {interval(row, 'accepted_length')} " in line
        assert f" {row['tokens_per_s']:.1f} {interval(row, 'speedup', 'x')} " in line
    for category in CATEGORIES:
        own = categories.loc[categories["category"] == category].iloc[1:]
        pairs = zip(own["accepted_length"], own["speedup"], strict=True)
        cells = " ".join(f"{length:.2f} {speedup:.2f}x" for length, speedup in pairs)
        assert f"{category} {cells}" in lines


def test_many_arms_with_long_names_fit_the_terminal(tmp_path: Path) -> None:
    name = "draft_model-smollm2-135m [/b] K={}"
    arms = (ARMS[0], *((name.format(k), "draft_model", k, 0.7, "equal") for k in range(9, 17)))
    run = report.load_run(write_run(tmp_path, arms, prompts_per_category=1, num_tokens=8))
    parts = run.requests, run.timings, run.arms
    text = shown(metrics.summarise_arms(*parts), metrics.summarise_categories(*parts))
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "\u2026" not in text  # nothing is cut: long names fold
    assert "K=16" in text


@pytest.mark.parametrize("arms", [ARMS[:1], ALL_NONE])
def test_a_run_without_drafts_renders(
    tmp_path: Path, arms: tuple[tuple[str, str, int, float, str], ...]
) -> None:
    page = Page(report.build_report(write_run(tmp_path, arms)).read_text(encoding="utf-8"))
    summary, _ = report.read_tables(tmp_path)
    assert list(summary["accepted_length"]) == [1.0] * len(arms)
    assert "nan" not in " ".join(cell for row in page.lines for cell in row)
    assert "none" in shown(*report.read_tables(tmp_path))


def test_a_run_without_decode_steps_renders(tmp_path: Path) -> None:
    page = Page(report.build_report(write_run(tmp_path, num_tokens=1)).read_text(encoding="utf-8"))
    assert "1.00 [1.00, 1.00]" in [cell for row in page.lines for cell in row]
    assert "nan" not in " ".join(cell for row in page.lines for cell in row)


def test_a_missing_file_is_named_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    (tmp_path / "timings.parquet").unlink()
    with pytest.raises(ConfigError, match=r"timings\.parquet missing"):
        report.build_report(tmp_path)
    assert report.main([str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "timings.parquet missing" in message
    assert message.count("\n") == 1
    assert report.main([str(tmp_path / "nowhere")]) == 1


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_run(tmp_path, ARMS[:1], prompts_per_category=1) / "plots").write_text("in the way")
    assert report.main([str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "cannot be written" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("name", ["steps.parquet", "arms.json", "provenance.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (write_run(tmp_path) / name).write_text("{damaged")
    with pytest.raises(ConfigError, match=name):
        report.build_report(tmp_path)


def test_arms_and_traces_must_agree(tmp_path: Path) -> None:
    write_run(tmp_path)
    entries = [arm_entry(*arm) | launching(None) for arm in ARMS]
    (tmp_path / "arms.json").write_text(json.dumps(entries[:2]))
    with pytest.raises(ConfigError, match="oracle K=8"):
        report.build_report(tmp_path)
    (tmp_path / "arms.json").write_text(json.dumps([*entries, entries[1]]))
    with pytest.raises(ConfigError, match="twice"):
        report.build_report(tmp_path)
    del entries[2]["verdict"]["dtype"]
    (tmp_path / "arms.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigError, match="dtype"):
        report.build_report(tmp_path)


def test_command_line_prints_both_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, prompts_per_category=1)
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "equality verdict" in out
    assert "translation" in out
    assert str(tmp_path / "report.html") in out
