"""Rows that end on the device: the kernel against its twin, and against the rule word for word."""

import pytest
import torch

from runner.row_ends import MAX_END_TOKENS, RowEnds, end_rows, end_rows_ref
from runner.states import RequestState
from tests.strategies import assert_same, clone_state, draw_cases, state_tensors

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

CASES = draw_cases(
    num_rows=[3, 8, 40], width=[1, 2, 5, 9], num_padding=[0, 1, 4], vocab_size=[4, 30, 1000]
)


@pytest.mark.parametrize("case", CASES)
def test_end_rows_equals_its_twin_and_the_rule(device: torch.device, case: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    num_rows, width, vocab_size = case["num_rows"], case["width"], case["vocab_size"]
    state = RequestState(num_rows, 64, 4, 3, device)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for tensor, low in ((state.total_len.tensor, 5), (state.max_total_len.tensor, 50)):
        tensor.copy_(draw(low, low + 10, num_rows))
    state.draft_limit.fill_(3)
    rows = torch.randperm(num_rows, generator=generator)[: max(1, num_rows // 2)].tolist()
    places = [*rows, *[-1] * case["num_padding"]]
    tokens = draw(0, vocab_size, len(places), width + 2)  # the view below has a stride
    counts = draw(0, width + 1, len(places)).int()
    tokens[:, :width][torch.arange(width) >= counts[:, None]] = -1
    ends = RowEnds(num_rows, device)
    own = {row: draw(0, vocab_size, int(draw(0, 4, 1))).tolist() for row in range(num_rows)}
    for row, token_ids in own.items():
        ends.add_request(row, token_ids)
    ends.end_token_ids.apply_write()
    expected = {name: t.cpu().clone() for name, t in state_tensors(state).items()}
    for place, row in enumerate(places):
        run = tokens[place, : int(counts[place])].tolist()
        if row >= 0 and not set(own[row]).isdisjoint(run):
            expected["max_total_len"][row] = expected["total_len"][row]
            expected["draft_limit"][row] = 0
    twin = clone_state(state)
    for end, rows_state in ((end_rows, state), (end_rows_ref, twin)):
        end(
            torch.tensor(places, dtype=torch.int32, device=device),
            tokens[:, :width].to(device),
            counts.to(device),
            ends.end_token_ids.tensor,
            rows_state,
        )
    for by in (state, twin):
        assert_same({name: t.cpu() for name, t in state_tensors(by).items()}, expected)


def test_more_end_tokens_than_the_table_holds_are_left_to_the_host(device: torch.device) -> None:
    ends = RowEnds(2, device)
    ends.add_request(1, range(100, 100 + 3 * MAX_END_TOKENS))
    ends.add_request(0, ())
    ends.end_token_ids.apply_write()
    assert ends.end_token_ids.tensor[1].tolist() == list(range(100, 100 + MAX_END_TOKENS))
    assert set(ends.end_token_ids.tensor[0].tolist()) == {-1}
    ends.add_request(1, [7])  # a new owner leaves nothing of the last one's
    ends.end_token_ids.apply_write()
    assert ends.end_token_ids.tensor[1].tolist() == [7] + [-1] * (MAX_END_TOKENS - 1)


def test_numbers_that_are_no_tokens_end_nothing(device: torch.device) -> None:
    """-2 is what stands behind the end of a run, -1 behind the end of a list of end tokens."""
    ends = RowEnds(1, device)
    ends.add_request(0, [2**40, -2, 7, -1])
    ends.end_token_ids.apply_write()
    assert ends.end_token_ids.tensor[0].tolist() == [7] + [-1] * (MAX_END_TOKENS - 1)
