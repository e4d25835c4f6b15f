"""Bench `sampler`: cases, lines and table; the timing itself needs a GPU."""

from typing import Any

import pytest
import torch

from experiments.bench_sampler import (
    DTYPES,
    PEER_US,
    VOCAB_SIZE,
    SamplerBenchConfig,
    sampler_cases,
    sampler_line,
)
from experiments.bench_sampler_inputs import SamplerBenchCase, Work
from experiments.bench_tables import sampler_tables
from tests.test_experiments_bench import shown


def test_every_figure_of_the_peer_has_a_case() -> None:
    cases = {(c.kernel, c.size, c.dtype) for c in sampler_cases(SamplerBenchConfig())}
    assert len(cases) == 2 * (7 * 4 + 7 * 3)
    for (kernel, dtype), by_size in PEER_US.items():
        assert all((kernel, size, DTYPES[dtype]) in cases for size in by_size)


def line(kernel: str, size: int, us: float, us_in_l2: float | None) -> dict[str, Any]:
    case = SamplerBenchCase(kernel, size, torch.float32, VOCAB_SIZE)
    work = Work((), lambda: None, lambda: None, read_bytes=8_000_000, write_bytes=0)
    figures = {"us": us, "us_in_l2": us_in_l2, "extra_bytes": 1_500_000}
    return sampler_line(case, work, figures, ceiling=4000.0)


def test_a_line_is_set_beside_floor_and_peer() -> None:
    found = line("rejection_t0", 32, 30.0, 13.45)
    assert (found["requests"], found["lines"]) == (32, 160)
    assert found["floor_us"] == pytest.approx(2.0)
    assert found["over_floor"] == pytest.approx(15.0)
    assert (found["peer_us"], found["peer_in_l2"]) == (26.9, True)
    assert found["of_peer"] == pytest.approx(0.5)
    found = line("gumbel_t0", 320, 29.3, None)
    assert (found["requests"], found["lines"], found["peer_in_l2"]) == (None, 320, False)
    assert found["of_peer"] == pytest.approx(0.5)
    found = line("process_top_p", 32, 29.3, 20.0)
    assert (found["peer_us"], found["peer_in_l2"], found["of_peer"]) == (None, None, None)


def test_the_table_has_a_dash_where_there_is_no_peer() -> None:
    lines = [line("rejection_t0", 32, 30.0, 13.45), line("process_top_p", 320, 12345.6, None)]
    prompt = {"prompt_len": 32768, "chunk": 2048, "seconds_without": 0.5, "seconds_with": 1.25}
    prompt |= {"peak_bytes_without": 1e8, "peak_bytes_with": 3.5e8, "extra_bytes": 2.5e8}
    record = {"vocab_size": VOCAB_SIZE, "read_ceiling_gb_per_s": 4000.4, "lines": lines}
    record["prompt_logprobs"] = [prompt]
    text = shown(sampler_tables(record))
    assert any("the device reads 4000 GB/s" in found for found in text)
    assert "rejection_t0 float32 32 160 30.0 13.4 8.0 2.0 15.00 26.9 0.50 1.5" in text
    assert "32768 2048 100.0 350.0 250.0 0.50 1.25" in text
    assert "process_top_p float32 - 320 12345.6 - 8.0 2.0 6172.80 - - 1.5" in text
