"""The bench of whole steps on a GPU, over tiny models: graphs, gaps, phases, memory.

Run on a GPU machine with `pytest -m gpu`.
"""

import pytest

from experiments.bench_e2e import E2EBenchConfig, run_e2e_bench
from experiments.e2e_cases import list_cases
from experiments.e2e_models import why_not_here

pytestmark = pytest.mark.gpu


def test_lines_have_the_figures_of_a_graph() -> None:
    config = E2EBenchConfig(device="cuda", shapes="tiny", batches=[1, 8], repeats=2)
    record = run_e2e_bench(config, lambda _: None, {})
    rows = [*record["lines"], *record["forwards"], *record["scale"]]
    assert not record["failed"], [row["reason"] for row in rows if row["status"] == "failed"]
    lines = [line for line in record["lines"] if line["status"] == "measured"]
    cases = list_cases(config.batches, config.cases)
    expected = [case.name for case in cases if why_not_here(case, tiny=True) is None]
    assert [line["name"] for line in lines] == expected
    for line in lines:
        assert line["launches_per_step"]["step"] == 1.0, line["name"]
        assert 0 < line["device_ms"] < line["ms_max"] * 1.5, line["name"]
        assert line["gap_ms"] == pytest.approx(line["ms"] - line["device_ms"])
        assert 0 < line["host_us"] <= line["ms_max"] * 1e3
        assert line["steps_in_flight"] == 2
        split = line["split"]
        assert split["target_ms"] > 0
        assert split["step_ms"] >= split["target_ms"] + split["verify_ms"]
    assert all(row["status"] == "measured" for row in record["forwards"])
    for row in record["scale"]:
        assert row["status"] == "measured"
        assert row["bytes"] > 0
        assert row["expected_bytes"] > 0
