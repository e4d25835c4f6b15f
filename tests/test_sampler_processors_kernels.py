"""Processors' kernels against their twins, and both against a line-by-line oracle."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sampler.processors.allowed_token_ids import AllowedTokenIds
from sampler.processors.bad_words import MAX_TOKENS, MAX_WORDS, BadWords
from sampler.processors.logit_bias import MAX_BIASED_TOKENS, LogitBias
from sampler.processors.min_p import MinP
from sampler.processors.min_tokens import MAX_STOP_TOKENS, MinTokens
from sampler.processors.penalties import Penalties
from specdec.protocols import CommitContext
from specdec.types import SamplingParams
from tests.poison import fill_poison
from tests.processor_cases import EDGE, MAX_LEN, Case, K, context_of, fill_rows, make_case, setup_of

pytestmark = pytest.mark.gpu

VOCAB_SIZES = [1, 999, 1024, 4097]
LARGE = 128256  # too many for the interpreter
MODULES = ("token_mask", "bad_words", "min_tokens", "logit_bias", "penalties", "min_p")
NONE = SamplingParams(max_tokens=50)
NEG = float("-inf")

Ban = Callable[[SamplingParams, list[int], list[int], Tensor], None]


class Words:
    """A tokenizer whose words are numbers: "3-5" has the ids 3, 5; a space before adds nothing."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(part) for part in text.strip().split("-")]


def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(f"sampler.processors.{module}.use_triton", lambda tensor: False)


def params_allowed(case: Case, vocab_size: int, rng: np.random.Generator) -> list[SamplingParams]:
    some = [rng.integers(0, vocab_size, n).tolist() for n in (1, 5, 40)]
    return [NONE, *(SamplingParams(allowed_token_ids=ids) for ids in some)]


def ban_not_allowed(
    params: SamplingParams, prompt: list[int], new: list[int], line: Tensor
) -> None:
    if params.allowed_token_ids is not None:
        banned = torch.ones_like(line, dtype=torch.bool)
        banned[params.allowed_token_ids] = False
        line[banned] = NEG


def params_bad_words(case: Case, vocab_size: int, rng: np.random.Generator) -> list[SamplingParams]:
    """Take words from what the texts and drafts really end with, and others that nearly match."""
    result = [NONE]
    for index in range(1, len(case.rows)):
        text = case.texts[index] + [d for d in case.drafts[index] if d >= 0]
        words = [[int(rng.integers(vocab_size))]]
        for length in (1, 2, 3, 4, len(text), len(text) + 4):
            for end in range(len(text) - K, len(text) + 1):
                before = text[max(0, end - length) : end]
                words.append([*before, int(rng.integers(vocab_size))])
                if len(before) > 1:
                    changed = list(before)
                    changed[int(rng.integers(len(before)))] = int(rng.integers(vocab_size))
                    words.append([*changed, int(rng.integers(vocab_size))])
        strings = list(dict.fromkeys("-".join(map(str, word)) for word in words))
        result.append(SamplingParams(bad_words=strings))
    return result


def ban_bad_words(params: SamplingParams, prompt: list[int], new: list[int], line: Tensor) -> None:
    for word in params.bad_words or ():
        *before, last = [int(part) for part in word.split("-")]
        if len(before) <= len(new) and new[len(new) - len(before) :] == before:
            line[last] = NEG


def params_min_tokens(
    case: Case, vocab_size: int, rng: np.random.Generator
) -> list[SamplingParams]:
    """Put the minimum into the middle of each request's lines."""
    result = [NONE]
    for index in range(1, len(case.rows)):
        num_new = len(case.texts[index]) - case.prompt_lens[index]
        stop = rng.integers(0, vocab_size, 3).tolist()
        minimum = num_new + index - 1
        result.append(SamplingParams(min_tokens=minimum, max_tokens=99, stop_token_ids=stop))
    return result


EOS = 0


def ban_ends(params: SamplingParams, prompt: list[int], new: list[int], line: Tensor) -> None:
    if len(new) < params.min_tokens:
        line[[EOS, *(params.stop_token_ids or ())]] = NEG


def params_bias(case: Case, vocab_size: int, rng: np.random.Generator) -> list[SamplingParams]:
    def draw(count: int) -> dict[int, float]:
        ids = rng.permutation(vocab_size)[:count].tolist()
        return dict(zip(ids, (50 * rng.normal(size=len(ids))).tolist(), strict=True))

    return [NONE, *(SamplingParams(logit_bias=draw(n)) for n in (1, 30, MAX_BIASED_TOKENS))]


def add_bias(params: SamplingParams, prompt: list[int], new: list[int], line: Tensor) -> None:
    for token_id, bias in (params.logit_bias or {}).items():
        line[token_id] += bias


def params_penalties(case: Case, vocab_size: int, rng: np.random.Generator) -> list[SamplingParams]:
    return [
        NONE,
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(frequency_penalty=0.9, presence_penalty=-1.1),
        SamplingParams(repetition_penalty=0.6, frequency_penalty=-0.3, presence_penalty=0.7),
    ]


def penalize(params: SamplingParams, prompt: list[int], new: list[int], line: Tensor) -> None:
    for token_id in {*prompt, *new} - {-1}:
        factor = params.repetition_penalty
        line[token_id] = line[token_id] / factor if line[token_id] > 0 else line[token_id] * factor
    for token_id, count in Counter(new).items():
        if token_id >= 0:
            line[token_id] -= params.frequency_penalty * count + params.presence_penalty


def params_min_p(case: Case, vocab_size: int, rng: np.random.Generator) -> list[SamplingParams]:
    greedy = SamplingParams(temperature=0.0, min_p=0.5)
    return [greedy, *(SamplingParams(min_p=p) for p in (0.01, 0.3, 1.0))]


def cut_below(params: SamplingParams, prompt: list[int], new: list[int], line: Tensor) -> None:
    if params.min_p > 0 and params.temperature > 0:
        probs = line.double().softmax(0)
        line[probs < params.min_p * probs.max() * (1 - 1e-6)] = NEG


KINDS: dict[str, tuple[type, Any, Ban]] = {
    "allowed": (AllowedTokenIds, params_allowed, ban_not_allowed),
    "bad_words": (BadWords, params_bad_words, ban_bad_words),
    "min_tokens": (MinTokens, params_min_tokens, ban_ends),
    "bias": (LogitBias, params_bias, add_bias),
    "penalties": (Penalties, params_penalties, penalize),
    "min_p": (MinP, params_min_p, cut_below),
}


def check(
    name: str, vocab_size: int, seed: int, device: torch.device, patch: pytest.MonkeyPatch
) -> None:
    """Hold a kernel to its twin and to the oracle."""
    processor_cls, draw_params, oracle = KINDS[name]
    case = make_case(vocab_size, seed, device)
    params = draw_params(case, vocab_size, np.random.default_rng(seed))
    processor = processor_cls(setup_of(vocab_size, case.num_rows, device))
    context = context_of(vocab_size, frozenset({EOS}), Words())
    used = fill_rows(processor, case, params, context)
    assert used == [False, True, True, True]
    if isinstance(processor, Penalties):
        fill_poison(processor.rows.counts)
        fill_poison(processor.rows.prompt_mask)
        new_rows = torch.tensor(case.rows[::-1], dtype=torch.int32, device=device)
        processor.prepare_rows(new_rows, case.ctx.state)
    kernel, edge = case.copy_of_logits()
    processor.apply(kernel, case.ctx)
    assert (edge == EDGE).all(), "wrote behind the vocabulary"
    with patch.context() as patched:
        twins(patched)
        twin, _ = case.copy_of_logits()
        processor.apply(twin, case.ctx)
    tolerance = 1e-6 if name == "penalties" else 0  # a GPU may round a product and a sum at once
    torch.testing.assert_close(kernel, twin, rtol=tolerance, atol=tolerance, equal_nan=True)
    expected = case.logits.cpu().clone()
    for line, (index, prompt, new) in enumerate(case.line_texts()):
        oracle(params[index], prompt, new, expected[line])
    torch.testing.assert_close(twin.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    # The first request uses nothing, the last line is padding: not a bit of them may change.
    for untouched in (slice(0, K + 1), slice(-1, None)):
        torch.testing.assert_close(
            kernel[untouched], case.logits[untouched], rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_kernel_is_its_twin_and_the_oracle(
    device: torch.device,
    name: str,
    vocab_size: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(name, vocab_size, seed, device, monkeypatch)


@pytest.mark.parametrize("name", KINDS)
def test_kernel_is_its_twin_at_the_vocabulary_of_a_large_model(
    device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, LARGE, 5, device, monkeypatch)


def make_penalties(
    case: Case, vocab_size: int, device: torch.device
) -> tuple[Penalties, list[SamplingParams]]:
    params = params_penalties(case, vocab_size, np.random.default_rng(0))
    processor = Penalties(setup_of(vocab_size, case.num_rows, device))
    fill_rows(processor, case, params, context_of(vocab_size))
    fill_poison(processor.rows.counts)
    fill_poison(processor.rows.prompt_mask)
    return processor, params


@pytest.mark.interpreter
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_rows_are_counted_from_nothing_and_others_are_left_alone(
    device: torch.device, vocab_size: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(vocab_size, seed, device)
    processor, _ = make_penalties(case, vocab_size, device)
    rows = processor.rows
    before = rows.counts.clone(), rows.prompt_mask.clone()
    new_rows = torch.tensor(case.rows[1:], dtype=torch.int32, device=device)
    processor.prepare_rows(new_rows, case.ctx.state)
    kernel = rows.counts.clone(), rows.prompt_mask.clone()
    rows.counts.copy_(before[0])
    rows.prompt_mask.copy_(before[1])
    with monkeypatch.context() as patched:
        twins(patched)
        processor.prepare_rows(new_rows, case.ctx.state)
    assert torch.equal(kernel[0], rows.counts)
    assert torch.equal(kernel[1], rows.prompt_mask)
    for index, row in enumerate(case.rows[1:], start=1):
        new = Counter(case.texts[index][case.prompt_lens[index] :])
        counts = kernel[0][row].tolist()
        assert {i: n for i, n in enumerate(counts) if n} == dict(new)
        words = [w & 0xFFFFFFFF for w in kernel[1][row].tolist()]
        prompt = {32 * i + b for i, word in enumerate(words) for b in range(32) if word >> b & 1}
        assert prompt == set(case.texts[index][: case.prompt_lens[index]])
    others = [row for row in range(case.num_rows) if row not in case.rows[1:]]
    assert torch.equal(kernel[0][others], before[0][others])
    assert torch.equal(kernel[1][others], before[1][others])


@pytest.mark.interpreter
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_committed_tokens_are_added_where_a_row_has_penalties(
    device: torch.device, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(vocab_size, 3, device)
    processor, _ = make_penalties(case, vocab_size, device)
    counts = processor.rows.counts
    places = [case.rows[2], -1, case.rows[0], case.rows[3], case.rows[1]]
    rng = np.random.default_rng(0)
    num_sampled = [K + 1, 3, 2, 0, 1]
    sampled = rng.integers(0, vocab_size, (len(places), K + 1))
    sampled[0] = sampled[0, 0]  # one token four times
    sampled[np.arange(K + 1) >= np.array(num_sampled)[:, None]] = -1
    ctx = CommitContext(
        case.ctx.state,
        torch.tensor(places, dtype=torch.int32, device=device),
        torch.from_numpy(sampled).to(device),
        torch.tensor(num_sampled, dtype=torch.int32, device=device),
    )
    before = counts.clone()
    processor.commit(ctx)
    kernel = counts.clone()
    expected = before.cpu().clone()
    for place in (0, 4):
        for token in sampled[place, : num_sampled[place]].tolist():
            expected[places[place], token] += 1
    assert torch.equal(kernel.cpu(), expected)
    counts.copy_(before)
    with monkeypatch.context() as patched:
        twins(patched)
        processor.commit(ctx)
    assert torch.equal(counts, kernel)


@pytest.mark.interpreter
def test_fullest_rows_fit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 4097
    case = make_case(vocab_size, 1, device, num_reqs=1)
    longest = [str(i) for i in range(MAX_TOKENS - 8 * (MAX_WORDS - 1))]
    words = ["-".join(str(8 * w + i) for i in range(8)) for w in range(MAX_WORDS - 1)]
    bad = SamplingParams(bad_words=[*words, "-".join(longest)], max_tokens=50)
    stop = SamplingParams(
        min_tokens=MAX_LEN, max_tokens=50, stop_token_ids=list(range(1, MAX_STOP_TOKENS))
    )
    context = context_of(vocab_size, frozenset({EOS}), Words())
    for cls, params in ((BadWords, bad), (MinTokens, stop)):
        processor = cls(setup_of(vocab_size, case.num_rows, device))
        assert fill_rows(processor, case, [params], context) == [True]
        kernel, _ = case.copy_of_logits()
        processor.apply(kernel, case.ctx)
        twin, _ = case.copy_of_logits()
        with monkeypatch.context() as patched:
            twins(patched)
            processor.apply(twin, case.ctx)
        torch.testing.assert_close(kernel, twin, rtol=0, atol=0, equal_nan=True)
        if cls is MinTokens:
            assert (kernel[0] == NEG).sum() == MAX_STOP_TOKENS
