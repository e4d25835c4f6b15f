"""Steps as drafters see them, built by hand: permuted rows, poison wherever nothing is valid."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.draft_inputs import DraftPass
from sampler.gumbel import gumbel_sample
from sampler.noise import STREAM_DRAFT, noise_gumbel, noise_key, noise_uniform
from specdec.protocols import DraftBuffers, DraftContext, Noise, StateView
from tests.poison import POISON, fill_poison

# What a place of a step did.
CHUNK, LAST_CHUNK, VERIFY, AT_END, PADDING, EMPTY = range(6)


@dataclass(frozen=True)
class DraftSizes:
    """Sizes of a step; the rest comes from the seed."""

    kinds: tuple[int, ...]  # one a place; padding last
    seed: int = 0
    num_drafts: int = 4  # K
    block_size: int = 16
    max_model_len: int = 120
    spare_rows: int = 2
    vocab_size: int = 50


@dataclass
class Place:
    """What one place committed; `first` is the first position that a draft pass covers."""

    row: int
    query_len: int
    first: int
    length: int
    total_len: int
    draft_limit: int = 0

    @property
    def committed(self) -> range:
        """Return the positions whose KV the first pass writes."""
        return range(self.first, min(self.first + self.length, self.total_len))


class DraftCase:
    """A step that was committed, and the context of it.

    Args:
        sizes: of the step.
        device: of all tensors.
    """

    def __init__(self, sizes: DraftSizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.rng = np.random.default_rng(sizes.seed)
        num_real = sum(kind < PADDING for kind in sizes.kinds)
        self.num_rows = num_rows = num_real + sizes.spare_rows
        max_num_blocks = -(-sizes.max_model_len // sizes.block_size)
        self.num_blocks = num_rows * max_num_blocks
        self._rows = self.rng.permutation(num_rows).tolist()
        self._blocks = self.rng.permutation(self.num_blocks)
        int32 = torch.int32
        self.state = StateView(
            all_token_ids=_poisoned((num_rows, sizes.max_model_len), int32),
            prompt_len=_poisoned((num_rows,), int32),
            prefill_len=_poisoned((num_rows,), int32),
            total_len=_poisoned((num_rows,), int32),
            num_computed_tokens=_poisoned((num_rows,), int32),
            last_sampled_tokens=_poisoned((num_rows, 1), torch.int64),
            block_table=_poisoned((num_rows, max_num_blocks), int32),
            draft_limit=_poisoned((num_rows,), int32),
        )
        self._columns: list[tuple[int, ...]] = []
        self.places = [self._fill(kind) for kind in sizes.kinds]
        self.state = StateView(**{name: t.to(device) for name, t in vars(self.state).items()})
        self.temperature = torch.from_numpy(
            np.where(self.rng.random(num_rows) < 0.3, 0.0, 0.9).astype(np.float32)
        ).to(device)
        self.seeds = torch.from_numpy(self.rng.integers(-(2**62), 2**62, num_rows)).to(device)
        self.ctx = self._context()

    def buffers(self, kv: Any | None = None, with_logits: bool = False) -> DraftBuffers:
        """Return fresh poisoned buffers of a drafter."""
        rows, num_drafts = self.num_rows, self.sizes.num_drafts
        logits = _poisoned((rows, num_drafts, self.sizes.vocab_size), torch.float32)
        return DraftBuffers(
            draft_tokens=_poisoned((rows, num_drafts), torch.int64).to(self.device),
            draft_kind=torch.zeros(rows, dtype=torch.int8, device=self.device),
            draft_logits=logits.to(self.device) if with_logits else None,
            kv=kv,
        )

    def slot(self, row: int, position: int) -> int:
        """Return the slot of a row's position."""
        size = self.sizes.block_size
        block = int(self.state.block_table[row, position // size])
        assert block >= 0
        return block * size + position % size

    def _fill(self, kind: int) -> Place:
        """Make a row what a place of this kind leaves; note the place's columns of the step."""
        rng, sizes = self.rng, self.sizes
        query_len = int(rng.integers(1, sizes.num_drafts + 2))
        if kind in (PADDING, EMPTY):
            query_len = 0 if kind == EMPTY else query_len
            self._columns.append((-1, query_len, 1, 1, 0, 0))
            return Place(-1, query_len, 0, query_len, 0)
        row, num_sampled, num_rejected = self._rows.pop(), 1, 0
        if kind in (CHUNK, LAST_CHUNK):
            prefill_len = int(rng.integers(3, sizes.max_model_len - 1))
            start = int(rng.integers(0, prefill_len - 1))
            query_len = prefill_len - start
            if kind == CHUNK:
                query_len, num_sampled = int(rng.integers(1, query_len)), 0
            total_len = prefill_len + num_sampled
            place = Place(row, query_len, start, query_len + num_sampled, total_len)
        else:
            # A row at its end sampled less than it ran, or, a step late, nothing at all.
            prefill_len = int(rng.integers(2, sizes.max_model_len - sizes.num_drafts - 3))
            before = int(rng.integers(prefill_len + 1, sizes.max_model_len - sizes.num_drafts - 1))
            num_sampled = int(rng.integers(1, query_len + 1))
            if kind == AT_END:
                num_sampled = int(rng.integers(0, query_len))
                before = sizes.max_model_len - num_sampled
            start, num_rejected = before - 1, query_len - num_sampled
            place = Place(row, query_len, start + 1, query_len, before + num_sampled)
        if kind in (LAST_CHUNK, VERIFY):
            room = sizes.max_model_len - place.total_len - 1
            place.draft_limit = min(int(rng.integers(0, sizes.num_drafts + 1)), max(room, 0))
        samples, is_verify = int(kind != CHUNK), int(kind in (VERIFY, AT_END))
        self._columns.append((row, query_len, samples, is_verify, num_sampled, num_rejected))
        self._set(place, prefill_len, start + query_len - num_rejected)
        return place

    def _set(self, place: Place, prefill_len: int, num_computed: int) -> None:
        """Write the state of a place's row."""
        row, state, total_len = place.row, self.state, place.total_len
        state.prefill_len[row] = prefill_len
        state.prompt_len[row] = max(prefill_len // 2, 1)
        state.total_len[row] = total_len
        state.num_computed_tokens[row] = num_computed
        state.draft_limit[row] = place.draft_limit
        token_ids = torch.from_numpy(self.rng.integers(0, self.sizes.vocab_size, total_len))
        state.all_token_ids[row, :total_len] = token_ids.int()
        state.last_sampled_tokens[row] = int(token_ids[-1])
        # Blocks for every position that a pass can write, and none behind them.
        needed = -(-(total_len + max(place.draft_limit - 1, 0)) // self.sizes.block_size)
        blocks, self._blocks = self._blocks[:needed], self._blocks[needed:]
        state.block_table[row, :needed] = torch.from_numpy(blocks).int()

    def _context(self) -> DraftContext:
        columns = torch.tensor(self._columns, dtype=torch.int32).T.contiguous().to(self.device)
        query_lens = columns[1]
        starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32, device=self.device)
        starts[1:] = query_lens.cumsum(0)
        num_tokens = int(starts[-1])
        return DraftContext(
            state=self.state,
            idx_mapping=columns[0],
            query_lens=query_lens,
            samples=columns[2],
            is_verify=columns[3],
            query_start_loc=starts,
            # A draft pass is built from the state alone; of these it may take the length.
            positions=_poisoned((num_tokens,), torch.int64).to(self.device),
            input_ids=_poisoned((num_tokens,), torch.int64).to(self.device),
            seq_lens=_poisoned((len(query_lens),), torch.int32).to(self.device),
            hidden_states=None,
            aux_hidden_states=None,
            num_sampled=columns[4],
            num_rejected=columns[5],
            temperature=self.temperature,
            noise=self._noise(),
            block_size=self.sizes.block_size,
            max_seq_len=self.sizes.max_model_len,
            max_query_len=max(place.query_len for place in self.places),
            num_last_chunks=self.sizes.kinds.count(LAST_CHUNK),
            num_drafts=self.sizes.num_drafts,
        )

    def _noise(self) -> Noise:
        def gumbel(rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
            a, b = noise_key(self.seeds[rows.long()], positions, STREAM_DRAFT)
            return noise_gumbel((a[:, None], b[:, None]), token_ids.int())

        def uniform(rows: Tensor, positions: Tensor) -> Tensor:
            key = noise_key(self.seeds[rows.long()], positions, STREAM_DRAFT)
            return noise_uniform(key, torch.full_like(key[0], -1))

        def draw(logits: Tensor, idx_mapping: Tensor, positions: Tensor) -> Tensor:
            return gumbel_sample(
                logits, idx_mapping, positions, self.temperature, self.seeds, STREAM_DRAFT
            )

        return Noise(gumbel, uniform, draw)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return fill_poison(torch.zeros(shape, dtype=dtype))


def assert_rows_untouched(table: Tensor, rows: list[int]) -> None:
    """Check that only these rows of a poisoned table were written."""
    others = [row for row in range(len(table)) if row not in rows]
    assert (table[others] == POISON).all()


def tensors(step: DraftPass) -> dict[str, Tensor]:
    """Return all tensors of a pass by name."""
    named = {**vars(step), **vars(step.attn_metadata)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def assert_same_pass(actual: DraftPass, expected: DraftPass) -> None:
    """Compare two passes: tensors bit for bit, and the bounds."""
    ours, theirs = tensors(actual), tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].tolist() == tensor.tolist(), name
    for name in ("max_query_len", "max_seq_len"):
        assert getattr(actual.attn_metadata, name) == getattr(expected.attn_metadata, name)
