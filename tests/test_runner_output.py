"""The outcome's way to the host, clearing of drafts, and the writes of many tables at once."""

from typing import Any

import numpy as np
import pytest
import torch

from runner.async_output import OutputRing, StepTensors, publish_output, publish_output_ref
from runner.buffers import StagedTables, StagedWriteTensor
from runner.postprocess import clear_drafts, clear_drafts_ref

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]


def outcome_of(num_reqs: int, width: int, seed: int, device: torch.device) -> StepTensors:
    """Return random values of the right shapes; the tokens are a strided view."""
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(-1, 2**31 - 1, (num_reqs, width + 3))).to(device)

    def counts() -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 9, num_reqs).astype(np.int32)).to(device)

    return StepTensors(tokens[:, :width], counts(), counts(), counts(), counts())


@pytest.mark.parametrize(("num_reqs", "width"), [(1, 1), (3, 5), (7, 4), (33, 9)])
def test_publish_output_equals_its_twin(device: torch.device, num_reqs: int, width: int) -> None:
    ring = OutputRing(3, num_reqs + 2, width + 1, device)
    twin = torch.full_like(ring.tensor, -1)
    for step in (1, 2, 5):
        outcome = outcome_of(num_reqs, width, step, device)
        ring.step.fill_(step)
        publish_output(ring.step, outcome, ring.tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        host = StepTensors(**{name: t.cpu() for name, t in vars(outcome).items()})
        publish_output_ref(ring.step.cpu(), host, twin)
        assert torch.equal(ring.tensor, twin)
        assert int(ring.tensor[step % 3, 0, 0]) == step


def test_ring_reads_what_was_published_and_refuses_to_overrun(device: torch.device) -> None:
    ring = OutputRing(2, 4, 3, device)
    handles, outcomes = [], []
    for seed in range(2):
        ring.begin_step()
        ring.step += 1
        outcomes.append(outcome_of(4, 3, seed, device))
        publish_output(ring.step, outcomes[-1], ring.tensor)
        handles.append(ring.end_step(3, 3))
    with pytest.raises(RuntimeError, match="was not read"):
        ring.begin_step()
    for handle, outcome in zip(handles, outcomes, strict=True):
        output = handle.wait()
        assert output.sampled_tokens.tolist() == outcome.sampled_tokens[:3].tolist()
        for name in ("num_sampled", "num_rejected", "num_judged", "num_drafts"):
            assert getattr(output, name).tolist() == getattr(outcome, name)[:3].tolist()
    assert ring.num_in_flight == 0
    ring.begin_step()
    ring.abandon_steps()
    assert ring.begin_step() == 3 % 2


def test_steps_of_one_launch_have_a_place_each(device: torch.device) -> None:
    ring = OutputRing(6, 4, 3, device)
    handles, outcomes = [], []

    def launch() -> int:
        place = ring.begin_steps(3)
        for _ in range(3):
            ring.step += 1
            outcomes.append(outcome_of(4, 3, len(outcomes), device))
            publish_output(ring.step, outcomes[-1], ring.tensor)
        handles.extend(ring.end_steps(3, 3, 3))
        return place

    assert (launch(), launch()) == (1, 4)
    assert ring.num_in_flight == 6
    with pytest.raises(RuntimeError, match="step 7 would overwrite the outcome of step 1"):
        ring.begin_steps(3)
    for handle, outcome in zip(handles[:3], outcomes[:3], strict=True):
        output = handle.wait()
        assert output.sampled_tokens.tolist() == outcome.sampled_tokens[:3].tolist()
        assert output.num_sampled.tolist() == outcome.num_sampled[:3].tolist()
    assert launch() == 7 % 6
    for handle, outcome in zip(handles[3:], outcomes[3:], strict=True):
        assert handle.wait().num_judged.tolist() == outcome.num_judged[:3].tolist()
    assert ring.num_in_flight == 0
    with pytest.raises(AssertionError, match="6 steps in a ring of 6"):
        ring.begin_steps(6)


@pytest.mark.parametrize("num_drafts", [1, 4, 9])
def test_clear_drafts_equals_its_twin_and_leaves_other_rows(
    device: torch.device, num_drafts: int
) -> None:
    generator = torch.Generator().manual_seed(num_drafts)
    drafts = torch.randint(0, 99, (7, num_drafts), generator=generator).to(device)
    kind = torch.randint(0, 3, (7,), generator=generator).to(torch.int8).to(device)
    idx_mapping = torch.tensor([5, 0, 3, -1, -1], dtype=torch.int32, device=device)
    twin_drafts, twin_kind, before = drafts.clone(), kind.clone(), drafts.clone()
    clear_drafts(idx_mapping, drafts, kind)
    clear_drafts_ref(idx_mapping, twin_drafts, twin_kind)
    assert torch.equal(drafts, twin_drafts)
    assert torch.equal(kind, twin_kind)
    assert (drafts[[5, 0, 3]] == -1).all()
    assert torch.equal(drafts[[1, 2, 4, 6]], before[[1, 2, 4, 6]])


def tables_and_model(
    device: torch.device, pinned: bool
) -> tuple[list[StagedWriteTensor], list[np.ndarray]]:
    """Return tables of each kind, and arrays that the same writes go to."""
    kinds: list[Any] = [(9, torch.int32), ((5, 1300), torch.int32), (6, torch.int64)]
    kinds += [(4, torch.float32), ((3, 7), torch.int64)]
    tables = [StagedWriteTensor(size, dtype, device, pinned=pinned) for size, dtype in kinds]
    return tables, [table.tensor.cpu().numpy().copy() for table in tables]


@pytest.mark.parametrize("place", [None, 0])
@pytest.mark.parametrize("pinned", [False, True])
def test_tables_take_all_their_writes_in_one_launch(
    device: torch.device, place: int | None, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runner.buffers

    launches: list[int] = []
    launch = runner.buffers.apply_writes

    def counted(*args: Any) -> None:
        launches.append(1)
        launch(*args)

    monkeypatch.setattr(runner.buffers, "apply_writes", counted)
    tables, model = tables_and_model(device, pinned)
    group = StagedTables(tables, device, ring_depth=2)
    assert not group.apply(place)
    rng = np.random.default_rng(0)
    for _ in range(4):
        for table, array in zip(tables, model, strict=True):
            flat = array.reshape(len(array), -1)
            for _ in range(3):
                row, start = int(rng.integers(len(flat))), int(rng.integers(flat.shape[1]))
                values = rng.integers(-(2**30), 2**30, int(rng.integers(flat.shape[1] - start)) + 1)
                values = values[: flat.shape[1] - start].astype(array.dtype)
                table.stage_write(row, start, values)
                flat[row, start : start + len(values)] = values
                values[:] = 1  # the caller may overwrite its array at once
        assert group.apply(place)
        if device.type == "cuda":
            torch.cuda.synchronize()
        for table, array in zip(tables, model, strict=True):
            assert torch.equal(table.tensor.cpu(), torch.from_numpy(array))
            assert not table.has_staged
    assert len(launches) == 4
