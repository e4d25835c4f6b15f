"""The logits processors of an engine: which there are, which rows use them, when they run.

    allowed token ids, bad words, minimum length, logit bias, penalties, then plug-ins
    -> temperature -> min-p, then plug-ins that want to be behind the temperature

On a GPU all of them run in every step, and their kernels leave lines that do not use them at once.
A CPU runs those that a row of the step uses.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.buffers import StagedWriteTensor, copy_to_device
from runner.dispatch import use_triton
from runner.input_batch import InputBatch
from runner.states import NewRow
from sampler.processors.base import LogitsProcessorBase
from specdec.protocols import CommitContext, LogitsProcessor, RequestContext, StateView
from specdec.types import SamplingParams


class ProcessorChain:
    """Processors in their order.

    Args:
        processors: those before the temperature keep their order, and those behind it theirs.
        max_num_reqs: N.
        vocab_size: V.
        device: where logits and rows live.
        tokenizer: the target's, where it has one.
        eos_token_ids: what ends a text of the target.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        max_num_reqs: int,
        vocab_size: int,
        device: torch.device,
        tokenizer: Any | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.processors = list(processors)
        # [N] int32: 1 where a processor before the temperature is used.
        self.deferred = StagedWriteTensor(max_num_reqs, torch.int32, device)
        self._uses_np = np.zeros((len(self.processors), max_num_reqs), dtype=bool)
        self._device, self._vocab_size = device, vocab_size
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._new_rows: list[int] = []

    @property
    def tables(self) -> list[StagedWriteTensor]:
        """Return what `add_request` stages writes to."""
        if not self.processors:
            return []
        own = [table for processor in self.processors for table in processor.tables]
        return [self.deferred, *own]

    def check_request(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Refuse a request that a processor cannot honour.

        Raises:
            ConfigError, UnsupportedError: one sentence.
        """
        context = self._context(prompt_token_ids, len(prompt_token_ids))
        for processor in self.processors:
            processor.check_request(params, context)

    def add_request(self, row: int, params: SamplingParams, new: NewRow | None = None) -> None:
        """Stage what the processors keep of a row's new owner, whose tokens `new` knows."""
        if not self.processors:
            return
        token_ids, prompt_len = (new.token_ids, new.prompt_len) if new else ((), 0)
        context = self._context(token_ids, prompt_len)
        defers = False
        for index, processor in enumerate(self.processors):
            uses = processor.add_request(row, params, context) is not False
            self._uses_np[index, row] = uses
            defers |= uses and not processor.after_temperature
        self.deferred.stage_write(row, 0, int(defers))
        self._new_rows.append(row)

    def uses(self, rows_np: np.ndarray) -> bool:
        """Return whether any of some rows uses a processor."""
        return bool(self._uses_np[:, rows_np].any())

    def prepare_rows(self, state: StateView) -> None:
        """Let processors count the tokens of new rows, whose staged writes were applied."""
        if not self._new_rows:
            return
        rows_np = np.unique(np.array(self._new_rows, dtype=np.int32))
        for processor, uses in zip(self.processors, self._uses_np, strict=True):
            wanted = rows_np[uses[rows_np]]
            counts = type(processor).prepare_rows is not LogitsProcessorBase.prepare_rows
            if counts and len(wanted):
                processor.prepare_rows(copy_to_device(wanted, self._device), state)
        self._new_rows.clear()

    def active(
        self, logits: Tensor, batch: InputBatch
    ) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
        """Return the processors that a step runs before the temperature, and behind it."""
        used = self._used(logits, batch)
        return (
            [processor for processor in used if not processor.after_temperature],
            [processor for processor in used if processor.after_temperature],
        )

    def commit(self, batch: InputBatch, state: StateView, sampled: Tensor, counts: Tensor) -> None:
        """Show the processors what a step committed.

        Args:
            batch: the step.
            state: the rows, already advanced.
            sampled: [R, W] int64.
            counts: [R] int32, committed tokens of each place.
        """
        used = self._used(sampled, batch)
        if used:
            ctx = CommitContext(state, batch.idx_mapping, sampled, counts)
            for processor in used:
                processor.commit(ctx)

    def _used(self, tensor: Tensor, batch: InputBatch) -> list[LogitsProcessor]:
        """Return the processors that a row of the step uses, as far as the host may know."""
        if batch.plain:
            return []
        if not self.processors or use_triton(tensor):
            return self.processors
        rows_np = batch.idx_mapping.numpy()
        rows_np = rows_np[rows_np >= 0]
        if not len(rows_np):
            return self.processors  # padding alone stands for any step
        used = np.flatnonzero(self._uses_np[:, rows_np].any(1))
        return [self.processors[index] for index in used.tolist()]

    def _context(self, token_ids: Sequence[int], prompt_len: int) -> RequestContext:
        return RequestContext(
            token_ids, prompt_len, self._vocab_size, self._eos_token_ids, self._tokenizer
        )
