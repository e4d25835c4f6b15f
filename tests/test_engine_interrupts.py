"""A step interrupted at any line, or a plug-in that fails while it is read, costs no text."""

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, Engine, SamplingParams
from specdec.interrupts import InterruptShield
from specdec.trace import StepTrace
from tests.models import random_prompts, tiny_model, tiny_target

K = 3
PROMPTS = random_prompts((5, 17, 9))
PARAMS = [
    SamplingParams(temperature=t, seed=1, max_tokens=n) for t, n in ((0, 2), (0.8, 9), (0, 9))
]
ROOT = str(Path(__file__).parent.parent)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Have SIGINT raise, also where a shell that starts this in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@functools.cache
def target() -> Any:
    return tiny_target(tiny_model("llama"))


@functools.cache
def expected() -> list[list[int]]:
    llm = LLM(target(), "none", "sampled_match", max_model_len=64)
    return [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]


def make_engine(drafter: Any = "suffix", **options: Any) -> Engine:
    sizes = {"max_model_len": 64, "max_num_reqs": 2, "max_num_batched_tokens": 24}
    return Engine(target(), drafter, "sampled_match", K, **{**sizes, **options})


def add_all(engine: Engine) -> None:
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)


def finish(engine: Engine, error: type[BaseException], most_steps: int = 200) -> int:
    """Step to the end; returns how often it failed. Texts and streams must be as expected."""
    streamed: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
    texts, failures = {}, 0
    for _ in range(most_steps):
        if not engine.has_requests:
            break
        try:
            increments = engine.step()
        except error:
            failures += 1
            continue
        for increment in increments:
            streamed[increment.request_id] += increment.new_token_ids
            if increment.output is not None:
                texts[increment.request_id] = increment.output.token_ids
    assert [texts.get(str(i)) for i in range(len(PROMPTS))] == expected()
    assert streamed == texts
    assert not engine.unfinished_ids
    assert engine.runner.state.num_free_rows == engine.runner.state.max_num_reqs
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
    return failures


class _Interrupting:
    """Traces the project's lines, and asks for an interrupt at one of them."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: Any, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self


def interrupted_step(engine: Engine, line: int) -> None:
    tracer = _Interrupting(line)
    before = sys.gettrace()  # of a coverage tool
    sys.settrace(tracer)
    try:
        engine._pending = engine.step()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("drafter", ["suffix", "ngram"])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 4])
def test_an_interrupt_at_any_line_leaves_nothing_half_done(drafter: str, steps_before: int) -> None:
    for line in range(1 + steps_before, 2200, 61):
        engine = make_engine(drafter)
        add_all(engine)
        for _ in range(steps_before):
            engine._pending = engine.step()
        interrupted_step(engine, line)
        assert finish(engine, KeyboardInterrupt) == 0


@pytest.mark.parametrize("what", ["end_request", "observe", "add_step"])
def test_who_fails_while_a_step_is_read_takes_no_text_with_it(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    length = "goodput" if what == "observe" else "fixed"
    engine = make_engine(draft_length=length, trace=StepTrace())
    owner = {
        "end_request": engine.drafter,
        "observe": engine.draft_length,
        "add_step": engine.trace,
    }
    method, calls = getattr(owner[what], what), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError("planted")
        return method(*args, **kwargs)

    monkeypatch.setattr(owner[what], what, failing)
    add_all(engine)
    assert finish(engine, ZeroDivisionError) == 1


def test_a_drafter_that_fails_at_every_end_leaves_nothing_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(target(), "suffix", "sampled_match", K, max_model_len=64)

    def failing(request: object) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.drafter, "end_request", failing)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, PARAMS)
    assert not llm.engine.unfinished_ids
    assert [out.token_ids for out in llm.generate(PROMPTS, PARAMS)] == expected()


def test_what_a_callback_breaks_off_costs_other_requests_nothing() -> None:
    llm = LLM(target(), "none", "greedy", max_model_len=64)
    greedy = SamplingParams(temperature=0, max_tokens=3)
    llm.engine.add_request("mine", PROMPTS[0], greedy)
    steps = []

    def fail_at_the_end_of_mine(increment: object) -> None:
        steps.append(increment)
        if len(steps) == 3:
            raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError):
        llm.generate([PROMPTS[1]], greedy, on_increment=fail_at_the_end_of_mine)
    increments = []
    while llm.engine.has_requests:
        increments += llm.engine.step()
    assert {increment.request_id for increment in increments} == {"mine"}
    assert increments[-1].output is not None
    assert [t for i in increments for t in i.new_token_ids] == increments[-1].output.token_ids


def test_nothing_is_in_flight_behind_the_last_end() -> None:
    engine = make_engine("ngram", max_steps_in_flight=2, trace=StepTrace())
    add_all(engine)
    while engine.unfinished_ids:
        engine.step()
    assert not engine.has_requests
    engine.add_request("last", PROMPTS[0], PARAMS[1])
    engine.abort("last")
    assert [i.finish_reason for i in engine.step()] == ["abort"]
    assert not engine.has_requests


def interrupt_and_go_on(shield: InterruptShield, told: list[str]) -> None:
    with shield:
        signal.raise_signal(signal.SIGINT)
        told.append("went on")


def interrupt_and_lift(shield: InterruptShield, told: list[str]) -> None:
    with shield:
        signal.raise_signal(signal.SIGINT)
        told.append("went on")
        with shield.lifted():
            told.append("never")


def interrupt_while_lifted(shield: InterruptShield, told: list[str]) -> None:
    with shield, shield.lifted():
        signal.raise_signal(signal.SIGINT)
        told.append("never")


def interrupt_twice(shield: InterruptShield, told: list[str]) -> None:
    with shield:
        signal.raise_signal(signal.SIGINT)
        told.append("went on")
        signal.raise_signal(signal.SIGINT)
        told.append("never")


def interrupt_inside_two(shield: InterruptShield, told: list[str]) -> None:
    with shield:
        with shield:
            signal.raise_signal(signal.SIGINT)
        told.append("went on")


class TestShield:
    @pytest.mark.parametrize(
        ("act", "goes_on"),
        [
            (interrupt_and_go_on, True),
            (interrupt_and_lift, True),
            (interrupt_while_lifted, False),
            (interrupt_twice, True),
            (interrupt_inside_two, True),
        ],
    )
    def test_an_interrupt_waits_once_and_for_no_part_that_is_lifted(
        self, act: Callable[..., None], goes_on: bool
    ) -> None:
        told: list[str] = []
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            act(InterruptShield(), told)
        assert told == ["went on"] * goes_on
        assert signal.getsignal(signal.SIGINT) is before

    def test_other_threads_and_ignored_signals_are_left_alone(self) -> None:
        before, seen = signal.getsignal(signal.SIGINT), []

        def use() -> None:
            with InterruptShield():
                seen.append(signal.getsignal(signal.SIGINT))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert seen == [before]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with InterruptShield():
                assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)
