"""Arrivals, and what users wait for; greedy text knows nothing of arrivals."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import experiments.run
from experiments.arms import play
from experiments.prompts import Question
from experiments.workload import (
    ArrivalTraceConfig,
    Pace,
    PoissonConfig,
    WorkloadConfig,
    cut_groups,
    plan_paces,
    read_arrivals,
)
from specdec import Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.latencies import LATENCY_COLUMNS, latency_frame, summarise_latencies
from specdec.trace import StepTrace
from tests.models import byte_tokenizer, tiny_model, tiny_target
from tests.run_cases import run_tiny, save_tiny_target

QUESTIONS = [Question(i, "abc"[i % 3], (f"question {i} {i}",)) for i in range(7)]


def greedy(name: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@functools.cache
def target() -> Any:
    tokenizer = byte_tokenizer()
    return tiny_target(tiny_model(vocab_size=len(tokenizer)), tokenizer)


def make_engine(drafter: str = "ngram", **options: Any) -> Engine:
    sizes = {"max_model_len": 128, "max_num_reqs": 4, "device": "cpu"}
    return Engine(target(), drafter, "greedy", 3, trace=StepTrace(), **{**sizes, **options})


def test_groups_are_cut_by_batch_size_or_as_asked() -> None:
    paces = plan_paces(WorkloadConfig(), 7, batch_size=3, seed=0)
    assert [pace.arrivals for pace in paces] == [(0.0,) * 3, (0.0,) * 3, (0.0,)]
    assert {pace.most_running for pace in paces} == {3}
    groups = cut_groups(QUESTIONS, paces)
    assert [[q.question_id for q in group] for group in groups] == [[0, 1, 2], [3, 4, 5], [6]]
    (pace,) = plan_paces(WorkloadConfig(group_size=50), 7, batch_size=3, seed=0)
    assert pace == Pace((0.0,) * 7, 3)


def test_poisson_gaps_are_exponential_and_the_seed_alone_decides_them() -> None:
    rate, n = 4.0, 20_000
    (pace,) = plan_paces(PoissonConfig(rate_per_s=rate), n, 8, seed=5)
    gaps = np.diff([0.0, *pace.arrivals])
    assert gaps.min() > 0
    # Mean and standard deviation are both 1 / rate; theirs are 0.7 and 1.4 % here.
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert gaps.std() == pytest.approx(1 / rate, rel=0.06)
    assert plan_paces(PoissonConfig(rate_per_s=rate), n, 8, seed=5) == [pace]
    assert plan_paces(PoissonConfig(rate_per_s=rate, seed=5), n, 8, seed=6) == [pace]
    assert plan_paces(PoissonConfig(rate_per_s=rate), n, 8, seed=6) != [pace]
    cut = plan_paces(PoissonConfig(rate_per_s=rate, group_size=300), n, 8, seed=5)
    again = np.concatenate([np.diff([0.0, *pace.arrivals]) for pace in cut])
    assert again == pytest.approx(gaps)


def test_a_file_of_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.txt"
    path.write_text("# seconds\n0.5\n\n1.25 # two at once\n1.25\n3\n")
    assert read_arrivals(str(path)) == [0.5, 1.25, 1.25, 3.0]
    config = ArrivalTraceConfig(path=str(path), group_size=2)
    paces = plan_paces(config, 3, 4, seed=0)
    assert [pace.arrivals for pace in paces] == [(0.5, 1.25), (0.0,)]
    with pytest.raises(ConfigError, match=r"4 arrival times for 5 questions.*prompts.limit=4"):
        plan_paces(config, 5, 4, seed=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [("1\n0.5\n", ["line 2", "0.5"]), ("soon\n", ["line 1", "soon"]), ("nan\n", ["line 1"])],
)
def test_a_file_that_holds_no_times_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "arrivals.txt"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_arrivals(str(path))
    assert all(word in str(error.value) for word in words)
    with pytest.raises(ConfigError, match=r"no such file; give the path of a file of arrival"):
        read_arrivals(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: WorkloadConfig(group_size=0),
        lambda: PoissonConfig(rate_per_s=0),
        lambda: PoissonConfig(rate_per_s=math.inf),
        lambda: PoissonConfig(seed=-1),
    ],
)
def test_wrong_values_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"workload\."):
        make()


def test_text_and_accepted_length_do_not_depend_on_arrivals() -> None:
    found = {}
    for name, pace in {
        "at once": None,
        "two at a time": Pace((0.0,) * 7, 2),
        "now and then": Pace(tuple(0.02 * i for i in range(7)), 4),
    }.items():
        engine = make_engine()
        played = play(engine, QUESTIONS, greedy, pace)
        rows = engine.trace.requests() if engine.trace else None
        assert rows is not None
        outcomes = rows.drop(columns="step").sort_values(["request_id", "context_len"])
        texts = {turn.request_id: turn.token_ids for turn in played.turns}
        found[name] = texts, outcomes.reset_index(drop=True)
        assert len(texts) == 7
        running = engine.trace.steps()["num_reqs"].max() if engine.trace else 0
        assert running <= {"at once": 4, "two at a time": 2, "now and then": 4}[name]
    first = found.pop("at once")
    for texts, outcomes in found.values():
        assert texts == first[0]
        assert outcomes.equals(first[1])


def test_latencies_add_up_and_count_from_the_arrival() -> None:
    pace = Pace((0.0, 0.0, 0.0, 0.3, 0.3, 0.3, 0.3), 1)
    played = play(make_engine(), QUESTIONS, greedy, pace)
    by_name = {latency.request_id: latency for latency in played.latencies}
    for name, arrival_s in zip([f"{i}/1" for i in range(7)], pace.arrivals, strict=True):
        latency = by_name[name]
        assert latency.arrival_s == arrival_s
        assert 0 <= latency.queue_s < latency.ttft_s < latency.e2e_s
        assert (latency.num_tokens, latency.finish_reason) == (10, "length")
    # One at a time: who came second waits for the first.
    assert by_name["1/1"].queue_s >= by_name["0/1"].e2e_s
    assert by_name["6/1"].queue_s >= by_name["5/1"].queue_s >= by_name["4/1"].queue_s
    last = max(latency.arrival_s + latency.e2e_s for latency in played.latencies)
    assert last <= played.wall_s
    assert played.wall_s >= 0.3


def test_a_later_turn_arrives_when_the_one_before_is_answered() -> None:
    two = Question("q", "a", ("one", "two"))
    played = play(make_engine(), [two], greedy, Pace((0.05,), 1))
    first, second = played.latencies
    assert second.arrival_s == pytest.approx(first.arrival_s + first.e2e_s)
    assert (first.turn, second.turn) == (1, 2)
    assert second.num_prompt_tokens > first.num_prompt_tokens


def test_latency_summary_equals_values_worked_out_by_hand() -> None:
    fixed = {"k": 3, "group": 0, "turn": 1, "category": "a", "finish_reason": "stop"}
    fixed |= {"num_prompt_tokens": 5, "random_tokens": False, "arrival_s": 1.0}
    values = [("x", "1/1", 0.1, 0.5, 2.5, 5), ("x", "2/1", 0.3, 0.7, 0.7, 1)]
    values += [("y", "1/1", 0.0, 0.2, 1.2, 11)]
    names = ("arm", "request_id", "queue_s", "ttft_s", "e2e_s", "num_tokens")
    frame = latency_frame([fixed | dict(zip(names, row, strict=True)) for row in values])
    assert tuple(frame.columns) == LATENCY_COLUMNS
    assert frame["tpot_s"].tolist()[::2] == pytest.approx([0.5, 0.1])
    assert math.isnan(frame["tpot_s"][1])
    arms = [{"arm": "x", "k": 3}, {"arm": "y", "k": 3}, {"arm": "z", "k": 3}]
    x, y, z = summarise_latencies(frame, arms).to_dict("records")
    assert (x["num_requests"], y["num_requests"], z["num_requests"]) == (2, 1, 0)
    assert x["ttft_s_mean"] == pytest.approx(0.6)
    assert 0.5 <= x["ttft_s_mean_low"] <= x["ttft_s_mean_high"] <= 0.7
    assert x["ttft_s_p50"] == pytest.approx(0.6)
    assert x["ttft_s_p99"] == pytest.approx(0.698)
    assert x["tpot_s_mean"] == pytest.approx(0.5)
    assert math.isnan(x["tpot_s_mean_low"])  # one request has no interval
    assert y["e2e_s_p90"] == pytest.approx(1.2)
    assert math.isnan(z["e2e_s_p50"])
    assert not x["random_tokens"]
    assert summarise_latencies(frame.assign(random_tokens=True), arms)["random_tokens"][0]


def test_an_empty_table_has_its_columns() -> None:
    assert tuple(latency_frame([]).columns) == LATENCY_COLUMNS


def test_a_run_with_arrivals_gives_every_arm_the_same_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces = []
    played = experiments.run.play

    def watched(engine: Engine, group: Any, make: Any, pace: Pace) -> Any:
        paces.append(pace)
        return played(engine, group, make, pace)

    monkeypatch.setattr(experiments.run, "play", watched)
    options = ["workload=poisson", "workload.rate_per_s=40", "equality.enabled=false"]
    tiny = save_tiny_target(tmp_path / "tiny")
    result = run_tiny(tiny, tmp_path, *options, "batch_size=2", "seed=3")
    folder = result.folder
    assert "latency from arrival (poisson)" in str(result.tables[-1].title)
    assert result.tables[-1].row_count == 2
    assert len(paces) == 2
    assert paces[0] == paces[1]
    assert paces[0].most_running == 2
    latencies = pd.read_parquet(folder / "latencies.parquet")
    first = latencies[latencies["turn"] == 1]
    arms: Any = first.groupby("arm")["arrival_s"].apply(sorted)
    assert arms["none"] == arms["ngram K=4"] == list(paces[0].arrivals)
    entries = json.loads((folder / "arms.json").read_text())
    assert {entry["workload"]["name"] for entry in entries} == {"poisson"}
    assert not any(entry["random_tokens"] for entry in entries)
    summary = pd.read_csv(folder / "latencies.csv")
    assert list(summary["arm"]) == ["none", "ngram K=4"]
    assert (summary["num_requests"] == 4).all()
    assert (summary["ttft_s_p50"] < summary["e2e_s_p50"]).all()
    metrics = pd.read_csv(folder / "summary.csv")
    assert metrics["speedup"].notna().all()
