"""The kernels that process logits against their twins: equal bits, equal kept sets."""

import pytest
import torch
from torch import Tensor

from sampler.temperature import scale_logits, scale_logits_ref
from sampler.top_k_top_p import apply_top_k_top_p, apply_top_k_top_p_ref
from tests.poison import fill_poison
from tests.strategies import draw_cases

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

# Kernel and twin round the mass before a token apart by less than this.
MASS_BOUND = 1e-5
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def spread_rows(values: list[float], dtype: torch.dtype, rows: Tensor) -> Tensor:
    """Return a table that holds the values at the rows, and poison everywhere else."""
    table = fill_poison(torch.empty(2 * len(rows) + 1, dtype=dtype))
    table[rows] = torch.tensor(values, dtype=dtype)
    return table


def arguments(
    logits: Tensor,
    temperatures: list[float],
    limits: list[tuple[int, float]],
    device: torch.device,
) -> Arguments:
    """Give line i its own row, permuted among poisoned ones; lines without a row are padding.

    The logits are a view of wider memory, and what lies behind the vocabulary beats every token.
    """
    num_lines, vocab_size = logits.shape
    wide = torch.full((num_lines, vocab_size + 3), 6e4, dtype=logits.dtype)
    wide[:, :vocab_size] = logits
    rows = torch.randperm(2 * len(limits) + 1)[: len(limits)]
    idx_mapping = torch.full((num_lines,), -1, dtype=torch.int32)
    idx_mapping[: len(limits)] = rows.int()
    tables = (
        spread_rows(temperatures, torch.float32, rows),
        spread_rows([k for k, _ in limits], torch.int32, rows),
        spread_rows([p for _, p in limits], torch.float32, rows),
    )
    moved = [t.to(device) for t in (wide, idx_mapping, *tables)]
    return (moved[0][:, :vocab_size], *moved[1:])  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    "case",
    draw_cases(
        num=10,
        vocab_size=[1, 7, 999, 1024, 2049],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
        num_padding=range(3),
    ),
)
def test_scaled_logits_have_the_bits_of_the_twin(device: torch.device, case: dict) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    temperatures = [0.0, 1.0, 0.7, 1e-3]
    num_lines = len(temperatures) + case["num_padding"]
    logits = 20 * torch.randn(num_lines, case["vocab_size"], generator=generator)
    logits[:, ::5] = float("-inf")
    logits[len(temperatures) :] = float("nan")
    limits = [(case["vocab_size"], 1.0)] * len(temperatures)
    given, rows, temperature, *_ = arguments(logits.to(case["dtype"]), temperatures, limits, device)
    before = given.clone()
    scaled = scale_logits(given, rows, temperature)
    assert scaled.dtype == torch.float32
    twin = scale_logits_ref(given, rows, temperature)
    torch.testing.assert_close(scaled, twin, rtol=0, atol=0, equal_nan=True)
    # Greedy lines and padding are raw.
    raw = torch.tensor([0, *range(len(temperatures), num_lines)], device=device)
    torch.testing.assert_close(scaled[raw], given[raw].float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(given, before, rtol=0, atol=0, equal_nan=True)


def truncate(given: Arguments) -> tuple[Tensor, Tensor]:
    """Return what kernel and twin leave of copies of the same logits."""
    results = []
    for apply in (apply_top_k_top_p, apply_top_k_top_p_ref):
        # A copy with the strides of the view.
        wide = torch.full((given[0].shape[0], given[0].stride(0)), 6e4, device=given[0].device)
        copy = wide[:, : given[0].shape[1]]
        copy.copy_(given[0])
        apply(copy, *given[1:])
        assert (wide[:, given[0].shape[1] :] == 6e4).all(), "wrote behind the vocabulary"
        results.append(copy)
    return results[0].cpu(), results[1].cpu()


def check(logits: Tensor, limits: list[tuple[int, float]], device: torch.device) -> Tensor:
    """Hold the kernel to its twin line by line; returns what it kept, [lines, V] bool."""
    kernel, twin = truncate(arguments(logits, [1.0] * len(limits), limits, device))
    kept, twin_kept = kernel > float("-inf"), twin > float("-inf")
    for line, (k, p) in enumerate(limits):
        values = logits[line].double()
        assert torch.equal(kernel[line, kept[line]], logits[line, kept[line]])
        assert float(values[kept[line]].min()) > float(
            values[~kept[line]].max() if (~kept[line]).any() else float("-inf")
        ), "what is kept is not all above a cut"
        kth = values.sort(descending=True).values[k - 1]
        mass = torch.where(values >= kth, values, float("-inf")).softmax(0)
        for token in (kept[line] != twin_kept[line]).nonzero().flatten().tolist():
            before = float(mass[values > values[token]].sum())
            assert abs(before - p) < MASS_BOUND, (line, token, before)
    return kept


# (k, p) of a line; k = 0 stands for no limit.
LIMITS = [(0, 1.0), (1, 1.0), (5, 1.0), (50, 0.9), (0, 0.9), (0, 1e-6), (0, 0.999), (2, 0.3)]


@pytest.mark.parametrize(
    "case",
    [
        *draw_cases(
            num=12, vocab_size=[1, 2, 7, 999, 1024], kind=["normal", "ties", "masked"], first=[0, 4]
        ),
        {"vocab_size": 4097, "kind": "normal", "first": 3, "seed": 1},
    ],
)
def test_kept_sets_are_the_twins(device: torch.device, case: dict) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    vocab_size = case["vocab_size"]
    limits = [(min(k or vocab_size, vocab_size), p) for k, p in LIMITS]
    limits = limits[case["first"] : case["first"] + 4]
    shape = (len(limits), vocab_size)
    logits = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(
        -2, 2, (len(limits), 1), generator=generator
    )
    if case["kind"] == "ties":
        # Five values, zeros of both signs among them, so that nearly every cut is among equals.
        logits = (torch.randint(-2, 3, shape, generator=generator) * 0.7).float()
        logits[:, ::3] *= -1
    if case["kind"] == "masked":
        masked = torch.rand(shape, generator=generator) < 0.7
        masked[:, case["seed"] % vocab_size] = False
        logits[masked] = float("-inf")
    check(logits, limits, device)


def test_mass_is_taken_over_what_top_k_left(device: torch.device) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(4, 1)
    kept = check(logits, [(2, 0.55), (2, 0.6), (4, 0.55), (4, 0.75)], device)
    assert kept.sum(1).tolist() == [1, 2, 2, 3]


def test_tokens_apart_by_one_unit_in_the_last_place_are_told_apart(device: torch.device) -> None:
    values = torch.tensor([3.0, -3.0, 1e-40, -1e-40, 2e-45, 60.0])
    step = torch.nextafter(values, torch.full_like(values, float("inf")))
    logits = torch.stack([values, step, step], 1).repeat(1, 2)
    kept = check(logits, [(2, 1.0)] * len(values), device)
    # Four equals on top, of which the two that are asked for keep the others.
    assert kept.tolist() == [[False, True, True] * 2] * len(values)


def test_greedy_lines_and_padding_are_not_touched(device: torch.device) -> None:
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(2))
    logits[3] = float("nan")
    given = arguments(logits, [0.0, 1.0, 0.0], [(1, 0.5), (3, 1.0), (2, 1.0)], device)
    for result in truncate(given):
        assert torch.equal(result[[0, 2]], logits[[0, 2]])
        assert int((result[1] > float("-inf")).sum()) == 3
        assert result[3].isnan().all()


def test_nan_is_never_kept_where_a_line_is_truncated(device: torch.device) -> None:
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(3))
    logits[:, [0, 7, 32]] = torch.tensor([float("nan"), -float("nan"), float("nan")])
    given = arguments(logits, [1.0] * 4, [(5, 1.0), (33, 0.9), (31, 1.0), (3, 0.5)], device)
    for result in truncate(given):
        assert not result.isnan().any()
        assert (result > float("-inf")).sum(1).tolist()[0] == 5
        assert (result > float("-inf")).any(1).all()
    assert torch.equal(*truncate(given))


@pytest.mark.parametrize("extreme", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_lines_without_a_law_end_too(device: torch.device, extreme: float) -> None:
    logits = torch.full((2, 40), extreme)
    given = arguments(logits, [1.0] * 2, [(5, 1.0), (40, 0.9)], device)
    kernel, _ = truncate(given)
    assert kernel.shape == logits.shape


def test_a_line_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    logits = 3 * torch.randn(5, 1100, generator=torch.Generator().manual_seed(4))
    limits = [(50, 0.9), (1100, 0.8), (7, 1.0), (1100, 1.0), (1, 1.0)]
    together, _ = truncate(arguments(logits, [1.0] * 5, limits, device))
    for line in (1, 2):
        one = slice(line, line + 1)
        alone, _ = truncate(arguments(logits[one], [1.0], limits[one], device))
        assert torch.equal(alone[0], together[line])


def many_patches(kind: str, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Return logits [V] of far more patches than the kernel compares at once."""
    logits = torch.randn(vocab_size, generator=generator)
    if kind == "peaked":
        return 5 * logits
    if kind == "flat":
        return 0.01 * logits
    if kind == "ties":
        return (logits * 2).round()
    if kind == "gathered":  # all that is kept lies in few patches, so that few patches reach it
        logits[320:480] += 12
        return logits
    assert kind == "spread"  # a large logit in each patch, and a mass below it that counts, too
    logits[::32] += 5
    logits[5::32] += 4
    return logits


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "gathered", "spread"])
def test_cut_is_the_twins_where_patches_can_be_left_out(device: torch.device, kind: str) -> None:
    generator = torch.Generator().manual_seed(8)
    vocab_size = 7001  # 219 patches
    limits = [(40, 1.0), (200, 0.95), (300, 1.0), (7001, 0.9), (7001, 0.4), (5000, 0.99)]
    logits = torch.stack([many_patches(kind, vocab_size, generator) for _ in limits])
    kept = check(logits, limits, device)
    if kind != "ties":
        assert kept[[0, 2]].sum(1).tolist() == [40, 300]


def test_wider_patches_change_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(9)
    limits = [(40, 1.0), (5000, 0.9), (600, 0.7)]
    logits = torch.stack([many_patches("peaked", 5000, generator) for _ in limits])
    given = arguments(logits, [1.0] * len(limits), limits, device)
    narrow, _ = truncate(given)
    monkeypatch.setattr("sampler.top_k_top_p._MAX_PATCHES", 40)  # 128 tokens each
    wide, _ = truncate(given)
    assert torch.equal(wide, narrow)
    check(logits, limits, device)
