"""Launches chosen by the time of a whole pass: what is kept, and what the file then holds."""

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from experiments import tune_forward
from experiments.tune_forward import (
    FORWARDS,
    ForwardTuner,
    Found,
    compare,
    known_choices,
    layers_of,
    new_lines,
    time_options,
    variants,
)
from experiments.tune_linears import SHIPPED_MODELS
from runner.models.hf import HFModel
from runner.models.linear_choices import SHIPPED, TOKEN_LIMITS, read_choices
from runner.models.linear_launch import LinearLaunch, LinearShape
from specdec.errors import ConfigError
from tests.models import tiny_model

SHAPE = LinearShape(576, 576)
PRESENT, SLOW, FAST = (LinearLaunch(16, n, 64) for n in (16, 32, 64))


class Pass:
    """A pass whose time depends on the launch that is in place."""

    def __init__(self, ms: dict[LinearLaunch | None, float]) -> None:
        self.ms, self.placed, self.timed = ms, PRESENT, list[LinearLaunch | None]()

    def place(self, launch: LinearLaunch | None) -> None:
        self.placed = launch

    def forward(self) -> float:
        self.timed.append(self.placed)
        return self.ms[self.placed]

    def time(
        self, *options: LinearLaunch | None, error: Callable[[], float] = lambda: 0.01
    ) -> dict[LinearLaunch | None, float]:
        return time_options(PRESENT, options, self.place, self.forward, error)


def test_each_option_is_timed_once_and_the_present_one_is_in_place_again() -> None:
    whole = Pass({PRESENT: 1.0, SLOW: 1.2, FAST: 0.8, None: 0.9})
    timed = whole.time(SLOW, FAST, PRESENT, FAST, None)
    assert timed == {PRESENT: 1.0, SLOW: 1.2, FAST: 0.8, None: 0.9}
    assert whole.timed == [PRESENT, SLOW, FAST, None]
    assert whole.placed == PRESENT


def test_a_launch_that_asks_for_too_much_is_out() -> None:
    whole = Pass({PRESENT: 1.0, FAST: 0.8})

    def forward() -> float:
        if whole.placed == FAST:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return whole.forward()

    timed = time_options(PRESENT, [FAST], whole.place, forward, lambda: 0.0)
    assert timed == {PRESENT: 1.0, FAST: math.inf}
    assert whole.placed == PRESENT


@pytest.mark.parametrize("wrong", [1.0, math.nan])
def test_a_launch_whose_pass_says_something_else_is_out(wrong: float) -> None:
    whole = Pass({PRESENT: 1.0, SLOW: 1.2, FAST: 0.8})
    timed = whole.time(SLOW, FAST, error=lambda: wrong if whole.placed == FAST else 0.02)
    assert timed == {PRESENT: 1.0, SLOW: 1.2, FAST: math.inf}


def test_a_launch_that_is_faster_in_every_turn_is_taken() -> None:
    whole = Pass({PRESENT: 1.0, FAST: 0.99})
    assert compare(PRESENT, FAST, whole.place, whole.forward) == (True, 1.0, 0.99)
    assert whole.placed == FAST
    assert whole.timed == [PRESENT, FAST] * 5


def test_a_gain_that_is_too_small_changes_nothing() -> None:
    whole = Pass({PRESENT: 1.0, FAST: 0.998})
    assert compare(PRESENT, FAST, whole.place, whole.forward)[0] is False
    assert whole.placed == PRESENT


def test_the_luckiest_of_equal_launches_is_seldom_taken() -> None:
    # Passes of one true time and noise of half a percent: 22 options, the best of which is luck.
    rng, taken = random.Random(0), 0

    def forward() -> float:
        return 1.0 + abs(rng.gauss(0.0, 0.005))

    options = [LinearLaunch(16, 16, 64, num_stages=n) for n in range(5, 27)]
    for _ in range(100):
        timed = time_options(PRESENT, options, lambda _: None, forward, lambda: 0.0)
        best = min(timed, key=lambda launch: timed[launch])
        assert timed[best] < timed[PRESENT] or best == PRESENT
        taken += compare(PRESENT, best, lambda _: None, forward)[0]
    assert taken <= 10


def test_a_target_that_runs_unfused_is_refused() -> None:
    model = HFModel(copy.deepcopy(tiny_model("llama")), fuse=False)
    compilers: Any = None
    with pytest.raises(ConfigError, match="runs unfused"):
        ForwardTuner(model, [SHAPE], compilers, lambda: True)


def test_variants_of_a_launch() -> None:
    small = {(one.prefetch, one.early) for one in variants(PRESENT, SHAPE)}
    assert small == {(0, False), (0, True), (256, False), (256, True)}
    large = LinearShape(14336, 4096, glu=True)
    assert {one.early for one in variants(PRESENT, large)} == {False}
    tiled = LinearLaunch(64, 128, 64, more_t=16, tiled=True)
    assert variants(tiled, large) == [tiled]


def test_each_range_has_a_pass_that_lies_in_it() -> None:
    assert tuple(FORWARDS) == TOKEN_LIMITS
    for (num_reqs, query_len), least, most in zip(
        FORWARDS.values(), (0, *TOKEN_LIMITS), TOKEN_LIMITS, strict=False
    ):
        assert least < num_reqs * query_len <= most


def test_with_8_bit_weights_the_layers_that_have_them_are_tuned() -> None:
    shape = SHIPPED_MODELS["llama-8b"]
    wide, narrow = layers_of(shape, "auto"), layers_of(shape, "fp8")
    assert LinearShape(128256, 4096) in wide
    assert [replace(layer, eight_bit=False) for layer in narrow] == wide[:-1]
    assert all(layer.eight_bit for layer in narrow)


def test_a_line_keeps_what_was_measured_alone(tmp_path: Path) -> None:
    key = {**asdict(SHAPE), "max_tokens": 16}
    earlier = {"choices": [{**key, "launch": None, "library_us": 5.0}, {**key, "max_tokens": 32}]}
    other = LinearShape(64, 64)
    found = [(16, Found(SHAPE, FAST, 1.0, 0.8)), (16, Found(other, None, 0.8, 0.7))]
    first, second = new_lines(found, earlier)
    assert first["library_us"] == 5.0
    assert first["forward"] == {"num_reqs": 1, "query_len": 5, "ms_before": 1.0, "ms": 0.8}
    path = tmp_path / "choices.json"
    path.write_text(json.dumps({"choices": [first, second]}), encoding="utf-8")
    assert read_choices(path) == {(SHAPE, 16): FAST, (other, 16): None}


def test_known_choices_are_the_shipped_ones_behind_ones_own(tmp_path: Path) -> None:
    name = "nvidia_h200_bfloat16.json"
    shipped, own = read_choices(SHIPPED / name), tmp_path / name
    (shape, limit), _ = next(iter(shipped.items()))
    line = {**asdict(shape), "max_tokens": limit, "launch": asdict(FAST)}
    record = {"provenance": {"commit": "b"}, "choices": [line], "earlier": [{"commit": "a"}]}
    own.write_text(json.dumps(record), encoding="utf-8")
    merged = tmp_path / "merged.json"
    merged.write_text(json.dumps(known_choices(own)), encoding="utf-8")
    assert read_choices(merged) == shipped | {(shape, limit): FAST}
    known = json.loads(merged.read_text(encoding="utf-8"))
    assert known["provenance"] == {"commit": "b"}
    assert known["earlier"][-1] == {"commit": "a"}  # no history is lost, that of the file shipped
    before = json.loads((SHIPPED / name).read_text(encoding="utf-8"))["earlier"]
    assert len(known["earlier"]) == len(before) + 2  # stands before it, with its last run
    assert known_choices(tmp_path / "no_such_device.json") is None


def test_a_cpu_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tune_forward", "--device", "cpu"])
    assert tune_forward.main() == 2
    assert capsys.readouterr().err == "device='cpu' is not allowed; give a GPU\n"
