"""Records of the bench of whole steps: compared, shown and drawn."""

import copy
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import bench_e2e
from experiments.bench_tables import e2e_tables
from experiments.e2e_guard import compare_records
from experiments.e2e_tables import record_text
from specdec.errors import ConfigError

KINDS = (("8b", "eagle3", 5.4), ("8b", "none", None), ("135m", "ngram", None))


def measured_line(model: str, drafter: str, batch: int, aim_ms: float | None) -> dict[str, Any]:
    """A line as a GPU gives it; repeats lie within 1 %."""
    ms = 5.0 + 0.05 * batch
    phases = ("inputs", "target", "verify", "draft", "launch", "host")
    return {
        "name": f"{model} {drafter} batch {batch}",
        "model": model,
        "drafter": drafter,
        "batch": batch,
        "status": "measured",
        "reason": None,
        "ms": ms,
        "ms_min": ms * 0.995,
        "ms_max": ms * 1.005,
        "device_ms": ms - 0.1,
        "gap_ms": 0.1,
        "host_us": 210.0,
        "launches_per_step": {"step": 1.0, "kernels outside": 0.5},
        "tokens_per_step": 3.0,
        "tokens_per_s": 3e3 * batch / ms,
        "floor_ms": 4.0,
        "over_floor": ms / 4,
        "peer_ms": 6.0,
        "peer_kind": "V2, median",
        "over_peer": ms / 6,
        "aim_ms": aim_ms,
        "aim_met": aim_ms and ms <= aim_ms,
        "split": {f"{name}_ms": 0.25 for name in phases} | {"step_ms": 5.5},
    }


def scale_row(axis: str, value: int) -> dict[str, Any]:
    return {
        **{"model": "135m", "axis": axis, "value": value, "drafter": "eagle3"},
        **{"status": "measured", "ms": 1.0 + 0.1 * value, "expected_ms": 1.1, "fit": "1 ms + law"},
        **{"bytes": 3_000_000 * value, "expected_bytes": 2_900_000 * value, "graph_bytes": 10**6},
    }


def made_record() -> dict[str, Any]:
    forward = measured_line("8b", "none", 1, None) | {"name": "8b forward 1x5"}
    forward |= {"aim_over_floor": 1.3, "peer_over_floor": 1.47, "aim_met": True}
    return {
        "bench": "e2e",
        "provenance": {"device": "a GPU", "dtype": "bfloat16"},
        "config": {"shapes": "full", "output_len": 256},
        "ceilings": {"read_gb_per_s": 4500.0},
        "lines": [measured_line(m, d, b, aim) for m, d, aim in KINDS for b in (1, 8, 32)],
        "forwards": [forward],
        "scale": [scale_row(axis, n) for axis in ("batch", "context") for n in (1, 2, 64)],
    }


def scaled(record: dict[str, Any], name: str, factor: float) -> dict[str, Any]:
    found = copy.deepcopy(record)
    for line in (*found["lines"], *found["forwards"]):
        if line["name"] == name:
            line |= {key: line[key] * factor for key in ("ms", "ms_min", "ms_max")}
    return found


def verdicts(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    return {found.name: found.verdict for found in compare_records(old, new)}


@pytest.mark.parametrize("name", ["8b eagle3 batch 8", "8b forward 1x5"])
def test_a_line_that_became_6_percent_slower_is_flagged_alone(name: str) -> None:
    record = made_record()
    found = verdicts(record, scaled(record, name, 1.06))
    assert found.pop(name) == "slower"
    assert set(found.values()) == {"same"}
    assert verdicts(scaled(record, name, 1.06), record)[name] == "faster"


def test_noise_is_not_flagged() -> None:
    record, name = made_record(), "8b none batch 1"
    assert set(verdicts(record, record).values()) == {"same"}
    assert verdicts(record, scaled(record, name, 1.04))[name] == "same"
    # Medians 8 % apart, of repeats that overlap.
    wide = scaled(record, name, 1.08)
    next(line for line in wide["lines"] if line["name"] == name)["ms_min"] = 5.0
    assert verdicts(record, wide)[name] == "same"


def test_lines_that_one_record_lacks_are_named() -> None:
    record, less = made_record(), made_record()
    dropped = less["lines"].pop(0)["name"]
    failed = less["lines"][0]
    failed |= {"status": "failed", "reason": "no luck"}
    for key in ("ms", "ms_min", "ms_max"):
        del failed[key]
    found = verdicts(record, less)
    assert found[dropped] == found[failed["name"]] == "missing"
    assert verdicts(less, record)[dropped] == "new"
    assert verdicts(less, less)[failed["name"]] == "not measured"


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ("provenance", "device", "different devices"),
        ("provenance", "dtype", "different dtypes"),
        ("config", "shapes", "different shapes"),
        ("config", "output_len", "different output lengths"),
    ],
)
def test_records_that_do_not_compare_are_refused(section: str, key: str, said: str) -> None:
    record, other = made_record(), made_record()
    other[section][key] = "another"
    with pytest.raises(ConfigError, match=said):
        compare_records(record, other)


def test_a_record_of_another_bench_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    for text in ('{"bench": "step"}', "[]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="give a record of bench=e2e"):
            bench_e2e.read_record(path)


def run_main(monkeypatch: pytest.MonkeyPatch, *options: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_e2e.py", *map(str, options)])
    return bench_e2e.main()


def test_the_command_line_compares_and_ends_with_1_where_a_line_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = made_record()
    slower = scaled(record, "135m ngram batch 32", 1.06)
    other = copy.deepcopy(record)
    other["provenance"]["device"] = "another GPU"
    for name, found in (("old", record), ("slower", slower), ("other", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    (tmp_path / "broken.json").write_text("{")
    old = tmp_path / "old.json"
    assert run_main(monkeypatch, "--compare", old, old) == 0
    assert "slower" not in capsys.readouterr().out
    assert run_main(monkeypatch, "--compare", old, tmp_path / "slower.json") == 1
    lines = capsys.readouterr().out.splitlines()
    flagged = [line.split() for line in lines if "slower" in line]
    assert flagged == [["135m", "ngram", "batch", "32", "6.600", "6.996", "+6.0%", "slower"]]
    for name in ("other", "broken", "nowhere"):
        assert run_main(monkeypatch, "--compare", old, tmp_path / f"{name}.json") == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1


def test_tables_show_figures_and_what_was_left_out() -> None:
    record = made_record()
    record["lines"][1] = {"name": "8b eagle3 batch 8", "status": "failed", "reason": "no luck"}
    state = {"sm_mhz": 1500, "sm_mhz_min": 1410, "sm_mhz_max": 1980, "watts": 699.6}
    record["lines"][0]["state"] = state | {"limited_by": {"power": 0.75}}
    text = record_text(record)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "8b eagle3 batch 1 1500 1410 1980 700 power 75%" in lines
    figures = "5.050 5.025..5.075 4.950 0.100 594 3.00 210 1.5 4.000 1.26 6.000 0.84 5.4 yes"
    assert f"8b eagle3 batch 1 {figures}" in lines
    assert any(line.startswith("8b eagle3 batch 32 6.600") and "NO" in line for line in lines)
    assert "8b eagle3 batch 8: failed: no luck" in lines
    assert "batch 64 135m eagle3 7.400 1.100 192.0 185.6 1.0 1 ms + law" in lines
    console = Console(width=200, record=True, file=io.StringIO())
    for table in e2e_tables(record):
        console.print(table)
    shown = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert f"8b eagle3 batch 1 {figures}" in shown


def test_lines_are_written_in_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record, path = made_record(), tmp_path / "record.json"
    record["lines"].reverse()  # a record has lines with an aim first
    record["lines"][-1] |= {"split": None, "peer_ms": None}
    record["lines"][-2] = {"name": "8b eagle3 batch 8", "status": "failed", "reason": "no luck"}
    path.write_text(json.dumps(record))
    assert run_main(monkeypatch, "--table", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(record["lines"]) - 1
    assert lines[2].startswith("| 8B,")
    at = lines.index("| 8B, `eagle3` | 1 | **5.05** | 4.00 | 1.26 |  | 5.40 |  |")
    found = "6.00 | 5.40 **missed** | 0.25, 0.25, 0.25"
    assert lines[at + 1] == f"| 8B, `eagle3` | 32 | **6.60** | 4.00 | 1.65 | {found} |"
    path.write_text(json.dumps({"bench": "step"}))
    assert run_main(monkeypatch, "--table", path) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_record_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "record.json", tmp_path / "pictures" / "e2e.png"
    path.write_text(json.dumps(made_record()))
    assert run_main(monkeypatch, "--plot", path, picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    empty = made_record() | {"lines": [], "scale": []}
    path.write_text(json.dumps(empty))
    assert run_main(monkeypatch, "--plot", path, picture) == 1
    assert "no line of the record was measured" in capsys.readouterr().err
    path.write_text(json.dumps({"bench": "step"}))
    assert run_main(monkeypatch, "--plot", path, picture) == 1
