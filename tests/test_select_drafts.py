"""Kernels that decide whose drafts a row holds, against their twins and plain loops."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafters.select_drafts import ChildDrafts, select_drafts, select_drafts_ref
from runner.adopt_drafts import adopt_drafts, adopt_drafts_ref
from specdec.protocols import DraftBuffers
from tests.poison import fill_poison

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

# places, padding places, spare rows, children, K
SIZES = [(1, 0, 0, 1, 1), (5, 2, 3, 2, 4), (7, 1, 2, 3, 5), (33, 7, 9, 4, 8), (9, 3, 2, 2, 70)]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def rows_of(rng: np.random.Generator, size: tuple[int, ...]) -> tuple[int, torch.Tensor]:
    """Return N, and a permuted idx_mapping with padding behind."""
    num_real, num_padding, spare = size[:3]
    num_rows = num_real + spare
    rows = [*rng.permutation(num_rows)[:num_real].tolist(), *[-1] * num_padding]
    return num_rows, torch.tensor(rows, dtype=torch.int32)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return fill_poison(torch.zeros(shape, dtype=dtype)).to(device)


@sizes
@pytest.mark.parametrize("with_confidence", [False, True])
@pytest.mark.parametrize("broadcast", [False, True])
def test_the_child_with_the_best_score_among_those_that_propose_is_taken(
    device: torch.device, size: tuple[int, ...], with_confidence: bool, broadcast: bool
) -> None:
    rng = np.random.default_rng(sum(size))
    num_children, k = size[3:]
    num_rows, idx_mapping = rows_of(rng, size)
    shape = num_children, num_rows, k
    tokens = torch.from_numpy(rng.integers(-1, 4, shape))
    kind = torch.from_numpy(rng.integers(0, 3, shape[:2]).astype(np.int8))
    confidence = torch.from_numpy(rng.random(shape, dtype=np.float32))
    lines = 1 if broadcast else len(idx_mapping)
    # Few values: ties are common, and negative scores among them.
    scores = torch.from_numpy(rng.integers(-2, 1, (lines, num_children)).astype(np.float32))
    scores = scores.to(device).expand(len(idx_mapping), -1)
    children = ChildDrafts(
        tokens.to(device), kind.to(device), confidence.to(device) if with_confidence else None
    )
    results = []
    for function in (select_drafts, select_drafts_ref):
        out = DraftBuffers(
            poisoned((num_rows, k + 2), torch.int64, device)[:, 1 : k + 1],
            poisoned((num_rows,), torch.int8, device),
            None,
            None,
            poisoned((num_rows, k), torch.float32, device) if with_confidence else None,
        )
        chosen = poisoned((num_rows,), torch.int32, device)
        function(idx_mapping.to(device), scores, children, out, chosen)
        results.append([out.draft_tokens, out.draft_kind, chosen, out.draft_confidence])
    rows = idx_mapping[idx_mapping >= 0].tolist()
    others = [row for row in range(num_rows) if row not in rows]
    for actual, twin in zip(*results, strict=True):
        if actual is not None:
            torch.testing.assert_close(actual, twin, rtol=0, atol=0, equal_nan=True)
            untouched = poisoned(tuple(actual[others].shape), actual.dtype, device)
            torch.testing.assert_close(actual[others], untouched, equal_nan=True)
    for place, row in enumerate(rows):
        proposing = [c for c in range(num_children) if tokens[c, row, 0] >= 0]
        best = max(proposing, key=lambda c: float(scores[place, c]), default=-1)
        assert int(results[0][2][row]) == best
        expected = tokens[best, row].tolist() if best >= 0 else [-1] * k
        assert results[0][0][row].tolist() == expected
        assert int(results[0][1][row]) == (int(kind[best, row]) if best >= 0 else 0)
        if with_confidence and best >= 0:
            assert results[0][3][row].tolist() == confidence[best, row].tolist()


@sizes
def test_staged_drafts_replace_those_of_places_that_verify_for_one_step(
    device: torch.device, size: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(sum(size))
    k = size[4]
    num_rows, idx_mapping = rows_of(rng, size)
    staged = torch.from_numpy(rng.integers(-1, 3, (num_rows, k)).astype(np.int32))
    held = torch.from_numpy(rng.integers(-1, 50, (num_rows, k)))
    kind = torch.from_numpy(rng.integers(0, 3, num_rows).astype(np.int8))
    is_verify = torch.from_numpy(rng.integers(0, 2, len(idx_mapping)).astype(np.int32))
    batch: Any = SimpleNamespace(
        idx_mapping=idx_mapping.to(device),
        is_verify=is_verify.to(device),
        num_reqs=len(idx_mapping),
    )
    states = []
    for function in (adopt_drafts, adopt_drafts_ref):
        state: Any = SimpleNamespace(
            host_drafts=SimpleNamespace(tensor=staged.clone().to(device)),
            draft_tokens=held.clone().to(device),
            draft_kind=kind.clone().to(device),
            from_host=poisoned((num_rows,), torch.int8, device),
            num_speculative_tokens=k,
        )
        function(batch, state)
        states.append(state)
    actual, twin = states
    for name in ("draft_tokens", "draft_kind", "from_host"):
        assert torch.equal(getattr(actual, name), getattr(twin, name)), name
    assert torch.equal(actual.host_drafts.tensor, twin.host_drafts.tensor)
    place_of = {row: place for place, row in enumerate(idx_mapping.tolist()) if row >= 0}
    for row in range(num_rows):
        place = place_of.get(row)
        adopts = place is not None and bool(is_verify[place]) and int(staged[row, 0]) >= 0
        expected = staged[row] if adopts else held[row]
        assert actual.draft_tokens[row].tolist() == expected.tolist()
        assert int(actual.draft_kind[row]) == (1 if adopts else int(kind[row]))
        left = staged[row] if place is None else torch.full((k,), -1)
        assert actual.host_drafts.tensor[row].tolist() == left.tolist()
        if place is not None:
            assert int(actual.from_host[row]) == adopts
