"""Staged writes against a numpy model, host copies that alias nothing, poisoned fresh memory."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runner import buffers
from runner.buffers import StagedWriteTensor, copy_to_device
from runner.input_batch import InputBuffers, StepPlan
from tests.poison import POISON

CPU = torch.device("cpu")
DTYPES = [torch.int32, torch.int64, torch.float32]


class StagedWrites(RuleBasedStateMachine):
    """The CPU stages, applies; the device advances rows in between, as it does lengths."""

    @initialize(
        dtype=st.sampled_from(DTYPES), num_rows=st.integers(1, 4), row_len=st.integers(1, 9)
    )
    def create(self, dtype: torch.dtype, num_rows: int, row_len: int) -> None:
        self.shape = (num_rows, row_len)
        self.staged = StagedWriteTensor(self.shape, dtype, CPU, fill=7)
        self.model = np.full(self.shape, 7.0)  # what the device holds
        self.pending: list[tuple[int, int, list[int]]] = []

    @rule(
        data=st.data(),
        values=st.lists(st.integers(-1000, 1000), max_size=9),
        as_array=st.booleans(),
    )
    def stage(self, data: st.DataObject, values: list[int], as_array: bool) -> None:
        values = values[: self.shape[1]]
        row = data.draw(st.integers(0, self.shape[0] - 1))
        start = data.draw(st.integers(0, self.shape[1] - len(values)))
        given = np.array(values, dtype=np.int64)
        self.staged.stage_write(row, start, given if as_array else list(values))
        given[:] = POISON  # the caller may use its array again at once
        self.pending.append((row, start, values))

    @rule(data=st.data(), value=st.integers(-1000, 1000))
    def stage_one_number(self, data: st.DataObject, value: int) -> None:
        row = data.draw(st.integers(0, self.shape[0] - 1))
        self.staged.stage_write(row, 0, value)
        self.pending.append((row, 0, [value]))

    @rule(data=st.data(), past=st.integers(1, 3))
    def refuse_what_leaves_the_tensor(self, data: st.DataObject, past: int) -> None:
        rows, row_len = self.shape
        length = data.draw(st.integers(1, row_len + past))
        row, start = data.draw(
            st.sampled_from([(-past, 0), (rows - 1 + past, 0), (0, -past), (0, row_len)])
        )
        with pytest.raises(IndexError, match=f"row {row}, column {start}"):
            self.staged.stage_write(row, start, [0] * length)

    @rule()
    def apply(self) -> None:
        self.staged.apply_write()
        for row, start, values in self.pending:
            self.model[row, start : start + len(values)] = values
        self.pending = []

    @rule(data=st.data(), step=st.integers(1, 5))
    def advance_on_the_device(self, data: st.DataObject, step: int) -> None:
        row = data.draw(st.integers(0, self.shape[0] - 1))
        self.staged.tensor[row] += step
        self.model[row] += step

    @invariant()
    def device_holds_what_was_applied(self) -> None:
        assert np.array_equal(self.staged.tensor.numpy(), self.model)

    @invariant()
    def staged_writes_are_counted_and_never_overlap(self) -> None:
        cells = {(row, start + i) for row, start, v in self.pending for i in range(len(v))}
        assert (self.staged.num_staged > 0) == bool(cells)
        staged = [
            (row, start + i)
            for row, writes in self.staged._staged.items()
            for start, values in writes
            for i in range(len(values))
        ]
        # One launch writes all of them in no order: a cell that is there twice would be a race.
        assert sorted(staged) == sorted(cells)

    def teardown(self) -> None:
        if hasattr(self, "staged"):
            self.apply()
            self.device_holds_what_was_applied()
            assert self.staged.num_staged == 0


StagedWrites.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, derandomize=True
)
TestStagedWrites = StagedWrites.TestCase


class Launches:
    """Stands for `apply_writes`: counts its calls."""

    def __init__(self) -> None:
        self.num_writes: list[int] = []

    def __call__(self, tables: Any, addresses: Any, header: torch.Tensor, *args: Any) -> None:
        self.num_writes.append(len(header))
        buffers.apply_writes_ref(tables, addresses, header, *args)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counter = Launches()
    monkeypatch.setattr(buffers, "apply_writes", counter)
    return counter


def test_nothing_staged_launches_nothing(launches: Launches) -> None:
    table = StagedWriteTensor((3, 4), torch.int32, CPU)
    table.apply_write()
    table.stage_write(1, 2, [])
    table.apply_write()
    assert launches.num_writes == []


def test_everything_staged_goes_in_one_launch(launches: Launches) -> None:
    table = StagedWriteTensor((3, 8), torch.int32, CPU)
    for row in range(3):
        table.stage_write(row, row, [1, 2, 3])
    table.stage_write(0, 7, 9)
    table.apply_write()
    table.apply_write()
    assert launches.num_writes == [4]
    assert table.tensor[0].tolist() == [1, 2, 3, 0, 0, 0, 0, 9]


def test_later_write_wins_in_the_middle_of_an_earlier_one() -> None:
    table = StagedWriteTensor((1, 8), torch.int32, CPU)
    table.stage_write(0, 0, [1] * 8)
    table.stage_write(0, 3, [2, 2])
    table.stage_write(0, 4, [3])
    table.apply_write()
    assert table.tensor[0].tolist() == [1, 1, 1, 2, 3, 1, 1, 1]


def test_device_side_advance_of_another_row_survives_a_staged_row() -> None:
    lengths = StagedWriteTensor(3, torch.int32, CPU)
    lengths.stage_write(0, 0, 10)
    lengths.apply_write()
    lengths.stage_write(2, 0, 20)  # staged before the device advances row 0, applied after
    lengths.tensor[0] += 5
    lengths.apply_write()
    assert lengths.tensor.tolist() == [15, 0, 20]


def test_columns_of_a_plan_are_shipped_where_they_changed(launches: Launches) -> None:
    inputs, rng = InputBuffers(6, 60, 60, CPU), np.random.default_rng(0)

    def staged(plan: StepPlan, num_places: int) -> list[int]:
        """Ship a plan, compare what the device has, return the numbers of columns shipped."""
        launches.num_writes.clear()
        inputs.stage(plan, num_places, 3)
        inputs.columns.apply_write()
        num_padding = num_places - plan.num_reqs
        expected = np.stack(
            [
                np.append(plan.rows_np, [-1] * num_padding),
                np.append(plan.query_lens_np, [3] * num_padding),
                np.append(plan.num_logits_np, [3] * num_padding),
                np.append(plan.samples_np, [0] * num_padding),
                np.append(~plan.is_prefill_np, [0] * num_padding),
            ]
        )
        assert np.array_equal(inputs.columns.tensor.numpy()[:, :num_places], expected)
        return list(launches.num_writes)

    for _ in range(30):
        num_reqs = int(rng.integers(1, 7))
        is_prefill = rng.random(num_reqs) < 0.5
        plan = StepPlan(
            rows_np=rng.permutation(9)[:num_reqs].astype(np.int32),
            query_lens_np=rng.integers(1, 9, num_reqs).astype(np.int32),
            is_prefill_np=is_prefill,
            is_last_chunk_np=is_prefill & (rng.random(num_reqs) < 0.5),
            max_seq_len=40,
            max_total_len=40,
        )
        num_places = int(rng.integers(num_reqs, 7))
        staged(plan, num_places)
        assert staged(plan, num_places) == []
        moved = dataclasses.replace(plan, rows_np=plan.rows_np + 10)
        assert staged(moved, num_places) == [1], "only the rows differ"
        assert staged(dataclasses.replace(moved, rows_np=moved.rows_np.copy()), num_places) == []


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_copy_to_device_does_not_alias_its_source(dtype: type) -> None:
    source = np.arange(12, dtype=dtype).reshape(3, 4)
    copied = copy_to_device(source, CPU)
    transposed = copy_to_device(source.T, CPU)
    source[:] = -1
    assert copied.flatten().tolist() == list(range(12))
    assert transposed[1].tolist() == [1, 5, 9]


def test_fresh_memory_of_our_packages_is_poisoned_and_no_one_elses() -> None:
    fresh = InputBuffers(2, 3, 4, CPU)
    assert (fresh.positions == POISON).all()
    assert (fresh.seq_lens == POISON).all()
    # `out=` keeps what the memory holds, unless it is poisoned.
    foreign = torch.zeros(4)
    torch.empty(4, out=foreign)
    assert foreign.tolist() == [0.0] * 4
