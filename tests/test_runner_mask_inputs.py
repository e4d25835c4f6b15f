"""The kernel that builds a pass over masks against its twin, and both against plain loops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runner.attention_metadata import AttentionMetadata
from runner.mask_inputs import mask_inputs, mask_inputs_ref
from tests.draft_cases import (
    AT_END,
    CHUNK,
    EMPTY,
    LAST_CHUNK,
    PADDING,
    VERIFY,
    DraftCase,
    DraftSizes,
)

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

MIXED = (CHUNK, LAST_CHUNK, VERIFY, AT_END)
CASES = [
    DraftSizes((VERIFY,), 41, num_drafts=2, block_size=1),
    DraftSizes((VERIFY, AT_END, VERIFY), 42, block_size=3),
    DraftSizes((LAST_CHUNK,), 43),
    DraftSizes((CHUNK, CHUNK), 44, spare_rows=0),
    DraftSizes((*MIXED, PADDING), 45, num_drafts=7, block_size=3),
    DraftSizes((*MIXED, *MIXED, PADDING, EMPTY), 46),
    DraftSizes((PADDING, PADDING), 47),
    DraftSizes((AT_END, VERIFY, EMPTY), 48, num_drafts=8, block_size=1),
    # More tokens, and more places, than a kernel's block.
    DraftSizes((VERIFY, LAST_CHUNK, AT_END) * 45, 49, num_drafts=3),
]
KV: Any = None  # a pass only carries it
cases = pytest.mark.parametrize("sizes", CASES, ids=range(len(CASES)))


def tensors(metadata: AttentionMetadata) -> dict[str, Tensor]:
    """Return all tensors of a pass by name."""
    return {name: value for name, value in vars(metadata).items() if isinstance(value, Tensor)}


@cases
def test_masks_follow_the_last_known_input_as_far_as_drafts_can_be_used(
    device: torch.device, sizes: DraftSizes
) -> None:
    case = DraftCase(sizes, device)
    for num_masks in sorted({1, sizes.num_drafts - 1}):
        metadata = mask_inputs(case.ctx, KV, num_masks)
        twin = tensors(mask_inputs_ref(case.ctx, KV, num_masks))
        for name, tensor in tensors(metadata).items():
            assert tensor.dtype == twin[name].dtype, name
            assert tensor.tolist() == twin[name].tolist(), name
        assert metadata.block_table is case.state.block_table
        assert metadata.idx_mapping is case.ctx.idx_mapping
        assert (metadata.max_query_len, metadata.max_seq_len) == (num_masks, sizes.max_model_len)
        num_reqs = case.ctx.num_reqs
        starts = [place * num_masks for place in range(num_reqs + 1)]
        assert metadata.query_start_loc.tolist() == starts
        for i, place in enumerate(case.places):
            count = max(min(num_masks, place.draft_limit - 1), 0)
            end = place.total_len - 1 + count if count else 0
            assert int(metadata.seq_lens[i]) == end
            for mask in range(num_masks):
                position, slot = 0, -1
                if mask < count:
                    position = place.total_len - 1 + mask
                    slot = case.slot(place.row, position)
                token = i * num_masks + mask
                actual = metadata.positions[token], metadata.slot_mapping[token]
                assert tuple(map(int, actual)) == (position, slot)


def test_cases_reach_rows_that_use_no_some_and_all_masks() -> None:
    seen = set()
    for sizes in CASES:
        for place in DraftCase(sizes, torch.device("cpu")).places:
            count = max(place.draft_limit - 1, 0)
            seen.add("none" if count == 0 else "all" if count == sizes.num_drafts - 1 else "some")
    assert seen == {"none", "some", "all"}
