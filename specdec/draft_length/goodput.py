"""The number of drafts that promises the most committed tokens per second, learned while running.

    goodput(k) = E(k) / cost(k),  E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k

a_i is the chance that draft i is there and is accepted, given that those before it were; cost(k)
is the time of a step that verifies and drafts k, for about as many requests (within a power of
two). Both are averages of what was seen, the older the less. A number of requests that was not met
before tries every choice in turn, and now and then one that was not taken is tried again, as texts
and load change. Given the same observations the choices are the same.

Source: Liu et al. 2024, "Optimizing Speculative Decoding for Serving Large Language Models Using
Goodput".
"""

from dataclasses import dataclass

import numpy as np

from specdec.draft_length.base import (
    DraftLengthBase,
    DraftLengthConfig,
    StepOutcome,
    check_lengths,
)
from specdec.errors import ConfigError
from specdec.registry import register_draft_length

# Weight and value of what is believed of a draft position before anything was seen there.
_PRIOR_WEIGHT, _PRIOR_ACCEPTANCE = 1.0, 0.5
# A step that takes longer than so many mean ones says nothing of its shape: it compiled a kernel,
# or the machine did something else. So many of them in a row are the new truth.
_OUTLIER, _PERSISTENT = 3.0, 3
# Steps that a choice is tried for at most, as a multiple of those that have to be measured: where
# prompts run in every step none may ever be.
_PATIENCE = 4
_JUDGE_EVERY = 8  # steps that a choice is kept for before it is weighed again


@dataclass
class GoodputConfig(DraftLengthConfig):
    """Parameters.

    Args:
        choices: numbers of drafts to choose among, rising; None takes 0, 1, 2, 4, ... and K.
        half_life: observations after which an older one counts half: steps for acceptance, steps
            of the same shape for their cost.
        explore_steps: steps that every choice is measured for in a new batch size.
        probe_every: steps between two tries of a choice that is not taken; 0 never tries again.
        min_gain: gain in goodput, as a share, below which the present choice is kept.
    """

    name: str = "goodput"
    choices: list[int] | None = None
    half_life: int = 64
    explore_steps: int = 3
    probe_every: int = 256
    min_gain: float = 0.02

    def __post_init__(self) -> None:
        """Check every range."""
        choices = self.choices
        if choices is not None and (not choices or choices != sorted(set(choices))):
            raise ConfigError(
                f"draft_length goodput: choices={choices} is not allowed; give rising integers, "
                f"or null"
            )
        lowest = {"half_life": 1, "explore_steps": 1, "probe_every": 0, "min_gain": 0}
        for name, low in lowest.items():
            if not getattr(self, name) >= low:
                raise ConfigError(
                    f"draft_length goodput: {name}={getattr(self, name)} is not allowed; give at "
                    f"least {low}"
                )


class _Cost:
    """The decayed mean time of a shape."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._weight = 0.0
        self._num_slow = 0  # in a row

    def add(self, seconds: float, decay: float) -> None:
        slow = self.count > 0 and seconds > self.seconds * _OUTLIER
        self._num_slow = self._num_slow + 1 if slow else 0
        if 0 < self._num_slow < _PERSISTENT:
            return
        if slow or seconds * _OUTLIER < self.seconds:
            self._weight = 0.0  # what was seen before was the outlier
        self.count += 1
        self._weight = self._weight * decay + 1
        self.seconds += (seconds - self.seconds) / self._weight


@register_draft_length("goodput", GoodputConfig)
class GoodputLength(DraftLengthBase):
    """Learns acceptance and cost, and takes what pays most."""

    learns = True
    config: GoodputConfig

    def __init__(self, config: GoodputConfig, num_speculative_tokens: int) -> None:
        super().__init__(config, num_speculative_tokens)
        k = num_speculative_tokens
        powers = [1 << i for i in range(k.bit_length()) if 1 << i < k]
        self._choices = tuple(config.choices or sorted({0, *powers, k}))
        check_lengths(self._choices, k, "draft_length goodput: choices")
        self._decay = 0.5 ** (1 / config.half_life)
        # [K], decayed: verifications that came to a draft position, and those that went on.
        self._reached, self._accepted = np.zeros(k), np.zeros(k)
        self._costs: dict[tuple[int, int], _Cost] = {}  # by batch size and length
        self._tried: dict[tuple[int, int], int] = {}  # steps spent on measuring
        self._best: dict[int, int] = {}  # by batch size
        self._steps_to_judge: dict[int, int] = {}  # likewise
        self._steps_to_probe = config.probe_every
        self._probe: tuple[int, int, int] | None = None  # batch size, length, steps left
        self._num_probes = 0

    @property
    def choices(self) -> tuple[int, ...]:
        """Return what the configuration says, or 0, 1, 2, 4, ... and K."""
        return self._choices

    def choose(self, num_reqs: int) -> int:
        """Return what is to be measured, or else what pays most."""
        size = _bucket(num_reqs)
        # From the largest on: it shows the acceptance of every position.
        for length in reversed(self._choices):
            if self._needs_measuring(size, length):
                self._tried[size, length] = self._tried.get((size, length), 0) + 1
                return length
        return self._probed(size) if self._is_probing(size) else self._take_best(size)

    def observe(self, outcome: StepOutcome) -> None:
        """Count what was accepted, and the time of a step that verified as many as it drafted."""
        planned, sampled = outcome.num_verified, outcome.num_sampled
        self._reached *= self._decay
        self._accepted *= self._decay
        # at_least[i]: verifications that accepted i drafts or more.
        counts = np.bincount(np.clip(sampled - 1, 0, planned), minlength=planned + 1)
        at_least = counts[::-1].cumsum()[::-1]
        self._reached[:planned] += at_least[:-1]
        self._accepted[:planned] += at_least[1:]
        if outcome.only_verifies and planned == outcome.num_drafted:
            key = _bucket(outcome.num_reqs), planned
            self._costs.setdefault(key, _Cost()).add(outcome.seconds, self._decay)

    def acceptance(self) -> np.ndarray:
        """Return [K] the chance that a draft is accepted where those before it were."""
        reached, accepted = self._reached + _PRIOR_WEIGHT, self._accepted.copy()
        return (accepted + _PRIOR_WEIGHT * _PRIOR_ACCEPTANCE) / reached

    def goodput(self, num_reqs: int) -> dict[int, float]:
        """Return committed tokens per second of a request, by length, at a batch size."""
        expected = np.concatenate([[1.0], 1 + self.acceptance().cumprod().cumsum()])
        size = _bucket(num_reqs)
        measured = [k for k in self._choices if (size, k) in self._costs]
        if not measured:
            return {}
        seconds = [self._costs[size, k].seconds for k in measured]
        # A choice that could not be measured is taken to cost what lies between its neighbours.
        costs = np.interp(self._choices, measured, seconds)
        return {k: float(expected[k] / s) for k, s in zip(self._choices, costs, strict=True)}

    def reasons(self) -> list[str]:
        """Return what was learned."""
        rates = ", ".join(f"{rate:.2f}" for rate in self.acceptance())
        lines = [f"acceptance by position: {rates}", f"{self._num_probes} probes"]
        for size in sorted(self._best):
            parts = [f"{k}: {rate:.0f}" for k, rate in self.goodput(size).items()]
            lines.append(
                f"up to {size} requests: {self._best[size]}; tokens/s of a request by drafts "
                f"{', '.join(parts)}"
            )
        return lines

    def _needs_measuring(self, size: int, length: int) -> bool:
        cost, wanted = self._costs.get((size, length)), self.config.explore_steps
        tried = self._tried.get((size, length), 0)
        return (cost is None or cost.count < wanted) and tried < _PATIENCE * (wanted + 1)

    def _is_probing(self, size: int) -> bool:
        """Return whether another choice has its turn; begin that where it is time."""
        if self._probe is not None:
            if self._probe[0] == size and self._probe[2] > 0:
                return True
            self._probe = None
        others = [k for k in self._choices if k != self._best.get(size)]
        if not self.config.probe_every or not others:
            return False
        self._steps_to_probe -= 1
        if self._steps_to_probe > 0:
            return False
        self._steps_to_probe = self.config.probe_every
        # The first step of them verifies what the choice before it drafted.
        length = others[self._num_probes % len(others)]
        self._probe = size, length, self.config.explore_steps + 1
        self._num_probes += 1
        return True

    def _probed(self, size: int) -> int:
        assert self._probe is not None
        _, length, left = self._probe
        self._probe = size, length, left - 1
        return length

    def _take_best(self, size: int) -> int:
        left = self._steps_to_judge.get(size, 0)
        if left > 0:
            self._steps_to_judge[size] = left - 1
            return self._best[size]
        goodput = self.goodput(size)
        if not goodput:
            return self._choices[-1]
        best = max(self._choices, key=lambda k: goodput[k])
        present = self._best.get(size)
        if present is not None and goodput[best] < goodput[present] * (1 + self.config.min_gain):
            best = present
        self._best[size], self._steps_to_judge[size] = best, _JUDGE_EVERY - 1
        return best


def _bucket(num_reqs: int) -> int:
    """Return the power of two that a number of requests is rounded up to."""
    return 1 << max(num_reqs - 1, 0).bit_length()
