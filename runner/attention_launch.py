"""How the kernel of paged attention is launched: sizes of its tiles, and programs that share keys.

The choice follows from host integers that do not change within a captured shape, and from the
number of multiprocessors: equal shapes on equal devices always give equal bits, captured or eager.
"""

import functools
from dataclasses import dataclass

import torch
import triton

_MAX_SPLITS = 64
# So many are always worth it; more, while a multiprocessor has no program: at a length of 300 the
# programs that find no key cost more than the split gains, at 32k sixteen read as fast as 33.
_SPLITS = 16
# Splits fill the device once and no more: measured on an H200, a second wave of programs costs up
# to a third of the time, a wave that is not quite full costs less.
_MIN_SPLIT_KEYS = 64
_SMS_INTERPRETED = 8  # Triton's interpreter has none; a few make it split


@dataclass(frozen=True)
class AttentionShape:
    """What a launch is chosen from: host integers that do not change within a captured shape."""

    num_tokens: int  # T
    num_reqs: int  # R
    max_query_len: int
    num_kv_heads: int
    num_packed: int  # query heads a KV head
    head_size: int
    itemsize: int  # bytes of a KV element


@dataclass(frozen=True)
class AttentionLaunch:
    """How the kernel is launched."""

    block_m: int  # rows of a tile
    block_n: int  # keys a step
    max_splits: int  # programs that may share the keys of a tile
    min_split_keys: int  # fewer are not worth a program
    num_warps: int
    num_stages: int

    @property
    def min_split_steps(self) -> int:
        """Return `min_split_keys` in steps of `block_n` keys."""
        return triton.cdiv(self.min_split_keys, self.block_n)


def choose_launch(shape: AttentionShape, num_sms: int) -> AttentionLaunch:
    """Choose a launch by shapes alone, so that equal shapes always give equal bits.

    Args:
        shape: of the pass.
        num_sms: multiprocessors of the device.
    """
    exact = shape.itemsize == 4  # float32 keeps its operands in registers: tiles have to be small
    rows = max(shape.max_query_len, 1) * shape.num_packed
    # tl.dot takes 16 rows or more, and a tile holds at least one token with all its heads.
    block_m = max(16, min(32 if exact else 64, triton.next_power_of_2(rows)))
    block_m = max(block_m, triton.next_power_of_2(shape.num_packed))
    block_d = block_columns(shape.head_size)
    block_n = 64 if block_d <= 128 else 32
    if exact:
        block_n = max(16, min(64, 2**16 // (block_d * block_m)))
    programs = count_tiles(shape, block_m)[0] * shape.num_kv_heads
    wanted = num_sms * (3 if block_d <= 64 else 2)
    if not exact and block_m <= 32 and programs > wanted:
        block_n = 32  # so small that more of them fit a multiprocessor: one wave in place of two
    return AttentionLaunch(
        block_m=block_m,
        block_n=block_n,
        max_splits=max(1, min(_MAX_SPLITS, wanted // programs, max(_SPLITS, num_sms // programs))),
        min_split_keys=_MIN_SPLIT_KEYS,
        num_warps=8 if exact or block_m * block_d > 64 * 128 else 4,
        num_stages=2 if exact else 3,
    )


def block_columns(head_size: int) -> int:
    """Return the columns of a tile; tl.dot takes 16 or more."""
    return max(16, triton.next_power_of_2(head_size))


def count_tiles(shape: AttentionShape, block_m: int) -> tuple[int, int]:
    """Return a bound on the tiles of a pass, and the tokens of a tile."""
    tile_tokens = block_m // shape.num_packed
    if shape.max_query_len <= tile_tokens:
        return shape.num_reqs, tile_tokens
    return shape.num_tokens // tile_tokens + shape.num_reqs, tile_tokens


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a device."""
    if device.type != "cuda":
        return _SMS_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
