"""The paged attention kernel against its twin and against a plain oracle."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from runner.attention_launch import AttentionLaunch, AttentionShape, choose_launch
from runner.kv_cache import write_kv, write_kv_ref
from runner.paged_attention import paged_attention_forward, paged_attention_forward_ref
from tests.attention_cases import LAYER, TOLERANCES, AttentionCase, AttentionSizes

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

BF16 = torch.bfloat16
SIZES = {
    "one token": AttentionSizes((1,), (0,), num_kv_heads=1, packed=1),
    "decode": AttentionSizes((1,) * 4, (0, 40, 15, 16), packed=4, num_padding=2, seed=1),
    "decode bf16": AttentionSizes((1,) * 3, (70, 3, 33), packed=7, dtype=BF16, seed=2),
    "verify": AttentionSizes(
        (5,) * 3, (3, 0, 61), 3, packed=3, head_size=24, block_size=3, num_padding=1, seed=3
    ),
    "verify past the end": AttentionSizes(
        (6, 6), (30, 41), packed=3, head_size=64, past_end=2, dtype=BF16, num_padding=1, seed=4
    ),
    "all past the end": AttentionSizes((3, 3), (20, 5), past_end=3, block_size=4, seed=5),
    "mixed lengths": AttentionSizes(
        (1, 2, 3, 4, 0, 6, 7, 8, 9), (9, 8, 7, 6, 5, 4, 3, 2, 1), 1, 1, block_size=1, seed=6
    ),
    "chunks": AttentionSizes((70, 1, 5, 70), (0, 50, 20, 33), 1, packed=4, num_padding=1, seed=7),
    "chunks bf16": AttentionSizes(
        (70, 3, 0, 1), (31, 65, 12, 8), 2, packed=3, head_size=24, dtype=BF16, seed=8
    ),
    "many heads": AttentionSizes((2, 1), (10, 3), 1, packed=20, head_size=8, seed=9),
    "window 1": AttentionSizes((1, 4), (50, 20), window=1, block_size=3, seed=10),
    "window 6": AttentionSizes((9, 1, 70), (40, 3, 5), 1, window=6, num_padding=1, seed=11),
    "window 50": AttentionSizes((5, 5), (150, 20), packed=3, window=50, past_end=1, seed=12),
    "window not reached": AttentionSizes((3, 1), (10, 30), window=1000, dtype=BF16, seed=13),
}


def small_launch(**fields: Any) -> AttentionLaunch:
    """Return a launch of small steps that splits whatever can be split."""
    given = {"block_m": 16, "block_n": 16, "max_splits": 5, "min_split_keys": 1, **fields}
    return AttentionLaunch(**given, num_warps=4, num_stages=2)


def run(case: AttentionCase, metadata: Any = None, launch: AttentionLaunch | None = None) -> Any:
    """Return the kernel's output for a case, or for changed metadata of it."""
    metadata = metadata or case.metadata
    window = case.sizes.window
    return paged_attention_forward(case.query, metadata, LAYER, case.scaling, window, launch)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_output_is_that_of_each_request_alone(sizes: AttentionSizes, device: torch.device) -> None:
    case = AttentionCase(sizes, device)
    case.write()
    output = run(case)
    case.check(output)
    twin = paged_attention_forward_ref(case.query, case.metadata, LAYER, case.scaling, sizes.window)
    real = torch.cat(
        [torch.arange(b, b + n) for b, n in zip(case.starts, case.real_lens, strict=False)]
    )
    # Both were rounded.
    tolerance = {name: 2 * value for name, value in TOLERANCES[sizes.dtype].items()}
    torch.testing.assert_close(output[real], twin[real], **tolerance)
    if sizes.dtype == torch.float32:
        case.check(twin)


@pytest.mark.parametrize("name", ["decode", "verify past the end", "window 6", "window 50"])
@pytest.mark.parametrize("launch", [small_launch(), small_launch(block_n=32, max_splits=2)])
def test_split_keys_give_the_same_output(
    name: str, launch: AttentionLaunch, device: torch.device
) -> None:
    case = AttentionCase(SIZES[name], device)
    case.write()
    case.check(run(case, launch=launch))


@pytest.mark.parametrize("min_split_keys", [1, 64])
def test_bound_on_the_lengths_changes_no_bit(min_split_keys: int, device: torch.device) -> None:
    # An eager pass knows its lengths, a captured one only the model's limit.
    case = AttentionCase(AttentionSizes((2, 2), (60, 3), 1, num_padding=1, seed=20), device)
    case.write()
    launch = small_launch(max_splits=3, min_split_keys=min_split_keys)
    outputs = [
        run(case, case.with_(max_seq_len=bound), launch) for bound in (1, 62, 100, 16 * 3, 4096)
    ]
    case.check(outputs[1])
    for output in outputs[2:]:
        assert torch.equal(output, outputs[1])
    case.check(outputs[0])  # too low: slower, not wrong


@pytest.mark.parametrize("shift", [1, -1])
def test_check_notices_a_causal_mask_that_is_off_by_one(shift: int, device: torch.device) -> None:
    case = AttentionCase(AttentionSizes((5, 5), (30, 12), seed=21), device)
    case.write()
    output = run(case, case.with_(positions=case.metadata.positions + shift))
    with pytest.raises(AssertionError, match="not close"):
        case.check(output)


def test_check_notices_a_window_that_is_off_by_one(device: torch.device) -> None:
    case = AttentionCase(AttentionSizes((5, 1), (30, 12), window=4, seed=22), device)
    case.write()
    output = paged_attention_forward(case.query, case.metadata, LAYER, case.scaling, 5)
    with pytest.raises(AssertionError, match="not close"):
        case.check(output)


def test_padding_alone_gives_zeros_and_writes_nothing(device: torch.device) -> None:
    case = AttentionCase(AttentionSizes((3,), (4,), num_padding=2, seed=23), device)
    metadata = case.with_(
        idx_mapping=torch.full_like(case.metadata.idx_mapping, -1),
        seq_lens=torch.full_like(case.metadata.seq_lens, 1),  # not trusted where there is no row
        slot_mapping=torch.full_like(case.metadata.slot_mapping, -1),
    )
    before = [t.clone() for t in (*case.kv.keys, *case.kv.values)]
    case.kv.write(LAYER, metadata.slot_mapping, case.new_keys, case.new_values)
    assert (run(case, metadata) == 0).all()
    for tensor, old in zip((*case.kv.keys, *case.kv.values), before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_size", "dtype"),
    [(1, 1, 16, torch.float32), (7, 3, 64, BF16), (33, 2, 24, torch.float32), (5, 5, 5, BF16)],
)
def test_write_stores_what_has_a_slot(
    num_tokens: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    slots = torch.randperm(num_tokens + 9, generator=generator)[:num_tokens]
    slots[::3] = -1 if num_tokens > 1 else 3
    # As a model hands them over: [num_kv_heads, T, D] turned, and a part of a wider projection.
    key = torch.randn(num_kv_heads, num_tokens, head_size, generator=generator).transpose(0, 1)
    value = torch.randn(num_tokens, num_kv_heads, 2 * head_size, generator=generator)
    key, value = key.to(dtype).to(device), value.to(dtype).to(device)[..., head_size:]
    slots = slots.to(device)
    sizes = (num_tokens + 11, num_kv_heads, head_size)
    caches, twins = torch.full((2, 2, *sizes), float("nan"), dtype=dtype, device=device)
    write_kv(caches[0], caches[1], slots, key, value)
    write_kv_ref(twins[0], twins[1], slots, key, value)
    for cache, twin, given in zip(caches, twins, (key, value), strict=True):
        assert torch.equal(cache[slots[slots >= 0]], given[slots >= 0])
        assert cache[-1].isnan().all(), "the kernel needs no trash slot"
        torch.testing.assert_close(cache[:-1], twin[:-1], rtol=0, atol=0, equal_nan=True)


def test_launch_fits_every_shape() -> None:
    axes: Any = ((1, 5, 9, 512), (1, 3, 4, 7, 20, 64), (8, 24, 64, 128, 256), (2, 4))
    for max_query_len, packed, head_size, itemsize in itertools.product(*axes):
        shape = AttentionShape(600, 4, max_query_len, 2, packed, head_size, itemsize)
        launch = choose_launch(shape, num_sms=132)
        for size in (launch.block_m, launch.block_n):
            assert size >= 16, shape
            assert size & (size - 1) == 0, shape
        assert packed <= launch.block_m, shape
        # Keys and values of the steps in flight, and the queries, have to fit the shared memory.
        columns = max(16, head_size) * itemsize
        stages = launch.num_stages - 1
        assert (2 * stages * launch.block_n + 2 * launch.block_m) * columns <= 220 * 1024, shape
        assert 1 <= launch.max_splits <= 64, shape


def test_a_device_that_is_full_splits_no_keys() -> None:
    shape = AttentionShape(
        num_tokens=8192,
        num_reqs=4,
        max_query_len=2048,
        num_kv_heads=8,
        num_packed=4,
        head_size=128,
        itemsize=2,
    )
    assert choose_launch(shape, num_sms=132).max_splits == 1
    decode = dataclasses.replace(shape, num_tokens=4, max_query_len=1)
    # 4 requests of 8 KV heads: as many splits as keep all programs in one wave.
    assert choose_launch(decode, num_sms=132).max_splits == 2 * 132 // 32
