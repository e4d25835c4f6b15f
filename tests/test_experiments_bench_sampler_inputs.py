"""Inputs and checks of bench `sampler`."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.bench_sampler_inputs import (
    KERNELS,
    LINE_KERNELS,
    SamplerBenchCase,
    make_work,
)
from sampler.verify.rejection import RejectionVerifier

CPU = torch.device("cpu")


def small(kernel: str, size: int, dtype: torch.dtype = torch.float32) -> SamplerBenchCase:
    return SamplerBenchCase(kernel, size, dtype, vocab_size=1500)


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_are_seeded(kernel: str) -> None:
    work, again = (make_work(small(kernel, 3), CPU) for _ in range(2))
    for first, second in zip(work.tensors, again.tensors, strict=True):
        assert torch.equal(first, second)
        assert (first != 0).float().mean() > 0.9
    assert 0 < work.read_bytes <= sum(tensor.nbytes for tensor in work.tensors)
    assert work.write_bytes == (3 * 1500 * 4 if kernel.startswith("process") else 0)
    work.check()


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_pass_the_check(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    work = make_work(small(kernel, 2, dtype), device)
    assert {tensor.dtype for tensor in work.tensors} == {dtype}
    work.check()
    work.call(*(tensor.clone() for tensor in work.tensors))


@pytest.mark.parametrize("kernel", ["rejection_t0", "rejection_t1", "rejection_q", "block_q"])
def test_drafts_are_kept_and_refused(kernel: str) -> None:
    work = make_work(small(kernel, 40), CPU)
    kept = work.call(*work.tensors).num_sampled - 1
    assert 0.5 < kept.float().mean() < 3.5
    assert set(kept.tolist()) >= {0, 1, 4}


def test_a_verification_reads_a_last_line_where_all_drafts_are_kept() -> None:
    work = make_work(small("rejection_t0", 40), CPU)
    num_full = int((work.call(*work.tensors).num_sampled == 5).sum())
    assert work.read_bytes == (40 * 4 + num_full) * 1500 * 4
    assert make_work(small("synthetic_t1", 40), CPU).read_bytes == 40 * 1500 * 4


def test_a_check_finds_another_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    work, verify = make_work(small("rejection_t1", 3), CPU), RejectionVerifier.verify
    outcomes = iter((1, 0))

    def shifted(self: Any, inputs: Any) -> Any:
        found = verify(self, inputs)
        return dataclasses.replace(found, num_sampled=found.num_sampled + next(outcomes))

    monkeypatch.setattr(RejectionVerifier, "verify", shifted)
    with pytest.raises(AssertionError, match="3 of 3 differ"):
        work.check()


@pytest.mark.parametrize("kernel", LINE_KERNELS)
def test_a_call_reads_the_tensors_that_it_is_given(kernel: str) -> None:
    work = make_work(small(kernel, 2), CPU)

    def outcome(tensors: tuple[Tensor, ...]) -> Any:
        return work.call(*tensors)

    first = outcome(work.tensors)
    assert first is None or torch.equal(first, outcome(tuple(t.clone() for t in work.tensors)))
    assert first is None or not torch.equal(first, outcome(tuple(-t for t in work.tensors)))
