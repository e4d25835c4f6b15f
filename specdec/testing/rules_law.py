"""The joint law of texts under `rejection`, for drafters that hand over the law they draw from.

Requests may use three of the target's likely tokens alone, so that the law of a few consecutive
tokens is enumerable from transformers' own forward. House rule: bins with fewer than 5 expected are
merged, and chi-square has to stay under df + 10 * sqrt(2 * df), seeds fixed, nothing run again.
"""

import itertools

import numpy as np
import torch

from specdec.testing.play import Arrival, play
from specdec.testing.rule import NotApplicable, require, require_drafts
from specdec.testing.subject import Subject
from specdec.testing.target import LIKELY_TOKENS, tiny_model
from specdec.types import SamplingParams

_TOKENS = LIKELY_TOKENS[1:4]
_PROMPT = (21, 40, 63, 21, 40)
_NUM_TEXTS = 900
_MIN_EXPECTED = 5.0


def check_law(subject: Subject) -> str | None:
    """Check the joint law of K + 2 consecutive tokens at temperature 1."""
    require_drafts(subject)
    if not subject.capabilities.offers_q:
        raise NotApplicable("declared offers_q=False: one-hot drafts need no law")
    if subject.target.name != "tiny":
        raise NotApplicable("the law is enumerated for the kit's own target alone")
    # One token in, so that rows stand at unlike places of their runs; and room for all drafts
    # behind the window, so that the end cuts no run inside of it.
    window, k = min(subject.num_speculative_tokens, 3) + 2, subject.num_speculative_tokens
    arrivals = [
        Arrival(
            0,
            _PROMPT,
            SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=1 + window + k,
                allowed_token_ids=list(_TOKENS),
            ),
        )
        for seed in range(_NUM_TEXTS)
    ]
    engine = subject.engine(
        "rejection", max_num_reqs=400, max_num_batched_tokens=4096, num_kv_blocks=400 * 8
    )
    result = play(engine, arrivals)
    accepted = sum(out.stats.num_accepted for out in result.outputs.values())
    require(
        accepted > 0.02 * _NUM_TEXTS,
        f"{accepted} drafts were accepted in {_NUM_TEXTS} texts: the law says nothing",
        "store draft_logits of the target's whole vocabulary, and draw from them",
    )
    counts = np.zeros(len(_TOKENS) ** window)
    for text in result.texts.values():
        digits = [_TOKENS.index(token) for token in text[1 : 1 + window]]
        counts[int("".join(map(str, digits)), len(_TOKENS))] += 1
    value, bound = chi_square(counts, exact_law(1 + window).sum(0))
    require(
        value <= bound,
        f"the joint law of {window} tokens is not the target's: chi-square {value:.0f}, allowed "
        f"{bound:.0f}",
        "draft_logits have to be the very law that the draft was drawn from (divided by the "
        "temperature, truncated alike), and drafts be drawn by ctx.noise at their own positions",
    )
    return None


@torch.inference_mode()
def exact_law(length: int) -> np.ndarray:
    """Return the joint law of a length of tokens after the prompt, [3] * length."""
    model, law = tiny_model(), np.ones(1)
    for t in range(length):
        texts = list(itertools.product(_TOKENS, repeat=t))
        ids = torch.tensor([[*_PROMPT, *text] for text in texts])
        logits = model(ids, use_cache=False).logits[:, -1, list(_TOKENS)].double()
        law = (law[:, None] * logits.softmax(-1).numpy()).reshape(-1)
    return law.reshape((len(_TOKENS),) * length)


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """Return the statistic of counts against a law, and the bound that it must stay under."""
    observed, expected = [0.0], [0.0]
    order = np.argsort(law.reshape(-1))
    for outcome in order:
        if expected[-1] >= _MIN_EXPECTED:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += float(counts.reshape(-1)[outcome])
        expected[-1] += float(law.reshape(-1)[outcome] * counts.sum())
    o, e = np.array(observed), np.array(expected)
    df = len(e) - 1
    assert df > 2, "too few bins to test anything"
    return float(((o - e) ** 2 / e).sum()), df + 10 * (2 * df) ** 0.5
