"""Block verification writes texts with the target's own joint law, whatever is drafted.

As test_rejection_law.py, with bugs of its own: above all noise that is keyed by position alone.
"""

import dataclasses

import pytest
import torch
from torch import Tensor

from sampler.noise import STREAM_ACCEPT, STREAM_DRAFT, mix_epoch, noise_key, noise_uniform
from sampler.verify.block import BlockVerifier
from sampler.verify.joint import JointJudgement
from sampler.verify.rejection import RejectionVerifier
from specdec.protocols import VerifyInputs, VerifyOutputs
from tests.law_cases import (
    CASES,
    NUM_TEXTS,
    PROMPT,
    TABLE,
    V,
    law_test,
    write_texts,
)
from tests.statistics import dense_gumbel_sample, processed_law


@pytest.fixture(autouse=True)
def dense_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash all of the few tokens at once; test_rejection_law shows that this changes nothing."""
    monkeypatch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)


@pytest.mark.parametrize(("name", "temperature", "top_p"), CASES)
def test_texts_have_the_joint_law_of_the_target(
    name: str, temperature: float, top_p: float
) -> None:
    texts = write_texts(BlockVerifier, name, temperature, top_p)
    result = law_test(texts, temperature, top_p)
    assert result.passes, result


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.5, 0.7)])
def test_sampled_drafts_are_kept_as_often_as_the_weights_say(
    temperature: float, top_p: float
) -> None:
    target = processed_law(TABLE.numpy(), temperature, top_p)
    draft = processed_law(0.4 * TABLE.numpy(), 1.0)
    first, second = PROMPT
    p, q = target[first, second], draft[first, second]
    weight = [min(1.0, p[x] / q[x]) for x in range(V)]
    after = [
        sum(min(weight[x] * target[second, x, y], draft[second, x, y]) for y in range(V))
        for x in range(V)
    ]
    texts = write_texts(BlockVerifier, "q, flatter than the target", temperature, top_p)
    for count, chance in (
        (1, sum(q[x] * weight[x] for x in range(V))),
        (2, sum(q[x] * after[x] for x in range(V))),
    ):
        measured = (texts.first_accepted >= count).mean()
        deviation = (chance * (1 - chance) / NUM_TEXTS) ** 0.5
        assert abs(measured - chance) < 5 * deviation


def test_more_drafts_are_kept_than_by_rejection() -> None:
    name = "q, flatter than the target"
    block, rejection = (
        write_texts(verifier, name).first_accepted.mean()
        for verifier in (BlockVerifier, RejectionVerifier)
    )
    assert block > rejection + 0.01


# --- injected bugs --------------------------------------------------------------------------------


class DraftNoiseByPosition(BlockVerifier):
    """Drafters' noise knows the position alone, so that a refused draft comes again."""

    noise_epoch = False


class AcceptNoiseByPosition(BlockVerifier):
    """The uniform of a run is keyed by the place where the run ends, in whichever step."""

    def _judge(self, inputs: VerifyInputs) -> JointJudgement:
        def uniform(key: tuple[Tensor, Tensor], run: Tensor) -> Tensor:
            seeds, total_len = key
            end = noise_key(seeds, total_len + run, STREAM_ACCEPT)
            return noise_uniform(end, torch.zeros_like(end[0]))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sampler.verify.joint.noise_key", lambda *args: args[:2])
            patch.setattr("sampler.verify.joint.noise_uniform", uniform)
            return super()._judge(inputs)


class NoiseByPosition(AcceptNoiseByPosition):
    """Both."""

    noise_epoch = False


class ResidualFromTarget(BlockVerifier):
    """After a refusal the token is drawn from the target instead of the residual."""

    def _judge(self, inputs: VerifyInputs) -> JointJudgement:
        judgement = super()._judge(inputs)
        assert judgement.weight is not None
        # So large a weight that the draft's law is nothing beside it.
        return dataclasses.replace(judgement, weight=torch.full_like(judgement.weight, 1e6))


class ResidualSharesDraftNoise(BlockVerifier):
    """The residual is drawn with the very noise that drew the refused draft."""

    residual_stream = STREAM_DRAFT

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        first = inputs.draw_positions[inputs.cu_num_logits[:-1].long()]
        seeds = mix_epoch(inputs.seeds, first)
        return super().verify(dataclasses.replace(inputs, seeds=seeds))


class StopsLikeRejection(BlockVerifier):
    """A run is ended by the first uniform that is not below its weight."""

    def _judge(self, inputs: VerifyInputs) -> JointJudgement:
        judgement = super()._judge(inputs)
        assert judgement.stop_prob is not None
        longer = torch.zeros_like(judgement.accepted)
        longer[:-1] = judgement.stop_prob[1:] > 0.5
        accepted = longer & (inputs.draft_tokens >= 0)
        return dataclasses.replace(judgement, accepted=accepted)


BUGS = [
    (NoiseByPosition, "one-hot, likeliest"),
    (NoiseByPosition, "q, opposite of the target"),
    (DraftNoiseByPosition, "q, opposite of the target"),
    (ResidualFromTarget, "q, opposite of the target"),
    (ResidualFromTarget, "q, flatter than the target"),
    (ResidualFromTarget, "runs cut by -1"),
    (ResidualSharesDraftNoise, "q, opposite of the target"),
    (StopsLikeRejection, "one-hot, likeliest"),
    (StopsLikeRejection, "runs cut by -1"),
    (BlockVerifier, "bug: stale q"),
]
IN_TWINS_ALONE = [
    (AcceptNoiseByPosition, "one-hot, likeliest"),
    (AcceptNoiseByPosition, "q, opposite of the target"),
]


@pytest.mark.parametrize(("bug", "name"), [*BUGS, *IN_TWINS_ALONE])
def test_injected_bug_breaks_the_joint_law(bug: type[BlockVerifier], name: str) -> None:
    result = law_test(write_texts(bug, name))
    assert not result.passes, result


# --- the kernels, on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "temperature", "top_p"), CASES)
def test_kernels_write_texts_with_the_joint_law_of_the_target(
    name: str, temperature: float, top_p: float
) -> None:
    texts = write_texts(BlockVerifier, name, temperature, top_p, "cuda")
    result = law_test(texts, temperature, top_p)
    assert result.passes, result


@pytest.mark.gpu
@pytest.mark.parametrize(("bug", "name"), [case for case in BUGS if case[0] is not NoiseByPosition])
def test_bug_around_the_kernels_breaks_the_joint_law(bug: type[BlockVerifier], name: str) -> None:
    result = law_test(write_texts(bug, name, device="cuda"))
    assert not result.passes, result


@pytest.mark.gpu
def test_kernels_write_the_texts_of_their_twins() -> None:
    for name in {name for name, *_ in CASES}:
        texts, twin = (write_texts(BlockVerifier, name, device=d) for d in ("cuda", "cpu"))
        # A logarithm that rounds otherwise may turn a close call.
        assert (texts.tokens != twin.tokens).any(1).mean() < 1e-3, name
