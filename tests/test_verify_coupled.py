"""Gumbel coupling: the autoregressive text, and drafts kept as often as the theory promises."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sampler.draft_noise import draft_noise
from sampler.gumbel import gumbel_sample
from sampler.noise import STREAM_TARGET, mix_seed
from sampler.verify.coupled import CoupledConfig, CoupledVerifier
from sampler.verify.sampled_match import SampledMatchConfig, SampledMatchVerifier
from specdec.protocols import Verifier
from tests.statistics import dense_gumbel_sample
from tests.test_sampled_match import (
    DRAFTERS,
    PARAMS,
    PREEMPTING,
    autoregressive_texts,
    drafter_spec,
    folder,
    texts_of,
    write,
)

__all__ = ["folder"]  # a fixture
COUPLED = CoupledVerifier(CoupledConfig())
INDEPENDENT = SampledMatchVerifier(SampledMatchConfig())
NUM = 20_000


@pytest.mark.parametrize(
    "options",
    [{"max_num_reqs": 8}, {"max_steps_in_flight": 2, **PREEMPTING}, {"graph_scope": "step"}],
    ids=["batch", "preempted in flight", "fixed shapes"],
)
@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_text_is_the_autoregressive_one(drafter: str, options: Any, folder: str) -> None:
    spec = "none" if drafter == "none" else drafter_spec(drafter, folder)
    assert texts_of(write(spec, "coupled", **options)) == autoregressive_texts()


def test_drafts_drawn_from_the_target_with_its_own_noise_are_all_kept() -> None:
    spec = {"name": "draft_model", "model": "target", "sampling": "gumbel"}
    kept = {}
    for verifier in ("coupled", "sampled_match"):
        stats = [
            output.stats
            for output, params in zip(write(spec, verifier), PARAMS, strict=True)
            if params.temperature > 0 and params.top_p == 1 and params.top_k == 0
        ]
        kept[verifier] = sum(s.num_accepted for s in stats), sum(s.num_drafted for s in stats)
    accepted, drafted = kept["coupled"]
    assert accepted == drafted > 0
    accepted, drafted = kept["sampled_match"]
    assert accepted < drafted


# Laws of few and many tokens, alike and unlike.
LAWS = {
    "flat": (np.ones(16), np.ones(16)),
    "flat, tilted": (np.ones(16), np.linspace(0.5, 1.5, 16)),
    "sharp and flat": (np.array([9.0, 1, 1, 1]), np.ones(4)),
    "crossed": (np.array([4.0, 3, 2, 1]), np.array([1.0, 2, 3, 4])),
    "parts": (np.array([1.0, 1, 0, 0]), np.array([0.0, 1, 1, 0])),
}


def kept_share(verifier: Verifier, target: np.ndarray, draft: np.ndarray) -> float:
    """Return how often a draft that is drawn with a verifier's noise is the target's sample."""
    rows = torch.arange(NUM, dtype=torch.int32)
    positions = torch.arange(NUM) % 97
    seeds = torch.tensor([mix_seed(i, 0) for i in range(NUM)])
    temperature = torch.ones(NUM)
    logits, draft_logits = (
        torch.from_numpy(law).log().float().expand(NUM, -1) for law in (target, draft)
    )
    drawn = draft_noise(verifier, temperature, seeds, None).draw(draft_logits, rows, positions)
    sampled = gumbel_sample(logits, rows, positions, temperature, seeds, STREAM_TARGET)
    return float((drawn == sampled).double().mean())


@pytest.mark.parametrize("name", LAWS)
def test_coupled_drafts_are_kept_as_often_as_promised(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)
    target, draft = (law / law.sum() for law in LAWS[name])
    distance = 0.5 * np.abs(target - draft).sum()
    promised = (1 - distance) / (1 + distance)
    noise = 5 * (0.25 / NUM) ** 0.5
    coupled = kept_share(COUPLED, target, draft)
    assert promised - noise < coupled < 1 - distance + noise
    # With noise of its own a draft is kept as often as two draws happen to agree.
    independent = kept_share(INDEPENDENT, target, draft)
    assert abs(independent - (target * draft).sum()) < noise
    assert independent < promised - noise


def test_stream_is_read_from_the_verifier_alone() -> None:
    # A verifier that says nothing about noise gets the drafters' own stream.
    plain: Any = SimpleNamespace(name="plain")
    seeds, rows = torch.tensor([5, 6]), torch.tensor([0, 1])
    arguments = (rows, torch.tensor([3, 4]))
    noise = [draft_noise(v, torch.ones(2), seeds, None) for v in (plain, INDEPENDENT, COUPLED)]
    first, second, third = (n.uniform(*arguments) for n in noise)
    assert torch.equal(first, second)
    assert not torch.isclose(first, third).any()
