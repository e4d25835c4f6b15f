"""Each kernel of the sampler against its torch twin: equal tokens, equal noise bits."""

import math
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sampler.gumbel import BLOCK_SIZE, gumbel_sample, gumbel_sample_ref
from sampler.noise import (
    GUMBEL_MAX,
    STREAM_DRAFT,
    STREAM_RESIDUAL,
    STREAM_TARGET,
    mix_seed,
    noise_gumbel,
    noise_gumbel_device,
    noise_key,
    noise_key_device,
    noise_uniform,
    noise_uniform_device,
)
from tests.poison import POISON, fill_poison
from tests.strategies import draw_cases, extreme_noise_keys

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

BLOCK = 1024


@triton.jit
def _noise_kernel(
    seeds_ptr,  # [L] int64
    positions_ptr,  # [L] int64
    keys_ptr,  # [L, 2] int64, out
    noise_ptr,  # [L, num_tokens] float32, out
    num_tokens,
    STREAM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    line = tl.program_id(0)
    tokens = tl.arange(0, BLOCK_SIZE)
    a, b = noise_key_device(tl.load(seeds_ptr + line), tl.load(positions_ptr + line), STREAM)
    tl.store(keys_ptr + 2 * line, a.to(tl.int64))
    tl.store(keys_ptr + 2 * line + 1, b.to(tl.int64))
    noise = noise_gumbel_device(a, b, tokens)
    tl.store(noise_ptr + line * num_tokens + tokens, noise, mask=tokens < num_tokens)


@triton.jit
def _noise_of_keys_kernel(
    keys_ptr,  # [L, 2] int64
    token_ids_ptr,  # [L] int32
    noise_ptr,  # [L] float32, out
    num_lines,
    BLOCK_SIZE: tl.constexpr,
):
    lines = tl.arange(0, BLOCK_SIZE)
    inside = lines < num_lines
    a = tl.load(keys_ptr + 2 * lines, mask=inside, other=0).to(tl.uint32)
    b = tl.load(keys_ptr + 2 * lines + 1, mask=inside, other=0).to(tl.uint32)
    tokens = tl.load(token_ids_ptr + lines, mask=inside, other=0)
    tl.store(noise_ptr + lines, noise_gumbel_device(a, b, tokens), mask=inside)


@triton.jit
def _uniforms_kernel(
    keys_ptr,  # [L, 2] int64
    token_ids_ptr,  # [L] int64
    uniforms_ptr,  # [L] float32, out
):
    line = tl.program_id(0)
    a = tl.load(keys_ptr + 2 * line).to(tl.uint32)
    b = tl.load(keys_ptr + 2 * line + 1).to(tl.uint32)
    tl.store(uniforms_ptr + line, noise_uniform_device(a, b, tl.load(token_ids_ptr + line)))


def _unsigned(halves: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack(halves, 1).to(torch.int64) & 0xFFFFFFFF


@pytest.mark.parametrize("case", draw_cases(stream=[0, 1, 2, 3]))
def test_noise_on_the_device_has_the_bits_of_its_twin(
    device: torch.device, case: dict[str, int]
) -> None:
    seed, stream = case["seed"], case["stream"]
    generator = torch.Generator().manual_seed(seed)
    num_lines, num_tokens = 5, 999
    noise_seeds = torch.randint(-(2**63), 2**63 - 1, (num_lines,), generator=generator)
    noise_seeds[0] = -1  # every bit set
    noise_seeds[1] = seed  # the high half empty
    positions = torch.randint(0, 2**20, (num_lines,), generator=generator)
    noise_seeds, positions = noise_seeds.to(device), positions.to(device)
    keys = torch.full((num_lines, 2), POISON, dtype=torch.int64, device=device)
    noise = torch.full((num_lines, num_tokens), float("nan"), device=device)
    _noise_kernel[(num_lines,)](
        noise_seeds, positions, keys, noise, num_tokens, STREAM=stream, BLOCK_SIZE=BLOCK
    )
    twin_keys = noise_key(noise_seeds, positions, stream)
    token_ids = torch.arange(num_tokens, dtype=torch.int32, device=device)
    twin_noise = noise_gumbel((twin_keys[0][:, None], twin_keys[1][:, None]), token_ids)
    assert torch.equal(keys, _unsigned(twin_keys))
    # The same bits go in; the two logarithms may round differently.
    torch.testing.assert_close(noise, twin_noise, rtol=1e-6, atol=1e-6)


def test_extreme_bits_give_the_twins_noise(device: torch.device) -> None:
    halves, token_ids = extreme_noise_keys()
    keys = (halves[0].to(device), halves[1].to(device))
    noise = torch.full((len(token_ids),), float("nan"), device=device)
    _noise_of_keys_kernel[(1,)](
        _unsigned(keys), token_ids.to(device), noise, len(token_ids), BLOCK_SIZE=8
    )
    torch.testing.assert_close(
        noise, noise_gumbel(keys, token_ids.to(device)), rtol=1e-6, atol=1e-6
    )
    assert float(noise.max()) <= GUMBEL_MAX
    uniforms = torch.full((len(token_ids),), float("nan"), device=device)
    _uniforms_kernel[(len(token_ids),)](_unsigned(keys), token_ids.long().to(device), uniforms)
    assert torch.equal(uniforms, noise_uniform(keys, token_ids.to(device)))


@dataclass(frozen=True)
class Lines:
    """The sizes of a call to `gumbel_sample`; the rest comes from the seed."""

    vocab_size: int
    num_lines: int
    num_padding: int
    temperatures: list[float]  # of the rows in use, which lines share
    num_other_rows: int
    stream: int
    seed: int


def line_cases() -> list[Lines]:
    cases = draw_cases(
        vocab_size=[1, 999, 1024, 4097],
        num_lines=range(1, 6),
        num_padding=range(3),
        temperatures=[
            [0.0],
            [0.6],
            [1.0],
            [1.0, 0.0],
            [0.6, 1.0],
            [0.0, 0.6, 1.0],
            [1.0, 1.0, 0.6],
        ],
        num_other_rows=range(1, 5),
        stream=[STREAM_TARGET, STREAM_DRAFT, STREAM_RESIDUAL],
    )
    return [Lines(**case) for case in cases]


def _arguments(case: Lines, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Build logits, idx_mapping, positions, and the rows: permuted, poison in all others."""
    generator = torch.Generator().manual_seed(case.seed)
    num_rows = len(case.temperatures) + case.num_other_rows
    rows = torch.randperm(num_rows, generator=generator)[: len(case.temperatures)]
    temperature = torch.empty(num_rows)
    noise_seeds = torch.empty(num_rows, dtype=torch.int64)
    fill_poison(temperature)
    fill_poison(noise_seeds)
    temperature[rows] = torch.tensor(case.temperatures)
    for i, row in enumerate(rows.tolist()):
        noise_seeds[row] = mix_seed(case.seed, i)
    total = case.num_lines + case.num_padding
    # Heavy tails: some lines have one clear winner, others hundreds of candidates.
    # A view of wider memory: the columns behind the vocabulary would win every draw. (A NaN would
    # not: a maximum on the device passes over it.)
    wide = torch.full((total, case.vocab_size + 3), 1e30)
    logits = wide[:, : case.vocab_size]
    logits[:] = torch.randn(logits.shape, generator=generator)
    logits *= 10.0 ** (2 * torch.rand(total, 1, generator=generator) - 1)
    masked = torch.rand(logits.shape, generator=generator) < 0.3
    masked[torch.arange(total), torch.randint(case.vocab_size, (total,), generator=generator)] = (
        False
    )
    logits[masked] = float("-inf")
    logits[case.num_lines :] = float("nan")
    choice = torch.randint(len(rows), (case.num_lines,), generator=generator)
    idx_mapping = torch.full((total,), -1, dtype=torch.int32)
    idx_mapping[: case.num_lines] = rows[choice].int()
    positions = torch.randint(0, 5000, (total,), generator=generator)
    rest = tuple(t.to(device) for t in (idx_mapping, positions, temperature, noise_seeds))
    return (wide.to(device)[:, : case.vocab_size], *rest)  # pyright: ignore[reportReturnType]


# The logits of padding lines are NaN, which numpy remarks on inside the interpreter.
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("case", line_cases())
def test_gumbel_sample_equals_its_twin(device: torch.device, case: Lines) -> None:
    compare_draws(device, case)


def compare_draws(device: torch.device, case: Lines) -> None:
    """Hold the tokens of a case to the twin's."""
    arguments = _arguments(case, device)
    before = [t.clone() for t in arguments]
    tokens = gumbel_sample(*arguments, case.stream)
    twin = gumbel_sample_ref(*arguments, case.stream)
    real = slice(0, case.num_lines)
    assert tokens.dtype == torch.int64
    assert tokens[real].tolist() == twin[real].tolist()
    logits, idx_mapping, _, temperature, _ = arguments
    drawn = logits[real].gather(1, tokens[real, None]).squeeze(1)
    assert (drawn > float("-inf")).all(), "a masked token was drawn"
    greedy = temperature[idx_mapping[real].long()] == 0
    assert torch.equal(tokens[real][greedy], logits[real][greedy].argmax(1))
    for tensor, old in zip(arguments, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


def test_lines_are_searched_beyond_the_block_of_the_highest_bound(
    device: torch.device,
) -> None:
    num_lines, vocab_size = 120, 2 * BLOCK_SIZE + 1
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(num_lines, vocab_size, generator=generator)
    idx_mapping = torch.zeros(num_lines, dtype=torch.int32)
    positions = torch.arange(num_lines)
    rest = (idx_mapping, positions, torch.ones(1), torch.full((1,), 4))
    twin = gumbel_sample_ref(logits, *rest, STREAM_TARGET)
    moved = (t.to(device) for t in (logits, *rest))
    assert torch.equal(gumbel_sample(*moved, STREAM_TARGET).cpu(), twin)  # pyright: ignore[reportCallIssue]
    key = noise_key(rest[3].expand(num_lines), positions, STREAM_TARGET)
    u = noise_uniform((key[0][:, None], key[1][:, None]), torch.arange(vocab_size).int())
    bounds = logits + math.log(2) * (127 - u.view(torch.int32) / 2**23)
    highest = bounds.argmax(1) // BLOCK_SIZE
    assert (highest != twin // BLOCK_SIZE).any(), "the first block always had the best token"


def test_no_block_is_left_out_where_scores_round_by_more_than_the_noise_differs(
    device: torch.device,
) -> None:
    num_lines, vocab_size = 40, 3 * BLOCK_SIZE + 5
    generator = torch.Generator().manual_seed(0)
    ties = torch.rand(num_lines, vocab_size, generator=generator) < 0.06
    logits = torch.where(ties, 1.2e7, 0.0)  # as a low temperature makes them
    arguments = (
        logits,
        torch.zeros(num_lines, dtype=torch.int32),
        torch.arange(num_lines),
        torch.ones(1),
        torch.full((1,), 4),
    )
    twin = gumbel_sample_ref(*arguments, STREAM_TARGET)
    moved = (tensor.to(device) for tensor in arguments)
    assert torch.equal(gumbel_sample(*moved, STREAM_TARGET).cpu(), twin)  # pyright: ignore[reportCallIssue]


def test_ties_go_to_the_lowest_id_within_and_across_blocks(device: torch.device) -> None:
    logits = torch.zeros(3, 4097, device=device)
    logits[0, [1030, 1040, 3000]] = 5.0
    logits[1, [700, 800]] = 5.0
    idx_mapping = torch.zeros(3, dtype=torch.int32, device=device)
    positions = torch.arange(3, device=device)
    temperature = torch.zeros(1, device=device)
    noise_seeds = torch.ones(1, dtype=torch.int64, device=device)
    arguments = (logits, idx_mapping, positions, temperature, noise_seeds, STREAM_TARGET)
    assert gumbel_sample(*arguments).tolist() == [1030, 700, 0]
    assert gumbel_sample_ref(*arguments).tolist() == [1030, 700, 0]


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("vocab_size", [1, 5, 1030])
def test_nan_never_wins_and_every_id_lies_inside_the_vocabulary(
    device: torch.device, vocab_size: int
) -> None:
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1))
    logits[:2] = float("nan")
    logits[2] = float("-inf")
    logits[3:5, ::2] = float("nan")
    idx_mapping = torch.tensor([0, 1, 0, 0, 1, -1], dtype=torch.int32, device=device)
    positions = torch.arange(6, device=device)
    temperature = torch.tensor([1.0, 0.0], device=device)
    noise_seeds = torch.ones(2, dtype=torch.int64, device=device)
    arguments = (logits.to(device), idx_mapping, positions, temperature, noise_seeds)
    tokens = gumbel_sample(*arguments, STREAM_TARGET).tolist()
    assert tokens == gumbel_sample_ref(*arguments, STREAM_TARGET).tolist()
    assert tokens[:3] == [0, 0, 0]
    assert tokens[5] == int(logits[5].argmax()), "padding takes the argmax"
    for line in (3, 4):
        assert tokens[line] in range(vocab_size)
        assert vocab_size == 1 or not logits[line, tokens[line]].isnan()
