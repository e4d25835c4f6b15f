"""Which way a linear layer is computed: by the library, or by our kernel and launched how.

The choice is made once by measurement (`python -m experiments.tune_linears`, then `tune_forward`),
kept in a file with its provenance, and read from there: two runs, and all ranks of one, take the
same. Shapes that no file holds take a rule of shapes alone. A file of one's own, in `linears/` of
the cache folder, goes before the ones that come with the project.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runner.models.linear_launch import LinearLaunch, LinearShape
from runner.weights import cache_dir
from specdec.errors import ConfigError

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "linears"
# Upper ends of the ranges of tokens that have a launch of their own.
TOKEN_LIMITS = (16, 32, 64, 160, 320)
_HALVES = (torch.bfloat16, torch.float16)
# Of the weights and inputs that a program has in flight: two programs fit a multiprocessor.
_STAGED_BYTES = 110 * 2**10


# By shape and upper end of the tokens; None is the library.
Choices = dict[tuple[LinearShape, int], LinearLaunch | None]


def file_name(device_name: str, dtype: torch.dtype) -> str:
    """Return the name of the file of a device's choices."""
    words = "".join(c if c.isalnum() else " " for c in device_name.lower()).split()
    return f"{'_'.join(words)}_{str(dtype).removeprefix('torch.')}.json"


def shape_of(line: Mapping[str, Any]) -> LinearShape:
    """Return the layer that a line of a file is about."""
    eight_bit = line.get("eight_bit", False)
    return LinearShape(line["rows"], line["columns"], line["glu"], eight_bit)


def read_choices(path: Path) -> Choices:
    """Read a file of choices.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))["choices"]
        choices = {
            (shape_of(line), line["max_tokens"]): (
                None if line["launch"] is None else LinearLaunch(**line["launch"])
            )
            for line in lines
        }
        for (shape, _), launch in choices.items():
            if launch is not None and (reason := why_not(shape, launch)):
                raise ValueError(f"{shape}: {reason}")
        return choices
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no choices of linear layers ({error}); make it again with "
            f"python -m experiments.tune_linears or tune_forward, or delete it"
        ) from error


def why_not(shape: LinearShape, launch: LinearLaunch) -> str | None:
    """Return why a layer cannot be launched so, None where it can."""
    if shape.glu and launch.splits > 1:
        return "gate and up in one have no splits"
    if launch.tiled and shape.eight_bit:
        return "8-bit weights are not computed by tiles"
    if launch.tiled and (shape.rows % 8 or shape.columns % 8):
        return "tiled, rows and columns are multiples of 8"
    return None


@functools.cache
def load_choices(device_name: str, dtype: torch.dtype) -> Choices:
    """Return the choices for a device, those of one's own before those that are shipped."""
    name = file_name(device_name, dtype)
    choices: Choices = {}
    for folder in (SHIPPED, cache_dir() / "linears"):
        path = folder / name
        if path.is_file():
            choices |= read_choices(path)
            logger.info("linear layers: %d choices from %s", len(choices), path.name)
    return choices


def choices_digest(choices: Choices) -> str:
    """Return a short hash that is equal for equal choices."""
    lines = sorted(
        f"{asdict(shape)} {limit} {launch and asdict(launch)}"
        for (shape, limit), launch in choices.items()
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def replace_choice(
    device_name: str,
    dtype: torch.dtype,
    shape: LinearShape,
    limit: int,
    launch: LinearLaunch | None,
) -> None:
    """Choose otherwise, in this process: for measuring what else could be chosen."""
    load_choices(device_name, dtype)[shape, limit] = launch
    _choose.cache_clear()


def token_limit(num_tokens: int, limits: Iterable[int] = TOKEN_LIMITS) -> int | None:
    """Return the end of the range that holds a number of tokens, None behind the last."""
    return next((limit for limit in limits if num_tokens <= limit), None)


@functools.cache
def _is_streaming_device(index: int | None) -> bool:
    """Return whether our kernel was built for a device: Hopper's tensor cores and launches."""
    return torch.cuda.get_device_capability(index)[0] == 9


def choose_linear(
    shape: LinearShape, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> LinearLaunch | None:
    """Return how a layer is launched, or None where the library computes it.

    For the library a weight of 8 bits is widened first.

    Args:
        shape: of the layer.
        num_tokens: T.
        dtype: of the input, and of a wide weight.
        device: where they lie.
    """
    limit = token_limit(num_tokens)
    if limit is None or device.type != "cuda" or dtype not in _HALVES:
        return None
    if not _is_streaming_device(device.index):
        return None
    return _choose(shape, limit, dtype, torch.cuda.get_device_name(device))


@functools.cache
def _choose(
    shape: LinearShape, limit: int, dtype: torch.dtype, device_name: str
) -> LinearLaunch | None:
    choices = load_choices(device_name, dtype)
    if (shape, limit) in choices:
        return choices[shape, limit]
    return rule(shape, limit)


def rule(shape: LinearShape, limit: int) -> LinearLaunch | None:
    """Return the launch of a shape that was never measured.

    Args:
        shape: of the layer.
        limit: tokens at most, one of `TOKEN_LIMITS`.
    """
    # The library would have to widen a weight of 8 bits first.
    most = 320 if shape.eight_bit else 64
    if limit > most or shape.columns % 8:
        return None
    block_t, more_t = (limit, 0) if limit <= 64 else (128, 32)
    block_n = 64 if shape.rows >= 2048 else 16
    block_k = 128 if shape.columns >= 1024 and limit <= 64 else 64
    steps, programs = -(-shape.columns // block_k), -(-shape.rows // block_n)
    splits = 1
    while not shape.glu and programs * splits < 128 and steps >= 8 * splits:
        splits *= 2
    weights = block_n * block_k * (2 if shape.glu else 1) * (1 if shape.eight_bit else 2)
    stage = weights + 2 * (block_t + more_t) * block_k  # bytes
    num_stages = max(3, min(6, steps + 1, _STAGED_BYTES // stage))
    return LinearLaunch(block_t, block_n, block_k, splits, 4, num_stages, more_t=more_t)
