"""The noise that drafters are given: of the stream, and as fresh, as the verifier asks for."""

# A launch gives plain integers to parameters annotated tl.constexpr.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from runner.dispatch import use_triton
from sampler.gumbel import gumbel_sample
from sampler.noise import (
    STREAM_DRAFT,
    mix_epoch,
    mix_epoch_device,
    noise_gumbel,
    noise_key,
    noise_uniform,
)
from specdec.protocols import Noise, Verifier

_BLOCK_ROWS = 256


@triton.jit
def _epoch_seeds_kernel(
    seeds_ptr,  # [N] int64
    epochs_ptr,  # [N] int32
    mixed_ptr,  # [N] int64, out
    num_rows,
    BLOCK_ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    seeds = tl.load(seeds_ptr + rows, mask=inside, other=0)
    epochs = tl.load(epochs_ptr + rows, mask=inside, other=0)
    tl.store(mixed_ptr + rows, mix_epoch_device(seeds, epochs), mask=inside)


def epoch_seeds(seeds: Tensor, epochs: Tensor) -> Tensor:
    """Return each row's noise seed in this epoch, [N] int64.

    Args:
        seeds: [N] int64.
        epochs: [N] int32, the rows' lengths.
    """
    if not use_triton(seeds):
        return epoch_seeds_ref(seeds, epochs)
    mixed = torch.empty_like(seeds)
    grid = (triton.cdiv(len(seeds), _BLOCK_ROWS),)
    _epoch_seeds_kernel[grid](seeds, epochs, mixed, len(seeds), BLOCK_ROWS=_BLOCK_ROWS)
    return mixed


def draft_noise(
    verifier: Verifier, temperature: Tensor, seeds: Tensor, total_len: Tensor | None
) -> Noise:
    """Return the drafters' noise.

    Args:
        verifier: `draft_stream` names the stream, `noise_epoch` says that noise also knows the
            row's length, so that it is fresh in every step.
        temperature: [N] float32.
        seeds: [N] int64.
        total_len: [N] int32; may be missing where the verifier needs no epoch.
    """
    stream = getattr(verifier, "draft_stream", STREAM_DRAFT)
    if getattr(verifier, "noise_epoch", False) and total_len is None:
        raise ValueError(f"verifier {verifier.name!r} needs the rows' lengths for drafters' noise")
    lengths = total_len if getattr(verifier, "noise_epoch", False) else None

    def key_of(rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        own = seeds[rows.long()]
        own = own if lengths is None else mix_epoch(own, lengths[rows.long()])
        return noise_key(own, positions, stream)

    def gumbel(rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        key = key_of(rows, positions)
        return noise_gumbel((key[0][:, None], key[1][:, None]), token_ids.int())

    def uniform(rows: Tensor, positions: Tensor) -> Tensor:
        key = key_of(rows, positions)
        return noise_uniform(key, torch.full_like(key[0], -1))  # -1 is no token's id

    def draw(logits: Tensor, idx_mapping: Tensor, positions: Tensor) -> Tensor:
        own = seeds if lengths is None else epoch_seeds(seeds, lengths)
        return gumbel_sample(logits, idx_mapping, positions, temperature, own, stream)

    return Noise(gumbel=gumbel, uniform=uniform, draw=draw)


def epoch_seeds_ref(seeds: Tensor, epochs: Tensor) -> Tensor:
    """Torch twin of `epoch_seeds`."""
    return mix_epoch(seeds, epochs)
