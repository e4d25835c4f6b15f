"""Rejection sampling writes texts with the target's own joint law, whatever is drafted.

Many rows go through several steps of the verifier against a target whose every text is enumerable.
Each bug that is injected must fail the very same test. On a GPU the verifier's kernels go through
the same tests. The engine is held to the law in test_rejection_law_engine.py.
"""

import dataclasses

import numpy as np
import pytest
import torch

from sampler.gumbel import gumbel_sample, gumbel_sample_ref
from sampler.noise import STREAM_DRAFT, STREAM_TARGET, mix_seed
from sampler.verify.judge import Judgement
from sampler.verify.rejection import RejectionVerifier
from sampler.verify.residual import draw_runs
from specdec.protocols import VerifyInputs, VerifyOutputs
from tests.law_cases import (
    CASES,
    NUM_TEXTS,
    PROMPT,
    SETTINGS,
    TABLE,
    V,
    exact_law,
    law_test,
    write_texts,
)
from tests.statistics import (
    chi_square,
    dense_gumbel_sample,
    processed_law,
    window_counts,
    window_law,
)


@pytest.fixture(autouse=True)
def dense_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash all of the few tokens at once; that this changes nothing is a test of its own."""
    monkeypatch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)


@pytest.mark.parametrize(("name", "temperature", "top_p"), CASES)
def test_texts_have_the_joint_law_of_the_target(
    name: str, temperature: float, top_p: float
) -> None:
    texts = write_texts(RejectionVerifier, name, temperature, top_p)
    result = law_test(texts, temperature, top_p)
    assert result.passes, result


@pytest.mark.parametrize(
    ("name", "factor", "temperature", "top_p"),
    [
        *[("q, opposite of the target", -1.0, *setting) for setting in SETTINGS],
        ("q, flatter than the target", 0.4, *SETTINGS[0]),
    ],
)
def test_sampled_drafts_are_accepted_as_often_as_the_laws_overlap(
    name: str, factor: float, temperature: float, top_p: float
) -> None:
    target = processed_law(TABLE.numpy(), temperature, top_p)
    draft = processed_law(factor * TABLE.numpy(), 1.0)
    overlap = np.minimum(target, draft)
    at_prompt = overlap[PROMPT[0], PROMPT[1]]
    texts = write_texts(RejectionVerifier, name, temperature, top_p)
    # One draft is kept with probability sum of min(p, q), two with the product along the text.
    both = sum(at_prompt[x] * overlap[PROMPT[1], x].sum() for x in range(V))
    for count, probability in ((1, at_prompt.sum()), (2, both)):
        measured = (texts.first_accepted >= count).mean()
        deviation = (probability * (1 - probability) / NUM_TEXTS) ** 0.5
        assert abs(measured - probability) < 5 * deviation


def test_one_hot_draft_is_accepted_as_often_as_the_target_draws_it() -> None:
    probability = processed_law(TABLE.numpy(), 1.0)[PROMPT[0], PROMPT[1]].min()
    texts = write_texts(RejectionVerifier, "one-hot, least likely")
    deviation = (probability * (1 - probability) / NUM_TEXTS) ** 0.5
    assert abs((texts.first_accepted >= 1).mean() - probability) < 5 * deviation


# --- injected bugs --------------------------------------------------------------------------------


class ResidualFromTarget(RejectionVerifier):
    """After a rejection the token is drawn from the target instead of the residual."""

    def _draw(self, inputs: VerifyInputs, judgement: Judgement) -> VerifyOutputs:
        return draw_runs(inputs, judgement, self.residual_stream, refuses=False)


class ResidualSharesDraftNoise(RejectionVerifier):
    """The residual is drawn with the very noise that drew the rejected draft."""

    residual_stream = STREAM_DRAFT


class AcceptsAlways(RejectionVerifier):
    """Every draft is kept."""

    def _judge(self, inputs: VerifyInputs) -> Judgement:
        return dataclasses.replace(super()._judge(inputs), accepted=inputs.draft_tokens >= 0)


class QOfTheFirstDraft(RejectionVerifier):
    """Every draft is judged by the law that drew the first one of its run."""

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        first = torch.zeros_like(inputs.expanded_local_pos)
        return super().verify(dataclasses.replace(inputs, expanded_local_pos=first))


class OneAcceptanceForAllPositions(RejectionVerifier):
    """Acceptance noise does not know the position: each draft alone still has the right law."""

    def _judge(self, inputs: VerifyInputs) -> Judgement:
        fixed = torch.zeros_like(inputs.draw_positions)
        return super()._judge(dataclasses.replace(inputs, draw_positions=fixed))


class OneResidualForAllPositions(RejectionVerifier):
    """Noise of drawn tokens does not know the position."""

    def _draw(self, inputs: VerifyInputs, judgement: Judgement) -> VerifyOutputs:
        fixed = torch.zeros_like(inputs.draw_positions)
        return super()._draw(dataclasses.replace(inputs, draw_positions=fixed), judgement)


BUGS = [
    (ResidualFromTarget, "one-hot, least likely"),
    (ResidualFromTarget, "one-hot, likeliest"),
    (ResidualFromTarget, "q, opposite of the target"),
    (ResidualFromTarget, "runs cut by -1"),
    (ResidualSharesDraftNoise, "q, opposite of the target"),
    (AcceptsAlways, "one-hot, least likely"),
    (AcceptsAlways, "q, flatter than the target"),
    (QOfTheFirstDraft, "q, opposite of the target"),
    (QOfTheFirstDraft, "kinds alternate on a row"),
    (OneAcceptanceForAllPositions, "q, flatter than the target"),
    (OneAcceptanceForAllPositions, "one-hot, likeliest"),
    (OneResidualForAllPositions, "one-hot, least likely"),
    (OneResidualForAllPositions, "q, opposite of the target"),
    (RejectionVerifier, "bug: stale q"),
]


@pytest.mark.parametrize(("bug", "name"), BUGS)
def test_injected_bug_breaks_the_joint_law(bug: type[RejectionVerifier], name: str) -> None:
    result = law_test(write_texts(bug, name))
    assert not result.passes, result


def test_injected_bug_of_one_position_hides_from_single_tokens() -> None:
    # Why the joint law is tested: each token alone has the right law under this bug.
    texts = write_texts(OneAcceptanceForAllPositions, "one-hot, likeliest")
    law = window_law(exact_law(1.0, 1.0), 0, 1)
    assert chi_square(window_counts(texts.tokens, 0, 1, V), law).passes
    assert not law_test(texts).passes


# --- the kernels, on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "temperature", "top_p"), CASES)
def test_kernels_write_texts_with_the_joint_law_of_the_target(
    name: str, temperature: float, top_p: float
) -> None:
    texts = write_texts(RejectionVerifier, name, temperature, top_p, "cuda")
    result = law_test(texts, temperature, top_p)
    assert result.passes, result


@pytest.mark.gpu
@pytest.mark.parametrize(("bug", "name"), BUGS)
def test_bug_around_the_kernels_breaks_the_joint_law(
    bug: type[RejectionVerifier], name: str
) -> None:
    result = law_test(write_texts(bug, name, device="cuda"))
    assert not result.passes, result


@pytest.mark.gpu
def test_kernels_write_the_texts_of_their_twins() -> None:
    for name in {name for name, *_ in CASES}:
        texts, twin = (write_texts(RejectionVerifier, name, device=d) for d in ("cuda", "cpu"))
        # A logarithm that rounds otherwise may turn a close call.
        assert (texts.tokens != twin.tokens).any(1).mean() < 1e-3, name


def test_dense_noise_draws_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 7, generator=generator)
    logits[logits < -2] = float("-inf")
    rows = torch.randperm(200, generator=generator).int()
    positions = torch.randint(50, (200,), generator=generator)
    temperature = (torch.arange(200) % 3).float()
    seeds = torch.tensor([mix_seed(i, 0) for i in range(200)])
    args = (logits, rows, positions, temperature, seeds, STREAM_TARGET)
    assert torch.equal(gumbel_sample_ref(*args), dense_gumbel_sample(*args))
    assert torch.equal(gumbel_sample(*args), dense_gumbel_sample(*args))
