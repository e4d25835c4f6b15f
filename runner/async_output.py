"""Bring a step's outcome to the host: the step's own kernel writes it into pinned memory.

The outcome goes to the next place of a ring, named by a step counter on the device, so that a
captured step publishes to another place every time it is replayed. No copy, no second stream: the
host records one event behind the step, and waits for it when it needs the outcome, after it has
enqueued the next step. A place is used again only after its outcome was read, which is asserted.
Steps of one launch have a place each and one event, behind the last of them.

Log-probabilities lie in a ring of their own, written and read only for the places that want them.
"""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from runner.input_batch import StepPlan
from runner.step_timer import StepTimer
from specdec.types import MAX_LOGPROBS

_NUM_COUNTS = 4
NUM_ENTRIES = 1 + MAX_LOGPROBS  # of a token's log-probabilities: its own, then the largest


@dataclass(frozen=True)
class PromptTensor:
    """Log-probabilities of a chunk of a prompt, readable with the outcome of its step."""

    place: int
    first: int  # index in the prompt of the first token they are for
    records: Tensor  # [number of tokens, 3, NUM_ENTRIES] int32, pinned on a GPU


@dataclass(frozen=True)
class StepOutput:
    """A step's outcome on the host, one entry a place."""

    sampled_tokens: np.ndarray  # [R, W] int32
    num_sampled: np.ndarray  # [R]
    num_rejected: np.ndarray  # [R], -1 positions included
    num_judged: np.ndarray  # [R], valid drafts that this step judged
    num_drafts: np.ndarray  # [R], valid drafts proposed for the next step
    # [P, W, 3, NUM_ENTRIES] int32: id, bits of the float32 log-probability, and rank of each of
    # the sampled tokens of those places, and of the most likely tokens there.
    logprobs: np.ndarray | None = None
    logprob_places: np.ndarray | None = None  # [P], those that want some; None where none does
    prompts: Sequence[PromptTensor] = ()


@dataclass(frozen=True)
class StepTensors:
    """What a step's verification leaves on the device, one entry a place."""

    sampled_tokens: Tensor  # [R, W] int64; what stands behind num_sampled means nothing
    num_sampled: Tensor  # [R] int32
    num_rejected: Tensor  # [R] int32
    num_judged: Tensor  # [R] int32
    num_drafts: Tensor  # [R] int32, written once the drafter has proposed


@triton.jit
def _publish_output_kernel(
    step_ptr,  # [1] int32
    sampled_tokens_ptr,  # [R, W] int64
    sampled_tokens_stride,
    num_sampled_ptr,  # [R] int32, as the other counts
    num_rejected_ptr,
    num_judged_ptr,
    num_drafts_ptr,
    ring_ptr,  # [depth, max_num_reqs + 1, 4 + max_width] int32, pinned, out
    ring_stride,
    line_stride,
    depth,
    width,
    WIDTH: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    step = tl.load(step_ptr)
    ring = ring_ptr + (step % depth).to(tl.int64) * ring_stride
    # The first line names the step, so that the host can tell whose outcome it reads.
    if place == 0:
        tl.store(ring, step)
    line = ring + (place + 1) * line_stride
    tl.store(line, tl.load(num_sampled_ptr + place))
    tl.store(line + 1, tl.load(num_rejected_ptr + place))
    tl.store(line + 2, tl.load(num_judged_ptr + place))
    tl.store(line + 3, tl.load(num_drafts_ptr + place))
    j = tl.arange(0, WIDTH)
    pointers = sampled_tokens_ptr + place * sampled_tokens_stride + j
    tokens = tl.load(pointers, mask=j < width, other=-1)
    tl.store(line + 4 + j, tokens.to(tl.int32), mask=j < width)


def publish_output(step: Tensor, outcome: StepTensors, ring: Tensor) -> None:
    """Write a step's outcome to its place of the ring.

    Args:
        step: [1] int32, steps so far, this one included.
        outcome: on the device.
        ring: [depth, max_num_reqs + 1, 4 + max_width] int32, pinned on a GPU: line 0 of a place
            begins with the step, line 1 + batch_idx holds num_sampled, num_rejected, num_judged,
            num_drafts and the sampled tokens.
    """
    if not use_triton(step):
        publish_output_ref(step, outcome, ring)
        return
    num_reqs, width = outcome.sampled_tokens.shape
    _publish_output_kernel[(num_reqs,)](
        step,
        outcome.sampled_tokens,
        outcome.sampled_tokens.stride(0),
        outcome.num_sampled,
        outcome.num_rejected,
        outcome.num_judged,
        outcome.num_drafts,
        ring,
        ring.stride(0),
        ring.stride(1),
        ring.shape[0],
        width,
        WIDTH=triton.next_power_of_2(width),
    )


def publish_output_ref(step: Tensor, outcome: StepTensors, ring: Tensor) -> None:
    """Torch twin of `publish_output`."""
    num_reqs, width = outcome.sampled_tokens.shape
    place = ring[int(step) % len(ring)]
    place[0, 0] = step[0]
    lines = place[1 : num_reqs + 1]
    counts = (outcome.num_sampled, outcome.num_rejected, outcome.num_judged, outcome.num_drafts)
    lines[:, :_NUM_COUNTS] = torch.stack(counts, 1)
    lines[:, _NUM_COUNTS : _NUM_COUNTS + width] = outcome.sampled_tokens.int()


class OutputRing:
    """Places for the outcomes of the steps in flight.

    Args:
        depth: places; more than there are steps in flight.
        max_num_reqs: places of a batch at most.
        max_width: tokens that a place can commit in a step.
        device: where the steps run.
    """

    def __init__(self, depth: int, max_num_reqs: int, max_width: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        shape = (depth, max_num_reqs + 1, _NUM_COUNTS + max_width)
        self.tensor = torch.full(shape, -1, dtype=torch.int32, pin_memory=on_gpu)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.depth = depth
        self._lines = self.tensor.numpy()
        # [depth, max_num_reqs, max_width, 3, NUM_ENTRIES]: see StepOutput.
        shape = (depth, max_num_reqs, max_width, 3, NUM_ENTRIES)
        self.logprobs = torch.full(shape, -1, dtype=torch.int32, pin_memory=on_gpu)
        self._logprob_lines = self.logprobs.numpy()
        self.events = [torch.cuda.Event() for _ in range(depth)] if on_gpu else []
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self._num_enqueued = 0
        self._num_waited_for = 0  # steps up to the last one whose event was waited for
        self._unread: set[int] = set()

    @property
    def num_in_flight(self) -> int:
        """Return how many steps were enqueued whose outcome was not read."""
        return len(self._unread)

    def begin_step(self) -> int:
        """Count a step that is about to be enqueued; returns its place.

        Raises:
            RuntimeError: the place still holds an outcome that was not read.
        """
        step = self._num_enqueued + 1
        oldest = step - self.depth
        if oldest in self._unread:
            raise RuntimeError(
                f"step {step} would overwrite the outcome of step {oldest}, which was not read: "
                f"the ring holds {self.depth} steps; wait for older ones first"
            )
        self._num_enqueued = step
        self._unread.add(step)
        return step % self.depth

    def begin_steps(self, num_steps: int) -> int:
        """Count steps that are about to be enqueued in one launch; returns the first one's place.

        Raises:
            RuntimeError: a place still holds an outcome that was not read.
        """
        assert num_steps < self.depth, f"{num_steps} steps in a ring of {self.depth} places"
        place = self.begin_step()
        for _ in range(num_steps - 1):
            self.begin_step()
        return place

    def abandon_steps(self) -> None:
        """Forget every step that was not read, one that failed on its way included."""
        self._unread.clear()
        # It may have been counted on the device or not: wait for all, and look.
        self._num_enqueued = int(self.step)

    def end_step(
        self,
        num_reqs: int,
        width: int,
        logprob_places: np.ndarray | None = None,
        prompts: Sequence[PromptTensor] = (),
    ) -> "AsyncOutput":
        """Mark the end of the step in the stream and return a handle to its outcome.

        Args:
            num_reqs: places that are read.
            width: tokens of a place.
            logprob_places: those whose log-probabilities are read, too.
            prompts: what the step enqueued beside its outcome.
        """
        step = self._num_enqueued
        if self.events:
            self.events[step % self.depth].record(self._current_stream())
        return AsyncOutput(self, (step, step), (num_reqs, width), logprob_places, prompts)

    def end_steps(
        self, num_steps: int, num_reqs: int, width: int, logprob_places: np.ndarray | None = None
    ) -> "list[AsyncOutput]":
        """Mark the end of a launch of several steps; return handles to their outcomes, in order.

        Args:
            num_steps: as they were begun.
            num_reqs, width, logprob_places: see `end_step`.
        """
        last = self._num_enqueued
        if self.events:
            self.events[last % self.depth].record(self._current_stream())
        return [
            AsyncOutput(self, (step, last), (num_reqs, width), logprob_places, ())
            for step in range(last - num_steps + 1, last + 1)
        ]

    def _current_stream(self) -> "torch.cuda.Stream":
        """Return the current stream: the one of the last step, asked for by its handle alone.

        Making a stream object costs the host as much as launching a graph.
        """
        assert self._stream is not None
        handle = torch._C._cuda_getCurrentRawStream(self._stream.device_index)
        if handle != self._stream.cuda_stream:
            self._stream = torch.cuda.current_stream(self._stream.device)
        return self._stream

    def read(self, step: int, last: int, num_reqs: int, width: int) -> StepOutput:
        """Wait for a step and copy its outcome out of the ring.

        Args:
            step: which one.
            last: the last step of its launch.
            num_reqs: places that are read.
            width: tokens of a place.
        """
        place = step % self.depth
        if self.events and last > self._num_waited_for:
            self.events[last % self.depth].synchronize()
            self._num_waited_for = last
        written = int(self._lines[place, 0, 0])
        assert written == step, f"the place of step {step} holds the outcome of step {written}"
        self._unread.discard(step)
        lines = self._lines[place, 1 : num_reqs + 1, : _NUM_COUNTS + width].copy()
        counts = lines[:, :_NUM_COUNTS].T
        return StepOutput(lines[:, _NUM_COUNTS:], *counts)

    def read_logprobs(self, step: int, places: np.ndarray, width: int) -> np.ndarray:
        """Copy some places' log-probabilities out of the ring, for a step that was waited for."""
        return self._logprob_lines[step % self.depth][places, :width]


class AsyncOutput:
    """The outcome of an enqueued step; `wait` blocks on that step's event only."""

    def __init__(
        self,
        ring: OutputRing,
        steps: tuple[int, int],  # its own, and the last one of its launch
        shape: tuple[int, int],
        logprob_places: np.ndarray | None,
        prompts: Sequence[PromptTensor],
    ) -> None:
        self._ring, self._steps, self._shape = ring, steps, shape
        self._logprob_places, self._prompts = logprob_places, prompts
        self._output: StepOutput | None = None

    def wait(self) -> StepOutput:
        """Wait for the step and return its outcome."""
        if self._output is None:
            output = self._ring.read(*self._steps, *self._shape)
            places = self._logprob_places
            if places is not None:
                logprobs = self._ring.read_logprobs(self._steps[0], places, self._shape[1])
                output = replace(output, logprobs=logprobs, logprob_places=places)
            if self._prompts:
                output = replace(output, prompts=self._prompts)
            self._output = output
        return self._output


@dataclass
class StepHandle:
    """A step that was enqueued, or the steps of one launch."""

    plan: StepPlan
    output: AsyncOutput
    timer: StepTimer | None  # where it was asked to be timed
    generations: np.ndarray  # [R] int64, of the rows when the step was enqueued
    num_computed_tokens: int  # tokens that the target ran in a step, padding included
    later: tuple[AsyncOutput, ...] = ()  # of the steps behind the first, where a launch holds more
