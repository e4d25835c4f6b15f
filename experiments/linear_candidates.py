"""Launches of linear layers that are worth measuring, by shape and range of tokens."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from runner.models.linear_launch import LinearLaunch, LinearShape

_SHARED_BYTES = 220 * 2**10  # of a multiprocessor
_PREFETCH = (0, 256, 1024, 4096)


def candidates(shape: LinearShape, limit: int) -> Iterator[LinearLaunch]:
    """Give launches worth trying, before what they prefetch is chosen."""
    yield from _streamed(shape, limit)
    # Not for fewer tokens: there memory is the bound, and streaming asks for it ahead.
    if limit >= 64 and not shape.eight_bit and shape.columns % 8 == shape.rows % 8 == 0:
        yield from _tiled(shape, limit)


def _tiled(shape: LinearShape, limit: int) -> Iterator[LinearLaunch]:
    """Give launches whose tiles are moved by hardware."""
    tokens = {64: [(64, 0)], 160: [(128, 32), (64, 16)], 320: [(128, 32), (64, 0)]}[limit]
    small = shape.rows * shape.columns <= 2**20
    if small and limit == 160:
        tokens = [*tokens, (32, 0), (64, 0)]  # fewer tokens each, so that there are enough programs
    for (block_t, more_t), block_n, splits in itertools.product(tokens, (64, 128, 256), (1, 2, 4)):
        programs = -(-shape.rows // block_n) * splits * -(-limit // (block_t + more_t))
        columns, block_k = block_n * (2 if shape.glu else 1), 128 if limit <= 64 else 64
        if programs < (40 if small else 80) or (splits > 1 and (shape.glu or programs > 264)):
            continue
        if -(-shape.columns // block_k) < 4 * splits or columns * (block_t + more_t) > 256 * 160:
            continue
        stage = 2 * block_k * (columns + block_t + more_t)
        num_warps = 8 if columns * (block_t + more_t) >= 128 * 128 else 4
        # One program a multiprocessor with many steps in flight, or two with half as many.
        for num_stages in sorted({min(8, _SHARED_BYTES // stage), _SHARED_BYTES // 2 // stage}):
            if 3 <= num_stages <= 8:
                yield LinearLaunch(
                    block_t, block_n, block_k, splits, num_warps, num_stages, 0, more_t, tiled=True
                )


def _streamed(shape: LinearShape, limit: int) -> Iterator[LinearLaunch]:
    """Give launches that stream the weight."""
    tokens = [{160: (128, 32), 320: (256, 64)}.get(limit, (limit, 0))]
    if limit > 64 and shape.eight_bit:
        # Smaller sums leave room for a second program, which widens while the first one multiplies.
        tokens = [(128, 32), (64, 16)]
    elif limit > 160 and shape.glu:
        return
    rows = (16, 32, 64) if shape.rows < 2048 else (32, 64, 128) if limit <= 64 else (64, 128)
    widths = (64, 128, 256) if limit <= 64 else (64, 128) if shape.eight_bit else (64,)
    for (block_t, more_t), block_n, block_k, splits in itertools.product(
        tokens, rows, widths, (1, 2, 3, 4, 8)
    ):
        programs = -(-shape.rows // block_n) * splits * -(-limit // (block_t + more_t))
        steps = -(-shape.columns // block_k)
        if splits > 1 and (shape.glu or programs > 560 or steps < 3 * splits):
            continue
        if programs < (90 if limit <= 160 else 60) and shape.rows * shape.columns > 2**20:
            continue
        weights = block_n * block_k * (2 if shape.glu else 1)
        width = 1 if shape.eight_bit else 2
        stage = width * weights + 2 * (block_t + more_t) * block_k
        num_stages = min(6, -(-steps // splits) + 1, _SHARED_BYTES // 2 // stage)
        if num_stages < 3 and limit > 64:
            num_stages = min(4, _SHARED_BYTES // stage)
        if num_stages < 3:
            continue
        num_warps = 8 if block_n * (block_t + more_t) >= 128 * 64 else 4
        yield LinearLaunch(block_t, block_n, block_k, splits, num_warps, num_stages, 0, more_t)


def with_prefetch(launch: LinearLaunch, shape: LinearShape) -> list[LinearLaunch]:
    """Return a launch with each amount that it may prefetch, and with each start of the next."""
    # Of a row, what the last split has: behind the last row there is no memory to ask for.
    steps = -(-shape.columns // launch.block_k)
    begin = (launch.splits - 1) * -(-steps // launch.splits) * launch.block_k
    width = 1 if shape.eight_bit else 2
    most = max(0, width * (shape.columns - begin)) // 16 * 16
    amounts = sorted({min(amount, most) for amount in _PREFETCH})
    if launch.tiled or width * shape.columns % 16:  # what is asked for begins at 16 bytes
        amounts = [0]
    # Only a kernel that leaves room on every multiprocessor may let the next begin at once.
    small = shape.rows * shape.columns <= 2**22
    return [
        replace(launch, prefetch=amount, early=early)
        for amount in amounts
        for early in ((False, True) if small else (False,))
    ]
