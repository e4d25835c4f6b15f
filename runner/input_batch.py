"""The inputs of one step: what the host decides (`StepPlan`) and what the device builds from state.

`InputBuffers` are allocated once; an `InputBatch` is a view of their first elements, filled by
`runner.prepare.prepare_inputs`. All inputs of a step travel in one `InputBatch`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner.buffers import copy_to_device
from specdec.errors import CapacityError


@dataclass(frozen=True)
class StepPlan:
    """The scheduler's decision for a step, in the order of the batch."""

    rows_np: np.ndarray  # [R] int32, -1 in padding
    query_lens_np: np.ndarray  # [R] int32, tokens to run
    is_prefill_np: np.ndarray  # [R] bool, the tokens are prompt (or resumed) tokens
    is_last_chunk_np: np.ndarray  # [R] bool, a prefill that reaches prefill_len
    max_seq_len: int  # bound on any row's context length including this step
    max_total_len: int  # bound on any row's total_len after this step

    @property
    def num_reqs(self) -> int:
        """Return R."""
        return len(self.rows_np)

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return int(self.query_lens_np.sum())

    @property
    def num_logits_np(self) -> np.ndarray:
        """Return the logits lines of each place: all of a verification, one of a prefill."""
        return np.where(self.is_prefill_np, 1, self.query_lens_np).astype(np.int32)


@dataclass
class InputBatch:
    """One step's inputs: R requests, T tokens, L logits lines."""

    plan: StepPlan
    num_reqs: int
    num_tokens: int
    num_logits: int
    # [R] int32, copied from the plan: place -> row.
    idx_mapping: Tensor
    # [R] int32, copied from the plan.
    query_lens: Tensor
    num_logits_per_req: Tensor
    # [R] int32, copied from the plan: 1 where this place samples (not a chunk before the last).
    samples: Tensor
    # [R] int32, copied from the plan: 1 where this place verifies (its tokens are no prefill).
    is_verify: Tensor
    # Everything below is filled by prepare_inputs.
    query_start_loc: Tensor  # [R + 1] int32
    cu_num_logits: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32, context length including this step
    positions: Tensor  # [T] int64
    input_ids: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, -1 = write no KV
    logits_indices: Tensor  # [L] int64: line -> token
    expanded_idx_mapping: Tensor  # [L] int32: line -> row
    expanded_local_pos: Tensor  # [L] int32: place of the line in its row's run


class InputBuffers:
    """Persistent memory of the step inputs, sized for the largest step.

    Args:
        max_num_reqs: places at most.
        max_num_tokens: tokens a step at most.
        max_num_logits: logits lines a step at most.
        device: where they live.
    """

    def __init__(
        self, max_num_reqs: int, max_num_tokens: int, max_num_logits: int, device: torch.device
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.max_num_logits = max_num_logits
        self.device = device

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.query_start_loc = empty(max_num_reqs + 1, torch.int32)
        self.cu_num_logits = empty(max_num_reqs + 1, torch.int32)
        self.seq_lens = empty(max_num_reqs, torch.int32)
        self.positions = empty(max_num_tokens, torch.int64)
        self.input_ids = empty(max_num_tokens, torch.int64)
        self.slot_mapping = empty(max_num_tokens, torch.int64)
        self.logits_indices = empty(max_num_logits, torch.int64)
        self.expanded_idx_mapping = empty(max_num_logits, torch.int32)
        self.expanded_local_pos = empty(max_num_logits, torch.int32)

    def batch(self, plan: StepPlan) -> InputBatch:
        """Ship the plan in one copy and return the step's views, still to be filled.

        Raises:
            CapacityError: the plan is larger than the buffers.
        """
        num_logits_np = plan.num_logits_np
        num_reqs, num_tokens, num_logits = plan.num_reqs, plan.num_tokens, int(num_logits_np.sum())
        if (
            num_reqs > self.max_num_reqs
            or num_tokens > self.max_num_tokens
            or num_logits > self.max_num_logits
        ):
            raise CapacityError(
                f"step of {num_reqs} requests, {num_tokens} tokens, {num_logits} logits lines "
                f"exceeds buffers for {self.max_num_reqs}, {self.max_num_tokens}, "
                f"{self.max_num_logits}"
            )
        samples = ~plan.is_prefill_np | plan.is_last_chunk_np
        columns = [plan.rows_np, plan.query_lens_np, num_logits_np, samples, ~plan.is_prefill_np]
        packed = copy_to_device(np.stack(columns).astype(np.int32), self.device)
        return InputBatch(
            plan=plan,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_logits=num_logits,
            idx_mapping=packed[0],
            query_lens=packed[1],
            num_logits_per_req=packed[2],
            samples=packed[3],
            is_verify=packed[4],
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            cu_num_logits=self.cu_num_logits[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            positions=self.positions[:num_tokens],
            input_ids=self.input_ids[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            logits_indices=self.logits_indices[:num_logits],
            expanded_idx_mapping=self.expanded_idx_mapping[:num_logits],
            expanded_local_pos=self.expanded_local_pos[:num_logits],
        )
