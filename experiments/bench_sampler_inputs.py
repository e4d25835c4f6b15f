"""Seeded inputs of `bench=sampler`: a kernel, the tensors that it reads, and its torch twin.

Logits are 3 * N(0, 1). Drafts are kept about as often as refused: one-hot ones stand out of the
logits in 7 lines of 10, those with q are drawn from logits with N(0, 1) added. A check looks at the
leading lines, for no line knows of another request's.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.async_output import NUM_ENTRIES
from sampler.gumbel import gumbel_sample, gumbel_sample_ref
from sampler.logprobs import LogprobLines, topk_logprobs, topk_logprobs_ref
from sampler.noise import STREAM_TARGET
from sampler.sampler import process_logits
from sampler.states import SamplingState
from sampler.temperature import scale_logits_ref
from sampler.top_k_top_p import apply_top_k_top_p_ref
from sampler.verify.base import VerifierBase
from sampler.verify.block import BlockConfig, BlockVerifier
from sampler.verify.rejection import RejectionConfig, RejectionVerifier
from sampler.verify.sampled_match import SampledMatchConfig, SampledMatchVerifier
from sampler.verify.synthetic import SyntheticConfig, SyntheticVerifier
from specdec.protocols import DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q, VerifyInputs

NUM_DRAFTS = 4  # of each request that is verified

_TEMPERATURE = 0.7  # of `process`; dividing by 1 would change nothing
_STANDS_OUT = 18.0  # logit of a token that has most of the mass, whatever the others have
_CHECKED_LINES = 32
_CHECKED_REQS = 16
# Kernel and twin round sums differently: one of so many draws may fall on the other side, and a
# line may keep so many more tokens of top-p.
_DRAWS_A_MISS = 16
_CUT_SLACK = 4


@dataclass(frozen=True)
class SamplerBenchCase:
    """One row of the table; `size` counts lines, or requests of NUM_DRAFTS + 1 lines."""

    kernel: str
    size: int
    dtype: torch.dtype
    vocab_size: int


@dataclass(frozen=True)
class Work:
    """One kernel over one input.

    Args:
        tensors: its large inputs.
        call: runs it over them, or over copies elsewhere in memory.
        check: compares it with its torch twin; an AssertionError where they differ.
        read_bytes: what no kernel can avoid reading.
        write_bytes: what it has to write besides, where that has the logits' size.
    """

    tensors: tuple[Tensor, ...]
    call: Callable[..., Any]
    check: Callable[[], None]
    read_bytes: int
    write_bytes: int = 0


def _random_logits(num_lines: int, case: SamplerBenchCase, generator: torch.Generator) -> Tensor:
    """Return [num_lines, V] float32."""
    shape = (num_lines, case.vocab_size)
    return torch.randn(shape, generator=generator, device=generator.device) * 3


def _random_rows(num_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a permutation of rows, int32, and their seeds, int64."""
    device = generator.device
    rows = torch.randperm(num_rows, generator=generator, device=device).int()
    return rows, torch.randint(2**62, (num_rows,), generator=generator, device=device)


def _host(tensor: Tensor) -> Tensor:
    """Return a copy on the host; logits in float32, which changes none of them."""
    return (tensor.float() if tensor.dtype.is_floating_point else tensor).cpu()


def _assert_few_differ(differs: Tensor, num_allowed: int) -> None:
    """Count what differs, [n] bool."""
    found = int(differs.sum())
    assert found <= num_allowed, f"{found} of {len(differs)} differ from the twin"


def _gumbel(temperature: float) -> Callable[[SamplerBenchCase, torch.Generator], Work]:
    def make(case: SamplerBenchCase, generator: torch.Generator) -> Work:
        logits = _random_logits(case.size, case, generator).to(case.dtype)
        rows, seeds = _random_rows(case.size, generator)
        device = generator.device
        positions = torch.randint(4096, (case.size,), generator=generator, device=device)
        temperatures = torch.full((case.size,), temperature, device=device)

        def call(logits: Tensor) -> Tensor:
            return gumbel_sample(logits, rows, positions, temperatures, seeds, STREAM_TARGET)

        def check() -> None:
            n = min(case.size, _CHECKED_LINES)
            expected = gumbel_sample_ref(
                _host(logits[:n]),
                _host(rows[:n]),
                _host(positions[:n]),
                _host(temperatures),
                _host(seeds),
                STREAM_TARGET,
            )
            allowed = n // _DRAWS_A_MISS if temperature > 0 else 0
            _assert_few_differ(_host(call(logits)[:n]) != expected, allowed)

        return Work((logits,), call, check, logits.nbytes)

    return make


def _process(top_k: int, top_p: float) -> Callable[[SamplerBenchCase, torch.Generator], Work]:
    def make(case: SamplerBenchCase, generator: torch.Generator) -> Work:
        logits = _random_logits(case.size, case, generator).to(case.dtype)
        rows, _ = _random_rows(case.size, generator)
        state = SamplingState(case.size, case.vocab_size, generator.device)
        state.temperature.fill_(_TEMPERATURE)
        state.top_k.fill_(top_k or case.vocab_size)
        state.top_p.fill_(top_p)

        def call(logits: Tensor) -> Tensor:
            return process_logits(logits, rows, state)

        def check() -> None:
            n = min(case.size, _CHECKED_LINES)
            lines, temperature = _host(rows[:n]), _host(state.temperature)
            expected = scale_logits_ref(_host(logits[:n]), lines, temperature)
            limits = _host(state.top_k), _host(state.top_p)
            apply_top_k_top_p_ref(expected, lines, temperature, *limits)
            _assert_same_cut(_host(call(logits)[:n]), expected)

        written = case.size * case.vocab_size * torch.float32.itemsize
        return Work((logits,), call, check, logits.nbytes, written)

    return make


def _assert_same_cut(actual: Tensor, expected: Tensor) -> None:
    """Compare truncated logits [n, V]."""
    kept, expected_kept = actual > float("-inf"), expected > float("-inf")
    differs = (kept != expected_kept).sum(1) > _CUT_SLACK
    _assert_few_differ(differs, len(actual) // _DRAWS_A_MISS)
    both = kept & expected_kept
    assert bool(both.any(1).all()), "a line keeps nothing"
    torch.testing.assert_close(actual[both], expected[both])


def _logprobs(num_best: int) -> Callable[[SamplerBenchCase, torch.Generator], Work]:
    def make(case: SamplerBenchCase, generator: torch.Generator) -> Work:
        logits = _random_logits(case.size, case, generator).to(case.dtype)
        rows, _ = _random_rows(case.size, generator)
        size, device = case.size, generator.device
        lines = LogprobLines(
            tokens=torch.randint(case.vocab_size, (size, 1), generator=generator, device=device),
            num_tokens=torch.ones(size, dtype=torch.int32, device=device),
            cu_num_logits=torch.arange(size + 1, dtype=torch.int32, device=device),
            idx_mapping=rows,
            num_logprobs=torch.full((size,), num_best, dtype=torch.int32, device=device),
        )
        step = torch.zeros(1, dtype=torch.int32, device=device)
        ring = torch.full((1, size, 1, 3, NUM_ENTRIES), -1, dtype=torch.int32)
        ring = ring.pin_memory() if device.type == "cuda" else ring

        def call(logits: Tensor) -> None:
            topk_logprobs(logits, lines, step, ring)

        def check() -> None:
            call(logits)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the kernel writes to the host's memory
            n = min(size, _CHECKED_LINES)
            leading = LogprobLines(
                tokens=_host(lines.tokens[:n]),
                num_tokens=_host(lines.num_tokens[:n]),
                cu_num_logits=_host(lines.cu_num_logits[: n + 1]),
                idx_mapping=_host(rows[:n]),
                num_logprobs=_host(lines.num_logprobs),
            )
            expected = torch.full_like(ring[:, :n], -1)
            topk_logprobs_ref(_host(logits[:n]), leading, _host(step), expected)
            found = ring[0, :n, 0, :, : num_best + 1]
            expected = expected[0, :, 0, :, : num_best + 1]
            assert torch.equal(found[:, [0, 2]], expected[:, [0, 2]]), "ids or ranks differ"
            values = [part[:, 1].contiguous().view(torch.float32) for part in (found, expected)]
            torch.testing.assert_close(*values, rtol=1e-5, atol=1e-4)

        return Work((logits,), call, check, logits.nbytes)

    return make


@dataclass(frozen=True)
class _Verification:
    """A verifier's step over one-hot drafts, or over drafts with q."""

    verifier_cls: type[VerifierBase]
    config: Any
    temperature: float
    with_q: bool = False

    def bound(self, device: torch.device) -> VerifierBase:
        """Return a verifier that reads tensors of a device."""
        verifier = self.verifier_cls(self.config)
        verifier.bind(NUM_DRAFTS, device)
        return verifier

    def __call__(self, case: SamplerBenchCase, generator: torch.Generator) -> Work:
        """Make a step of `case.size` requests."""
        inputs = _verify_inputs(case, generator, self.temperature, self.with_q)
        verifier = self.bound(generator.device)

        def call(logits: Tensor, draft_logits: Tensor | None = None) -> Any:
            there = dataclasses.replace(inputs, logits=logits, draft_logits=draft_logits)
            return verifier.verify(there)

        def check() -> None:
            n = min(case.size, _CHECKED_REQS)
            actual = verifier.verify(inputs)
            expected = self.bound(torch.device("cpu")).verify(_leading(inputs, n))
            differs = _host(actual.num_sampled[:n]) != expected.num_sampled
            differs |= (_host(actual.sampled_tokens[:n]) != expected.sampled_tokens).any(1)
            _assert_few_differ(differs, n // _DRAWS_A_MISS if self.temperature > 0 else 0)

        q = inputs.draft_logits
        tensors = (inputs.logits,) if q is None else (inputs.logits, q)
        return Work(tensors, call, check, self._read_bytes(case, verifier, inputs))

    def _read_bytes(
        self, case: SamplerBenchCase, verifier: VerifierBase, inputs: VerifyInputs
    ) -> int:
        """Return the bytes of the lines that judge a draft or draw the token that is emitted.

        The last line of a request is the one that is needed only where all its drafts are kept;
        `synthetic` looks at no draft.
        """
        if isinstance(verifier, SyntheticVerifier):
            num_lines = case.size
        else:
            num_sampled = verifier.verify(inputs).num_sampled
            num_lines = case.size * NUM_DRAFTS + int((num_sampled == NUM_DRAFTS + 1).sum())
        line_bytes = case.vocab_size * case.dtype.itemsize
        return num_lines * line_bytes + case.size * NUM_DRAFTS * line_bytes * self.with_q


def _verify_inputs(
    case: SamplerBenchCase, generator: torch.Generator, temperature: float, with_q: bool
) -> VerifyInputs:
    """Return a step whose requests all have NUM_DRAFTS drafts."""
    num_reqs, width, device = case.size, NUM_DRAFTS + 1, generator.device
    rows, seeds = _random_rows(num_reqs, generator)
    logits = _random_logits(num_reqs * width, case, generator)
    judging = logits.view(num_reqs, width, -1)[:, :NUM_DRAFTS]
    draft_logits = None
    if with_q:
        q = judging + torch.randn(judging.shape, generator=generator, device=device)
        noise = torch.empty_like(q).exponential_(generator=generator).log_()
        drafts = (q - noise).argmax(2)
        draft_logits = torch.empty_like(q, dtype=case.dtype)
        draft_logits[rows.long()] = q.to(case.dtype)
    else:
        shape = (num_reqs, NUM_DRAFTS)
        drafts = torch.randint(case.vocab_size, shape, generator=generator, device=device)
        stands_out = torch.rand(shape, generator=generator, device=device) < 0.7
        raised = torch.where(stands_out, _STANDS_OUT, judging.gather(2, drafts[..., None])[..., 0])
        judging.scatter_(2, drafts[..., None], raised[..., None])
    local = torch.arange(width, device=device)
    first = torch.randint(4096, (num_reqs, 1), generator=generator, device=device)
    kind = DRAFT_KIND_WITH_Q if with_q else DRAFT_KIND_ONE_HOT
    return VerifyInputs(
        logits=logits.to(case.dtype),
        all_greedy=False,  # what a captured step knows
        draft_tokens=torch.nn.functional.pad(drafts, (0, 1), value=-1).flatten(),
        draft_kind=torch.full((num_reqs * width,), kind, dtype=torch.int8, device=device),
        draft_logits=draft_logits,
        cu_num_logits=torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * width,
        max_num_logits=width,
        expanded_idx_mapping=rows.repeat_interleave(width),
        expanded_local_pos=local.int().repeat(num_reqs),
        draw_positions=(first + local).flatten(),
        temperature=torch.full((num_reqs,), temperature, device=device),
        seeds=seeds,
    )


def _leading(inputs: VerifyInputs, num_reqs: int) -> VerifyInputs:
    """Return the first requests of a step, on the host."""
    n, q = num_reqs * inputs.max_num_logits, inputs.draft_logits
    return dataclasses.replace(
        inputs,
        logits=_host(inputs.logits[:n]),
        draft_tokens=_host(inputs.draft_tokens[:n]),
        draft_kind=_host(inputs.draft_kind[:n]),
        draft_logits=None if q is None else _host(q),
        cu_num_logits=_host(inputs.cu_num_logits[: num_reqs + 1]),
        expanded_idx_mapping=_host(inputs.expanded_idx_mapping[:n]),
        expanded_local_pos=_host(inputs.expanded_local_pos[:n]),
        draw_positions=_host(inputs.draw_positions[:n]),
        temperature=_host(inputs.temperature),
        seeds=_host(inputs.seeds),
    )


_SYNTHETIC = SyntheticConfig(rates=[1.0, 1.0, 0.0, 0.0])

LINE_KERNELS: dict[str, Callable[[SamplerBenchCase, torch.Generator], Work]] = {
    "gumbel_t0": _gumbel(0.0),
    "gumbel_t1": _gumbel(1.0),
    "process": _process(0, 1.0),
    "process_top_k": _process(50, 1.0),
    "process_top_p": _process(0, 0.9),
    "logprobs_5": _logprobs(5),
    "logprobs_20": _logprobs(20),
}
REQUEST_KERNELS: dict[str, Callable[[SamplerBenchCase, torch.Generator], Work]] = {
    "rejection_t0": _Verification(RejectionVerifier, RejectionConfig(), 0.0),
    "rejection_t1": _Verification(RejectionVerifier, RejectionConfig(), 1.0),
    "rejection_q": _Verification(RejectionVerifier, RejectionConfig(), 1.0, with_q=True),
    "block_q": _Verification(BlockVerifier, BlockConfig(), 1.0, with_q=True),
    "sampled_match_t1": _Verification(SampledMatchVerifier, SampledMatchConfig(), 1.0),
    "synthetic_t0": _Verification(SyntheticVerifier, _SYNTHETIC, 0.0),
    "synthetic_t1": _Verification(SyntheticVerifier, _SYNTHETIC, 1.0),
}
KERNELS = {**LINE_KERNELS, **REQUEST_KERNELS}


def make_work(case: SamplerBenchCase, device: torch.device) -> Work:
    """Return a case's kernel over inputs of a seeded generator."""
    generator = torch.Generator(device=device)
    generator.manual_seed(case.size)
    return KERNELS[case.kernel](case, generator)
