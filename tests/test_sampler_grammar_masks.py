"""The kernel that masks logits lines, against its twin and by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sampler.processors.grammar import GrammarMasks, mask_lines, mask_lines_ref
from specdec import SamplingParams
from specdec.protocols import ProcessorSetup, RequestContext

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

NUM_ROWS = 7
CONTEXT = RequestContext((), 0, 0, frozenset(), None)


def lines_of(rows: list[int], lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return row and local position of each line of a batch."""
    mapping = [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
    local = [i for length in lengths for i in range(length)]
    as_int = {"dtype": torch.int32, "device": device}
    return torch.tensor(mapping, **as_int), torch.tensor(local, **as_int)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("vocab_size", [1, 31, 999, 1024, 4097])
def test_kernel_masks_as_its_twin(vocab_size: int, seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_words, max_lines = -(-vocab_size // 32), 4
    bits = torch.randint(-(2**31), 2**31, (NUM_ROWS, max_lines * num_words), generator=generator)
    masks = bits.int().to(device)
    # Permuted rows, padding among them; row 5 has no mask, row 2 has fewer than lines.
    mapping, local = lines_of([6, 2, -1, 5, 0], [3, 4, 2, 3, 1], device)
    num_lines = torch.tensor([1, 9, 2, 9, 9, 0, 3], dtype=torch.int32, device=device)
    logits = torch.randn(len(mapping), vocab_size, generator=generator).to(device)
    logits[3, 0] = float("nan")  # what is not masked stays, whatever it is
    expected, result = logits.clone(), logits.clone()
    mask_lines_ref(expected, mapping, local, num_lines, masks)
    mask_lines(result, mapping, local, num_lines, masks)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    for line, (row, i) in enumerate(zip(mapping.tolist(), local.tolist(), strict=True)):
        if row < 0 or i >= num_lines[row]:
            assert torch.equal(result[line].nan_to_num(), logits[line].nan_to_num())
            continue
        words = masks[row].view(max_lines, num_words)[i].tolist()
        for token in {0, vocab_size // 2, vocab_size - 1}:
            allowed = words[token // 32] >> (token % 32) & 1
            assert (result[line, token] == float("-inf")) == (not allowed)


def test_new_owner_of_a_row_has_no_masks(device: torch.device) -> None:
    vocab_size = 40
    masks = GrammarMasks(ProcessorSetup(NUM_ROWS, vocab_size, 8, 2, device))
    masks.stage(3, np.zeros((3, 2), dtype=np.int32))
    masks.stage(1, np.full((2, 2), 4, dtype=np.int32))
    _apply(masks)
    mapping, local = lines_of([3, 1], [3, 3], device)
    logits = torch.zeros(6, vocab_size, device=device)
    assert torch.isinf(_masked(masks, logits, mapping, local)).sum(1).tolist() == [
        *[vocab_size] * 3,
        *[vocab_size - 2] * 2,  # bit 2 of both words
        0,
    ]
    masks.add_request(3, SamplingParams(), CONTEXT)
    _apply(masks)
    hidden = torch.isinf(_masked(masks, logits, mapping, local)).sum(1).tolist()
    assert hidden == [0, 0, 0, *[vocab_size - 2] * 2, 0]


def _apply(masks: GrammarMasks) -> None:
    for table in masks.tables:
        table.apply_write()


def _masked(masks: GrammarMasks, logits: Tensor, mapping: Tensor, local: Tensor) -> Tensor:
    result = logits.clone()
    mask_lines(result, mapping, local, masks.num_lines.tensor, masks.masks.tensor)
    return result
