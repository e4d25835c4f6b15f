"""Paged attention against plain attention per request, with NaN in every slot it must not read."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runner.attention import build_attention_metadata, paged_attention
from runner.kv_cache import PagedKVCache
from specdec.errors import UnsupportedError
from tests.strategies import seeds

LAYER = 1  # of two: the other one must stay as it was
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    # One rounding of the output to 8 bits; values are about 1.
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 2.0**-7},
}


@dataclass(frozen=True)
class Shape:
    """What hypothesis draws."""

    query_lens: list[int]  # of real places
    num_padding: int
    num_kv_heads: int
    packed: int  # query heads a KV head
    head_size: int
    block_size: int
    window: int | None
    dtype: torch.dtype
    seed: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return Shape(
        query_lens=draw(st.lists(st.sampled_from([1, 1, 3, 5, 17]), min_size=1, max_size=5)),
        num_padding=draw(st.integers(0, 2)),
        num_kv_heads=draw(st.integers(1, 3)),
        packed=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([5, 8, 17])),
        block_size=draw(st.sampled_from([1, 4, 7])),
        window=draw(st.sampled_from([None, 1, 6, 1000])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(seeds),
    )


class Case:
    """Requests with some context already cached, and one pass over new tokens."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(shape.seed)
        self.generator = torch.Generator().manual_seed(shape.seed)
        num_reqs = len(shape.query_lens)
        self.context_lens = self.rng.integers(0, 20, num_reqs)
        self.seq_lens = self.context_lens + shape.query_lens
        self.num_heads = shape.num_kv_heads * shape.packed
        # Keys and values of every position of every request, by place.
        sizes = (shape.num_kv_heads, shape.head_size)
        self.keys = [self._random(int(n), *sizes) for n in self.seq_lens]
        self.values = [self._random(int(n), *sizes) for n in self.seq_lens]
        self._build_cache()

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(self.shape.dtype)

    def _build_cache(self) -> None:
        shape, num_reqs = self.shape, len(self.shape.query_lens)
        max_blocks = -(-int(self.seq_lens.max()) // shape.block_size)
        num_rows, num_blocks = num_reqs + 3, num_reqs * max_blocks + 2
        self.rows = self.rng.permutation(num_rows)[:num_reqs]
        free = self.rng.permutation(num_blocks)
        # Behind a row's own blocks, and in all other rows, stand blocks of other requests.
        table = self.rng.integers(0, num_blocks, (num_rows, max_blocks + 2))
        self.block_table = torch.from_numpy(table).int()
        for row, length in zip(self.rows, self.seq_lens, strict=True):
            count = -(-int(length) // shape.block_size)
            self.block_table[row, :count] = torch.from_numpy(free[:count]).int()
            free = free[count:]
        self.kv = PagedKVCache(
            2,
            num_blocks,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_size,
            shape.dtype,
            torch.device("cpu"),
        )
        self.null = slice(self.kv.null_slot, self.kv.trash_slot)
        for tensor in (*self.kv.keys, *self.kv.values):
            tensor.fill_(float("nan"))
            tensor[self.null] = 0
        for place, context_len in enumerate(self.context_lens):
            slots = self.slots(place)[:context_len]
            self.kv.write(
                LAYER, slots, self.keys[place][: len(slots)], self.values[place][: len(slots)]
            )

    def slots(self, place: int) -> Tensor:
        """Return the slot of every position of a place."""
        position = torch.arange(int(self.seq_lens[place]))
        size = self.shape.block_size
        blocks = self.block_table[self.rows[place], position // size].long()
        return blocks * size + position % size

    def run(self, query: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        """Run one pass over all places; padding places verify one token each."""
        shape = self.shape
        query_lens = np.array(shape.query_lens + [1] * shape.num_padding)
        positions = [
            torch.arange(c, s) for c, s in zip(self.context_lens, self.seq_lens, strict=True)
        ]
        slots = [self.slots(place)[c:] for place, c in enumerate(self.context_lens)]
        padding = torch.full((shape.num_padding,), -1)
        metadata = build_attention_metadata(
            self.kv,
            self.block_table,
            torch.cat([torch.from_numpy(self.rows), padding]).int(),
            query_lens,
            torch.cat([*positions, padding.clamp(min=0)]),
            torch.cat([torch.from_numpy(self.seq_lens), padding.clamp(min=0)]).int(),
            torch.cat([*slots, padding]),
            max_seq_len=int(self.seq_lens.max()),
        )
        output, weights = paged_attention(
            _layer(),
            query.transpose(0, 1)[None],
            new_keys.transpose(0, 1)[None],
            new_values.transpose(0, 1)[None],
            None,
            sliding_window=shape.window,
            attn_metadata=metadata,
        )
        assert weights is None
        return output[0]

    def expected(self, place: int, query: Tensor) -> Tensor:
        """Attend over a request alone, in float64, one token and head at a time."""
        shape, output = self.shape, torch.zeros(query.shape, dtype=torch.float64)
        for i in range(len(query)):
            position = int(self.context_lens[place]) + i
            first = 0 if shape.window is None else max(0, position - shape.window + 1)
            for head in range(self.num_heads):
                kv_head = head // shape.packed
                keys = self.keys[place][first : position + 1, kv_head].double()
                values = self.values[place][first : position + 1, kv_head].double()
                scores = keys @ query[i, head].double() / math.sqrt(shape.head_size)
                output[i, head] = scores.softmax(0) @ values
        return output


def _layer() -> nn.Module:
    module = nn.Module()
    module.layer_idx = LAYER  # pyright: ignore[reportArgumentType]
    return module


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shapes())
def test_output_is_that_of_each_request_alone(shape: Shape) -> None:
    case = Case(shape)
    num_tokens = sum(shape.query_lens) + shape.num_padding
    query = case._random(num_tokens, case.num_heads, shape.head_size)
    padding = case._random(shape.num_padding, shape.num_kv_heads, shape.head_size)
    new_keys = [k[c:] for k, c in zip(case.keys, case.context_lens, strict=True)]
    new_values = [v[c:] for v, c in zip(case.values, case.context_lens, strict=True)]
    before = [t.clone() for t in (*case.kv.keys, *case.kv.values)]
    output = case.run(query, torch.cat([*new_keys, padding]), torch.cat([*new_values, padding]))

    assert output.dtype == shape.dtype
    assert output.isfinite().all(), "a slot that is not the request's leaked"
    begin = 0
    for place, query_len in enumerate(shape.query_lens):
        part = slice(begin, begin + query_len)
        expected = case.expected(place, query[part]).to(shape.dtype)
        torch.testing.assert_close(output[part], expected, **TOLERANCES[shape.dtype])
        begin += query_len
    _check_cache(case, before)


def _check_cache(case: Case, before: list[Tensor]) -> None:
    """Check what the pass wrote: each request's positions, trash for padding, and nothing else."""
    written = torch.cat([case.slots(place) for place in range(len(case.rows))])
    tensors = (*case.kv.keys, *case.kv.values)
    untouched = torch.ones(len(tensors[0]), dtype=torch.bool)
    untouched[written] = False
    untouched[case.kv.trash_slot] = False
    for layer, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
        same = untouched if layer % 2 == LAYER else torch.ones_like(untouched)
        torch.testing.assert_close(tensor[same], old[same], rtol=0, atol=0, equal_nan=True)
    for place in range(len(case.rows)):
        assert torch.equal(case.kv.keys[LAYER][case.slots(place)], case.keys[place])
        assert torch.equal(case.kv.values[LAYER][case.slots(place)], case.values[place])
    assert (case.kv.keys[LAYER][case.null] == 0).all()
    trash = case.kv.keys[LAYER][case.kv.trash_slot]
    assert bool(trash.isnan().all()) == (case.shape.num_padding == 0)


def test_token_past_the_end_of_its_row_writes_only_trash() -> None:
    kv = PagedKVCache(2, 2, 4, 1, 8, torch.float32, torch.device("cpu"))
    metadata = build_attention_metadata(
        kv,
        torch.tensor([[1, 0]], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        np.array([2]),
        torch.tensor([3, 0]),
        torch.tensor([4], dtype=torch.int32),
        torch.tensor([7, -1]),
        max_seq_len=4,
    )
    ones = torch.ones(1, 1, 2, 8)
    output, _ = paged_attention(_layer(), ones, ones, ones, None, attn_metadata=metadata)
    assert output.isfinite().all()
    (written,) = kv.keys[LAYER].flatten(1).any(1).nonzero(as_tuple=True)
    assert written.tolist() == [7, kv.trash_slot]


def test_scaling_that_is_given_replaces_the_default() -> None:
    shape = Shape([3], 0, 1, 1, 8, 4, None, torch.float32, 5)
    outputs = []
    for scaling in (None, 8**-0.5, 0.0):
        case = Case(shape)
        query = case._random(3, 1, 8)
        metadata = build_attention_metadata(
            case.kv,
            case.block_table,
            torch.from_numpy(case.rows).int(),
            np.array([3]),
            torch.arange(int(case.context_lens[0]), int(case.seq_lens[0])),
            torch.from_numpy(case.seq_lens).int(),
            case.slots(0)[int(case.context_lens[0]) :],
            max_seq_len=int(case.seq_lens[0]),
        )
        new = [
            x[0][int(case.context_lens[0]) :].transpose(0, 1)[None]
            for x in (case.keys, case.values)
        ]
        output, _ = paged_attention(
            _layer(), query.transpose(0, 1)[None], *new, None, scaling, attn_metadata=metadata
        )
        outputs.append(output)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    # No scale at all: every key weighs the same.
    mean = case.values[0].mean(0)
    torch.testing.assert_close(outputs[2][0, -1], mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["s_aux", "softcap", "position_bias"])
def test_attention_option_that_is_not_honoured_is_refused(option: str) -> None:
    kv = PagedKVCache(2, 1, 4, 1, 8, torch.float32, torch.device("cpu"))
    metadata = build_attention_metadata(
        kv,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        np.array([1]),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        max_seq_len=1,
    )
    ones = torch.ones(1, 1, 1, 8)
    with pytest.raises(UnsupportedError, match=option):
        paged_attention(_layer(), ones, ones, ones, None, attn_metadata=metadata, **{option: 1.0})
