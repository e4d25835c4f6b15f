"""Block verification, exactly: the chances of its runs at recorded laws, and what follows a run.

All drafts of a small vocabulary are judged at once, each with the chance that the drafter draws it,
so that expectations are sums and not estimates. The chances come from the rule's own judgement.
"""

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sampler.noise import STREAM_RESIDUAL, mix_seed
from sampler.verify.block import BlockConfig, BlockVerifier
from sampler.verify.joint import judge_prefixes
from sampler.verify.judge import draft_probabilities_ref
from sampler.verify.residual import draw_runs
from specdec.protocols import DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q, VerifyInputs
from tests.statistics import ChiSquare, chi_square, dense_gumbel_sample

V, K = 4, 3


@dataclass(frozen=True)
class Recorded:
    """Every run of K drafts, judged in one step; a prefix has the same laws in every run."""

    inputs: VerifyInputs
    runs: np.ndarray  # [V^K, K]
    chances: np.ndarray  # [V^K], of being drafted


def record(
    seed: int, spread: float, kind: int = DRAFT_KIND_WITH_Q, closeness: float = 0
) -> Recorded:
    """Draw laws for every prefix, and lay out all runs.

    Args:
        seed: of the laws.
        spread: standard deviation of logits.
        kind: of the drafts.
        closeness: share of the target's logits in the draft's.
    """
    rng = np.random.default_rng(seed)
    target: dict[tuple[int, ...], np.ndarray] = {}
    draft: dict[tuple[int, ...], np.ndarray] = {}
    for length in range(K + 1):
        for prefix in itertools.product(range(V), repeat=length):
            target[prefix] = spread * rng.standard_normal(V)
            own = spread * rng.standard_normal(V)
            draft[prefix] = closeness * target[prefix] + (1 - closeness) * own
            if rng.random() < 0.2:
                target[prefix][rng.integers(V)] = -np.inf
    runs = list(itertools.product(range(V), repeat=K))
    n = len(runs)
    logits = np.stack([[target[run[:i]] for i in range(K + 1)] for run in runs])
    draft_logits = np.stack([[draft[run[:i]] for i in range(K)] for run in runs])
    law = np.exp(draft_logits)
    law /= law.sum(-1, keepdims=True)
    tokens = np.asarray(runs)
    chances = np.take_along_axis(law, tokens[..., None], -1)[..., 0].prod(1)
    judged = np.concatenate([tokens, np.full((n, 1), -1)], 1)
    local = torch.arange(K + 1).repeat(n)
    inputs = VerifyInputs(
        logits=torch.from_numpy(logits).float().view(-1, V),
        all_greedy=False,
        draft_tokens=torch.from_numpy(judged).reshape(-1),
        draft_kind=torch.full((n * (K + 1),), kind, dtype=torch.int8),
        draft_logits=torch.from_numpy(draft_logits).float(),
        cu_num_logits=(K + 1) * torch.arange(n + 1, dtype=torch.int32),
        max_num_logits=K + 1,
        expanded_idx_mapping=torch.arange(n, dtype=torch.int32).repeat_interleave(K + 1),
        expanded_local_pos=local.int(),
        draw_positions=9 + local,
        temperature=torch.ones(n),
        seeds=torch.tensor([mix_seed(i, seed) for i in range(n)]),
    )
    return Recorded(inputs, tokens, chances)


def kept_by_block(recorded: Recorded) -> np.ndarray:
    """Return the chance that draft 1..K of each run are kept, [V^K, K], from the judgement."""
    stop_prob = judge_prefixes(recorded.inputs).stop_prob
    assert stop_prob is not None
    goes_on = 1 - stop_prob.double().numpy().reshape(-1, K + 1)[:, 1:]
    # Draft i is kept unless every run of i or more fails.
    return 1 - goes_on[:, ::-1].cumprod(1)[:, ::-1]


def kept_by_rejection(recorded: Recorded) -> np.ndarray:
    """Return the same of rejection sampling: the product of min(1, p / q)."""
    target, draft, _ = draft_probabilities_ref(recorded.inputs)
    ratio = (target.double() / draft.double()).clamp(max=1).view(-1, K + 1)[:, :K]
    return ratio.cumprod(1).numpy()


LAWS = [(seed, spread, close) for seed in range(6) for spread in (0.5, 2.0) for close in (0, 0.7)]


@pytest.mark.parametrize(("seed", "spread", "closeness"), LAWS)
def test_expected_length_is_never_below_that_of_rejection(
    seed: int, spread: float, closeness: float
) -> None:
    recorded = record(seed, spread, closeness=closeness)
    block = (kept_by_block(recorded).sum(1) * recorded.chances).sum()
    rejection = (kept_by_rejection(recorded).sum(1) * recorded.chances).sum()
    assert block > rejection + 1e-4


@pytest.mark.parametrize(("seed", "spread", "closeness"), LAWS)
def test_prefixes_are_kept_with_their_weight(seed: int, spread: float, closeness: float) -> None:
    # Whatever is drafted behind it: this is what makes the rule lossless.
    recorded = record(seed, spread, closeness=closeness)
    kept = kept_by_block(recorded)
    target, draft, _ = (x.double().numpy() for x in draft_probabilities_ref(recorded.inputs))
    ratio = (target / draft).reshape(-1, K + 1)[:, :K]
    weight = np.ones(len(kept))
    for i in range(K):
        weight = np.minimum(weight * ratio[:, i], 1)
        # Runs that begin alike lie side by side.
        alike = V ** (K - 1 - i)
        chances = recorded.chances.reshape(-1, alike)
        mean = (kept[:, i].reshape(-1, alike) * chances).sum(1) / chances.sum(1)
        np.testing.assert_allclose(mean, weight[::alike], atol=2e-6)


def test_one_hot_runs_are_as_long_as_those_of_rejection() -> None:
    for seed in range(4):
        recorded = record(seed, 1.0, DRAFT_KIND_ONE_HOT)
        np.testing.assert_allclose(kept_by_block(recorded), kept_by_rejection(recorded), atol=1e-6)


def test_drafts_of_the_target_itself_are_all_kept() -> None:
    recorded = record(0, 1.0, closeness=1.0)
    possible = np.isfinite(recorded.inputs.logits.view(-1, K + 1, V)[:, :K].numpy()).all((1, 2))
    kept = judge_prefixes(recorded.inputs).accepted.view(-1, K + 1).sum(1).numpy()
    assert possible.sum() > 10
    assert (kept[possible] == K).all()


def test_runs_are_kept_as_often_as_the_judgement_says() -> None:
    recorded = record(1, 1.0)
    expected = kept_by_block(recorded)
    num_seeds, counts = 200, np.zeros_like(expected)
    for i in range(num_seeds):
        seeds = recorded.inputs.seeds + i * 7919
        accepted = judge_prefixes(dataclasses.replace(recorded.inputs, seeds=seeds)).accepted
        counts += accepted.view(-1, K + 1)[:, :K].numpy()
    deviation = np.sqrt(num_seeds * expected * (1 - expected)) + 1e-3
    assert (np.abs(counts - num_seeds * expected) < 5 * deviation).all()
    # Bound to be seen through: the runs of rejection sampling are others.
    other = num_seeds * kept_by_rejection(recorded)
    assert not (np.abs(counts - other) < 5 * deviation).all()


# --- the token after a run ------------------------------------------------------------------------

TARGET = np.array([0.55, 0.3, 0.1, 0.05])
DRAFT = np.array([0.02, 0.1, 0.03, 0.85])
NUM_DRAWS = 20_000


def residual_test(monkeypatch: pytest.MonkeyPatch, forget_weight: bool = False) -> ChiSquare:
    """Refuse the second draft of many runs whose first one has weight 0.5, and draw."""
    monkeypatch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)
    one = record(0, 1.0).inputs
    n, width = NUM_DRAWS, 3
    first = np.array([0.25, 0.25, 0.25, 0.25])
    logits = torch.from_numpy(np.log(np.stack([first, TARGET, TARGET]))).float().repeat(n, 1)
    draft_logits = torch.from_numpy(np.log(np.stack([[0.5, 0.2, 0.2, 0.1], DRAFT]))).float()
    local = torch.arange(width).repeat(n)
    inputs = dataclasses.replace(
        one,
        logits=logits,
        draft_tokens=torch.tensor([0, 3, -1]).repeat(n),
        draft_kind=torch.full((n * width,), DRAFT_KIND_WITH_Q, dtype=torch.int8),
        draft_logits=draft_logits.expand(n, 2, V),
        cu_num_logits=width * torch.arange(n + 1, dtype=torch.int32),
        max_num_logits=width,
        expanded_idx_mapping=torch.arange(n, dtype=torch.int32).repeat_interleave(width),
        expanded_local_pos=local.int(),
        draw_positions=9 + local,
        temperature=torch.ones(n),
        seeds=torch.tensor([mix_seed(i, 0) for i in range(n)]),
    )
    judgement = judge_prefixes(inputs)
    assert judgement.weight is not None
    torch.testing.assert_close(judgement.weight.view(n, width)[:, 1], torch.full((n,), 0.5))
    judgement = dataclasses.replace(
        judgement,
        accepted=local == 0,
        weight=None if forget_weight else judgement.weight,
    )
    drawn = draw_runs(inputs, judgement, STREAM_RESIDUAL).sampled_tokens[:, 1]
    law = np.maximum(0.5 * TARGET - DRAFT, 0)
    return chi_square(np.bincount(drawn.numpy(), minlength=V), law / law.sum())


def test_residual_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = residual_test(monkeypatch)
    assert result.passes, result


def test_forgotten_weight_breaks_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    result = residual_test(monkeypatch, forget_weight=True)
    assert not result.passes, result


# --- rows of other kinds --------------------------------------------------------------------------


def verify(inputs: VerifyInputs) -> tuple[Tensor, Tensor]:
    """Return the tokens of each run and their number."""
    outputs = BlockVerifier(BlockConfig()).verify(inputs)
    return outputs.sampled_tokens, outputs.num_sampled


def test_greedy_rows_keep_the_leading_argmax_drafts() -> None:
    recorded = record(2, 1.0)
    inputs = dataclasses.replace(recorded.inputs, temperature=torch.zeros(V**K))
    tokens, num_sampled = verify(inputs)
    best = inputs.logits.argmax(1).view(-1, K + 1).numpy()
    lengths = (recorded.runs == best[:, :K]).cumprod(1).sum(1)
    assert (num_sampled.numpy() == lengths + 1).all()
    assert set(lengths) == {0, 1, 2, 3}
    for run, length, line in zip(tokens.tolist(), lengths, best, strict=True):
        assert run[: length + 1] == line[: length + 1].tolist()


def test_a_run_ends_before_the_first_hole() -> None:
    recorded = record(3, 1.0, closeness=0.9)
    judged = recorded.inputs.draft_tokens.view(-1, K + 1).clone()
    judged[:, 1:] = -1
    inputs = dataclasses.replace(recorded.inputs, draft_tokens=judged.view(-1))
    tokens, num_sampled = verify(inputs)
    assert set(num_sampled.tolist()) == {1, 2}
    stop_prob = judge_prefixes(inputs).stop_prob
    weight = judge_prefixes(inputs).weight
    assert stop_prob is not None
    assert weight is not None
    # The only draft is the last one: it is kept with its weight.
    assert torch.equal(stop_prob.view(-1, K + 1)[:, 1], weight.view(-1, K + 1)[:, 1])
    assert not stop_prob.view(-1, K + 1)[:, 2:].any()
    assert ((tokens >= 0).sum(1) == num_sampled).all()
