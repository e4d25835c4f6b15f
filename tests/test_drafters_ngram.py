"""Prompt lookup: the kernel against its twin, and both against a plain search."""

import numpy as np
import pytest
import torch
from torch import Tensor

from drafters import ngram
from drafters.ngram import NgramConfig, NgramDrafter, look_up_drafts, look_up_drafts_ref
from tests.draft_cases import (
    AT_END,
    CHUNK,
    EMPTY,
    LAST_CHUNK,
    PADDING,
    VERIFY,
    DraftCase,
    DraftSizes,
    assert_rows_untouched,
)

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

MIXED = (CHUNK, LAST_CHUNK, VERIFY, AT_END, VERIFY, LAST_CHUNK)


def look_up(text: list[int], num_drafts: int, min_n: int, max_n: int) -> list[int]:
    """Search as the definition says it: longest first, then most recent."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[len(text) - n :]:
                following = text[end + 1 :]
                return [following[i % len(following)] for i in range(num_drafts)]
    return [-1] * num_drafts


def texts_of(case: DraftCase) -> dict[int, list[int]]:
    """Return the committed tokens of each row of a step."""
    return {
        place.row: case.state.all_token_ids[place.row, : place.total_len].tolist()
        for place in case.places
        if place.row >= 0
    }


def check(case: DraftCase, min_n: int, max_n: int) -> list[list[int]]:
    """Hold the kernel to its twin and to the plain search; return the drafts."""
    actual, twin = case.buffers().draft_tokens, case.buffers().draft_tokens
    args = (min_n, max_n, case.ctx.max_seq_len)
    look_up_drafts(case.state, case.ctx.idx_mapping, actual, *args)
    look_up_drafts_ref(case.state, case.ctx.idx_mapping, twin, *args)
    assert actual.tolist() == twin.tolist()
    texts = texts_of(case)
    assert_rows_untouched(actual, list(texts))
    for row, text in texts.items():
        assert actual[row].tolist() == look_up(text, case.sizes.num_drafts, min_n, max_n)
    return [actual[row].tolist() for row in texts]


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 3), (2, 2), (3, 5), (1, 9)])
@pytest.mark.parametrize("vocab_size", [2, 5, 300])
@pytest.mark.parametrize("num_drafts", [1, 5])
def test_drafts_are_those_of_a_plain_search(
    device: torch.device, num_drafts: int, vocab_size: int, min_n: int, max_n: int
) -> None:
    found = []
    for seed, kinds in enumerate([(*MIXED, PADDING, EMPTY), (VERIFY,), (PADDING,)]):
        sizes = DraftSizes(kinds, seed, num_drafts, vocab_size=vocab_size, max_model_len=61)
        found += check(DraftCase(sizes, device), min_n, max_n)
    if vocab_size == 5 and min_n == 1:
        assert any(drafts[0] >= 0 for drafts in found)


@pytest.mark.parametrize("block_tokens", [16, 64])
def test_matches_are_found_across_the_blocks_of_a_search(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, block_tokens: int
) -> None:
    monkeypatch.setattr(ngram, "_MAX_BLOCK_TOKENS", block_tokens)
    for seed, vocab_size in enumerate((2, 4, 12, 40)):
        sizes = DraftSizes((*MIXED, *MIXED), seed, vocab_size=vocab_size, max_model_len=200)
        check(DraftCase(sizes, device), 1, 4)


def set_texts(case: DraftCase, texts: list[list[int]]) -> None:
    """Give the places of a case these texts."""
    for place, text in zip(case.places, texts, strict=True):
        place.total_len = len(text)
        case.state.all_token_ids[place.row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        case.state.total_len[place.row] = len(text)


def drafts_of(device: torch.device, text: list[int], min_n: int, max_n: int) -> list[int]:
    """Return the drafts of a single text."""
    case = DraftCase(DraftSizes((VERIFY,), max_model_len=60), device)
    set_texts(case, [text])
    return check(case, min_n, max_n)[0]


def test_a_match_at_the_end_goes_on_periodically(device: torch.device) -> None:
    assert drafts_of(device, [9, 1, 2, 1, 2], 1, 2) == [1, 2, 1, 2]
    assert drafts_of(device, [7, 7], 1, 3) == [7, 7, 7, 7]


def test_the_longest_match_beats_a_more_recent_one(device: torch.device) -> None:
    assert drafts_of(device, [1, 2, 3, 8, 3, 9, 1, 2, 3], 1, 3)[0] == 8
    assert drafts_of(device, [1, 2, 3, 8, 3, 9, 1, 2, 3], 1, 1)[0] == 9


def test_no_match_and_a_single_token_give_no_draft(device: torch.device) -> None:
    assert drafts_of(device, [1, 2, 3, 4], 1, 3) == [-1] * 4
    assert drafts_of(device, [1, 2, 1], 2, 3) == [-1] * 4
    assert drafts_of(device, [5], 1, 3) == [-1] * 4


def test_long_texts_are_searched_whole(device: torch.device) -> None:
    # Matches at the very beginning, near a block's edge, and just before the end; and none.
    length = 3 * ngram._MAX_BLOCK_TOKENS + 77
    starts = [0, length // 3, length - 6, None]
    sizes = DraftSizes((VERIFY,) * len(starts), max_model_len=length + 9, spare_rows=0)
    case = DraftCase(sizes, device)
    rng = np.random.default_rng(3)
    texts = []
    for start in starts:
        text = rng.permutation(length).tolist()
        text[-2:] = [length + 1, length + 2]
        if start is not None:
            text[start : start + 2] = text[-2:]
        texts.append(text)
    set_texts(case, texts)
    found = run(case, 2, 3)
    for place, text, start in zip(case.places, texts, starts, strict=True):
        expected = [-1] * 4 if start is None else text[start + 2 : start + 6]
        assert found[place.row].tolist() == expected


def run(case: DraftCase, min_n: int, max_n: int) -> Tensor:
    """Return the draft table that the drafter itself fills."""
    drafter = NgramDrafter(NgramConfig(min_n=min_n, max_n=max_n))
    buffers = case.buffers()
    drafter.bind(case.state, buffers)
    drafter.first_pass(case.ctx)
    drafter.propose(case.ctx)
    return buffers.draft_tokens
