"""The oracle replays the text that a row's prompt begins, and nothing for unknown prompts."""

from typing import Any

import pytest
import torch

from drafters.none import NoneConfig, NoneDrafter
from drafters.oracle import OracleConfig, OracleDrafter
from specdec.protocols import TargetView
from tests.draft_cases import (
    AT_END,
    CHUNK,
    LAST_CHUNK,
    PADDING,
    VERIFY,
    DraftCase,
    DraftSizes,
    assert_rows_untouched,
)

V = 50
SIZES = DraftSizes((CHUNK, LAST_CHUNK, VERIFY, AT_END, VERIFY, VERIFY, PADDING), 3, vocab_size=V)


def case_of(device: torch.device, sizes: DraftSizes = SIZES) -> DraftCase:
    """Build a step; prompts of unlike length, the last two places' texts begin alike."""
    case = DraftCase(sizes, device)
    first, second = case.places[4], case.places[5]
    case.state.all_token_ids[second.row, :2] = case.state.all_token_ids[first.row, :2]
    case.state.prompt_len[[first.row, second.row]] = 2
    return case


def texts_of(case: DraftCase) -> list[list[int]]:
    """Return the committed tokens of the real places, with a made-up continuation."""
    return [
        case.state.all_token_ids[p.row, : p.total_len].tolist()
        + [(p.row + i) % V for i in range(7)]
        for p in case.places
        if p.row >= 0
    ]


def make_oracle(case: DraftCase, texts: list[list[int]], **options: Any) -> OracleDrafter:
    """Load and bind an oracle over a step's state."""
    oracle = OracleDrafter(OracleConfig(texts=texts, **options))
    oracle.load(TargetView(None, V, 1, torch.float32, case.device, case.sizes.num_drafts, 120))
    oracle.bind(case.state, case.buffers())
    return oracle


def expected_drafts(case: DraftCase, texts: list[list[int]]) -> dict[int, list[int]]:
    """Search each row's prompt in plain lists: the first text that it begins."""
    expected = {}
    for place in case.places:
        if place.row < 0:
            continue
        prompt = case.state.all_token_ids[place.row].tolist()
        prompt = prompt[: int(case.state.prompt_len[place.row])]
        text = next((t for t in texts if t[: len(prompt)] == prompt), [])
        run = text[place.total_len : place.total_len + case.sizes.num_drafts]
        expected[place.row] = run + [-1] * (case.sizes.num_drafts - len(run))
    return expected


@pytest.mark.parametrize("chosen", ["all", "backwards", "few", "short", "alike", "none"])
def test_the_first_text_that_a_prompt_begins_is_replayed(device: torch.device, chosen: str) -> None:
    case = case_of(device)
    texts = {
        "all": texts_of(case),
        "backwards": texts_of(case)[::-1],
        "few": texts_of(case)[1:4:2],
        "short": [text[: len(text) - 9] for text in texts_of(case)],  # ends before or at the row
        "alike": [texts_of(case)[5], [], texts_of(case)[4]],
        "none": [],
    }[chosen]
    oracle = make_oracle(case, texts)
    oracle.first_pass(case.ctx)
    oracle.propose(case.ctx)
    drafts, expected = oracle.buffers.draft_tokens, expected_drafts(case, texts)
    assert {row: drafts[row].tolist() for row in expected} == expected
    assert_rows_untouched(drafts, list(expected))
    if chosen == "all":
        assert any(run[0] >= 0 for run in expected.values())


def test_an_unknown_prompt_is_not_taken_for_a_known_one_whatever_its_hash(
    device: torch.device,
) -> None:
    case = case_of(device)
    oracle = make_oracle(case, texts_of(case)[:1])
    oracle._weights.zero_()
    oracle._hashes.zero_()  # every prefix now looks like every other
    oracle.propose(case.ctx)
    drafts, expected = oracle.buffers.draft_tokens, expected_drafts(case, texts_of(case)[:1])
    assert {row: drafts[row].tolist() for row in expected} == expected


def test_rates_spoil_drafts_and_never_make_any(device: torch.device) -> None:
    case = case_of(device, DraftSizes((VERIFY,) * 200, 5, vocab_size=V))
    texts = texts_of(case)[::2]
    oracle = make_oracle(case, texts, rates=[1.0, 0.0, 0.5])
    oracle.propose(case.ctx)
    expected = expected_drafts(case, texts)
    right = [0] * case.sizes.num_drafts
    for row, run in expected.items():
        for i, (draft, wanted) in enumerate(
            zip(oracle.buffers.draft_tokens[row].tolist(), run, strict=True)
        ):
            assert draft in ((wanted, (wanted + 1) % V) if wanted >= 0 else (-1,))
            right[i] += draft == wanted >= 0
    known = sum(run[0] >= 0 for run in expected.values())
    assert right[:2] == [known, 0]
    assert 0.3 * known < right[2] < 0.7 * known
    assert 0.3 * known < right[3] < 0.7 * known


def test_none_proposes_nothing(device: torch.device) -> None:
    case = DraftCase(SIZES, device)
    drafter = NoneDrafter(NoneConfig())
    drafter.bind(case.state, case.buffers())
    drafter.first_pass(case.ctx)
    drafter.propose(case.ctx)
    assert_rows_untouched(drafter.buffers.draft_tokens, [])
