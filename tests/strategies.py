"""Shared builders: states with permuted rows and poison everywhere else, steps over them.

A case is a handful of sizes and a seed, small to print; the data come from a generator with that
seed. The cases of a test are drawn when it is collected, always the same ones. Kernel tests run on
GPU hosts too, which need not have hypothesis: nothing here may import it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.buffers import StagedWriteTensor
from runner.input_batch import InputBatch, InputBuffers, StepPlan
from runner.states import RequestState
from tests.poison import fill_poison

VOCAB_SIZE = 1000
NUM_CASES = 14  # kernel tests launch in Triton's interpreter, which takes milliseconds a program


def draw_cases(num: int = NUM_CASES, **axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Draw cases: a value of every axis for each, and a `seed` for the rest of it.

    Independent draws would leave a value out now and then. Here the values of an axis come in
    random order, each about as often as any other, so that none is left out where `num` allows.

    Args:
        num: of cases.
        axes: the values that each field of a case may take.
    """
    rng = np.random.default_rng(0)
    columns: dict[str, list[Any]] = {}
    for name, values in axes.items():
        rounds = [rng.permutation(len(values)) for _ in range(-(-num // len(values)))]
        order = rng.permutation(np.concatenate(rounds)[:num])
        columns[name] = [values[i] for i in order]
    columns["seed"] = rng.integers(2**32, size=num).tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def state_tensors(state: Any) -> dict[str, Tensor]:
    """Return every tensor that an object holds, by the name of its field."""
    tensors = {}
    for name, value in vars(state).items():
        value = value.tensor if isinstance(value, StagedWriteTensor) else value
        if isinstance(value, Tensor):
            tensors[name] = value
    return tensors


def clone_state(state: RequestState) -> RequestState:
    """Return a state of the same sizes and with the same content, that shares no memory."""
    block_table = state.block_table.tensor
    twin = RequestState(
        state.max_num_reqs,
        state.max_model_len,
        block_table.shape[1],
        state.num_speculative_tokens,
        state.device,
    )
    for name, tensor in state_tensors(state).items():
        state_tensors(twin)[name].copy_(tensor)
    return twin


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors by name, bit for bit, NaN equal to NaN."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name],
            tensor,
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_other_rows_untouched(state: RequestState, before: RequestState, rows: list[int]) -> None:
    """Check that the rows which are in no place of a step are what they were."""
    others = [row for row in range(state.max_num_reqs) if row not in rows]
    assert_same(
        {name: t[others] for name, t in state_tensors(state).items()},
        {name: t[others] for name, t in state_tensors(before).items()},
    )


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step; the rest comes from the seed."""

    num_rows: int  # N
    num_real: int
    num_padding: int
    num_speculative_tokens: int  # K
    block_size: int
    max_model_len: int
    seed: int


# A full step with chunks longer than a kernel's block, beside what happens to be drawn.
LONG_STEP = StepSizes(
    num_rows=12,
    num_real=9,
    num_padding=2,
    num_speculative_tokens=5,
    block_size=16,
    max_model_len=700,
    seed=7,
)


def step_sizes(max_drafts: int = 8) -> list[StepSizes]:
    """Draw the sizes of some steps; lengths reach over the kernels' block of 256 tokens."""
    cases = draw_cases(
        num_more=range(1, 5),
        num_real=range(6),
        num_padding=range(4),
        num_speculative_tokens=range(max_drafts + 1),
        block_size=[1, 3, 16],
        max_model_len=[37, 700],
    )
    for case in cases:
        case["num_rows"] = case["num_real"] + case.pop("num_more")
        case["num_padding"] = case["num_padding"] or int(case["num_real"] == 0)  # R is at least 1
    return [LONG_STEP, *(StepSizes(**case) for case in cases)]


class StepCase:
    """A state in which the step's rows are valid and everything else is poison, and its plan.

    Args:
        sizes: of the step.
        device: of the state.
    """

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.rng = np.random.default_rng(sizes.seed)
        num_blocks = -(-sizes.max_model_len // sizes.block_size)
        self.state = RequestState(
            sizes.num_rows,
            sizes.max_model_len,
            num_blocks,
            sizes.num_speculative_tokens,
            device,
        )
        self._arrays = {name: t.cpu() for name, t in state_tensors(self.state).items()}
        for tensor in self._arrays.values():
            fill_poison(tensor)
        self._free_blocks = self.rng.permutation(sizes.num_rows * num_blocks)
        self.rows = self.rng.permutation(sizes.num_rows)[: sizes.num_real].tolist()
        places = [self._fill_row(row) for row in self.rows]
        for _ in range(sizes.num_padding):
            length = int(self.rng.integers(0, sizes.num_speculative_tokens + 2))
            places.append((-1, length, False, False))
        for name, tensor in state_tensors(self.state).items():
            tensor.copy_(self._arrays[name])
        rows, query_lens, is_prefill, is_last_chunk = zip(*places, strict=True)
        self.plan = StepPlan(
            rows_np=np.array(rows, dtype=np.int32),
            query_lens_np=np.array(query_lens, dtype=np.int32),
            is_prefill_np=np.array(is_prefill),
            is_last_chunk_np=np.array(is_last_chunk),
            max_seq_len=sizes.max_model_len,
            max_total_len=sizes.max_model_len,
        )

    def buffers(self) -> InputBuffers:
        """Return buffers a little larger than the step: its plan is there, all else is poison."""
        plan = self.plan
        num_logits = int(plan.num_logits_np.sum())
        sizes = plan.num_reqs + 2, plan.num_tokens + 5, num_logits + 3
        buffers = InputBuffers(*sizes, self.device)
        buffers.stage(plan, plan.num_reqs, 0)
        buffers.columns.apply_write()
        return buffers

    def sampled(self, batch: InputBatch) -> tuple[Tensor, Tensor]:
        """Return a verifier's outcome: tokens [R, W], -1 behind the run, and the runs' lengths."""
        width = max(int(self.plan.num_logits_np.max()), 1)
        counts = self.rng.integers(1, np.maximum(self.plan.num_logits_np, 1) + 1)
        tokens = self.rng.integers(0, VOCAB_SIZE, (len(counts), width))
        tokens[np.arange(width) >= counts[:, None]] = -1
        return (
            torch.from_numpy(tokens).to(batch.idx_mapping.device),
            torch.from_numpy(counts.astype(np.int32)).to(batch.idx_mapping.device),
        )

    def _fill_row(self, row: int) -> tuple[int, int, bool, bool]:
        """Make a row valid; return its place: row, query length, is prefill, is last chunk."""
        rng, sizes, arrays = self.rng, self.sizes, self._arrays
        kind = rng.choice(["chunk", "last_chunk", "verify", "verify_at_end"])
        prefill_len = int(rng.integers(2, sizes.max_model_len - 10))
        max_total_len = int(rng.integers(prefill_len + 1, sizes.max_model_len + 1))
        if kind in ("chunk", "last_chunk"):
            total_len = prefill_len
            num_computed = int(rng.integers(0, prefill_len - 1))
            query_len = prefill_len - num_computed
            if kind == "chunk":
                query_len = int(rng.integers(1, query_len))
        else:
            total_len = int(rng.integers(prefill_len + 1, max_total_len + 1))
            if kind == "verify_at_end":
                # The last step of a row, or one that runs past its last token.
                total_len = max(prefill_len + 1, max_total_len - int(rng.integers(0, 3)))
            num_computed = total_len - 1
            query_len = int(rng.integers(1, sizes.num_speculative_tokens + 2))
            arrays["last_sampled_tokens"][row] = int(rng.integers(VOCAB_SIZE))
        values = {
            "prompt_len": int(rng.integers(1, prefill_len + 1)),
            "prefill_len": prefill_len,
            "total_len": total_len,
            "max_total_len": max_total_len,
            "num_computed_tokens": num_computed,
            "draft_budget": int(rng.integers(0, sizes.num_speculative_tokens + 1)),
            "draft_limit": int(rng.integers(0, sizes.num_speculative_tokens + 1)),
            "draft_kind": int(rng.integers(0, 3)),
        }
        for name, value in values.items():
            arrays[name][row] = value
        token_ids = torch.from_numpy(rng.integers(0, VOCAB_SIZE, total_len))
        arrays["all_token_ids"][row, :total_len] = token_ids.int()
        drafts = rng.integers(0, VOCAB_SIZE, sizes.num_speculative_tokens)
        drafts[rng.integers(0, len(drafts) + 1) :] = -1
        drafts[rng.random(len(drafts)) < 0.1] = -1  # holes
        arrays["draft_tokens"][row] = torch.from_numpy(drafts)
        needed = -(-max_total_len // sizes.block_size)
        blocks, self._free_blocks = self._free_blocks[:needed], self._free_blocks[needed:]
        arrays["block_table"][row, :needed] = torch.from_numpy(blocks).int()
        return row, query_len, kind in ("chunk", "last_chunk"), kind == "last_chunk"


def extreme_noise_keys() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return key halves and token ids, [4] int32, whose hash is 0, 1, all ones, all ones but one.

    The hash of a token is fmix32(fmix32(token * c + a) ^ b) with murmur3's finaliser, a bijection:
    for any token and a, the b that leads to a given hash is found by inverting the outer one.
    """
    hashes = torch.tensor([0, 1, -1, -2], dtype=torch.int32)
    token_ids = torch.tensor([0, 7, 49151, 128255], dtype=torch.int32)
    a = torch.tensor([0, 123456789, -5, 2**31 - 1], dtype=torch.int32)
    inner = _fmix32_by_hand((token_ids.long() * 0x9E3779B1 + a.long()) & 0xFFFFFFFF)
    b = inner ^ _unmix32(hashes.long() & 0xFFFFFFFF)
    return (a, torch.where(b >= 2**31, b - 2**32, b).to(torch.int32)), token_ids


def _times(h: Tensor, factor: int) -> Tensor:
    """Multiply unsigned 32-bit numbers, held in int64, modulo 2^32."""
    low, high = h & 0xFFFF, h >> 16
    return (low * factor + (((high * factor) & 0xFFFF) << 16)) & 0xFFFFFFFF


def _fmix32_by_hand(h: Tensor) -> Tensor:
    h = _times(h ^ (h >> 16), 0x85EBCA6B)
    h = _times(h ^ (h >> 13), 0xC2B2AE35)
    return h ^ (h >> 16)


def _unmix32(h: Tensor) -> Tensor:
    h = h ^ (h >> 16)
    h = _times(h, pow(0xC2B2AE35, -1, 2**32))
    h = h ^ (h >> 13) ^ (h >> 26)
    h = _times(h, pow(0x85EBCA6B, -1, 2**32))
    return h ^ (h >> 16)
