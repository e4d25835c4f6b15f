"""The rows that an engine writes to its trace, against rows worked out by hand.

The target counts up, and the oracle drafts what a text says at the same place: what is accepted
follows from where that text departs from counting.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from specdec import Engine, SamplingParams
from specdec.trace import OPTIONAL_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS, StepTrace, outcome_text
from tests.models import scripted_model, tiny_target

SCOPES = pytest.mark.parametrize("scope", ["none", "step"])
K = 3
WRONG = 90  # follows from nothing here
COLUMNS = [name for name in REQUEST_COLUMNS if name not in ("request_id", "label", "sample_index")]


@functools.cache
def target(eos_token_id: int | None = None) -> Any:
    return tiny_target(scripted_model([(i + 1) % 100 for i in range(100)], eos_token_id))


def counting(start: int, end: int, wrong_at: tuple[int, ...] = ()) -> list[int]:
    """Return start, ..., end - 1, with a wrong token in place of some."""
    return [WRONG if token in wrong_at else token for token in range(start, end)]


def make_engine(texts: list[list[int]], scope: str, eos: int | None = None, **options: Any) -> Any:
    """Build an engine whose trace is kept; in scope "step" every verification has K + 1 places."""
    sizes = {"max_model_len": 64, "max_num_reqs": 4, "block_size": 4, "device": "cpu"}
    drafter = {"name": "oracle", "texts": texts}
    options = {"num_speculative_tokens": K, "graph_scope": scope, **sizes, **options}
    return Engine(target(eos), drafter, "greedy", trace=StepTrace(), **options)


def greedy(max_tokens: int = 16, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **params)


def run(engine: Any) -> Any:
    """Run an engine to the end; returns its rows."""
    while engine.has_requests:
        engine.step()
    return engine.trace.requests()


def lines(rows: Any, **wanted: Any) -> list[tuple[Any, ...]]:
    """Return the rows of a request or sample as tuples in the order of COLUMNS."""
    for name, value in wanted.items():
        rows = rows[rows[name] == value]
    return [tuple(line) for line in rows[COLUMNS].itertuples(index=False)]


def padded(scope: str, *rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return rows with the positions that a fixed shape adds to them: they hold no draft."""
    if scope == "none":
        return list(rows)
    wide = []
    for row in rows:
        step, is_verify, context_len, num_positions, *counts, reason, outcome = row
        if is_verify:
            num_positions, outcome = K + 1, outcome.ljust(K, "-")
        wide.append((step, is_verify, context_len, num_positions, *counts, reason, outcome))
    return wide


@SCOPES
def test_rejections_and_places_without_a_draft(scope: str) -> None:
    engine = make_engine([counting(3, 13, wrong_at=(9, 10))], scope)
    engine.add_request("r", [3, 4, 5], greedy(12))
    assert lines(run(engine)) == padded(
        scope,
        # step, is_verify, context, positions, drafted, accepted, committed, reason, outcome
        (0, False, 3, 3, 0, 0, 1, "", ""),  # the prompt: 6
        (1, True, 4, 4, 3, 2, 3, "", "aar"),  # 7, 8, WRONG: 9 takes the place of the last
        (2, True, 7, 4, 3, 0, 1, "", "ruu"),  # WRONG, 11, 12: right behind a wrong one
        (3, True, 8, 3, 2, 2, 3, "", "aa"),  # 11, 12: there the oracle's text ends, and 13
        (4, True, 11, 1, 0, 0, 1, "", ""),  # it knows no more
        (5, True, 12, 1, 0, 0, 1, "", ""),
        (6, True, 13, 1, 0, 0, 1, "", ""),
        (7, True, 14, 1, 0, 0, 1, "length", ""),
    )


@SCOPES
def test_eos_inside_a_run_that_was_accepted(scope: str) -> None:
    engine = make_engine([counting(3, 40)], scope, eos=8)
    engine.add_request("r", [3, 4, 5], greedy())
    assert lines(run(engine)) == padded(
        scope,
        (0, False, 3, 3, 0, 0, 1, "", ""),
        # Of 7, 8, 9 and 10 two are kept: the draft 9 was accepted for nothing.
        (1, True, 4, 4, 2, 2, 2, "stop", "aae"),
    )


@SCOPES
def test_eos_that_takes_the_place_of_a_rejected_draft(scope: str) -> None:
    engine = make_engine([counting(3, 40, wrong_at=(7,))], scope, eos=7)
    engine.add_request("r", [3, 4, 5], greedy())
    assert lines(run(engine)) == padded(
        scope,
        (0, False, 3, 3, 0, 0, 1, "", ""),
        (1, True, 4, 4, 1, 0, 1, "stop", "ree"),
    )


@SCOPES
def test_a_stop_token_ends_a_run_and_ignored_eos_does_not(scope: str) -> None:
    engine = make_engine([counting(3, 40)], scope, eos=8)
    engine.add_request("r", [3, 4, 5], greedy(ignore_eos=True, stop_token_ids=[11]))
    assert lines(run(engine)) == padded(
        scope,
        (0, False, 3, 3, 0, 0, 1, "", ""),
        (1, True, 4, 4, 3, 3, 4, "", "aaa"),  # 7 to 10
        (2, True, 8, 4, 1, 1, 1, "stop", "aee"),
    )


@SCOPES
def test_max_tokens_inside_a_run(scope: str) -> None:
    engine = make_engine([counting(3, 40)], scope)
    engine.add_request("r", [3, 4, 5], greedy(7))
    assert lines(run(engine)) == padded(
        scope,
        (0, False, 3, 3, 0, 0, 1, "", ""),
        (1, True, 4, 4, 3, 3, 4, "", "aaa"),
        # Two tokens are left, and the target's own is one of them: one draft could be of use.
        (2, True, 8, 2, 1, 1, 2, "length", "a"),
    )


@SCOPES
def test_max_model_len_inside_a_run(scope: str) -> None:
    engine = make_engine([counting(3, 40)], scope, max_model_len=10)
    engine.add_request("r", [3, 4, 5], greedy(30))
    assert lines(run(engine)) == padded(
        scope,
        (0, False, 3, 3, 0, 0, 1, "", ""),
        (1, True, 4, 4, 3, 3, 4, "", "aaa"),
        (2, True, 8, 2, 1, 1, 2, "length", "a"),
    )


@SCOPES
def test_a_draft_budget_of_nothing(scope: str) -> None:
    engine = make_engine([counting(3, 40)], scope)
    engine.add_request("r", [3, 4, 5], greedy(3, num_speculative_tokens=0))
    assert lines(run(engine)) == padded(
        scope,
        (0, False, 3, 3, 0, 0, 1, "", ""),
        (1, True, 4, 1, 0, 0, 1, "", ""),
        (2, True, 5, 1, 0, 0, 1, "length", ""),
    )


@SCOPES
def test_preemption_and_resumption(scope: str) -> None:
    # 6 blocks of 4 tokens. In steps 1 and 2 both grow to 10 tokens; in step 3 the first needs its
    # fourth block, so the later one gives its row back, and comes again when the first has ended.
    texts = [counting(3, 60), counting(23, 80)]
    engine = make_engine(texts, scope, num_speculative_tokens=2, num_kv_blocks=6, max_model_len=32)
    engine.add_request("first", [3, 4, 5], greedy(12))
    engine.add_request("later", [23, 24, 25], greedy(12))
    rows = run(engine)
    wide = {"none": 0, "step": 1}[scope]
    begin = [
        (0, False, 3, 3, 0, 0, 1, "", ""),
        (1, True, 4, 3, 2, 2, 3, "", "aa"),
        (2, True, 7, 3, 2, 2, 3, "", "aa"),
    ]
    assert lines(rows, request_id="first") == [
        *begin,
        (3, True, 10, 3, 2, 2, 3, "", "aa"),
        (4, True, 13, 2 + wide, 1, 1, 2, "length", "a" + "-" * wide),
    ]
    assert lines(rows, request_id="later") == [
        *begin,
        (5, False, 10, 10, 0, 0, 1, "", ""),  # all its tokens again: no verification
        (6, True, 11, 3, 2, 2, 3, "", "aa"),
        (7, True, 14, 1 + 2 * wide, 0, 0, 1, "length", "-" * 2 * wide),
    ]


@SCOPES
def test_a_prompt_in_chunks_has_one_row(scope: str) -> None:
    engine = make_engine([counting(3, 40)], scope, max_num_batched_tokens=4)
    engine.add_request("r", counting(3, 13), greedy(2))
    rows = run(engine)
    assert lines(rows)[0] == (2, False, 10, 2, 0, 0, 1, "", "")  # 4, 4 and 2 tokens
    assert len(rows) == 2
    assert list(engine.trace.steps()["num_committed"]) == [0, 0, 1, 1]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_samples_of_one_request_are_told_apart(steps_in_flight: int) -> None:
    engine = make_engine([counting(3, 40)], "none", max_steps_in_flight=steps_in_flight)
    engine.add_request("r", [3, 4, 5], greedy(9, n=3), label="a")
    engine.add_request("s", [3, 4, 5], greedy(9), label=("any", "thing"))
    rows = run(engine)
    samples = rows.groupby(["request_id", "sample_index"])["num_committed"].sum()
    assert dict(samples) == {("r", 0): 9, ("r", 1): 9, ("r", 2): 9, ("s", 0): 9}
    assert set(rows.loc[rows["request_id"] == "r", "label"]) == {"a"}
    assert set(rows.loc[rows["request_id"] == "s", "label"]) == {("any", "thing")}


def test_a_name_that_comes_again_and_a_trace_that_comes_later() -> None:
    engine = make_engine([counting(3, 40)], "none")
    first, second = engine.trace, StepTrace()
    engine.add_request("r", [3, 4, 5], greedy(4), label="one")
    run(engine)
    engine.add_request("other", [3, 4, 5], greedy(12), label="kept")
    engine.step()
    engine.trace = second
    engine.add_request("r", [3, 4, 5], greedy(4), label="two")
    run(engine)
    assert list(first.requests()["label"].unique()) == ["one", "kept"]
    late: Any = second.requests()
    assert set(zip(late["request_id"], late["label"], strict=True)) == {
        ("other", "kept"),
        ("r", "two"),
    }
    assert lines(late, request_id="other")[0][2] == 4  # tokens that came before the trace


def test_two_steps_in_flight_leave_no_row_behind_the_end() -> None:
    traces = []
    for steps_in_flight in (1, 2):
        engine = make_engine([counting(3, 40)], "step", max_steps_in_flight=steps_in_flight)
        for i in range(5):  # more than there are rows, of unlike length
            engine.add_request(str(i), [3, 4, 5], greedy(3 + 2 * i))
        columns = [name for name in REQUEST_COLUMNS if name != "step"]
        rows = run(engine)[columns].sort_values(["request_id", "context_len"], ignore_index=True)
        traces.append(rows)
    assert traces[0].equals(traces[1])
    assert (traces[0].groupby("request_id")["finish_reason"].sum() == "length").all()


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((1, 0, 0, 0), ""),
        ((4, 0, 0, 0), "---"),
        ((4, 3, 3, 3), "aaa"),
        ((4, 3, 3, 0), "ruu"),
        ((5, 3, 3, 1), "aru-"),
        ((5, 3, 2, 2), "aae-"),
        ((5, 4, 2, 1), "aree"),
        ((3, 2, 0, 0), "ee"),
    ],
)
def test_outcome_letters(counts: tuple[int, int, int, int], text: str) -> None:
    assert outcome_text(*counts) == text


def test_outcomes_add_up_to_the_counts() -> None:
    engine = make_engine([counting(3, 60, wrong_at=(9, 14, 15, 22))], "step", eos=40)
    for i in range(4):
        engine.add_request(str(i), counting(3, 5 + i), greedy(40))
    rows = run(engine)
    outcome = rows["outcome"].str
    verify = rows["is_verify"]
    assert (outcome.count("a") == rows["num_accepted"]).all()
    assert (outcome.count("[aru]") == rows["num_drafted"]).all()
    assert (outcome.len() == rows["num_positions"] - 1)[verify].all()
    assert (rows.loc[~verify, "outcome"] == "").all()
    assert outcome.fullmatch("a*(ru*)?e*-*").all()


def test_many_rows_are_kept_in_order_and_survive_the_disk(tmp_path: Path) -> None:
    engine = make_engine([counting(3, 40)], "none")
    engine.add_request("r", [3, 4, 5], greedy(2), label="a")
    run(engine)
    trace, num_rows = engine.trace, 0
    for step in range(900):
        size = step % 7
        drafted, committed = np.full(size, step % 5), np.arange(size)
        trace.add_requests(size, (0, step, 1, step, 5, 4, drafted, 0, committed, 0))
        num_rows += size
    rows = trace.requests().iloc[2:]
    assert num_rows > 2000
    assert list(rows["step"]) == [step for step in range(900) for _ in range(step % 7)]
    assert list(rows["num_committed"]) == [i for step in range(900) for i in range(step % 7)]
    assert list(rows["num_drafted"]) == [step % 5 for step in range(900) for _ in range(step % 7)]
    trace.write(tmp_path, arm="x")
    back = pd.read_parquet(tmp_path / "requests.parquet")
    assert back.equals(trace.requests().assign(arm="x"))
    steps = pd.read_parquet(tmp_path / "steps.parquet")
    assert list(steps.columns) == [*STEP_COLUMNS, "arm"]
    assert steps["num_reqs"].dtype == np.int64
    assert steps["step_ms"].dtype == np.float64


def test_a_batch_that_goes_on_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[Any] = []
    key = StepTrace._key
    monkeypatch.setattr(StepTrace, "_key", lambda *given: looked_up.append(1) or key(*given))
    engine = make_engine([], "step")
    for i in range(4):
        engine.add_request(str(i), [3, 4, 5], greedy(30))
    rows = run(engine)
    assert len(rows) == 4 * 30
    assert len(looked_up) <= 3 * 4  # the prompts' step, the first that verifies, the last


def test_an_empty_trace_has_its_columns() -> None:
    trace = StepTrace()
    assert tuple(trace.requests().columns) == REQUEST_COLUMNS
    assert tuple(trace.steps().columns) == STEP_COLUMNS
    assert set(OPTIONAL_COLUMNS) < {*REQUEST_COLUMNS, *STEP_COLUMNS}
