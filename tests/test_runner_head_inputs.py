"""The kernels that build the passes of heads against their twins, and both against plain loops."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runner.head_inputs import (
    first_head_inputs,
    first_head_inputs_ref,
    next_head_inputs,
    next_head_inputs_ref,
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
    Place,
    assert_same_pass,
)

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

MIXED = (CHUNK, LAST_CHUNK, VERIFY, AT_END)
CASES = [
    DraftSizes((VERIFY,), 21, num_drafts=1, block_size=1),
    DraftSizes((VERIFY, AT_END, VERIFY), 22, block_size=3),
    DraftSizes((LAST_CHUNK,), 23),
    DraftSizes((CHUNK, CHUNK), 24, spare_rows=0),
    DraftSizes((*MIXED, PADDING), 25, num_drafts=7, block_size=3),
    DraftSizes((*MIXED, *MIXED, PADDING, EMPTY), 26),
    DraftSizes((LAST_CHUNK, VERIFY, LAST_CHUNK, EMPTY, PADDING), 27, num_drafts=2),
    DraftSizes((PADDING, PADDING), 28),
    DraftSizes((AT_END, AT_END, EMPTY), 29, num_drafts=8, block_size=1),
    # Chunks longer than a kernel's block of tokens, and more places than a block of them.
    DraftSizes((*MIXED * 3, PADDING), 30, max_model_len=900),
    DraftSizes((VERIFY, LAST_CHUNK, AT_END) * 45, 31, num_drafts=3, block_size=16),
]
KV: Any = None  # a pass only carries it
cases = pytest.mark.parametrize("sizes", CASES, ids=range(len(CASES)))


def known_inputs(place: Place, is_verify: int) -> range:
    """Return the positions of the place's step whose following token is committed."""
    first = place.first - is_verify
    return range(first, max(first, min(first + place.query_len, place.total_len - 1)))


@cases
def test_first_pass_pairs_each_position_with_the_token_behind_it(
    device: torch.device, sizes: DraftSizes
) -> None:
    case = DraftCase(sizes, device)
    ctx = case.ctx
    step = first_head_inputs(ctx, KV)
    assert_same_pass(step, first_head_inputs_ref(ctx, KV))
    metadata = step.attn_metadata
    assert metadata.positions is step.positions
    assert metadata.block_table is case.state.block_table
    assert metadata.idx_mapping is ctx.idx_mapping
    assert metadata.query_start_loc is ctx.query_start_loc
    assert len(step.positions) == len(ctx.positions)
    ids, positions, slots = step.input_ids, step.positions, metadata.slot_mapping
    for i, place in enumerate(case.places):
        known = known_inputs(place, int(ctx.is_verify[i])) if place.row >= 0 else range(0)
        start = int(ctx.query_start_loc[i])
        for j in range(place.query_len):
            expected = (0, 0, -1)
            if j < len(known):
                position = known[j]
                token_id = int(case.state.all_token_ids[place.row, position + 1])
                expected = (token_id, position, case.slot(place.row, position))
            t = start + j
            assert (int(ids[t]), int(positions[t]), int(slots[t])) == expected
        last = int(step.last_indices[i])
        assert 0 <= last < len(positions)
        if known:
            assert int(metadata.seq_lens[i]) == known.stop
            assert last == start + len(known) - 1
        if known and ctx.samples[i]:
            assert int(positions[last]) == place.total_len - 2
        if place.row < 0:
            assert int(metadata.seq_lens[i]) == 0
    longest = max(place.query_len for place in case.places)
    assert metadata.max_query_len == longest
    assert int(metadata.seq_lens.max()) <= metadata.max_seq_len


@cases
def test_next_pass_follows_the_first_one(device: torch.device, sizes: DraftSizes) -> None:
    case = DraftCase(sizes, device)
    drafts = torch.arange(case.ctx.num_reqs, device=device)
    for index in range(1, sizes.num_drafts):
        step = next_head_inputs(case.ctx, KV, drafts, index)
        assert_same_pass(step, next_head_inputs_ref(case.ctx, KV, drafts, index))
        metadata = step.attn_metadata
        assert step.input_ids is drafts
        assert metadata.positions is step.positions
        num_reqs = case.ctx.num_reqs
        assert metadata.query_start_loc.tolist() == list(range(num_reqs + 1))
        assert step.last_indices.tolist() == list(range(num_reqs))
        assert (metadata.max_query_len, metadata.max_seq_len) == (1, sizes.max_model_len)
        for i, place in enumerate(case.places):
            position = place.total_len - 2 + index
            expected = (0, -1, 0)
            if index < place.draft_limit:
                expected = (position, case.slot(place.row, position), position + 1)
            actual = (step.positions[i], metadata.slot_mapping[i], metadata.seq_lens[i])
            assert tuple(map(int, actual)) == expected


def test_cases_reach_every_kind_of_place() -> None:
    known, lengths, limits = [], [], set()
    for sizes in CASES:
        case = DraftCase(sizes, torch.device("cpu"))
        for i, place in enumerate(case.places):
            limits.add(place.draft_limit)
            if place.row >= 0:
                known.append(len(known_inputs(place, int(case.ctx.is_verify[i]))))
                lengths.append(place.query_len)
    pairs = list(zip(known, lengths, strict=True))
    assert any(count == 0 for count, _ in pairs)  # a row behind its end committed nothing
    assert any(0 < count < length for count, length in pairs)  # rejected drafts
    assert any(count == length for count, length in pairs)  # all accepted, and prompts
    assert max(lengths) > 256
    assert limits >= {0, 1, 2, 3, 4}


def test_token_table_may_lie_in_pinned_memory(device: torch.device) -> None:
    case = DraftCase(CASES[5], device)
    expected = first_head_inputs(case.ctx, KV)
    table = case.state.all_token_ids.cpu()
    if device.type == "cuda":
        table = table.pin_memory()
    ctx = replace(case.ctx, state=replace(case.state, all_token_ids=table))
    assert_same_pass(first_head_inputs(ctx, KV), expected)
