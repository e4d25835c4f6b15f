"""Stateless noise: a pure function of (seed, position, token id, stream).

`seed` is the request's 64-bit noise seed (the sample index of n is mixed in when the request is
added), `position` the place in the request's text of the token that is drawn, `token id` in the
target's vocabulary. Each use has its own stream, so draft noise, acceptance tests and residual
draws never share a number.

A rule that judges a draft by those behind it needs noise that is fresh in every step, although
steps overlap in positions: `mix_epoch` makes a seed of a row's seed and its length when a step
began.

A 64-bit key is mixed from (seed, position, stream) by three rounds of a Feistel-like permutation,
then each token id is hashed with it by two murmur3 finalisers. The 32 bits h give

    u = (h + 1/2) / 2^32,    e = -log(1 - u) ~ Exp(1),    gumbel = -log(e)

1 - u loses the small u that decide an argmax over many tokens, so e takes the series u + u^2 / 2
below 2^-12 (relative error under 2e-8). Noise is bounded: gumbel <= GUMBEL_MAX.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STREAM_TARGET = 0
STREAM_DRAFT = 1
STREAM_ACCEPT = 2
STREAM_RESIDUAL = 3

GUMBEL_MAX = 22.88  # -log(2^-33) = 22.873..., rounded up
_U_MAX = 1.0 - 2.0**-24  # largest float32 below 1
_EPOCH_FACTOR = 0xC2B2AE3D
_ROUND_KEYS = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834, 0x1082276B, 0xF3A27251)


def _i32(value: int) -> int:
    """Return the signed 32-bit number with the bits of `value`."""
    return value - (1 << 32) if value >= 1 << 31 else value


def mix_seed(seed: int, sample_index: int) -> int:
    """Return the 64-bit noise seed of a request's sample, signed."""
    value = (seed + sample_index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 31
    return value - (1 << 64) if value >= 1 << 63 else value


def mix_epoch(seeds: Tensor, epochs: Tensor) -> Tensor:
    """Return the int64 noise seed of each pair of an int64 seed and an integer epoch."""
    a = (seeds & 0xFFFFFFFF).to(torch.int32) ^ (epochs.to(torch.int32) * _i32(_EPOCH_FACTOR))
    b = (seeds >> 32).to(torch.int32)
    b = b ^ _fmix32(a + _i32(_ROUND_KEYS[0]))
    a = a + _fmix32(b ^ _i32(_ROUND_KEYS[1]))
    return (b.to(torch.int64) << 32) | (a.to(torch.int64) & 0xFFFFFFFF)


def _fmix32(h: Tensor) -> Tensor:
    """Murmur3's 32-bit finaliser on int32 (shifts are masked: torch shifts arithmetically)."""
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * _i32(0x85EBCA6B)
    h = h ^ ((h >> 13) & 0x7FFFF)
    h = h * _i32(0xC2B2AE35)
    return h ^ ((h >> 16) & 0xFFFF)


def noise_key(seeds: Tensor, positions: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Return the two int32 halves of the key of each (seed int64, position) pair."""
    low = (seeds & 0xFFFFFFFF).to(torch.int32)
    high = (seeds >> 32).to(torch.int32)
    a = low ^ _i32((stream * 0x9E3779B1) & 0xFFFFFFFF)
    b = high ^ (positions.to(torch.int32) * _i32(0x85EBCA77))
    for i in (0, 2, 4):
        a = a + _fmix32(b ^ _i32(_ROUND_KEYS[i]))
        b = b ^ _fmix32(a + _i32(_ROUND_KEYS[i + 1]))
    return a, b


def noise_uniform(key: tuple[Tensor, Tensor], token_ids: Tensor) -> Tensor:
    """Return float32 uniforms in (0, 1) for key halves and int32 ids of broadcastable shapes."""
    h = _fmix32(_fmix32(token_ids * _i32(0x9E3779B1) + key[0]) ^ key[1])
    bits = (h.to(torch.int64) & 0xFFFFFFFF).to(torch.float32)
    return (bits * 2.0**-32 + 2.0**-33).clamp(max=_U_MAX)


def noise_gumbel(key: tuple[Tensor, Tensor], token_ids: Tensor) -> Tensor:
    """Return float32 Gumbel noise for key halves and int32 token ids of broadcastable shapes."""
    u = noise_uniform(key, token_ids)
    return -torch.where(u < 2.0**-12, u * (1.0 + 0.5 * u), -torch.log(1.0 - u)).log()


@triton.jit
def _fmix32_device(h):
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def mix_epoch_device(seed, epoch):
    """Device twin of `mix_epoch` for int64 seeds."""
    a = (seed & 0xFFFFFFFF).to(tl.uint32)
    a = a ^ (epoch.to(tl.uint32) * tl.full((), 0xC2B2AE3D, tl.uint32))
    b = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    b = b ^ _fmix32_device(a + 0x9E3779B9)
    a = a + _fmix32_device(b ^ 0x7F4A7C15)
    return (b.to(tl.int64) << 32) | a.to(tl.int64)


@triton.jit
def noise_key_device(seed, position, STREAM: tl.constexpr):
    """Device twin of `noise_key` for one (seed int64, position) pair, as uint32 halves."""
    a = (seed & 0xFFFFFFFF).to(tl.uint32) ^ tl.full(
        (), (STREAM * 0x9E3779B1) % 4294967296, tl.uint32
    )
    b = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    b = b ^ (position.to(tl.uint32) * tl.full((), 0x85EBCA77, tl.uint32))
    a = a + _fmix32_device(b ^ 0x9E3779B9)
    b = b ^ _fmix32_device(a + 0x7F4A7C15)
    a = a + _fmix32_device(b ^ 0xF39CC060)
    b = b ^ _fmix32_device(a + 0x5CEDC834)
    a = a + _fmix32_device(b ^ 0x1082276B)
    b = b ^ _fmix32_device(a + 0xF3A27251)
    return a, b


@triton.jit
def noise_bits_device(a, b, token_ids):
    """Return the 32 bits of noise of one key and a token id or a block of them."""
    h = token_ids.to(tl.uint32) * tl.full((), 0x9E3779B1, tl.uint32) + a
    return _fmix32_device(_fmix32_device(h) ^ b)


@triton.jit
def noise_uniform_device(a, b, token_ids):
    """Device twin of `noise_uniform` for one key and a token id or a block of them."""
    h = noise_bits_device(a, b, token_ids)
    u = h.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.minimum(u, 0.99999994)


@triton.jit
def noise_gumbel_device(a, b, token_ids):
    """Device twin of `noise_gumbel` for one key and a block of token ids."""
    u = noise_uniform_device(a, b, token_ids)
    e = tl.where(u < 0.000244140625, u * (1.0 + 0.5 * u), -tl.log(1.0 - u))
    return -tl.log(e)
