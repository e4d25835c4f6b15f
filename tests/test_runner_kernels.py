"""Each kernel of the runner against its torch twin, on permuted rows with poison in all others."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runner.buffers import apply_writes, apply_writes_ref
from runner.input_batch import InputBatch
from runner.postprocess import limit_drafts, limit_drafts_ref, post_update, post_update_ref
from runner.prepare import prepare_inputs, prepare_inputs_ref
from tests.poison import POISON, fill_poison
from tests.strategies import (
    LONG_STEP,
    StepCase,
    StepSizes,
    assert_other_rows_untouched,
    assert_same,
    clone_state,
    draw_cases,
    state_tensors,
    step_sizes,
)

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]


def write_cases() -> list[dict[str, Any]]:
    """Draw tables' dtypes and row lengths, writes a table, where the packet lies, seed."""
    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    return draw_cases(
        dtypes=[[i32], [i64], [f32], [i32, i32], [i64, i32], [f32, i64], [i32, f32, i64]],
        row_len=[1, 63, 1024, 2100],
        num_writes=range(1, 5),
        num_other_rows=range(1, 4),
        is_pinned=[False, True],
    )


@pytest.mark.parametrize("case", write_cases())
def test_apply_writes_equals_its_twin_and_touches_nothing_else(
    device: torch.device, case: dict[str, Any]
) -> None:
    rng = np.random.default_rng(case["seed"])
    row_len, num_writes = case["row_len"], case["num_writes"]
    shape = (num_writes + case["num_other_rows"], row_len)
    expected = [fill_poison(torch.empty(shape, dtype=dtype)) for dtype in case["dtypes"]]
    actual, twin = ([base.to(device, copy=True) for base in expected] for _ in range(2))
    header: list[tuple[int, int, int, int]] = []
    words: list[Tensor] = []
    for table, base in enumerate(expected):
        width = base.dtype.itemsize // 4
        for row in rng.permutation(len(base))[:num_writes].tolist():
            length = int(rng.integers(1, row_len + 1))
            start = int(rng.integers(0, row_len - length + 1))
            values = torch.from_numpy(rng.integers(-(2**24), 2**24, length)).to(base.dtype)
            base[row, start : start + length] = values
            cell, begin = width * (row * row_len + start), sum(map(len, words))
            header.append((table, cell, begin, width * length))
            words.append(values.view(torch.int32))
    order = rng.permutation(len(header))
    packet = [torch.tensor(header)[order], torch.cat(words)]
    if not case["is_pinned"]:
        packet = [part.to(device) for part in packet]
    elif device.type == "cuda":
        packet = [part.pin_memory() for part in packet]
    max_len = max(length for *_, length in header)
    for tables, apply in ((actual, apply_writes), (twin, apply_writes_ref)):
        flat = [base.view(-1).view(torch.int32) for base in tables]
        addresses = torch.tensor([base.data_ptr() for base in flat]).to(device)
        apply(flat, addresses, packet[0], packet[1], max_len)
    for base, by_kernel, by_twin in zip(expected, actual, twin, strict=True):
        assert_same(
            {"kernel": by_kernel.cpu(), "twin": by_twin.cpu()}, dict(kernel=base, twin=base)
        )


@pytest.mark.parametrize("sizes", step_sizes())
def test_prepare_inputs_equals_its_twin(device: torch.device, sizes: StepSizes) -> None:
    case = StepCase(sizes, device)
    if sizes == LONG_STEP:
        assert case.plan.query_lens_np.max() > 256, "no chunk is longer than a block"
    before, twin_state = clone_state(case.state), clone_state(case.state)
    buffers, twin_buffers = case.buffers(), case.buffers()
    batch, twin_batch = buffers.batch(case.plan), twin_buffers.batch(case.plan)
    step = torch.tensor([41], dtype=torch.int32, device=device)
    twin_step = step.clone()
    prepare_inputs(batch, case.state, sizes.block_size, step)
    prepare_inputs_ref(twin_batch, twin_state, sizes.block_size, twin_step)
    assert (int(step), int(twin_step)) == (42, 42)
    # Whole buffers: what lies behind the step's views stays poison in both.
    assert_same(state_tensors(buffers), state_tensors(twin_buffers))
    assert_same(state_tensors(case.state), state_tensors(before))
    assert_same(state_tensors(twin_state), state_tensors(before))
    _check_against_the_formulas(case, batch)


def _check_against_the_formulas(case: StepCase, batch: InputBatch) -> None:
    """Rebuild each token of a step from the module's docstring, place by place."""
    state = {name: t.cpu().numpy() for name, t in state_tensors(case.state).items()}
    positions, input_ids = batch.positions.tolist(), batch.input_ids.tolist()
    slots, token, line = batch.slot_mapping.tolist(), 0, 0
    for place, (row, query_len) in enumerate(
        zip(case.plan.rows_np, case.plan.query_lens_np, strict=True)
    ):
        end = int(state["max_total_len"][row])
        for j in range(query_len):
            pos = int(state["num_computed_tokens"][row]) + j
            expected = (0, 0, -1)
            if row >= 0 and pos < end:
                expected = (pos, _input_id(state, row, pos), _slot(case, state, row, pos))
            assert (positions[token], input_ids[token], slots[token]) == expected
            token += 1
        computed = int(state["num_computed_tokens"][row]) + query_len
        assert int(batch.seq_lens[place]) == (min(computed, end) if row >= 0 else 0)
        assert int(batch.query_start_loc[place + 1]) == token
        num_logits = int(case.plan.num_logits_np[place])
        for i in range(num_logits):
            assert int(batch.logits_indices[line]) == token - num_logits + i
            assert int(batch.expanded_idx_mapping[line]) == row
            assert int(batch.expanded_local_pos[line]) == i
            line += 1
        assert int(batch.cu_num_logits[place + 1]) == line


def _input_id(state: dict[str, np.ndarray], row: int, pos: int) -> int:
    if pos < state["prefill_len"][row]:
        return int(state["all_token_ids"][row, pos])
    if pos == state["total_len"][row] - 1:
        return int(state["last_sampled_tokens"][row, 0])
    return max(int(state["draft_tokens"][row, pos - state["total_len"][row]]), 0)


def _slot(case: StepCase, state: dict[str, np.ndarray], row: int, pos: int) -> int:
    size = case.sizes.block_size
    block = int(state["block_table"][row, pos // size])
    assert block >= 0
    return block * size + pos % size


@pytest.mark.parametrize("sizes", step_sizes())
def test_post_update_equals_its_twin(device: torch.device, sizes: StepSizes) -> None:
    case = StepCase(sizes, device)
    before, twin_state = clone_state(case.state), clone_state(case.state)
    batch = case.buffers().batch(case.plan)
    tokens, num_sampled = case.sampled(batch)
    twin_sampled = num_sampled.clone()
    num_rejected, twin_rejected = _poisoned_counts(batch), _poisoned_counts(batch)
    post_update(batch, case.state, tokens, num_sampled, num_rejected)
    post_update_ref(batch, twin_state, tokens, twin_sampled, twin_rejected)
    assert_same(state_tensors(case.state), state_tensors(twin_state))
    assert_same(
        {"num_sampled": num_sampled, "num_rejected": num_rejected},
        {"num_sampled": twin_sampled, "num_rejected": twin_rejected},
    )
    assert_other_rows_untouched(case.state, before, case.rows)
    # No row is left beyond its end, and KV is valid exactly up to the last token (or chunk).
    rows = torch.tensor(case.rows, dtype=torch.int64, device=device)
    state = state_tensors(case.state)
    assert (state["total_len"][rows] <= state["max_total_len"][rows]).all()
    verified = torch.from_numpy(~case.plan.is_prefill_np)[: len(rows)].to(device)
    behind = state["total_len"][rows] - state["num_computed_tokens"][rows]
    assert (behind[verified] == 1).all()
    committed = state_tensors(case.state)["all_token_ids"][rows]
    inside = torch.arange(committed.shape[1], device=device) < state["total_len"][rows][:, None]
    assert (committed[inside] >= 0).all()
    assert (committed[~inside] == POISON).all()


@pytest.mark.parametrize("sizes", step_sizes(max_drafts=9))
def test_limit_drafts_equals_its_twin(device: torch.device, sizes: StepSizes) -> None:
    case = StepCase(sizes, device)
    before, twin_state = clone_state(case.state), clone_state(case.state)
    batch = case.buffers().batch(case.plan)
    num_drafts, twin_drafts = _poisoned_counts(batch), _poisoned_counts(batch)
    most = len(case.rows) % (sizes.num_speculative_tokens + 1)  # a step may propose fewer than K
    limit_drafts(batch, case.state, num_drafts, most)
    limit_drafts_ref(batch, twin_state, twin_drafts, most)
    assert_same(state_tensors(case.state), state_tensors(twin_state))
    assert_same({"num_drafts": num_drafts}, {"num_drafts": twin_drafts})
    assert_other_rows_untouched(case.state, before, case.rows)
    for place, row in enumerate(case.rows):
        count, limit = int(num_drafts[place]), int(case.state.draft_limit[row])
        drafts, old = case.state.draft_tokens[row].tolist(), before.draft_tokens[row].tolist()
        assert drafts == old[:count] + [-1] * (len(old) - count)
        assert count == min(limit, most, ([d < 0 for d in old] + [True]).index(True))
        kind = int(before.draft_kind[row])
        assert int(case.state.draft_kind[row]) == (max(kind, 1) if count else 0)


def _poisoned_counts(batch: InputBatch) -> Tensor:
    return torch.full_like(batch.idx_mapping, POISON)
