"""Keys of values and indices: the kernel against its twin, and the order of keys."""

import pytest
import torch
from torch import Tensor

from runner.top_keys import pack_top, pack_top_ref, unpack_index

VALUES = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3.4e38, -3.4e38, float("inf"), -float("inf")]


def given(count: int) -> tuple[Tensor, Tensor]:
    """Return values, many of them equal, and indices."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(VALUES), (count,), generator=generator)
    return torch.tensor(VALUES)[chosen], torch.randint(2**20, (count,), generator=generator)


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 255, 700])
@pytest.mark.parametrize("first", [0, 1, 128256])
def test_pack_top(device: torch.device, count: int, first: int) -> None:
    values, index = (tensor.to(device) for tensor in given(count))
    expected = pack_top_ref(values, index, first)
    assert torch.equal(pack_top(values, index, first), expected)


def test_keys_are_in_the_order_of_values_and_then_of_the_lowest_index() -> None:
    values, index = given(500)
    keys = pack_top_ref(values, index, 7)
    pairs = list(zip(values.tolist(), (-index).tolist(), strict=True))
    by_key = [pairs[i] for i in keys.argsort().tolist()]
    assert by_key == sorted(pairs)
    assert torch.equal(unpack_index(keys), index + 7)


def test_a_key_holds_the_largest_index() -> None:
    values = torch.tensor([-float("inf"), float("nan")])
    index = torch.full((2,), 2**31 - 8)
    keys = pack_top_ref(values, index, 7)
    assert unpack_index(keys).tolist() == [2**31 - 1] * 2
    assert keys[1] > pack_top_ref(torch.tensor([float("inf")]), index[:1])[0]


@pytest.mark.interpreter
@pytest.mark.gpu
def test_nan_of_either_sign_is_above_all(device: torch.device) -> None:
    bits = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32)  # a CPU's own is the second
    values = torch.cat([bits.view(torch.float32), torch.tensor([float("inf")])]).to(device)
    assert values.isnan().tolist() == [True, True, False]
    keys = pack_top(values, torch.zeros(3, dtype=torch.int64, device=device))
    assert keys[0] == keys[1] > keys[2]
