"""Persistent request state: one row a request, from the step it is added to its end or preemption.

A row is taken from a free list and never moved. Preemption is completion: the row is freed, and the
resumed request is added again with all its tokens. Every row has a generation counter, so that an
output that was enqueued for an earlier owner is recognised.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runner.buffers import StagedWriteTensor
from specdec.protocols import StateView


@dataclass(frozen=True)
class NewRow:
    """What the CPU knows about a request when it takes a row."""

    token_ids: Sequence[int]  # all tokens known so far: prompt, and after a preemption more
    prompt_len: int
    max_total_len: int  # prompt + max_tokens, at most max_model_len
    draft_budget: int  # drafts a step at most, 0 = speculation off
    # Most likely tokens to name beside each of the prompt's; None = no log-probabilities of it.
    num_prompt_logprobs: int | None = None
    num_prompt_done: int = 1  # prompt tokens whose log-probabilities were delivered (first: none)
    end_token_ids: Collection[int] = ()  # EOS and stop tokens that end its text


class RequestState:
    """State tensors of N rows; comments say who writes what after a row is added.

    Args:
        max_num_reqs: N.
        max_model_len: columns of the token table.
        max_num_blocks: columns of the block table.
        num_speculative_tokens: K.
        device: where the tensors live.
        token_table: "device", or "pinned": `all_token_ids` stays in pinned host memory, where
            kernels read and write it in place. It is by far the largest table.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_blocks: int,
        num_speculative_tokens: int,
        device: torch.device,
        token_table: str = "device",
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.device = device

        def staged(size: int | tuple[int, int]) -> StagedWriteTensor:
            return StagedWriteTensor(size, torch.int32, device)

        # [N, max_model_len]: the CPU writes a new row, the device appends committed tokens.
        self.all_token_ids = StagedWriteTensor(
            (max_num_reqs, max_model_len), torch.int32, device, pinned=token_table == "pinned"
        )
        # [N], written by the CPU only.
        self.prompt_len = staged(max_num_reqs)
        self.prefill_len = staged(max_num_reqs)
        self.draft_budget = staged(max_num_reqs)
        # [N], written by the CPU; runner.row_ends lowers it where a text has ended.
        self.max_total_len = staged(max_num_reqs)
        # [N], initialised by the CPU, advanced by the device.
        self.total_len = staged(max_num_reqs)
        self.num_computed_tokens = staged(max_num_reqs)
        # [N, max_num_blocks]: the CPU decides, by staged writes.
        self.block_table = staged((max_num_reqs, max_num_blocks))

        # [N, K]: drafts that the host proposed for the step at hand; see runner.adopt_drafts.
        self.host_drafts = StagedWriteTensor(
            (max_num_reqs, num_speculative_tokens), torch.int32, device, fill=-1
        )
        self.from_host = torch.zeros(max_num_reqs, dtype=torch.int8, device=device)

        # Owned by the device alone.
        self.last_sampled_tokens = torch.zeros(max_num_reqs, 1, dtype=torch.int64, device=device)
        self.draft_tokens = torch.full(
            (max_num_reqs, num_speculative_tokens), -1, dtype=torch.int64, device=device
        )
        self.draft_kind = torch.zeros(max_num_reqs, dtype=torch.int8, device=device)
        # Drafts that can still be used before the row ends; written after every commit.
        self.draft_limit = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

        # Positions that the drafter can see; the runner lowers it to the drafter's own context.
        self.draft_context = max_model_len
        self.generation_np = np.zeros(max_num_reqs, dtype=np.int64)
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))
        self._used_rows: set[int] = set()

    @property
    def num_free_rows(self) -> int:
        """Return how many rows have no owner."""
        return len(self._free_rows)

    def add_request(self, new: NewRow) -> int:
        """Give a free row to a request and stage its state.

        Returns:
            The row (`req_state_idx`).

        Raises:
            RuntimeError: no row is free (the scheduler counts them, so this is a bug).
        """
        if not self._free_rows:
            raise RuntimeError(f"all {self.max_num_reqs} rows are taken")
        row = self._free_rows.pop()
        self._used_rows.add(row)
        self.generation_np[row] += 1
        num_tokens = len(new.token_ids)
        self.all_token_ids.stage_write(row, 0, np.asarray(new.token_ids, dtype=np.int32))
        self.prompt_len.stage_write(row, 0, new.prompt_len)
        self.prefill_len.stage_write(row, 0, num_tokens)
        self.max_total_len.stage_write(row, 0, new.max_total_len)
        self.draft_budget.stage_write(row, 0, new.draft_budget)
        self.total_len.stage_write(row, 0, num_tokens)
        self.num_computed_tokens.stage_write(row, 0, 0)
        return row

    def remove_request(self, row: int) -> None:
        """Free a row; steps that are still in flight for it run on and are ignored."""
        self._used_rows.remove(row)
        self._free_rows.append(row)

    def remove_all(self) -> None:
        """Free every row."""
        for row in sorted(self._used_rows):
            self.remove_request(row)

    def read_draft_tokens(self) -> np.ndarray:
        """Wait for what was enqueued; return every row's drafts, [N, K] int64, -1 = none."""
        return self.draft_tokens.cpu().numpy()

    @property
    def tables(self) -> list[StagedWriteTensor]:
        """Return every tensor that the CPU writes by staging."""
        return [
            self.all_token_ids,
            self.prompt_len,
            self.prefill_len,
            self.max_total_len,
            self.draft_budget,
            self.total_len,
            self.num_computed_tokens,
            self.block_table,
            self.host_drafts,
        ]

    def view(self) -> StateView:
        """Return what plug-ins may read."""
        return StateView(
            all_token_ids=self.all_token_ids.tensor,
            prompt_len=self.prompt_len.tensor,
            prefill_len=self.prefill_len.tensor,
            total_len=self.total_len.tensor,
            num_computed_tokens=self.num_computed_tokens.tensor,
            last_sampled_tokens=self.last_sampled_tokens,
            block_table=self.block_table.tensor,
            draft_limit=self.draft_limit,
        )
