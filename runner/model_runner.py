"""One step of the engine on the device: gather, target, verify, commit, draft. Glue, no kernels."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from runner.async_output import AsyncOutput
from runner.attention import build_attention_metadata
from runner.input_batch import InputBatch, InputBuffers, StepPlan
from runner.kv_cache import PagedKVCache
from runner.memory import choose_num_kv_blocks
from runner.models.hf import HFModel
from runner.postprocess import limit_drafts, post_update
from runner.prepare import prepare_inputs
from runner.rows import scatter_rows
from runner.states import NewRow, RequestState
from runner.step_timer import StepTimer
from specdec.errors import UnsupportedError
from specdec.protocols import (
    DRAFT_KIND_NONE,
    DraftBuffers,
    DraftContext,
    Drafter,
    Noise,
    TargetView,
    VerifyContext,
)

logger = logging.getLogger(__name__)


class SamplerProtocol(Protocol):
    """What the runner asks of a sampler; `sampler.sampler.Sampler` is the one we ship."""

    @property
    def temperature(self) -> Tensor: ...

    def add_request(self, row: int, params: Any, seed: int, sample_index: int = 0) -> None: ...

    def apply_staged_writes(self) -> None: ...

    def noise(self) -> Noise: ...

    def sample(
        self, logits: Tensor, batch: InputBatch, state: RequestState, draft_logits: Tensor | None
    ) -> Any: ...


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes of the runner."""

    max_num_reqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    num_kv_blocks: int | None  # None: as many as the device's memory allows
    block_size: int


@dataclass
class StepHandle:
    """A step that was enqueued."""

    plan: StepPlan
    output: AsyncOutput
    timer: StepTimer
    generations: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class ModelRunner:
    """State, KV caches, target, sampler and drafter of one engine, on one device.

    Args:
        target: the target model.
        sampler: processes logits and verifies.
        drafter: proposes.
        config: sizes.
        tokenizer: handed to the drafter, which may have to compare it with its own.
    """

    def __init__(
        self,
        target: HFModel,
        sampler: SamplerProtocol,
        drafter: Drafter,
        config: RunnerConfig,
        tokenizer: Any | None = None,
    ) -> None:
        self.target, self.sampler, self.drafter, self.config = target, sampler, drafter, config
        self.device = device = target.device
        k, max_reqs = config.num_speculative_tokens, config.max_num_reqs
        max_num_blocks = -(-config.max_model_len // config.block_size)
        self.state = RequestState(max_reqs, config.max_model_len, max_num_blocks, k, device)
        self.buffers = InputBuffers(
            max_reqs, config.max_num_batched_tokens, max_reqs * (k + 1), device
        )
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        drafter.load(
            TargetView(
                model=target,
                vocab_size=target.vocab_size,
                hidden_size=target.hidden_size,
                dtype=target.dtype,
                device=device,
                num_speculative_tokens=k,
                max_model_len=config.max_model_len,
                tokenizer=tokenizer,
            )
        )
        self.num_kv_blocks = config.num_kv_blocks or 1
        self.kv = target.make_kv_cache(self.num_kv_blocks, config.block_size)
        self._bind_drafter()
        if config.num_kv_blocks is None:
            self.num_kv_blocks = choose_num_kv_blocks(self)
            for kv in self.kv_caches:
                kv.resize(self.num_kv_blocks)
        logger.info(
            "KV cache: %d blocks of %d tokens, %.2f GiB; drafter state: %d bytes",
            self.num_kv_blocks,
            config.block_size,
            sum(kv.num_bytes for kv in self.kv_caches) / 2**30,
            drafter.state_bytes(),
        )

    @property
    def kv_caches(self) -> list[PagedKVCache]:
        """Return the target's cache and, where it has one, the drafter's."""
        return [self.kv] if self.draft_kv is None else [self.kv, self.draft_kv]

    def _bind_drafter(self) -> None:
        """Give the drafter its buffers; capabilities are read after `load`, which may set them."""
        wants, config = self.drafter.capabilities, self.config
        if wants.aux_layers:
            raise UnsupportedError(
                f"drafter {type(self.drafter).__name__} asks for outputs of target layers "
                f"{wants.aux_layers}; only the last hidden state is offered"
            )
        if wants.on_cpu:
            raise UnsupportedError(
                f"drafter {type(self.drafter).__name__} runs on token lists of the CPU, which is "
                f"not offered; read the rows of the state instead"
            )
        if wants.max_context is not None:
            self.state.draft_context = min(wants.max_context, config.max_model_len)
        self.draft_logits: Tensor | None = None
        if wants.offers_q and config.num_speculative_tokens > 0:
            self.draft_logits = torch.zeros(
                config.max_num_reqs,
                config.num_speculative_tokens,
                self.target.vocab_size,
                dtype=torch.float32,
                device=self.device,
            )
        self.draft_kv: PagedKVCache | None = None
        if wants.kv is not None:
            self.draft_kv = PagedKVCache(
                wants.kv.num_layers,
                self.num_kv_blocks,
                config.block_size,
                wants.kv.num_kv_heads,
                wants.kv.head_size,
                wants.kv.dtype,
                self.device,
            )
        self._state_view = self.state.view()
        self._noise = self.sampler.noise()
        buffers = DraftBuffers(
            self.state.draft_tokens, self.state.draft_kind, self.draft_logits, self.draft_kv
        )
        self.drafter.bind(self._state_view, buffers)

    def add_request(self, new: NewRow, params: Any, seed: int) -> int:
        """Give a request a row and tell sampler and drafter; returns the row."""
        row = self.state.add_request(new)
        self.sampler.add_request(row, params, seed)
        self.drafter.add_request(row)
        return row

    def add_blocks(self, row: int, start: int, block_ids: list[int]) -> None:
        """Append KV blocks to a row's block table."""
        self.state.block_table.stage_write(row, start, block_ids)

    def remove_request(self, row: int) -> None:
        """Free a row."""
        self.state.remove_request(row)

    def execute_model(self, plan: StepPlan) -> StepHandle:
        """Enqueue one step and return a handle to its outcome.

        Padding places (row -1) touch no state and write no KV, so a plan of padding alone is the
        empty step.
        """
        # Kernels and events go to the current device, whatever device their tensors are on.
        on_gpu = self.device.type == "cuda"
        with torch.inference_mode(), torch.cuda.device(self.device) if on_gpu else nullcontext():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepHandle:
        timer = StepTimer(self.device.type == "cuda")
        timer.mark()
        self.state.apply_staged_writes()
        self.sampler.apply_staged_writes()
        batch = self.buffers.batch(plan)
        prepare_inputs(batch, self.state, self.config.block_size)
        metadata = build_attention_metadata(
            self.kv,
            self.state.block_table.tensor,
            batch.idx_mapping,
            plan.query_lens_np,
            batch.positions,
            batch.seq_lens,
            batch.slot_mapping,
            plan.max_seq_len,
        )
        timer.mark()
        hidden = self.target.forward(batch.input_ids, batch.positions, metadata)
        logits = self.target.compute_logits(hidden[batch.logits_indices])
        timer.mark()
        sampled = self.sampler.sample(logits, batch, self.state, self.draft_logits)
        counts = torch.zeros(4, batch.num_reqs, dtype=torch.int32, device=self.device)
        counts[0].copy_(sampled.num_sampled)
        counts[2].copy_(sampled.num_drafts)
        post_update(batch, self.state, sampled.sampled_tokens, counts[0], counts[1])
        timer.mark()
        self._propose(batch, hidden, counts)
        timer.mark()
        rows = plan.rows_np.clip(min=0)
        return StepHandle(
            plan=plan,
            output=AsyncOutput(sampled.sampled_tokens, counts, self._copy_stream),
            timer=timer,
            generations=self.state.generation_np[rows].copy(),
        )

    def _propose(self, batch: InputBatch, hidden: Tensor, counts: Tensor) -> None:
        """Let the drafter learn and propose, then cut what it proposed to what is usable."""
        if self.config.num_speculative_tokens == 0:
            return
        plan, rows = batch.plan, batch.idx_mapping
        drafts, kind = self.state.draft_tokens, self.state.draft_kind
        # Before the drafts are cleared: a drafter may want to see which of its own were rejected.
        self.drafter.observe(VerifyContext(batch.idx_mapping, counts[0], counts[1]))
        scatter_rows(drafts, rows, drafts.new_full((batch.num_reqs, drafts.shape[1]), -1))
        scatter_rows(kind, rows, kind.new_full((batch.num_reqs,), DRAFT_KIND_NONE))
        wants = self.drafter.capabilities
        self.drafter.propose(
            DraftContext(
                state=self._state_view,
                idx_mapping=batch.idx_mapping,
                query_start_loc=batch.query_start_loc,
                positions=batch.positions,
                input_ids=batch.input_ids,
                seq_lens=batch.seq_lens,
                hidden_states=hidden if wants.hidden_states == "last" else None,
                num_sampled=counts[0],
                num_rejected=counts[1],
                temperature=self.sampler.temperature,
                noise=self._noise,
                block_size=self.config.block_size,
                max_seq_len=min(plan.max_total_len, self.config.max_model_len),
                query_lens_np=plan.query_lens_np,
                is_prefill_np=plan.is_prefill_np,
                is_last_chunk_np=plan.is_last_chunk_np,
            )
        )
        limit_drafts(batch, self.state, counts[3])
