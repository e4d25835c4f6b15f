"""The goodput controller in a simulated world whose best length is known."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from specdec.draft_length import goodput
from specdec.draft_length.base import StepOutcome
from specdec.draft_length.goodput import GoodputConfig, GoodputLength

K = 8
CHOICES = [0, 1, 2, 4, 8]


@dataclass
class World:
    """Requests whose drafts are accepted at a rate, on a device that takes its time.

    A step takes `fixed` seconds, `per_position` for each position that it verifies, and
    `per_draft` for each pass of the drafter.
    """

    acceptance: float
    fixed: float = 10e-3
    per_position: float = 0.05e-3
    per_draft: float = 1e-3
    noise: float = 0.05
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    pending: int = 0  # drafts that the next step verifies
    seconds: float = 0.0
    tokens: int = 0

    def cost(self, num_reqs: int, verified: int, drafted: int) -> float:
        positions = num_reqs * (1 + verified)
        return self.fixed + self.per_position * positions + self.per_draft * drafted

    def goodput(self, num_reqs: int, length: int) -> float:
        expected = sum(self.acceptance**i for i in range(length + 1))
        return num_reqs * expected / self.cost(num_reqs, length, length)

    def best(self, num_reqs: int) -> int:
        return max(CHOICES, key=lambda length: self.goodput(num_reqs, length))

    def step(self, policy: GoodputLength, num_reqs: int) -> int:
        """Run a step and show it to the policy; returns what it chose."""
        verified, drafted = self.pending, policy.next_length(num_reqs)
        self.pending = drafted
        accepted = np.zeros(num_reqs, dtype=np.int64)
        if verified:
            kept = self.rng.random((num_reqs, verified)) < self.acceptance
            accepted = kept.cumprod(1).sum(1)
        seconds = self.cost(num_reqs, verified, drafted)
        seconds *= math.exp(self.noise * self.rng.standard_normal())
        self.seconds += seconds
        self.tokens += int((accepted + 1).sum())
        policy.observe(StepOutcome(num_reqs, verified, drafted, seconds, accepted + 1, True))
        return drafted


def make_policy(**options: object) -> GoodputLength:
    return GoodputLength(GoodputConfig(choices=CHOICES, **options), K)  # pyright: ignore[reportArgumentType]


def share_of_best(world: World, policy: GoodputLength, num_reqs: int, num_steps: int) -> float:
    """Run on, and return the share of steps that took the best length, or one within 3 % of it."""
    best = world.goodput(num_reqs, world.best(num_reqs))
    good = {k for k in CHOICES if world.goodput(num_reqs, k) > 0.97 * best}
    taken = Counter(world.step(policy, num_reqs) for _ in range(num_steps))
    return sum(taken[k] for k in good) / num_steps


# What pays: everything, a middle, and nothing.
WORLDS = [
    (World(0.95, per_draft=0.2e-3), 8, 8),
    (World(0.6, per_draft=1.5e-3), 8, 2),
    (World(0.7), 4, 4),
    (World(0.1, per_draft=2e-3), 8, 0),
]


@pytest.mark.parametrize(("world", "num_reqs", "best"), WORLDS)
def test_controller_converges_to_the_best_length(world: World, num_reqs: int, best: int) -> None:
    assert world.best(num_reqs) == best
    policy = make_policy(probe_every=0)
    # Every choice is measured for a few steps; within these it has to be found.
    for _ in range(60):
        world.step(policy, num_reqs)
    assert share_of_best(world, policy, num_reqs, 300) > 0.95


def test_goodput_reached_is_near_the_best_there_is_probes_included() -> None:
    world, policy = World(0.7), make_policy()
    for _ in range(3000):
        world.step(policy, 8)
    assert world.tokens / world.seconds > 0.95 * world.goodput(8, world.best(8))


def test_length_changes_with_the_batch_and_back() -> None:
    world = World(0.8, fixed=20e-3, per_position=0.5e-3, per_draft=0.1e-3)
    assert (world.best(2), world.best(64)) == (8, 1)
    policy = make_policy()
    for num_reqs in (2, 64, 2, 64):
        for _ in range(40):
            world.step(policy, num_reqs)
        assert share_of_best(world, policy, num_reqs, 200) > 0.9


def test_nothing_is_drafted_where_drafting_never_pays() -> None:
    world, policy = World(0.0), make_policy()
    for _ in range(100):
        world.step(policy, 4)
    taken = Counter(world.step(policy, 4) for _ in range(1000))
    assert taken[0] > 950
    # Now and then something is tried all the same: texts may change.
    assert taken[0] < 1000


def test_controller_notices_that_drafts_are_accepted_again() -> None:
    world, policy = World(0.0, per_draft=0.1e-3), make_policy(probe_every=32)
    for _ in range(300):
        world.step(policy, 4)
    assert share_of_best(world, policy, 4, 200) > 0.8
    world.acceptance = 0.95
    assert world.best(4) == 8
    for _ in range(600):
        world.step(policy, 4)
    assert share_of_best(world, policy, 4, 300) > 0.8


def test_choices_depend_on_what_was_observed_alone() -> None:
    runs = []
    for _ in range(2):
        world, policy = World(0.6), make_policy()
        runs.append([world.step(policy, 1 + i % 20 // 10) for i in range(500)])
    assert runs[0] == runs[1]


def test_every_choice_is_measured_in_every_batch_size() -> None:
    world, policy = World(0.9), make_policy(explore_steps=2, probe_every=0)
    for num_reqs in (1, 9, 16):  # 9 and 16 are of one size
        taken = Counter(world.step(policy, num_reqs) for _ in range(40))
        if num_reqs < 16:
            # Two measured steps, and the one before that drafted for the first of them.
            assert all(taken[length] >= 3 for length in CHOICES)
        else:
            assert sum(count >= 3 for count in taken.values()) < len(CHOICES)


def test_steps_that_run_prompts_say_nothing_of_the_cost_and_do_not_hold_it_up() -> None:
    policy = make_policy()
    for _ in range(200):
        drafted = policy.next_length(4)
        policy.observe(StepOutcome(4, drafted, drafted, 1.0, np.array([1, 2]), False))
    assert policy.goodput(4) == {}
    assert len(policy.counts) == len(CHOICES)
    assert policy.next_length(4) == 8
    assert policy.acceptance()[0] == pytest.approx(0.5, abs=0.1)


def test_a_slow_step_now_and_then_does_not_change_the_choice() -> None:
    world, policy = World(0.7, noise=0.0), make_policy(probe_every=0)
    first = True
    for i in range(400):
        world.fixed = 500e-3 if first or i % 50 == 7 else 10e-3
        first = False
        world.step(policy, 8)
    world.fixed = 10e-3
    assert share_of_best(world, policy, 8, 100) > 0.95


def test_report_says_what_was_chosen_and_why() -> None:
    world, policy = World(0.7, noise=0.0), make_policy(probe_every=0)
    for _ in range(200):
        world.step(policy, 8)
    report = policy.report()
    assert report["name"] == "goodput"
    assert sum(report["counts"].values()) == 200
    assert set(report["counts"]) == {str(length) for length in CHOICES}
    rates, _, size = report["why"]
    assert rates.startswith("acceptance by position: 0.7") or "0.6" in rates
    assert size.startswith("up to 8 requests: 4; tokens/s of a request by drafts 0: 96, 1: ")


def test_default_choices_are_powers_of_two_and_k() -> None:
    for k, expected in ((1, (0, 1)), (4, (0, 1, 2, 4)), (5, (0, 1, 2, 4, 5)), (8, (0, 1, 2, 4, 8))):
        assert GoodputLength(GoodputConfig(), k).choices == expected


# --- injected bugs --------------------------------------------------------------------------------


def converges(policy: GoodputLength) -> bool:
    """Return whether the controller finds the best length of all the worlds."""
    for acceptance, per_draft in ((0.95, 0.2e-3), (0.7, 1e-3), (0.1, 2e-3)):
        world, own = World(acceptance, per_draft=per_draft), type(policy)(policy.config, K)
        for _ in range(60):
            world.step(own, 8)
        if share_of_best(world, own, 8, 300) < 0.95:
            return False
    return True


class CostBlind(GoodputLength):
    """Takes every step for equally long."""

    def goodput(self, num_reqs: int) -> dict[int, float]:
        """Return what is accepted alone."""
        expected = np.concatenate([[1.0], 1 + self.acceptance().cumprod().cumsum()])
        return {k: float(expected[k]) for k in self.choices}


class Marginal(GoodputLength):
    """Takes a position's acceptance for independent of those before it."""

    def acceptance(self) -> np.ndarray:
        """Return accepted drafts over all steps instead of over those that came so far."""
        return (self._accepted + 0.5) / (self._reached[0] + 1)


def test_right_controller_converges_and_wrong_ones_do_not() -> None:
    config = GoodputConfig(choices=CHOICES, probe_every=0)
    assert converges(GoodputLength(config, K))
    assert not converges(CostBlind(config, K))
    assert not converges(Marginal(config, K))


def test_controller_that_never_forgets_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    late = World(0.0, per_draft=0.1e-3)
    policy = make_policy(probe_every=32, half_life=10**9)
    monkeypatch.setattr(goodput, "_PRIOR_WEIGHT", 1e4)
    for _ in range(300):
        late.step(policy, 4)
    late.acceptance = 0.95
    for _ in range(600):
        late.step(policy, 4)
    assert share_of_best(late, policy, 4, 300) < 0.8
