"""Bring a step's outcome to the host without stopping the device's stream."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class StepOutput:
    """A step's outcome on the host, one entry a place."""

    sampled_tokens: np.ndarray  # [R, W] int64
    num_sampled: np.ndarray  # [R]
    num_rejected: np.ndarray  # [R], -1 positions included
    num_judged: np.ndarray  # [R], valid drafts that this step judged
    num_drafts: np.ndarray  # [R], valid drafts proposed for the next step


class AsyncOutput:
    """A copy in flight from the device to pinned host memory.

    The copy runs on a side stream behind everything enqueued so far; `wait` blocks on its event
    only. On a CPU the values are copied at once.

    Args:
        sampled_tokens: [R, W] int64.
        counts: [4, R] int32: num_sampled, num_rejected, num_judged, num_drafts.
        copy_stream: side stream, None on a CPU.
    """

    def __init__(
        self, sampled_tokens: Tensor, counts: Tensor, copy_stream: "torch.cuda.Stream | None"
    ) -> None:
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            self._tokens, self._counts = sampled_tokens.clone(), counts.clone()
            return
        copy_stream.wait_stream(torch.cuda.current_stream(sampled_tokens.device))
        with torch.cuda.stream(copy_stream):
            self._tokens = torch.empty_like(sampled_tokens, device="cpu", pin_memory=True)
            self._counts = torch.empty_like(counts, device="cpu", pin_memory=True)
            self._tokens.copy_(sampled_tokens, non_blocking=True)
            self._counts.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(copy_stream)
        # The sources may be freed while the side stream still reads them.
        sampled_tokens.record_stream(copy_stream)
        counts.record_stream(copy_stream)

    def wait(self) -> StepOutput:
        """Wait for the copy and return the values."""
        if self._event is not None:
            self._event.synchronize()
        counts = self._counts.numpy()
        return StepOutput(self._tokens.numpy(), counts[0], counts[1], counts[2], counts[3])
