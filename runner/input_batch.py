"""The inputs of one step: what the host decides (`StepPlan`) and what the device builds from state.

`InputBuffers` are allocated once; an `InputBatch` is a view of their first elements, filled by
`runner.prepare.prepare_inputs`. All inputs of a step travel in one `InputBatch`. The plan's columns
lie in a staged table, so a step with the places of the step before ships nothing.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from runner.buffers import StagedWriteTensor
from specdec.errors import CapacityError


@dataclass(frozen=True)
class StepPlan:
    """The scheduler's decision for a step, in the order of the batch.

    The arrays are never changed once a plan was handed over.
    """

    rows_np: np.ndarray  # [R] int32, -1 in padding
    query_lens_np: np.ndarray  # [R] int32, tokens to run
    is_prefill_np: np.ndarray  # [R] bool, the tokens are prompt (or resumed) tokens
    is_last_chunk_np: np.ndarray  # [R] bool, a prefill that reaches prefill_len
    max_seq_len: int  # bound on any row's context length including this step
    max_total_len: int  # bound on any row's total_len after this step
    num_drafted: int | None = None  # drafts to propose for each request; None = K

    @property
    def num_reqs(self) -> int:
        """Return R."""
        return len(self.rows_np)

    @cached_property
    def num_tokens(self) -> int:
        """Return T."""
        return int(self.query_lens_np.sum())

    @cached_property
    def num_logits_np(self) -> np.ndarray:
        """Return the logits lines of each place: all of a verification, one of a prefill."""
        return np.where(self.is_prefill_np, 1, self.query_lens_np).astype(np.int32)

    @cached_property
    def samples_np(self) -> np.ndarray:
        """Return for each place whether it samples: a chunk before the last does not."""
        return ~self.is_prefill_np | self.is_last_chunk_np

    @cached_property
    def num_verified(self) -> int | None:
        """Return how many drafts every place verifies, None where they are not alike."""
        longest = int(self.query_lens_np.max(initial=0))
        alike = not self.is_prefill_np.any() and bool((self.query_lens_np == longest).all())
        return longest - 1 if alike and longest else None

    def has_arrays_of(self, other: "StepPlan") -> bool:
        """Return whether the arrays are the very ones of another plan: a quick test for equal."""
        return (
            self.rows_np is other.rows_np
            and self.query_lens_np is other.query_lens_np
            and self.is_prefill_np is other.is_prefill_np
            and self.is_last_chunk_np is other.is_last_chunk_np
        )


def padding_plan(
    num_places: int,
    query_len: int,
    is_prefill: bool = False,
    max_seq_len: int | None = None,
    num_drafted: int | None = None,
) -> StepPlan:
    """Return a plan of padding alone: it runs at full cost and touches no state.

    Args:
        num_places: places of the step.
        query_len: tokens a place.
        is_prefill: whether the tokens are prompt tokens.
        max_seq_len: context length that is read for; None takes `query_len`.
        num_drafted: drafts to propose; None takes K.
    """
    flag = np.full(num_places, is_prefill)
    return StepPlan(
        rows_np=np.full(num_places, -1, dtype=np.int32),
        query_lens_np=np.full(num_places, query_len, dtype=np.int32),
        is_prefill_np=flag,
        is_last_chunk_np=flag,
        max_seq_len=max_seq_len or query_len,
        max_total_len=(max_seq_len or query_len) + 1,
        num_drafted=num_drafted,
    )


@dataclass
class InputBatch:
    """One step's inputs: R requests, T tokens, L logits lines.

    In a batch of a fixed shape (`rows_np` is None) the integers are those of the shape, and nothing
    may be decided on the host by what the places hold.
    """

    rows_np: np.ndarray | None  # [R] int32, the plan's
    num_reqs: int
    num_tokens: int
    num_logits: int
    max_query_len: int
    max_num_logits: int  # W, most logits lines of a place
    max_seq_len: int  # bound on seq_lens
    max_total_len: int  # bound on any row's total_len after the step
    num_last_chunks: int  # prompts that end in this step, padding not counted
    # Columns of the plan, [R] int32: place -> row, -1 in padding.
    idx_mapping: Tensor
    query_lens: Tensor
    num_logits_per_req: Tensor
    samples: Tensor  # 1 where this place samples (not a chunk before the last)
    is_verify: Tensor  # 1 where this place verifies (its tokens are no prefill)
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
    plain: bool = False  # no row asks for logits processors or log-probabilities


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

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        # [5, max_num_reqs]: idx_mapping, query_lens, num_logits, samples, is_verify.
        self.columns = StagedWriteTensor((5, max_num_reqs), torch.int32, device)
        self._shipped = np.zeros((5, max_num_reqs), dtype=np.int32)
        self._last: tuple[StepPlan, int, int] | None = None
        self.query_start_loc = empty(max_num_reqs + 1, torch.int32)
        self.cu_num_logits = empty(max_num_reqs + 1, torch.int32)
        self.seq_lens = empty(max_num_reqs, torch.int32)
        self.positions = empty(max_num_tokens, torch.int64)
        self.input_ids = empty(max_num_tokens, torch.int64)
        self.slot_mapping = empty(max_num_tokens, torch.int64)
        self.logits_indices = empty(max_num_logits, torch.int64)
        self.expanded_idx_mapping = empty(max_num_logits, torch.int32)
        self.expanded_local_pos = empty(max_num_logits, torch.int32)

    def stage(self, plan: StepPlan, num_places: int, query_len: int) -> None:
        """Stage those columns of a plan that are not on the device yet.

        Args:
            plan: the step.
            num_places: places that the device will read; those behind the plan's become padding.
            query_len: tokens and logits lines of the padding.
        """
        if self._last is not None:
            last, last_places, last_len = self._last
            if (num_places, query_len) == (last_places, last_len) and plan.has_arrays_of(last):
                return
        self._last = (plan, num_places, query_len)
        num_reqs = plan.num_reqs
        columns = np.empty((5, num_places), dtype=np.int32)
        columns[0, :num_reqs] = plan.rows_np
        columns[1, :num_reqs] = plan.query_lens_np
        columns[2, :num_reqs] = plan.num_logits_np
        columns[3, :num_reqs] = plan.samples_np
        columns[4, :num_reqs] = ~plan.is_prefill_np
        columns[:, num_reqs:] = np.array([-1, query_len, query_len, 0, 0])[:, None]
        shipped = self._shipped[:, :num_places]
        for index in np.nonzero((columns != shipped).any(1))[0].tolist():
            self.columns.stage_write(index, 0, columns[index])
            shipped[index] = columns[index]

    def forget(self) -> None:
        """Take nothing for shipped any more: a step failed."""
        self._last = None
        self._shipped.fill(-2)  # no column holds it

    def batch(self, plan: StepPlan) -> InputBatch:
        """Return a plan's views, whose columns were staged, still to be filled.

        Raises:
            CapacityError: the plan is larger than the buffers.
        """
        num_logits = int(plan.num_logits_np.sum())
        num_reqs, num_tokens = plan.num_reqs, plan.num_tokens
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
        columns = self.columns.tensor[:, :num_reqs]
        return InputBatch(
            rows_np=plan.rows_np,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_logits=num_logits,
            max_query_len=int(plan.query_lens_np.max(initial=0)),
            max_num_logits=int(plan.num_logits_np.max(initial=0)),
            max_seq_len=plan.max_seq_len,
            max_total_len=plan.max_total_len,
            num_last_chunks=int((plan.is_last_chunk_np & (plan.rows_np >= 0)).sum()),
            idx_mapping=columns[0],
            query_lens=columns[1],
            num_logits_per_req=columns[2],
            samples=columns[3],
            is_verify=columns[4],
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

    def fixed_batch(self, num_reqs: int, query_len: int, max_seq_len: int) -> InputBatch:
        """Return the views of a uniform step of a fixed shape, whatever its places hold."""
        batch = self.batch(padding_plan(num_reqs, query_len, max_seq_len=max_seq_len))
        batch.rows_np = None
        return batch
