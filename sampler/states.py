"""Sampling parameters by row: written by the CPU through staged writes, read by `idx_mapping`."""

import torch
from torch import Tensor

from runner.buffers import StagedWriteTensor
from sampler.noise import mix_seed
from specdec.types import SamplingParams


class SamplingState:
    """Rows of temperature, top-k, top-p and noise seed; the CPU alone writes them.

    Args:
        max_num_reqs: N.
        vocab_size: top_k of 0 or -1 is stored as this.
        device: where the rows live.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._temperature = StagedWriteTensor(max_num_reqs, torch.float32, device)
        self._top_k = StagedWriteTensor(max_num_reqs, torch.int32, device, fill=vocab_size)
        self._top_p = StagedWriteTensor(max_num_reqs, torch.float32, device, fill=1.0)
        self._seeds = StagedWriteTensor(max_num_reqs, torch.int64, device)

    @property
    def tables(self) -> list[StagedWriteTensor]:
        """Return what the CPU stages writes to; whoever runs the step applies them."""
        return [self._temperature, self._top_k, self._top_p, self._seeds]

    @property
    def temperature(self) -> Tensor:
        """Return [N] float32; 0 = argmax."""
        return self._temperature.tensor

    @property
    def top_k(self) -> Tensor:
        """Return [N] int32; V = no limit."""
        return self._top_k.tensor

    @property
    def top_p(self) -> Tensor:
        """Return [N] float32; 1 = no limit."""
        return self._top_p.tensor

    @property
    def seeds(self) -> Tensor:
        """Return [N] int64 noise seeds."""
        return self._seeds.tensor

    def add_request(self, row: int, params: SamplingParams, seed: int, sample_index: int) -> None:
        """Stage the parameters of a row's new owner."""
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self._temperature.stage_write(row, 0, params.temperature)
        self._top_k.stage_write(row, 0, top_k)
        self._top_p.stage_write(row, 0, params.top_p)
        self._seeds.stage_write(row, 0, mix_seed(seed, sample_index))
