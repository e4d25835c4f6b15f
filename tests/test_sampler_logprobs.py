"""Log-probabilities of chosen tokens: kernels against their twin, and both against a softmax."""

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from torch import Tensor

import sampler.logprobs
from runner.async_output import NUM_ENTRIES
from sampler.logprob_rows import topk_logprobs_of_prompt
from sampler.logprobs import BLOCK_SIZE, LogprobLines, topk_logprobs, topk_logprobs_ref
from specdec.types import MAX_LOGPROBS
from tests.poison import fill_poison

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

UNTOUCHED = -77
DEPTH = 3
# Lines of each place; a place of one line is that of a prompt's last chunk, say.
RAGGED = (4, 1, 4, 2)


@dataclass
class Case:
    """A step's logits, what is asked of them, and how many tokens each place kept."""

    logits: Tensor
    lines: LogprobLines
    wanted: list[int]  # by place

    def to(self, device: torch.device) -> "Case":
        """Return a copy on a device."""
        moved = {f.name: getattr(self.lines, f.name).to(device) for f in fields(self.lines)}
        moved["tokens"] = padded_columns(moved["tokens"])
        return Case(self.logits.to(device), LogprobLines(**moved), self.wanted)


def padded_columns(tokens: Tensor) -> Tensor:
    """Return the same [R, W] as a strided view."""
    wide = torch.full((len(tokens), tokens.shape[1] + 2), -1, device=tokens.device)
    wide[:, : tokens.shape[1]] = tokens
    return wide[:, : tokens.shape[1]]


def make_case(
    vocab_size: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    lines: tuple[int, ...] = RAGGED,
    wanted: tuple[int, ...] = (5, MAX_LOGPROBS, -1, 0),
) -> Case:
    """Build a step: permuted rows, poison in all others, the last place is padding."""
    rng = np.random.default_rng(seed)
    num_places, width = len(lines) + 1, max(lines)
    cu_num_logits = np.concatenate([[0], np.cumsum([*lines, width])]).astype(np.int32)
    num_lines = int(cu_num_logits[-1])
    logits = torch.from_numpy(rng.normal(0, 4, (num_lines, vocab_size))).to(dtype)
    rows = np.full(num_places, -1, dtype=np.int32)
    rows[:-1] = rng.permutation(2 * num_places)[: num_places - 1]
    num_logprobs = fill_poison(torch.empty(2 * num_places, dtype=torch.int32))
    num_logprobs[torch.from_numpy(rows[:-1]).long()] = torch.tensor(wanted, dtype=torch.int32)
    kept = np.array([int(rng.integers(1, n + 1)) for n in lines] + [0], dtype=np.int32)
    case_lines = LogprobLines(
        tokens=torch.from_numpy(rng.integers(0, vocab_size, (num_places, width))),
        num_tokens=torch.from_numpy(kept),
        cu_num_logits=torch.from_numpy(cu_num_logits),
        idx_mapping=torch.from_numpy(rows),
        num_logprobs=num_logprobs,
    )
    return Case(logits, case_lines, [*wanted, -1])


def fresh_ring(case: Case, device: torch.device) -> Tensor:
    num_places, width = case.lines.tokens.shape
    shape = (DEPTH, num_places + 2, width + 1, 3, NUM_ENTRIES)
    on_gpu = device.type == "cuda"
    return torch.full(shape, UNTOUCHED, dtype=torch.int32, pin_memory=on_gpu)


def run(case: Case, device: torch.device, step: int = 4) -> Tensor:
    """Return the ring that the launcher filled."""
    ring = fresh_ring(case, device)
    there = case.to(device)
    step_tensor = torch.tensor([step], dtype=torch.int32, device=device)
    topk_logprobs(there.logits, there.lines, step_tensor, ring)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return ring


def run_twin(case: Case, step: int = 4) -> Tensor:
    ring = fresh_ring(case, torch.device("cpu"))
    topk_logprobs_ref(case.logits, case.lines, torch.tensor([step], dtype=torch.int32), ring)
    return ring


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    """Compare rings: ids and ranks exactly, log-probabilities up to float32's rounding."""
    for plane in (0, 2):
        assert torch.equal(ours[..., plane, :], expected[..., plane, :])
    written = expected[..., 0, 0] != UNTOUCHED
    values = (ring[written][:, 1].contiguous().view(torch.float32) for ring in (ours, expected))
    torch.testing.assert_close(*values, rtol=2e-6, atol=2e-5)
    assert torch.equal(ours[~written], expected[~written]), "a cell nobody asked for was written"


def check_oracle(case: Case, ring: Tensor, step: int = 4) -> None:
    """Compare with a float64 softmax over the vocabulary and a full sort."""
    place_of_ring, lines = ring[step % DEPTH], case.lines
    starts = lines.cu_num_logits.tolist()
    for place, num_best in enumerate(case.wanted):
        num_kept = int(lines.num_tokens[place]) if num_best >= 0 else 0
        assert (place_of_ring[place, num_kept:] == UNTOUCHED).all()
        for j in range(num_kept):
            scores = case.logits[starts[place] + j].double().numpy().copy()
            scores[np.isnan(scores)] = -np.inf
            top = scores.max() if scores.max() > -np.inf else 0.0
            with np.errstate(divide="ignore", invalid="ignore"):
                logprobs = scores - (np.log(np.exp(scores - top).sum()) + top)
            order = np.argsort(-scores, kind="stable")[: max(num_best, 0)]
            ids = [int(lines.tokens[place, j]), *order.tolist()]
            record = place_of_ring[place, j]
            n = len(ids)
            assert record[0].tolist() == ids + [-1] * (NUM_ENTRIES - n)
            assert record[2, :n].tolist() == [int((scores > scores[i]).sum()) + 1 for i in ids]
            expected = np.where(scores[ids] > -np.inf, logprobs[ids], -np.inf)
            got = record[1].contiguous().view(torch.float32)[:n].double().numpy()
            np.testing.assert_allclose(got, expected, rtol=3e-6, atol=3e-5)


@pytest.mark.parametrize("vocab_size", [1, 3, 999, 1024, BLOCK_SIZE, BLOCK_SIZE + 1, 9000])
@pytest.mark.parametrize("seed", [0, 1])
def test_kernels_equal_the_twin_and_a_softmax(
    device: torch.device, vocab_size: int, seed: int
) -> None:
    case = make_case(vocab_size, seed)
    ring = run(case, device)
    assert_equal(ring, run_twin(case))
    check_oracle(case, ring)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_of_a_coarse_dtype_go_to_the_lowest_id(
    device: torch.device, dtype: torch.dtype
) -> None:
    case = make_case(5000, seed=3, dtype=dtype)
    ring = run(case, device)
    assert_equal(ring, run_twin(case))
    check_oracle(case, ring)


def test_lines_of_ties_infinities_and_nans(device: torch.device) -> None:
    case = make_case(4500, seed=4, wanted=(7, MAX_LOGPROBS, 3, 2))
    logits = case.logits
    case.lines.num_tokens[:4] = torch.tensor(RAGGED, dtype=torch.int32)
    logits[0] = 1.5  # all tie, over two blocks
    logits[1] = float("-inf")  # nothing is allowed
    logits[2] = float("-inf")
    logits[2, 4200] = -3.0
    logits[3, ::3] = float("nan")
    logits[4] = torch.where(torch.arange(4500) % 2 > 0, 0.0, -0.0)  # equal, whatever their bits
    logits[5, 4096:] = float("-inf")
    logits[6] = -1e30
    logits[6, 17] = 3e38
    case.lines.tokens[0, 2:4] = torch.tensor([4200, 6])  # the one that is left, and a NaN
    ring = run(case, device)
    assert_equal(ring, run_twin(case))
    check_oracle(case, ring)


def test_a_step_of_padding_and_of_rows_that_ask_for_nothing_writes_nothing(
    device: torch.device,
) -> None:
    case = make_case(600, seed=5, lines=(2, 2), wanted=(-1, -1))
    assert (run(case, device) == UNTOUCHED).all()
    assert (run_twin(case) == UNTOUCHED).all()


@pytest.mark.parametrize("step", [0, 5, 2**31 - 1])
def test_the_step_names_the_place_of_the_ring(device: torch.device, step: int) -> None:
    case = make_case(300, seed=6)
    ring = run(case, device, step)
    written = [bool((place != UNTOUCHED).any()) for place in ring]
    assert written == [i == step % DEPTH for i in range(DEPTH)]


def test_bits_do_not_depend_on_how_the_work_is_shared(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(3 * BLOCK_SIZE + 7, seed=7)
    expected = run(case, device)
    for most in (1, 40):
        monkeypatch.setattr(sampler.logprobs, "_MAX_PROGRAMS", most)
        assert torch.equal(run(case, device), expected)


@pytest.mark.parametrize(("num_lines", "num_logprobs"), [(1, 0), (6, 3), (9, MAX_LOGPROBS)])
def test_prompt_lines_are_read_one_token_each(
    device: torch.device, num_lines: int, num_logprobs: int
) -> None:
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(rng.normal(0, 3, (num_lines, 1200))).float()
    tokens = torch.from_numpy(rng.integers(0, 1200, num_lines))
    out = torch.full((num_lines, 3, NUM_ENTRIES), UNTOUCHED, dtype=torch.int32, device=device)
    topk_logprobs_of_prompt(logits.to(device), tokens.to(device), num_logprobs, out)
    out = out.cpu()
    logprobs = torch.log_softmax(logits.double(), 1)
    best = logprobs.topk(max(num_logprobs, 1)).indices[:, :num_logprobs]
    ids = torch.cat([tokens[:, None], best], 1)
    assert torch.equal(out[:, 0, : num_logprobs + 1].long(), ids)
    assert (out[:, 0, num_logprobs + 1 :] == -1).all()
    values = out[:, 1].contiguous().view(torch.float32)[:, : num_logprobs + 1]
    torch.testing.assert_close(values.double(), logprobs.gather(1, ids), rtol=0, atol=2e-5)
    ranks = (logprobs[:, None, :] > logprobs.gather(1, ids)[:, :, None]).sum(2) + 1
    assert torch.equal(out[:, 2, : num_logprobs + 1].long(), ranks)
