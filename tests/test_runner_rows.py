"""The scatter kernel against its twin, on strided views, with poison where nothing is written."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runner.rows import scatter_rows, scatter_rows_ref
from tests.poison import fill_poison

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

NUM_ROWS = 9
# Views of a table [9, 5, 1200], and what shape of values fits them.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "one column": lambda table: table[:, 2, 700],
    "rows": lambda table: table[:, 1, :1],
    "runs": lambda table: table[:, :, 3],
    "lines": lambda table: table[:, 3, :1100],
    "blocks": lambda table: table[:, 1:4, 5:900],
    "four dimensions": lambda table: table.view(NUM_ROWS, 5, 30, 40)[:, :, ::7, :3],
    "nothing": lambda table: table[:, :0],
}


def filled(shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random values of any dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("places", [[4, 0, 8, 2, -1, -1], [3], [-1, -1], [*range(NUM_ROWS)]])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_scatter_writes_the_rows_of_real_places(
    device: torch.device, dtype: torch.dtype, view: str, places: list[int]
) -> None:
    table = fill_poison(torch.zeros(NUM_ROWS, 5, 1200, dtype=dtype)).to(device)
    target = VIEWS[view](table)
    idx_mapping = torch.tensor(places, dtype=torch.int32, device=device)
    values = filled(torch.Size((len(places), *target.shape[1:])), dtype, seed=len(places))
    values = values.to(device)
    by_twin, by_hand = table.clone(), table.clone()
    scatter_rows(target, idx_mapping, values)
    scatter_rows_ref(VIEWS[view](by_twin), idx_mapping, values)
    for place, row in enumerate(places):
        if row >= 0:
            VIEWS[view](by_hand)[row] = values[place]
    for expected in (by_twin, by_hand):
        torch.testing.assert_close(table, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bool, torch.int32, torch.bfloat16, torch.float16]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_values_may_be_broadcast_or_transposed(
    device: torch.device, dtype: torch.dtype, transposed: bool
) -> None:
    places = [5, 2, 7, -1]
    table = fill_poison(torch.zeros(NUM_ROWS, 3, 65, dtype=dtype)).to(device)
    idx_mapping = torch.tensor(places, dtype=torch.int32, device=device)
    if transposed:
        values = filled(torch.Size((65, 3, 4)), dtype, seed=1).to(device).transpose(0, 2)
    else:
        values = filled(torch.Size((1, 1, 65)), dtype, seed=1).to(device)
    expected = table.clone()
    scatter_rows(table, idx_mapping, values)
    for place, row in enumerate(places[:3]):
        expected[row] = values[place if transposed else 0]
    torch.testing.assert_close(table, expected, rtol=0, atol=0, equal_nan=True)


def test_values_of_another_dtype_are_refused(device: torch.device) -> None:
    table = torch.zeros(NUM_ROWS, dtype=torch.int8, device=device)
    idx_mapping = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(AssertionError, match="int64"):
        scatter_rows(table, idx_mapping, torch.ones(1, dtype=torch.int64, device=device))
