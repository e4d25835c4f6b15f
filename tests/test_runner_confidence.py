"""The cut by confidence against its twin and against a loop by hand; what drafters store for it."""

import numpy as np
import pytest
import torch

from runner.confidence import cut_by_confidence, cut_by_confidence_ref, store_confidence
from specdec.protocols import DRAFT_KIND_NONE, DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q
from tests.poison import POISON, fill_poison

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

NUM_ROWS = 11
PLACES = [[7, 0, 10, 3, 5, -1, -1], [4], [-1, -1], [*range(NUM_ROWS)]]


def kept_by_hand(confidence: list[float], threshold: float, has_q: bool) -> int:
    """Return how many drafts stay."""
    product = np.float32(1.0)
    for i, own in enumerate(confidence):
        product *= np.float32(own)
        if product < np.float32(threshold):
            return i + has_q
    return len(confidence)


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.45, 1.0])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("places", PLACES)
def test_cut_equals_its_twin_and_a_loop(
    device: torch.device, places: list[int], num_drafts: int, threshold: float
) -> None:
    rng = np.random.default_rng(num_drafts + 10 * len(places))
    tokens = fill_poison(torch.zeros(NUM_ROWS, num_drafts + 2, dtype=torch.int64))
    confidence = fill_poison(torch.zeros(NUM_ROWS, num_drafts + 1, dtype=torch.float32))
    kinds = torch.full((NUM_ROWS,), POISON % 128, dtype=torch.int8)
    for row in [row for row in places if row >= 0]:
        tokens[row, :num_drafts] = torch.from_numpy(rng.integers(0, 99, num_drafts))
        own = rng.choice([1.0, 0.95, 0.6, 0.2], num_drafts)
        confidence[row, :num_drafts] = torch.from_numpy(own).float()
        kind = rng.choice([DRAFT_KIND_NONE, DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q])
        kinds[row] = int(kind)
        if rng.random() < 0.3:  # what has no draft has no confidence
            tokens[row, num_drafts - 1], confidence[row, num_drafts - 1] = -1, float("nan")
    expected = tokens.clone()
    for row in [row for row in places if row >= 0]:
        own = [c for c in confidence[row, :num_drafts].tolist() if not np.isnan(c)]
        kept = kept_by_hand(own, threshold, int(kinds[row]) == DRAFT_KIND_WITH_Q)
        expected[row, kept:num_drafts] = -1
    by_twin, by_kernel = tokens.to(device), tokens.to(device)
    idx_mapping = torch.tensor(places, dtype=torch.int32, device=device)
    rest = kinds.to(device), confidence.to(device)[:, :num_drafts], threshold
    cut_by_confidence(idx_mapping, by_kernel[:, :num_drafts], *rest)
    cut_by_confidence_ref(idx_mapping, by_twin[:, :num_drafts], *rest)
    assert by_kernel.tolist() == by_twin.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confidence_is_the_probability_of_the_draft(
    device: torch.device, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(4, 97, generator=generator)).to(dtype)
    logits[1, 5:] = float("-inf")  # truncated
    drafts = torch.tensor([3, 0, 96, 7])
    table = fill_poison(torch.zeros(NUM_ROWS, 3, dtype=torch.float32)).to(device)
    idx_mapping = torch.tensor([8, 2, 5, -1], dtype=torch.int32, device=device)
    store_confidence(table, idx_mapping, 1, logits.to(device), drafts.to(device))
    expected = logits.float().softmax(1).gather(1, drafts[:, None])[:, 0]
    torch.testing.assert_close(table[[8, 2, 5], 1].cpu(), expected[:3], rtol=1e-5, atol=1e-7)
    table[[8, 2, 5], 1] = float("nan")
    assert table.isnan().all()
