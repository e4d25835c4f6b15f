"""Rejection sampling writes texts with the target's own joint law, whatever is drafted.

Many rows go through several steps of the verifier against a target whose every text is enumerable.
Each bug that is injected must fail the very same test. On a GPU the verifier's kernels go through
the same tests. The engine is held to the law in test_rejection_law_engine.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sampler.gumbel import gumbel_sample, gumbel_sample_ref
from sampler.noise import STREAM_DRAFT, STREAM_TARGET, mix_seed, noise_gumbel, noise_key
from sampler.verify.judge import Judgement
from sampler.verify.rejection import RejectionConfig, RejectionVerifier
from specdec.protocols import (
    DRAFT_KIND_NONE,
    DRAFT_KIND_ONE_HOT,
    DRAFT_KIND_WITH_Q,
    VerifyInputs,
    VerifyOutputs,
)
from tests.statistics import (
    ChiSquare,
    chi_square,
    dense_gumbel_sample,
    joint_law,
    processed_law,
    window_counts,
    window_law,
)

V = 3
K = 2
# Tokens whose joint law is tested, one token in: rows then stand at unlike places of their runs.
WINDOW = K + 2
START = 1
LENGTH = START + WINDOW
NUM_TEXTS = 60_000
PROMPT = [0, 1]
# The target's logits after the last two tokens: skewed, so that their opposite is a bad draft.
TABLE = torch.tensor(
    [
        [[2.0, 0.0, -1.0], [0.5, 1.5, -0.5], [-1.0, 0.3, 1.2]],
        [[0.0, -0.8, 1.4], [1.8, -0.2, 0.4], [-0.3, 1.0, 0.1]],
        [[1.1, 0.6, -1.2], [-0.9, 0.2, 1.6], [0.4, -1.5, 0.9]],
    ]
)

# Texts so far [n, t] and seeds [n] -> drafts [n, K] (-1 = none), kinds [n], draft logits [n, K, V].
Proposal = tuple[Tensor, Tensor, Tensor]
Propose = Callable[[Tensor, Tensor], Proposal]


@pytest.fixture(autouse=True)
def dense_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash all of the few tokens at once; that this changes nothing is a test of its own."""
    monkeypatch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)


def after(table: Tensor, texts: Tensor) -> Tensor:
    """Return the logits after texts [n, t], t >= 2, [n, V]."""
    return table.to(texts.device)[texts[:, -2], texts[:, -1]]


def kinds_of(drafts: Tensor, kind: int) -> Tensor:
    """Return one kind for all rows, [n] int8."""
    return torch.full((len(drafts),), kind, dtype=torch.int8, device=drafts.device)


def one_hot(sign: float) -> Propose:
    """Draft the likeliest token of sign * target."""

    def propose(texts: Tensor, seeds: Tensor) -> Proposal:
        for _ in range(K):
            texts = torch.cat([texts, (sign * after(TABLE, texts)).argmax(1, keepdim=True)], 1)
        drafts = texts[:, -K:]
        logits = torch.zeros(len(texts), K, V, device=texts.device)
        return drafts, kinds_of(drafts, DRAFT_KIND_ONE_HOT), logits

    return propose


def sampled(factor: float) -> Propose:
    """Draw drafts from softmax(factor * target) with the noise that drafters are given."""

    def propose(texts: Tensor, seeds: Tensor) -> Proposal:
        logits = []
        for _ in range(K):
            logits.append(factor * after(TABLE, texts))
            key = noise_key(seeds, torch.full_like(seeds, texts.shape[1]), STREAM_DRAFT)
            ids = torch.arange(V, dtype=torch.int32, device=texts.device)
            noise = noise_gumbel((key[0][:, None], key[1][:, None]), ids)
            texts = torch.cat([texts, (logits[-1] + noise).argmax(1, keepdim=True)], 1)
        drafts = texts[:, -K:]
        return drafts, kinds_of(drafts, DRAFT_KIND_WITH_Q), torch.stack(logits, 1)

    return propose


def alternating(first: Propose, second: Propose) -> Propose:
    """Change the drafter, and with it the kind, from place to place of one row."""

    def propose(texts: Tensor, seeds: Tensor) -> Proposal:
        takes_first = (seeds + texts.shape[1]) % 2 == 0
        drafts, kinds, logits = (
            torch.where(takes_first.view(-1, *[1] * (a.dim() - 1)), a, b)
            for a, b in zip(first(texts, seeds), second(texts, seeds), strict=True)
        )
        return drafts, kinds, logits

    return propose


def cut(propose: Propose) -> Propose:
    """Keep 0 to K drafts of each run: -1 behind them."""

    def shortened(texts: Tensor, seeds: Tensor) -> Proposal:
        drafts, kinds, logits = propose(texts, seeds)
        keep = (seeds // 7 + texts.shape[1]) % (K + 1)
        column = torch.arange(K, device=texts.device)
        drafts = torch.where(column < keep[:, None], drafts, -1)
        return drafts, torch.where(keep > 0, kinds, DRAFT_KIND_NONE).to(torch.int8), logits

    return shortened


ADVERSARIAL = sampled(-1.0)
PROPOSALS: dict[str, Propose] = {
    "one-hot, least likely": one_hot(-1.0),
    "one-hot, likeliest": one_hot(1.0),
    "q, opposite of the target": ADVERSARIAL,
    "q, flatter than the target": sampled(0.4),
    "q, the target": sampled(1.0),
    "kinds alternate on a row": alternating(one_hot(-1.0), ADVERSARIAL),
    "runs cut by -1": cut(alternating(one_hot(1.0), ADVERSARIAL)),
}
SETTINGS = [(1.0, 1.0), (0.3, 1.0), (1.5, 1.0), (1.0, 0.8), (1.5, 0.7)]
IN_ALL_SETTINGS = ["one-hot, least likely", "q, opposite of the target", "runs cut by -1"]
CASES = [
    (name, *setting)
    for name in PROPOSALS
    for setting in (SETTINGS if name in IN_ALL_SETTINGS else SETTINGS[:1])
]


@dataclass(frozen=True)
class Texts:
    """What the loop wrote."""

    tokens: np.ndarray  # [n, LENGTH]
    first_accepted: np.ndarray  # [n] drafts accepted in the first step, of all texts alike


def target_table(temperature: float, top_p: float) -> Tensor:
    """Return the processed logits of the target, [V, V, V]."""
    law = torch.from_numpy(processed_law(TABLE.numpy(), temperature, top_p))
    return law.log().float()


def lines_of(
    texts: Tensor, seeds: Tensor, proposal: Proposal, table: Tensor, temperature: float
) -> VerifyInputs:
    """Lay out one verification of K + 1 lines for each text."""
    drafts, kinds, draft_logits = proposal
    n, device = len(texts), texts.device
    rows = torch.arange(n, dtype=torch.int32, device=device)
    judged = torch.cat([drafts, drafts.new_full((n, 1), -1)], 1)
    longer = torch.cat([texts, drafts.clamp(min=0)], 1)
    t = texts.shape[1]
    logits = torch.stack([after(table, longer[:, : t + j]) for j in range(K + 1)], 1)
    local = torch.arange(K + 1, device=device).repeat(n)
    return VerifyInputs(
        logits=logits.view(-1, V),
        draft_tokens=judged.reshape(-1),
        draft_kind=kinds.repeat_interleave(K + 1),
        draft_logits=draft_logits,
        cu_num_logits=(K + 1) * torch.arange(n + 1, dtype=torch.int32, device=device),
        max_num_logits=K + 1,
        expanded_idx_mapping=rows.repeat_interleave(K + 1),
        expanded_local_pos=local.int(),
        draw_positions=t + local,
        temperature=torch.full((n,), temperature, device=device),
        seeds=seeds,
        all_greedy=False,
    )


@functools.cache
def write_texts(
    verifier_cls: type[RejectionVerifier],
    name: str,
    temperature: float = 1.0,
    top_p: float = 1.0,
    device: str = "cpu",
) -> Texts:
    """Write NUM_TEXTS texts, each step from where the last one left each row."""
    verifier, propose = verifier_cls(RejectionConfig()), PROPOSALS[name]
    table = target_table(temperature, top_p)
    width = len(PROMPT) + LENGTH
    tokens = torch.full((NUM_TEXTS, width + K), -1, device=device)
    tokens[:, : len(PROMPT)] = torch.tensor(PROMPT)
    seeds = torch.tensor([mix_seed(i, 0) for i in range(NUM_TEXTS)], device=device)
    lengths = torch.full((NUM_TEXTS,), len(PROMPT), device=device)
    first_accepted = np.zeros(0)
    # Rows of equal length are verified together: the shortest ones advance.
    for t in range(len(PROMPT), width):
        (rows,) = (lengths == t).nonzero(as_tuple=True)
        if len(rows) == 0:
            continue
        texts, own = tokens[rows, :t], seeds[rows]
        inputs = lines_of(texts, own, propose(texts, own), table, temperature)
        outputs = verifier.verify(inputs)
        tokens[rows, t : t + K + 1] = outputs.sampled_tokens
        lengths[rows] += outputs.num_sampled
        if t == len(PROMPT):
            first_accepted = outputs.num_sampled.cpu().numpy() - 1
    return Texts(tokens[:, len(PROMPT) : width].cpu().numpy(), first_accepted)


def exact_law(temperature: float, top_p: float) -> np.ndarray:
    """Return the joint law of LENGTH tokens after the prompt."""
    law = processed_law(TABLE.numpy(), temperature, top_p)

    def next_law(texts: np.ndarray) -> np.ndarray:
        whole = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], 1)
        return law[whole[:, -2], whole[:, -1]]

    return joint_law(next_law, V, LENGTH)


def law_test(texts: Texts, temperature: float = 1.0, top_p: float = 1.0) -> ChiSquare:
    """Hold the joint law of the window to the exact one."""
    law = window_law(exact_law(temperature, top_p), START, WINDOW)
    return chi_square(window_counts(texts.tokens, START, WINDOW, V), law)


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

    def _next_tokens(self, inputs: VerifyInputs, judgement: Judgement) -> Tensor:
        without = torch.full_like(inputs.draft_tokens, -1)
        return super()._next_tokens(dataclasses.replace(inputs, draft_tokens=without), judgement)


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

    def _next_tokens(self, inputs: VerifyInputs, judgement: Judgement) -> Tensor:
        fixed = torch.zeros_like(inputs.draw_positions)
        return super()._next_tokens(dataclasses.replace(inputs, draw_positions=fixed), judgement)


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
    for name in PROPOSALS:
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
