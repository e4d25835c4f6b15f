"""A verifier's loop over rows of a toy target, whose every text is enumerable.

Many rows go through several steps of a verifier, each from where its last step left it; what they
wrote is held to the exact joint law. The proposals are drafters of every kind, good and bad.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sampler.noise import STREAM_DRAFT, mix_epoch, mix_seed, noise_gumbel, noise_key
from sampler.verify.config import VerifierConfig
from specdec.protocols import (
    DRAFT_KIND_NONE,
    DRAFT_KIND_ONE_HOT,
    DRAFT_KIND_WITH_Q,
    VerifyInputs,
)
from tests.statistics import (
    ChiSquare,
    chi_square,
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


def sampled(*factors: float) -> Propose:
    """Draw drafts from softmax(factor * target) with the noise that drafters are given.

    Args:
        factors: of each draft; the last one holds for all behind it.
    """

    def propose(texts: Tensor, seeds: Tensor) -> Proposal:
        logits = []
        for i in range(K):
            logits.append(factors[min(i, len(factors) - 1)] * after(TABLE, texts))
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


def stale(propose: Propose) -> Propose:
    """Hand over the draft logits of the step before: a bug."""

    def outdated(texts: Tensor, seeds: Tensor) -> Proposal:
        drafts, kinds, _ = propose(texts, seeds)
        return drafts, kinds, propose(torch.cat([texts[:, :1], texts[:, :-1]], 1), seeds)[2]

    return outdated


ADVERSARIAL = sampled(-1.0)
PROPOSALS: dict[str, Propose] = {
    "one-hot, least likely": one_hot(-1.0),
    "one-hot, likeliest": one_hot(1.0),
    "q, opposite of the target": ADVERSARIAL,
    "q, flatter than the target": sampled(0.4),
    "q, the target": sampled(1.0),
    "q, flat and then opposite": sampled(0.3, -1.0),
    "kinds alternate on a row": alternating(one_hot(-1.0), ADVERSARIAL),
    "runs cut by -1": cut(alternating(one_hot(1.0), ADVERSARIAL)),
    "bug: stale q": stale(ADVERSARIAL),
}
SETTINGS = [(1.0, 1.0), (0.3, 1.0), (1.5, 1.0), (1.0, 0.8), (1.5, 0.7)]
IN_ALL_SETTINGS = ["one-hot, least likely", "q, opposite of the target", "runs cut by -1"]
CASES = [
    (name, *setting)
    for name in PROPOSALS
    if not name.startswith("bug")
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
    verifier_cls: Any,
    name: str,
    temperature: float = 1.0,
    top_p: float = 1.0,
    device: str = "cpu",
) -> Texts:
    """Write NUM_TEXTS texts, each step from where the last one left each row.

    A verifier that asks for it gets drafts whose noise also knows the rows' length.
    """
    verifier, propose = verifier_cls(VerifierConfig()), PROPOSALS[name]
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
        fresh = mix_epoch(own, lengths[rows]) if verifier.noise_epoch else own
        inputs = lines_of(texts, own, propose(texts, fresh), table, temperature)
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
