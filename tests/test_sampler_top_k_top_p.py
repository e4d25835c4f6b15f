"""Truncation against an oracle that sorts in float64, ties and the full-sort fall-back included."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sampler.top_k_top_p import _sorted_cut, apply_top_k_top_p
from tests.hypotheses import QUICK, seeds
from tests.poison import fill_poison

HEAD = 512  # lines are cut inside this many tokens where they can be, else by a full sort


def kept_ids(logits: Tensor, k: int, p: float) -> set[int]:
    """Return the ids that stay: walk down the sorted tokens, then add equals of the last one."""
    values = logits.double().numpy()
    order = np.argsort(-values, kind="stable")
    kth = values[order[k - 1]]
    head = [i for i in order if values[i] >= kth and values[i] > -np.inf]
    last = values[head[-1]]
    if p < 1:
        weights = np.exp(values[head] - values[head[0]])
        probs, before = weights / weights.sum(), 0.0
        for i, prob in zip(head, probs, strict=True):
            if before >= p and i != head[0]:
                break
            last, before = values[i], before + prob
    return {int(i) for i in np.flatnonzero((values >= last) & (values > -np.inf))}


def apply(logits: Tensor, lines: list[tuple[int, float]]) -> Tensor:
    """Truncate line i by its own k and p, with rows permuted and poison in all others."""
    num_rows = 2 * len(lines) + 1
    temperature, top_p = (fill_poison(torch.empty(num_rows)) for _ in range(2))
    top_k = fill_poison(torch.empty(num_rows, dtype=torch.int32))
    rows = torch.arange(num_rows - 2, -1, -2)
    temperature[rows] = 1.0
    for row, (k, p) in zip(rows.tolist(), lines, strict=True):
        top_k[row], top_p[row] = k, p
    result = logits.clone()
    apply_top_k_top_p(result, rows.int(), temperature, top_k, top_p)
    return result


def check(logits: Tensor, lines: list[tuple[int, float]]) -> None:
    result = apply(logits, lines)
    for line, (k, p) in enumerate(lines):
        # float32 is what the rows hold.
        kept = kept_ids(logits[line], k, float(np.float32(p)))
        assert set(torch.isfinite(result[line]).nonzero().flatten().tolist()) == kept
        ids = sorted(kept)
        assert torch.equal(result[line, ids], logits[line, ids]), "a kept logit was changed"


@st.composite
def truncations(draw: st.DrawFn) -> tuple[int, list[tuple[int, float]], float, int]:
    """Draw vocabulary, (k, p) of each line, spread of the logits, seed."""
    vocab_size = draw(st.sampled_from([1, 2, 100, HEAD - 1, HEAD, HEAD + 1, 2000]))
    top_k = st.sampled_from([1, 2, 50, HEAD - 1, HEAD, HEAD + 1, vocab_size])
    top_p = st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0])
    lines = draw(st.lists(st.tuples(top_k, top_p), min_size=1, max_size=4))
    lines = [(min(k, vocab_size), p) for k, p in lines]
    return vocab_size, lines, draw(st.sampled_from([0.01, 1.0, 5.0])), draw(seeds)


@QUICK
@given(truncations())
def test_kept_tokens_are_the_oracles(
    case: tuple[int, list[tuple[int, float]], float, int],
) -> None:
    vocab_size, lines, spread, seed = case
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lines), vocab_size, generator=generator) * spread
    check(logits, lines)


@QUICK
@given(truncations())
def test_tokens_that_tie_with_the_last_kept_one_are_kept(
    case: tuple[int, list[tuple[int, float]], float, int],
) -> None:
    vocab_size, lines, _, seed = case
    # Five values only, so that nearly every cut falls among equals.
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(5, (len(lines), vocab_size), generator=generator)
    check(steps * float(np.log(2)), lines)


@QUICK
@given(truncations())
def test_masked_tokens_stay_masked(
    case: tuple[int, list[tuple[int, float]], float, int],
) -> None:
    vocab_size, lines, spread, seed = case
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lines), vocab_size, generator=generator) * spread
    masked = torch.rand(logits.shape, generator=generator) < 0.7
    masked[:, seed % vocab_size] = False
    logits[masked] = float("-inf")
    check(logits, lines)


@QUICK
@given(truncations())
def test_the_full_sort_gives_the_cuts_of_the_head(
    case: tuple[int, list[tuple[int, float]], float, int],
) -> None:
    vocab_size, lines, spread, seed = case
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lines), vocab_size, generator=generator) * spread
    result = apply(logits, lines)
    for line, (k, p) in enumerate(lines):
        kept = logits[line] >= _sorted_cut(logits[line], k, float(np.float32(p)))
        assert torch.equal(kept, torch.isfinite(result[line]))


def test_one_line_of_each_kind_shares_a_batch() -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(3))
    # The last two need more than the head: a flat line, and k beyond it.
    check(logits, [(3000, 1.0), (1, 1.0), (3000, 1e-6), (3000, 0.9), (2000, 0.95)])


def test_line_without_a_limit_is_not_touched() -> None:
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(4))
    assert torch.equal(apply(logits, [(64, 1.0), (64, 1.0)]), logits)


@pytest.mark.parametrize("line", [(1, 1.0), (64, 1e-6), (1, 1e-6)])
def test_smallest_k_or_p_leaves_the_argmax(line: tuple[int, float]) -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(5))
    kept = torch.isfinite(apply(logits, [line])[0]).nonzero().flatten().tolist()
    assert kept == [int(logits.argmax())]


def test_tie_that_reaches_over_the_head_keeps_every_equal() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, 1900:1910] = 4.0
    kept = torch.isfinite(apply(logits, [(20, 1.0)])[0])
    assert int(kept.sum()) == 2000
    check(logits, [(20, 1.0)])
    check(logits, [(20, 0.999)])
    # The ten have a mass of 0.2 among all equals, but 0.5 among the first 512 tokens alone.
    check(logits, [(20, 0.4)])
    check(logits, [(5, 0.5)])


def test_mass_is_taken_over_what_top_k_left() -> None:
    # 0.4, 0.3, 0.2, 0.1: of the first two alone, 0.4 is a mass of 4/7.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert torch.isfinite(apply(logits, [(2, 0.55)])).tolist() == [[True, False, False, False]]
    assert torch.isfinite(apply(logits, [(2, 0.6)])).tolist() == [[True, True, False, False]]
    assert torch.isfinite(apply(logits, [(4, 0.55)])).tolist() == [[True, True, False, False]]
    assert torch.isfinite(apply(logits, [(4, 0.75)])).tolist() == [[True, True, True, False]]


def test_padding_and_greedy_lines_of_a_limited_batch_are_not_touched() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(6))
    result = logits.clone()
    top_k, top_p = torch.tensor([2, 3], dtype=torch.int32), torch.tensor([0.5, 1.0])
    rows = torch.tensor([1, -1, 0], dtype=torch.int32)
    apply_top_k_top_p(result, rows, torch.tensor([0.0, 1.0]), top_k, top_p)
    assert int(torch.isfinite(result[0]).sum()) == 3
    assert torch.equal(result[1:], logits[1:])


def test_nan_is_never_kept_where_a_line_is_truncated() -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(7))
    logits[:, [0, 300, 599]] = float("nan")
    result = apply(logits, [(5, 1.0), (599, 0.9), (1, 0.5)])
    assert not result.isnan().any()
    assert torch.isfinite(result).sum(1).tolist()[0] == 5
    assert torch.isfinite(result[1]).sum() > 1
    assert torch.isfinite(result[2]).nonzero().flatten().tolist() == [
        int(logits[2].nan_to_num(-100).argmax())
    ]
