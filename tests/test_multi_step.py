"""Launches of several steps give what single steps give, under random arrival, end and preemption.

A CPU has no graphs: a launch is the captured function itself, called on the fixed shapes, with the
steps' outcomes in the ring. tests/test_gpu_multi_step.py repeats it with real graphs.
"""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.loader import LoadedTarget
from specdec import Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.grammar import StructuredOutputsParams
from specdec.trace import StepTrace
from tests.drafter_folders import NAMES, save_drafters
from tests.head_cases import CASES, HeadFiles
from tests.launch_schedules import (
    assert_same_texts,
    draw_endings,
    play,
    rows_and_kv,
    run_steps,
    without_temperature,
)
from tests.models import byte_tokenizer, random_prompts, scripted_model, tiny_model, tiny_target
from tests.schedules import Arrival, run_schedule
from tests.strategies import assert_same

K = 3
SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 64,
    "max_num_batched_tokens": 40,
    "max_num_reqs": 5,
    "block_size": 4,
    "graph_scope": "step",
    "graph_num_reqs": [1, 2, 5],
}
PLENTY = {"num_kv_blocks": 100}
PREEMPTING = {"num_kv_blocks": 18}
STEPS = (2, 4)
LETTERS = [chr(code) for code in range(ord("!"), ord("z"))]
BUILT_IN: list[Any] = [
    "none",
    "ngram",
    {"name": "draft_model", "model": "target"},
    {"name": "mixed", "drafters": ["ngram", {"name": "draft_model", "model": "target"}]},
]


@functools.cache
def spelling_target() -> LoadedTarget:
    """Return a target that ends a text of its own now and then, and has a tokenizer."""
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=65)
    return tiny_target(model, tokenizer)


def make_engine(
    target: LoadedTarget, drafter: Any, verifier: str, steps: int, **options: Any
) -> Engine:
    options = {**SIZES, **PLENTY, **options, "steps_per_launch": steps}
    return Engine(target, drafter, verifier, K, trace=StepTrace(), **options)


def assert_launches_do_not_show(
    target: LoadedTarget, drafter: Any, verifier: str, arrivals: list[Arrival], **options: Any
) -> Counter[str]:
    """Compare launches of 2 and 4 steps with single ones.

    Returns:
        Launches of several steps, preemptions, and requests by the reason of their end.
    """
    expected = play(make_engine(target, drafter, verifier, 1, **options), arrivals)
    counts = Counter(str(output.finish_reason) for output in expected.outputs.values())
    counts["preemptions"] = expected.num_preemptions
    for steps in STEPS:
        engine = make_engine(target, drafter, verifier, steps, **options)
        actual = play(engine, arrivals)
        num_whole = assert_same_texts(actual, expected)
        counts["launches"] += actual.launches.get(f"step x {steps}", 0)
        if not expected.num_preemptions + actual.num_preemptions:
            assert num_whole > len(arrivals) // 2
        counts["preemptions"] += actual.num_preemptions
    return counts


@pytest.mark.parametrize("drafter", BUILT_IN, ids=str)
@pytest.mark.parametrize(
    ("verifier", "in_flight"), [("greedy", 2), ("sampled_match", 1), ("rejection", 2)]
)
def test_launches_of_several_steps_give_what_single_steps_give(
    drafter: Any, verifier: str, in_flight: int
) -> None:
    counts: Counter[str] = Counter()
    for seed in (0, 1):
        arrivals = draw_endings(10 * in_flight + seed, 258, stop_strings=LETTERS)
        if verifier == "greedy":
            arrivals = without_temperature(arrivals)
        options = {"max_steps_in_flight": in_flight}
        counts += assert_launches_do_not_show(
            spelling_target(), drafter, verifier, arrivals, **options
        )
    assert counts["preemptions"] == 0
    assert min(counts["stop"], counts["length"], counts["abort"]) > 0
    assert counts["launches"] > 4


@pytest.mark.parametrize(("in_flight", "drafter"), [*enumerate(BUILT_IN[1:], 1)], ids=str)
def test_texts_stay_where_requests_are_preempted(drafter: Any, in_flight: int) -> None:
    arrivals = draw_endings(10 * in_flight + 3, 258, 12, LETTERS)
    options = {**PREEMPTING, "max_steps_in_flight": in_flight}
    counts = assert_launches_do_not_show(
        spelling_target(), drafter, "sampled_match", arrivals, **options
    )
    assert counts["preemptions"] > 0
    assert counts["launches"] > 2


@pytest.mark.parametrize("name", NAMES)
def test_drafters_with_weights(tmp_path: Path, name: str) -> None:
    target, drafter = tiny_target(tiny_model("llama")), save_drafters(tmp_path)[name]
    arrivals = draw_endings(7, 97)
    sampling = {**drafter, "sampling": "gumbel"}
    for spec, verifier in ((drafter, "sampled_match"), (sampling, "rejection")):
        counts = assert_launches_do_not_show(
            target, spec, verifier, arrivals, max_steps_in_flight=2
        )
        assert counts["launches"] > 2


@pytest.mark.parametrize("verifier", ["block", "coupled", "typical"])
def test_other_rules(verifier: str) -> None:
    drafter = {"name": "draft_model", "model": "target"}
    if verifier == "block":
        drafter["sampling"] = "gumbel"
    arrivals = draw_endings(8, 258, stop_strings=LETTERS)
    counts = assert_launches_do_not_show(spelling_target(), drafter, verifier, arrivals)
    assert counts["launches"] > 2


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3, SpecForge"])
def test_heads(tmp_path: Path, name: str) -> None:
    model = tiny_model("llama", scale=2.0, vocab_size=17, num_hidden_layers=6)
    files = HeadFiles(CASES[name], model, tmp_path)
    drafter = {"name": files.case.method, "path": files.path, "sampling": "argmax"}
    arrivals = draw_endings(9, 17)
    counts = assert_launches_do_not_show(tiny_target(model), drafter, "sampled_match", arrivals)
    assert counts["launches"] > 2


@pytest.mark.parametrize("drafter", BUILT_IN, ids=str)
def test_state_and_kv_are_those_of_single_steps_bit_for_bit(drafter: Any) -> None:
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=45, ignore_eos=True)
        for i, t in enumerate((0.0, 0.8, 0.8))
    ]
    found = []
    for steps in (4, 1):
        engine = make_engine(spelling_target(), drafter, "rejection", steps)
        for i, prompt in enumerate(random_prompts([5, 9, 3])):
            engine.add_request(str(i), prompt, params[i])
        run_steps(engine, found[0][0] if found else 9)
        found.append((engine.num_steps, rows_and_kv(engine)))
        assert len(engine.unfinished_ids) == 3
    assert found[0][0] == found[1][0] == 10
    assert_same(found[0][1], found[1][1])


# --- what a launch does ---------------------------------------------------------------------------


@functools.cache
def counting_target(eos: int | None = None) -> LoadedTarget:
    return tiny_target(scripted_model([(i + 1) % 100 for i in range(100)], eos))


def counting_engine(steps: int, eos: int | None = None, **options: Any) -> Engine:
    """Return an engine whose drafts are accepted whole: K + 1 tokens a step."""
    drafter = {"name": "oracle", "texts": [list(range(3, 99))]}
    return make_engine(counting_target(eos), drafter, "greedy", steps, **options)


def greedy(max_tokens: int = 50, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def test_a_launch_brings_all_its_steps_and_the_trace_has_a_line_for_each() -> None:
    engine = counting_engine(4)
    engine.add_request("r", [3, 4, 5], greedy(49))
    sizes = []
    while engine.has_requests:
        sizes.append([len(i.new_token_ids) for i in engine.step()])
    # The prompt, the step that others repeat, and launches; the last one has a step that is idle.
    assert sizes == [[1], [4], [4] * 4, [4] * 4, [4] * 3]
    assert engine.runner.graphs.launches["step x 4"] == 3
    assert engine.runner.graphs.launches["step"] == 1
    assert engine.trace is not None
    steps = engine.trace.steps()
    assert steps["step"].tolist() == list(range(14))
    assert steps["num_launched"].tolist() == [1, 1, *[4] * 12]
    assert steps["num_committed"].tolist() == [1, *[4] * 12, 0]
    for first in (2, 6, 10):
        times = steps.loc[first : first + 3, ["launch_ms", "host_ms", "step_ms"]]
        assert (times == times.iloc[0]).all(axis=None)
        assert (times["step_ms"] > 0).all()


@pytest.mark.parametrize("eos", [11, 14, 18])
def test_a_row_that_ended_commits_nothing_and_leaves_foreign_memory_alone(eos: int) -> None:
    engine = counting_engine(4, eos)
    engine.add_request("ends", [3, 4, 5], greedy())
    engine.add_request("goes on", [3, 4, 5], greedy(ignore_eos=True))
    for _ in range(2):
        engine.step()  # 3 to 10
    ends, other = engine.scheduler.running
    row, state, kv = ends.row, engine.runner.state, engine.runner.kv
    assert row is not None
    before = [keys.clone() for keys in kv.keys]
    increments = engine.step()
    texts = {i.request_id: i.output for i in increments if i.output is not None}
    assert texts["ends"].token_ids == list(range(6, eos + 1))
    num_runs = -(-(eos - 10) // (K + 1))
    assert int(state.total_len.tensor[row]) == 8 + 4 * num_runs
    assert int(state.num_computed_tokens.tensor[row]) == 7 + 4 * num_runs
    assert int(state.draft_limit[row]) == 0
    assert state.draft_tokens[row].tolist() == [-1] * K
    assert len(other.token_ids) == 8 + 4 * 4
    # Blocks of a request that ended are handed back; its table still names them.
    table = state.block_table.tensor
    allowed = {
        int(table[r, position // 4]) * 4 + position % 4
        for r, length in ((row, 8 + 4 * num_runs), (other.row, 8 + 4 * 4 + K + 1))
        for position in range(length)
    }
    for keys, old in zip(kv.keys, before, strict=True):
        changed = (keys != old).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert set(changed) <= allowed
        assert len(changed) > 4 * 4


def test_an_arrival_and_an_abort_wait_for_no_more_than_what_was_enqueued() -> None:
    engine = counting_engine(4, max_steps_in_flight=2)
    engine.add_request("first", [3, 4, 5], greedy(60, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert sum(flight.num_steps for flight in engine._in_flight) == 4
    engine.add_request("late", [3, 4, 5], greedy(9))
    engine.step()  # its prompt is enqueued behind one launch, which is read
    assert any(flight.scheduled.is_prefill.any() for flight in engine._in_flight)
    assert any(i.request_id == "late" for i in engine.step())
    engine.abort("first")
    (ended,) = [i for i in engine.step() if i.request_id == "first"]
    assert ended.finish_reason == "abort"


def schedule_of(engine: Engine, most_steps: int) -> int:
    """Return how many steps the scheduler decides at once, given so many as it may."""
    return engine.scheduler.schedule(0, most_steps).num_steps


def decoding(**options: Any) -> Engine:
    engine = counting_engine(4, **options)
    engine.add_request("r", [3, 4, 5], greedy(options.get("max_model_len", 64) - 3))
    for _ in range(2):
        engine.step()
    return engine


def test_what_the_blocks_or_the_end_do_not_allow_is_one_step() -> None:
    engine = decoding()
    assert schedule_of(engine, 4) == 4
    for num_foreign, expected in ((9, 4), (11, 1)):  # of 16 blocks
        engine = counting_engine(4, num_kv_blocks=16)
        engine.scheduler.blocks.grow([], 4 * num_foreign)
        engine.add_request("r", [3, 4, 5], greedy(61))
        for _ in range(2):
            engine.step()
        # 7 positions are computed. Four steps and K drafts reach 26, which takes 7 blocks.
        assert len(engine.scheduler.running[0].block_ids) == 3
        assert schedule_of(engine, 4) == expected
        assert len(engine.scheduler.running[0].block_ids) == {4: 7, 1: 4}[expected]
    engine = decoding(max_model_len=12)  # 3 + 1 + 4 tokens so far
    assert schedule_of(engine, 4) == 4, "the last four tokens may take a step each"
    engine = decoding(max_model_len=11)
    assert schedule_of(engine, 4) == 1


def test_who_waits_and_could_start_is_not_held_up() -> None:
    engine = decoding(max_num_reqs=2)
    engine.add_request("second", [3, 4, 5], greedy(9))
    assert schedule_of(engine, 4) == 1
    engine = decoding(max_num_reqs=1)
    engine.add_request("second", [3, 4, 5], greedy(9))
    assert schedule_of(engine, 4) == 4, "no row is free"


def test_a_batch_larger_than_what_is_captured_runs_single_steps() -> None:
    engine = counting_engine(4, max_num_batched_tokens=100, graph_num_reqs=[1, 4])
    for i in range(5):
        engine.add_request(str(i), [3, 4, 5], greedy(40))
    while engine.has_requests:
        engine.step()
    assert engine.runner.graphs.launches["target eager: more than 4 requests"] > 5
    assert "step x 4" not in engine.runner.graphs.launches


def test_structured_output_runs_single_steps_while_it_lasts() -> None:
    engine = make_engine(spelling_target(), "ngram", "sampled_match", 4)
    structure = SamplingParams(
        temperature=0.8,
        seed=1,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[abc]{4,9}"),
    )
    plain = SamplingParams(temperature=0.8, seed=2, max_tokens=30, ignore_eos=True)
    prompts = random_prompts([5, 9])
    arrivals = [Arrival(0, prompts[0], structure, None), Arrival(0, prompts[1], plain, None)]
    alone = make_engine(spelling_target(), "ngram", "sampled_match", 1)
    expected = run_schedule(alone, arrivals).texts()
    launches = engine.runner.graphs.launches
    singles_at_end = 0

    def watch(engine: Engine) -> None:
        nonlocal singles_at_end
        if "0" in engine.unfinished_ids:
            assert "step x 4" not in launches
            singles_at_end = launches["step"]

    assert run_schedule(engine, arrivals, watch).texts() == expected
    assert singles_at_end > 0
    assert launches["step x 4"] > 0


@pytest.mark.parametrize("fails_at", [3, 9, 10, 12])
def test_a_step_that_fails_inside_a_launch_leaves_an_engine_that_goes_on(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(tiny_model("llama"))
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=30) for i in range(3)]
    arrivals = [
        Arrival(0, prompt, p, None)
        for prompt, p in zip(random_prompts([5, 9, 3]), params, strict=True)
    ]
    options = {"max_steps_in_flight": 2}
    alone = make_engine(target, "ngram", "sampled_match", 1)
    expected = run_schedule(alone, arrivals).texts()
    engine = make_engine(target, "ngram", "sampled_match", 4, **options)
    forward, calls = target.model.forward_with_layers, []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == fails_at:
            raise RuntimeError("the device is gone")
        return forward(*args)

    monkeypatch.setattr(target.model, "forward_with_layers", failing)
    for i, arrival in enumerate(arrivals):
        engine.add_request(str(i), arrival.prompt, arrival.params)
    texts: dict[str, list[int]] = {}
    num_failures = 0
    while engine.has_requests:
        try:
            increments = engine.step()
        except RuntimeError:
            num_failures += 1
            continue
        for increment in increments:
            if increment.output is not None:
                texts[increment.request_id] = increment.output.token_ids
    assert num_failures == 1
    assert texts == expected
    assert engine.runner.graphs.launches["step x 4"] > 0


# --- what is refused, or has no effect ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"steps_per_launch": 0}, "steps_per_launch=0 .* >= 1"),
        ({"steps_per_launch": 2, "graph_scope": "none"}, "graph_scope is 'none'; set"),
        ({"steps_per_launch": 2, "graph_scope": "auto"}, "graph_scope is 'none'; set"),
        ({"steps_per_launch": 3, "graph_scope": "draft"}, "steps_per_launch=3 .* 'draft'"),
        ({"steps_per_launch": 2, "phase_events": True}, "does not go with phase_events"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(options: dict[str, Any], parts: str) -> None:
    with pytest.raises(ConfigError, match=parts):
        Engine(counting_target(), "ngram", "greedy", K, **{**SIZES, **PLENTY, **options})


@pytest.mark.parametrize(
    ("drafter", "policy", "reason"),
    [
        ("suffix", "fixed", "runs on the host"),
        ("ngram", "goodput", "may choose another draft length for every step"),
    ],
)
def test_what_needs_the_host_in_every_step_gets_single_steps_and_a_warning(
    drafter: str, policy: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = counting_target()
    options: dict[str, Any] = {**SIZES, **PLENTY, "steps_per_launch": 7}
    with caplog.at_level("WARNING"):
        engine = Engine(target, drafter, "greedy", K, draft_length=policy, **options)
    assert engine.steps_per_launch == 1
    assert f"steps_per_launch=7 has no effect: {reason}" in caplog.text.replace(
        "drafter SuffixDrafter ", ""
    ).replace("GoodputLength ", "")
    assert not any(key.num_steps > 1 for key in engine.runner.graphs.keys)


@pytest.mark.parametrize(
    "policy", [{"name": "by_batch_size", "table": {1: 3, 2: 1, 4: 0}}, {"name": "confidence"}]
)
def test_policies_whose_choice_is_that_of_the_batch_take_part(policy: dict[str, Any]) -> None:
    arrivals = draw_endings(11, 258, stop_strings=LETTERS)
    drafter = {"name": "draft_model", "model": "target"}
    texts = {}
    for steps in (1, 4):
        engine = make_engine(
            spelling_target(), drafter, "sampled_match", steps, draft_length=policy
        )
        texts[steps] = run_schedule(engine, arrivals).texts()
        # Asked once a step, as ever.
        assert sum(engine.draft_length.counts.values()) == engine.num_steps
        assert ("step x 4" in engine.runner.graphs.launches) == (steps == 4)
    both = texts[1].keys() & texts[4].keys()  # some are aborted in one of them
    assert len(both) > 5
    assert {name: texts[1][name] for name in both} == {name: texts[4][name] for name in both}


def test_captured_graphs_are_listed_with_their_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        engine = counting_engine(4)
    keys = [key for key in engine.runner.graphs.keys if key.part == "step"]
    repeated = [key for key in keys if key.num_steps == 4]
    assert {(key.num_reqs, key.plain) for key in repeated} == {
        (size, plain) for size in (1, 2, 5) for plain in (False, True)
    }
    assert {key.num_steps for key in keys} == {1, 4}
    assert "6 step x 4" in caplog.text
    assert torch.is_tensor(engine.runner.outputs.step)
    assert engine.runner.outputs.depth == 2 * 4
