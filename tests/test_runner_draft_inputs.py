"""The kernels that build draft passes against their twins, and both against plain loops."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.draft_inputs import (
    first_pass_inputs,
    first_pass_inputs_ref,
    next_pass_inputs,
    next_pass_inputs_ref,
)
from tests.draft_cases import (
    AT_END,
    CHUNK,
    EMPTY,
    LAST_CHUNK,
    PADDING,
    VERIFY,
    DraftCase,
    DraftSizes,
    assert_same_pass,
)

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

MIXED = (CHUNK, LAST_CHUNK, VERIFY, AT_END)
CASES = [
    DraftSizes((VERIFY,), 1, num_drafts=1, block_size=1),
    DraftSizes((VERIFY, AT_END, VERIFY), 2, block_size=3),
    DraftSizes((LAST_CHUNK,), 3),
    DraftSizes((CHUNK, CHUNK), 4, spare_rows=0),
    DraftSizes((*MIXED, PADDING), 5, num_drafts=7, block_size=3),
    DraftSizes((*MIXED, *MIXED, PADDING, EMPTY), 6),
    DraftSizes((LAST_CHUNK, VERIFY, LAST_CHUNK, EMPTY, PADDING), 7, num_drafts=2),
    DraftSizes((PADDING, PADDING), 8),
    DraftSizes((AT_END, AT_END, EMPTY), 9, num_drafts=8, block_size=1),
    # Chunks longer than a kernel's block of tokens, and more places than a block of them.
    DraftSizes((*MIXED * 3, PADDING), 10, max_model_len=900),
    DraftSizes((VERIFY, LAST_CHUNK, AT_END) * 45, 11, num_drafts=3, block_size=16),
]
KV: Any = None  # a pass only carries it
cases = pytest.mark.parametrize("sizes", CASES, ids=range(len(CASES)))


@cases
def test_first_pass_covers_the_committed_positions(device: torch.device, sizes: DraftSizes) -> None:
    case = DraftCase(sizes, device)
    step = first_pass_inputs(case.ctx, KV)
    assert_same_pass(step, first_pass_inputs_ref(case.ctx, KV))
    metadata = step.attn_metadata
    assert metadata.positions is step.positions
    assert metadata.block_table is case.state.block_table
    assert metadata.idx_mapping is case.ctx.idx_mapping
    token = 0
    for i, place in enumerate(case.places):
        assert int(metadata.query_start_loc[i]) == token
        for position in range(place.first, place.first + place.length):
            if position in place.committed:
                expected = (
                    int(case.state.all_token_ids[place.row, position]),
                    position,
                    case.slot(place.row, position),
                )
            else:
                expected = (0, 0, -1)
            ids, positions, slots = step.input_ids, step.positions, metadata.slot_mapping
            assert (int(ids[token]), int(positions[token]), int(slots[token])) == expected
            token += 1
        end = place.committed.stop if place.row >= 0 else 0
        assert int(metadata.seq_lens[i]) == end
        last = int(step.last_indices[i])
        assert 0 <= last < len(step.positions)
        if place.committed:
            assert last == int(metadata.query_start_loc[i]) + len(place.committed) - 1
            assert int(step.positions[last]) == place.committed[-1]
    assert int(metadata.query_start_loc[-1]) == token == len(step.positions)
    longest = max(place.length for place in case.places)
    assert longest <= metadata.max_query_len <= longest + 1
    assert int(metadata.seq_lens.max()) <= metadata.max_seq_len


@cases
def test_next_pass_covers_drafts_that_can_be_used(device: torch.device, sizes: DraftSizes) -> None:
    case = DraftCase(sizes, device)
    drafts = torch.arange(case.ctx.num_reqs, device=device)
    for index in range(1, sizes.num_drafts):
        step = next_pass_inputs(case.ctx, KV, drafts, index)
        assert_same_pass(step, next_pass_inputs_ref(case.ctx, KV, drafts, index))
        metadata = step.attn_metadata
        assert step.input_ids is drafts
        assert metadata.positions is step.positions
        num_reqs = case.ctx.num_reqs
        assert metadata.query_start_loc.tolist() == list(range(num_reqs + 1))
        assert step.last_indices.tolist() == list(range(num_reqs))
        assert (metadata.max_query_len, metadata.max_seq_len) == (1, sizes.max_model_len)
        for i, place in enumerate(case.places):
            position = place.total_len - 1 + index
            used = index < place.draft_limit
            expected = (0, -1, 0)
            if used:
                expected = (position, case.slot(place.row, position), position + 1)
            actual = (step.positions[i], metadata.slot_mapping[i], metadata.seq_lens[i])
            assert tuple(map(int, actual)) == expected


def test_cases_reach_every_kind_of_place() -> None:
    places = [place for sizes in CASES for place in DraftCase(sizes, torch.device("cpu")).places]
    ends = [place.total_len - place.first for place in places if place.row >= 0]
    lengths = [place.length for place in places if place.row >= 0]
    assert any(end == 0 for end in ends)  # nothing was committed
    assert any(0 < end < length for end, length in zip(ends, lengths, strict=True))
    assert any(end == length for end, length in zip(ends, lengths, strict=True))
    assert max(lengths) > 256
    assert {place.draft_limit for place in places} >= {0, 1, 2, 3, 4}


def test_token_table_may_lie_in_pinned_memory(device: torch.device) -> None:
    case = DraftCase(CASES[5], device)
    expected = first_pass_inputs(case.ctx, KV)
    table = case.state.all_token_ids.cpu()
    if device.type == "cuda":
        table = table.pin_memory()
    ctx = replace(case.ctx, state=replace(case.state, all_token_ids=table))
    assert_same_pass(first_pass_inputs(ctx, KV), expected)
