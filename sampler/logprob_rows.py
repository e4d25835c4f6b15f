"""Which rows ask for log-probabilities, and the taking of them in a step.

Those of sampled tokens are taken from the target's lines after verification and written to the
step's place of the ring, by kernels of the step itself. Those of prompt tokens are taken while a
prompt is run, in a step that is never a graph: a piece of the prompt's hidden states at a time is
turned into logits, so that memory does not grow with the prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runner.async_output import NUM_ENTRIES, OutputRing, PromptTensor, StepTensors
from runner.buffers import StagedWriteTensor, copy_to_device
from runner.dispatch import use_triton
from runner.input_batch import InputBatch, StepPlan
from runner.states import NewRow
from sampler.logprobs import LogprobLines, topk_logprobs
from specdec.types import SamplingParams

_PIECE_LINES = 256  # logits lines of a prompt at a time


class Logprobs:
    """Which rows ask for log-probabilities, and where they are taken.

    Args:
        max_num_reqs: N.
        device: where the rows live.
        mode: "raw" takes them from the target's logits as they are, "processed" from those that
            tokens are drawn from (after penalties, masks, temperature, top-k and top-p).
    """

    def __init__(self, max_num_reqs: int, device: torch.device, mode: str = "raw") -> None:
        self.mode = mode
        self.prompts = PromptLogprobs()
        self._num_logprobs = StagedWriteTensor(max_num_reqs, torch.int32, device, fill=-1)
        self._wants_np = np.zeros(max_num_reqs, dtype=bool)
        self._num_wanting = 0

    @property
    def tables(self) -> list[StagedWriteTensor]:
        """Return what the CPU stages writes to; whoever runs the step applies them."""
        return [self._num_logprobs]

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Stage what a row's new owner asks for."""
        self.remove_request(row)
        wanted = params.logprobs
        self._num_logprobs.stage_write(row, 0, -1 if wanted is None else wanted)
        if wanted is not None:
            self._wants_np[row] = True
            self._num_wanting += 1

    def remove_request(self, row: int) -> None:
        """Forget a row's owner, on the host alone: nothing asks for a row without one."""
        self.prompts.remove_request(row)
        if self._wants_np[row]:
            self._wants_np[row] = False
            self._num_wanting -= 1

    def clear(self) -> None:
        """Forget every row's owner."""
        self.prompts.clear()
        self._wants_np.fill(False)
        self._num_wanting = 0

    def places(self, rows_np: np.ndarray) -> np.ndarray | None:
        """Return the places of a step whose rows ask for some; None where no row does.

        Args:
            rows_np: [R] int32, place -> row, -1 in padding.
        """
        if not self._num_wanting:
            return None
        places = np.flatnonzero(self._wants_np[rows_np] & (rows_np >= 0))
        return places if len(places) else None

    def write(
        self,
        raw: Tensor,
        processed: Tensor,
        batch: InputBatch,
        outcome: StepTensors,
        outputs: OutputRing,
    ) -> None:
        """Write what a step's rows ask for to its place of the ring.

        Args:
            raw: [L, V] float, as the target gave them.
            processed: [L, V] float, as tokens were drawn from.
            batch: the step.
            outcome: of the step, committed.
            outputs: the ring.
        """
        if batch.plain or (not self._num_wanting and not use_triton(raw)):
            return
        lines = LogprobLines(
            tokens=outcome.sampled_tokens,
            num_tokens=outcome.num_sampled,
            cu_num_logits=batch.cu_num_logits,
            idx_mapping=batch.idx_mapping,
            num_logprobs=self._num_logprobs.tensor,
        )
        logits = raw if self.mode == "raw" else processed
        topk_logprobs(logits, lines, outputs.step, outputs.logprobs)


@dataclass
class _Prompt:
    """A prompt whose log-probabilities are being taken; that of token i + 1 comes from line i."""

    token_ids: np.ndarray  # [prompt_len] int64
    num_logprobs: int
    first_line: int  # what comes before was delivered
    position: int = 0  # where the next chunk begins


class PromptLogprobs:
    """Log-probabilities of prompts, chunk by chunk.

    Chunks follow each other from the start of the text on, so where one lies is known here. A
    request that was preempted is run again, but its lines are not taken twice.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}

    def add_request(self, row: int, new: NewRow) -> None:
        """Note what a row's new owner asks for."""
        self._prompts.pop(row, None)
        if new.num_prompt_logprobs is None or new.num_prompt_done >= new.prompt_len:
            return
        token_ids = np.asarray(new.token_ids[: new.prompt_len], dtype=np.int64)
        first_line = new.num_prompt_done - 1  # the first token has no line
        self._prompts[row] = _Prompt(token_ids, new.num_prompt_logprobs, first_line)

    def remove_request(self, row: int) -> None:
        """Forget a row's owner."""
        self._prompts.pop(row, None)

    def clear(self) -> None:
        """Forget every row's owner."""
        self._prompts.clear()

    def take(
        self, plan: StepPlan, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
    ) -> list[PromptTensor]:
        """Enqueue what a step's chunks give.

        Args:
            plan: the step.
            hidden: [T, hidden_size] of its tokens.
            compute_logits: turns [L, hidden_size] into [L, V].

        Returns:
            What becomes readable with the step's outcome.
        """
        if not self._prompts:
            return []
        starts = np.cumsum(plan.query_lens_np) - plan.query_lens_np
        taken: list[PromptTensor] = []
        for place in np.flatnonzero(plan.is_prefill_np).tolist():
            row = int(plan.rows_np[place])
            prompt = self._prompts.get(row)
            if prompt is None:
                continue
            begin, num_tokens = prompt.position, int(plan.query_lens_np[place])
            prompt.position += num_tokens
            last_line = len(prompt.token_ids) - 1
            first, end = max(begin, prompt.first_line), min(prompt.position, last_line)
            if first < end:
                start = int(starts[place]) + first - begin
                lines = hidden[start : start + end - first]
                records = self._take_lines(prompt, first, lines, compute_logits)
                taken.append(PromptTensor(place, first + 1, records))
            if prompt.position >= last_line:
                del self._prompts[row]
        return taken

    def _take_lines(
        self,
        prompt: _Prompt,
        first: int,
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return [L, 3, NUM_ENTRIES] int32 on the host, filled once the device gets there.

        Args:
            prompt: the prompt.
            first: its position that the first line belongs to.
            hidden: [L, hidden_size].
            compute_logits: see `take`.
        """
        num_lines, device = len(hidden), hidden.device
        tokens = copy_to_device(prompt.token_ids[first + 1 : first + 1 + num_lines], device)
        records = torch.empty(num_lines, 3, NUM_ENTRIES, dtype=torch.int32, device=device)
        for start in range(0, num_lines, _PIECE_LINES):
            piece = slice(start, start + _PIECE_LINES)
            logits = compute_logits(hidden[piece])
            topk_logprobs_of_prompt(logits, tokens[piece], prompt.num_logprobs, records[piece])
            del logits  # before the next piece's are there
        if device.type == "cpu":
            return records
        on_host = torch.empty(records.shape, dtype=records.dtype, pin_memory=True)
        return on_host.copy_(records, non_blocking=True)


def topk_logprobs_of_prompt(logits: Tensor, tokens: Tensor, num_logprobs: int, out: Tensor) -> None:
    """Write the log-probabilities of one prompt's tokens, and of the most likely ones beside them.

    Args:
        logits: [L, V] float, a line a token.
        tokens: [L] int64, the tokens.
        num_logprobs: most likely tokens.
        out: [L, 3, NUM_ENTRIES] int32 on the logits' device, out; see `topk_logprobs`.
    """
    device = logits.device
    zeros = torch.zeros(len(tokens), dtype=torch.int32, device=device)
    lines = LogprobLines(
        tokens=tokens[:, None],
        num_tokens=zeros + 1,
        cu_num_logits=torch.arange(len(tokens) + 1, dtype=torch.int32, device=device),
        idx_mapping=zeros,
        num_logprobs=torch.full((1,), num_logprobs, dtype=torch.int32, device=device),
    )
    topk_logprobs(logits, lines, zeros, out[None, :, None])
