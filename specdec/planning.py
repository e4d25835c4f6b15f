"""Turns a schedule into the runner's plan: its requests get their rows and blocks."""

import numpy as np

from runner.input_batch import StepPlan
from runner.model_runner import ModelRunner
from runner.states import NewRow
from specdec.request import Request
from specdec.scheduler import ScheduledStep, SchedulerOutput

# Where captured steps are replayed, the plan's bounds on lengths grow by so many tokens at a time:
# a plan that stays the same needs no copies.
_COARSE_BOUND = 64


class Planner:
    """Prepares the steps of one engine.

    Args:
        runner: holds the rows.
        max_model_len: tokens a request may hold.
        coarse: keep the bounds on lengths for some steps.
    """

    def __init__(self, runner: ModelRunner, max_model_len: int, coarse: bool) -> None:
        self._runner, self._max_model_len = runner, max_model_len
        self._bound_step = _COARSE_BOUND if coarse else 1
        self._planned: ScheduledStep | None = None  # what the plan at hand was made for

    def forget(self) -> None:
        """Make the next plan anew: a step failed."""
        self._planned = None

    def prepare(self, scheduled: ScheduledStep, schedule: SchedulerOutput) -> StepPlan:
        """Give rows and blocks to the schedule and turn it into the runner's plan.

        A batch that goes on as it was gets the same arrays again, or even the same plan: the runner
        need not ship it again then.
        """
        for request in schedule.new_requests:
            new = NewRow(
                request.token_ids,
                request.num_prompt_tokens,
                request.max_total_len,
                request.draft_budget,
                None if request.prompt_logprobs is None else request.params.prompt_logprobs,
                len(request.prompt_logprobs or ()),
                request.end_token_ids,
            )
            request.row = self._runner.add_request(
                new, request.params, request.seed, request.sample_index
            )
            request.generation = int(self._runner.state.generation_np[request.row])
            if request.grammar is not None:
                request.grammar.restart(request.output_token_ids)
        for request, start, block_ids in schedule.new_blocks:
            assert request.row is not None
            self._runner.add_blocks(request.row, start, block_ids)
        max_seq_len, max_total_len = self._bound(schedule.max_seq_len, schedule.max_total_len)
        if scheduled is self._planned:
            plan, rows_np = self._plan, self._plan.rows_np
            if plan.max_seq_len == max_seq_len and plan.max_total_len == max_total_len:
                return plan
        else:
            rows_np = np.array([request.row for request in scheduled.requests], dtype=np.int32)
        self._planned = scheduled
        self._plan = StepPlan(
            rows_np=rows_np,
            query_lens_np=scheduled.num_tokens,
            is_prefill_np=scheduled.is_prefill,
            is_last_chunk_np=scheduled.is_last_chunk,
            max_seq_len=max_seq_len,
            max_total_len=max_total_len,
            num_drafted=scheduled.num_drafted,
        )
        return self._plan

    def _bound(self, *lengths: int) -> list[int]:
        """Round bounds on lengths up, so that the plan can keep them for some steps."""
        step, limit = self._bound_step, self._max_model_len
        return [min(-(-length // step) * step, limit) for length in lengths]

    def release(self, request: Request) -> None:
        """Free a request's row, where it has one."""
        if request.row is not None:
            self._runner.remove_request(request.row)
            request.row = None
