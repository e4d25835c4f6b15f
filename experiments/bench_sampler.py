"""Bench `sampler`: the sampler's kernels on a GPU, beside the device's read rate and a peer.

For each kernel, dtype of the logits and number of lines, or of requests with K = 4 drafts, over a
vocabulary of 128256:

    us            median time, in a CUDA graph over copies of the logits that together exceed the
                  device's L2 by far
    us_in_l2      the same over one input, where that fits the L2: as after a head that wrote it
    read_bytes    logits and draft logits that no kernel can avoid, once
    write_bytes   float32 logits that have to be written, of `process` alone
    floor_us      both at the rate at which a plain reduction reads 4 GiB
    over_floor    us / floor_us
    peer_us       the peer's time, with its logits in L2 where they fit (peer_in_l2)
    of_peer       us_in_l2 or us, whichever is like the peer's, over peer_us
    extra_bytes   peak memory beside the inputs

What the log-probabilities of a prompt of 32768 tokens cost is `experiments.bench_prompt_logprobs`.

The engine verifies float32 above temperature 0, whatever the head gives; verification of bfloat16
is what the peer does. Results are held to the torch twins first. Needs torch, triton and numpy:

    python -m experiments.bench_sampler --out sampler.json
"""

import argparse
import gc
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.bench_attention import measure_read_ceiling, time_us
from experiments.bench_prompt_logprobs import bench_prompt_logprobs
from experiments.bench_sampler_inputs import (
    KERNELS,
    LINE_KERNELS,
    NUM_DRAFTS,
    SamplerBenchCase,
    Work,
    make_work,
)
from experiments.provenance import collect_provenance, shown_command
from specdec.errors import ConfigError, SpecdecError

VOCAB_SIZE = 128256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# vLLM 0.26.0, MRV2 sampler on one H200: median us in a CUDA graph, by kernel and dtype of the
# logits, then by lines or requests (K = 4). In order: gumbel_sample, compute_topk_scores, and
# rejection_sample with drafts onehot, draftprobs, block_draftprobs and synthetic.
PEER_US: dict[tuple[str, str], dict[int, float]] = {
    ("gumbel_t0", "float32"): {1: 5.8, 32: 10.7, 256: 48.2, 320: 58.6},
    ("gumbel_t1", "float32"): {1: 7.4, 32: 32.1, 256: 202.7, 320: 251.8},
    ("gumbel_t0", "bfloat16"): {1: 5.5, 32: 10.9, 256: 46.9, 320: 57.2},
    ("gumbel_t1", "bfloat16"): {1: 7.2, 32: 32.2, 256: 204.6, 320: 254.4},
    ("logprobs_5", "float32"): {1: 187.7, 32: 224.5, 256: 697.7, 320: 843.7},
    ("logprobs_20", "float32"): {1: 186.5, 32: 224.1, 256: 697.8, 320: 842.7},
    ("logprobs_5", "bfloat16"): {1: 154.4, 32: 184.1, 256: 507.4, 320: 592.4},
    ("logprobs_20", "bfloat16"): {1: 155.2, 32: 185.2, 256: 509.1, 320: 593.7},
    ("rejection_t0", "float32"): {1: 7.8, 32: 26.9, 64: 44.2},
    ("rejection_t1", "float32"): {1: 10.6, 32: 51.2, 64: 91.7},
    ("rejection_q", "float32"): {1: 15.5, 32: 76.1, 64: 135.6},
    ("block_q", "float32"): {1: 23.5, 32: 109.3, 64: 189.1},
    ("synthetic_t0", "float32"): {1: 8.8, 32: 28.3, 64: 45.9},
    ("synthetic_t1", "float32"): {1: 11.5, 32: 52.2, 64: 92.7},
    ("rejection_t0", "bfloat16"): {1: 7.9, 32: 18.1, 64: 33.6},
    ("rejection_t1", "bfloat16"): {1: 10.7, 32: 43.3, 64: 79.5},
    ("rejection_q", "bfloat16"): {1: 14.2, 32: 74.2, 64: 130.4},
    ("block_q", "bfloat16"): {1: 21.5, 32: 95.8, 64: 168.6},
    ("synthetic_t0", "bfloat16"): {1: 8.9, 32: 19.8, 64: 35.1},
    ("synthetic_t1", "bfloat16"): {1: 11.5, 32: 44.6, 64: 80.5},
}

_COLD_BYTES = 200 * 10**6  # read by a graph before it comes back to a copy: over three L2
_CALLS = 16  # of a graph at least, so that its launch does not count


@dataclass
class SamplerBenchConfig:
    """What `bench=sampler` runs.

    Args:
        device: a CUDA device.
        dtypes: of the logits: float32, bfloat16.
        kernels: which; those of lines, then those of whole verifications.
        num_lines: of the kernels that know lines.
        num_reqs: of verifications, each with 4 drafts.
        prompt_logprobs: measure what those of a long prompt cost, too.
    """

    name: str = "sampler"
    device: str = "auto"
    dtypes: list[str] = field(default_factory=lambda: list(DTYPES))
    kernels: list[str] = field(default_factory=lambda: list(KERNELS))
    num_lines: list[int] = field(default_factory=lambda: [1, 32, 256, 320])
    num_reqs: list[int] = field(default_factory=lambda: [1, 32, 64])
    prompt_logprobs: bool = True

    def __post_init__(self) -> None:
        """Check names and counts."""
        for name, known in (("dtypes", DTYPES), ("kernels", KERNELS)):
            for value in getattr(self, name):
                if value not in known:
                    raise ConfigError(
                        f"bench.{name}: {value!r} is not known; known: {', '.join(known)}"
                    )
        for name in ("num_lines", "num_reqs"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(f"bench.{name}={getattr(self, name)} is not allowed; give >= 1")


def sampler_cases(config: SamplerBenchConfig) -> list[SamplerBenchCase]:
    """Return every combination of a configuration."""
    cases = []
    for kernel, dtype in itertools.product(config.kernels, config.dtypes):
        sizes = config.num_lines if kernel in LINE_KERNELS else config.num_reqs
        cases += [SamplerBenchCase(kernel, size, DTYPES[dtype], VOCAB_SIZE) for size in sizes]
    return cases


def run_sampler_bench(
    cases: Sequence[SamplerBenchCase], device: torch.device, ceiling: float
) -> list[dict[str, Any]]:
    """Measure cases.

    Args:
        cases: what to measure.
        device: a GPU, which is the current one.
        ceiling: read rate in GB/s.

    Raises:
        AssertionError: a kernel differs from its twin.
    """
    rows = []
    for case in cases:
        gc.collect()
        torch.cuda.empty_cache()
        work = make_work(case, device)
        work.check()
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        fits_l2 = sum(tensor.nbytes for tensor in work.tensors) <= l2_bytes
        figures = {
            "us": _time_cold(work),
            "us_in_l2": _time_warm(work) if fits_l2 else None,
            "extra_bytes": _extra_bytes(work),
        }
        rows.append(sampler_line(case, work, figures, ceiling))
        print(_text(rows[-1]), flush=True)
        del work
    return rows


def sampler_line(
    case: SamplerBenchCase, work: Work, figures: dict[str, Any], ceiling: float
) -> dict[str, Any]:
    """Return a line of the record.

    Args:
        case: what was measured.
        work: its kernel.
        figures: us, us_in_l2 and extra_bytes.
        ceiling: read rate in GB/s.
    """
    of_lines, dtype = case.kernel in LINE_KERNELS, str(case.dtype).removeprefix("torch.")
    peer = PEER_US.get((case.kernel, dtype), {}).get(case.size)
    peer = peer if case.vocab_size == VOCAB_SIZE else None
    in_l2 = figures["us_in_l2"] is not None
    like_peer = figures["us_in_l2"] if in_l2 else figures["us"]
    floor_us = (work.read_bytes + work.write_bytes) / ceiling / 1e3
    return {
        "kernel": case.kernel,
        "dtype": dtype,
        "requests": None if of_lines else case.size,
        "lines": case.size if of_lines else case.size * (NUM_DRAFTS + 1),
        **figures,
        "read_bytes": work.read_bytes,
        "write_bytes": work.write_bytes,
        "floor_us": floor_us,
        "over_floor": figures["us"] / floor_us,
        "peer_us": peer,
        "peer_in_l2": None if peer is None else in_l2,
        "of_peer": None if peer is None else like_peer / peer,
    }


def _time_cold(work: Work) -> float:
    """Return the median time over inputs that are not in L2."""
    num_copies = max(2, math.ceil(_COLD_BYTES / work.read_bytes))
    copies = [tuple(t.clone() for t in work.tensors) for _ in range(num_copies - 1)]
    inputs = itertools.islice(itertools.cycle([work.tensors, *copies]), max(_CALLS, num_copies))
    return time_us([partial(work.call, *tensors) for tensors in inputs])


def _time_warm(work: Work) -> float:
    """Return the median time over one input again and again."""
    return time_us([partial(work.call, *work.tensors)] * _CALLS)


def _extra_bytes(work: Work) -> int:
    """Return the peak memory of a call beside its inputs, outputs included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work.call(*work.tensors)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _text(row: dict[str, Any]) -> str:
    """Return a row as text."""
    in_l2 = "" if row["us_in_l2"] is None else f"{row['us_in_l2']:.1f} in L2"
    peer = "" if row["peer_us"] is None else f"peer {row['peer_us']:.1f}, {row['of_peer']:.2f}"
    return (
        f"{row['kernel']:>16} {row['dtype']:>8} {row['lines']:>3} lines {row['us']:>7.1f} us "
        f"{in_l2:>12}  floor {row['floor_us']:>5.1f}, {row['over_floor']:>5.2f}  {peer:>18}  "
        f"{row['extra_bytes'] / 1e6:.1f} MB"
    )


def main() -> int:
    """Run the bench and write its record; returns 1 after one sentence on what is wrong."""
    defaults = SamplerBenchConfig()
    parser = argparse.ArgumentParser(description="the sampler's kernels beside floor and peer")
    parser.add_argument("--out", type=Path, help="where the JSON record goes")
    parser.add_argument("--dtypes", nargs="+", default=defaults.dtypes)
    parser.add_argument("--kernels", nargs="+", default=defaults.kernels)
    parser.add_argument("--num-lines", nargs="+", type=int, default=defaults.num_lines)
    parser.add_argument("--num-reqs", nargs="+", type=int, default=defaults.num_reqs)
    parser.add_argument("--no-prompt-logprobs", action="store_true")
    args = parser.parse_args()
    try:
        config = SamplerBenchConfig(
            dtypes=args.dtypes,
            kernels=args.kernels,
            num_lines=args.num_lines,
            num_reqs=args.num_reqs,
            prompt_logprobs=not args.no_prompt_logprobs,
        )
        if not torch.cuda.is_available():
            raise ConfigError("bench=sampler measures kernels on a GPU, and torch finds none")
        record = _record(config)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except (SpecdecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _record(config: SamplerBenchConfig) -> dict[str, Any]:
    """Run a configuration on the current device and return its record."""
    device = torch.device("cuda", torch.cuda.current_device())
    command = shown_command("experiments.bench_sampler", sys.argv[1:])
    provenance = collect_provenance(command, 0, device, torch.float32)
    provenance["dtype"] = ", ".join(config.dtypes)
    return {"bench": config.name, "provenance": provenance, **sampler_record(config, device)}


def sampler_record(config: SamplerBenchConfig, device: torch.device) -> dict[str, Any]:
    """Run a configuration and return what its record holds beside name and provenance."""
    with torch.cuda.device(device):
        ceiling = measure_read_ceiling(device)
        print(f"read ceiling {ceiling:.0f} GB/s", flush=True)
        lines = run_sampler_bench(sampler_cases(config), device, ceiling)
        gc.collect()
        prompts = bench_prompt_logprobs(device, VOCAB_SIZE) if config.prompt_logprobs else []
        for line in prompts:
            print(line, flush=True)
    return {
        "config": asdict(config),
        "vocab_size": VOCAB_SIZE,
        "read_ceiling_gb_per_s": ceiling,
        "lines": lines,
        "prompt_logprobs": prompts,
    }


if __name__ == "__main__":
    sys.exit(main())
