"""What a training step costs: operations by part and bytes that wait for the backward, or time.

    python -m experiments.training.cost --method eagle3 --tokens 512
    python -m experiments.training.cost --method eagle3 --tokens 20480 --device cuda --out file

On a CPU, one step of a target of the embedded one's shape with random weights runs and what torch
dispatches is counted; numbers are for each token, so that they hold for any batch of the same
lengths. On a GPU, steps of such a target in bf16 are timed by part, as `fit` runs them.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.bench_step import random_model
from experiments.provenance import collect_provenance
from experiments.training.config import FitConfig
from experiments.training.dataset import TokenBatch
from experiments.training.frozen_target import FrozenTarget, loss_targets, pad_batch
from experiments.training.losses import LossSpec, OutputHead, fused_loss
from experiments.training.trainee import METHODS, method_class
from runner.loader import LoadedTarget
from runner.models.hf import HFModel

_NUM_LAYERS = 30


@contextmanager
def _saved_bytes(total: dict[str, int]) -> Iterator[None]:
    """Add up the bytes that autograd keeps, each storage once."""
    seen: set[int] = set()

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total["bytes"] = total.get("bytes", 0) + storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


class _Step:
    """A step of a method on random tokens.

    Args:
        config: of the method.
        num_tokens: of the batch.
        length: of each sequence.
        device: where; on a GPU, in bf16.
    """

    def __init__(
        self, config: FitConfig, num_tokens: int, length: int, device: torch.device
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = random_model(_NUM_LAYERS, dtype, device)
        self.target = FrozenTarget(LoadedTarget("random", HFModel(model), None))
        cls = method_class(config.method)
        reduces = cls.reduces_vocabulary and config.draft_vocab_size
        ids = torch.arange(config.draft_vocab_size, device=device) if reduces else None
        self.trainee = cls(config, self.target, ids).float().to(device)
        self.head = OutputHead(self.target.head_weight, ids)
        offsets = self.trainee.offsets
        self.spec = LossSpec(config.loss, offsets, [1.0] * len(offsets), config.chunk_rows)
        starts = torch.arange(0, num_tokens + 1, length)
        zeros = torch.zeros(len(starts) - 1, dtype=torch.int64)
        self.tokens = torch.randint(100, (int(starts[-1]),))
        batch = TokenBatch(self.tokens, starts, zeros, zeros.float(), zeros)
        self.batch = pad_batch(batch).to(device)
        self.optimizer = torch.optim.AdamW(self.trainee.parameters(), fused=device.type == "cuda")
        self._autocast = torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")

    def run(self, part: Callable[[str], AbstractContextManager[None]]) -> None:
        """Run a step; `part` is entered around each of its parts."""
        with part("target"):
            states = self.target.states(self.batch, self.trainee.aux_layers)
        with part("forward"), self._autocast:
            hidden = self.trainee(self.batch, states).float()
        with part("loss"):
            targets = loss_targets(self.batch, states)
            loss, _ = fused_loss(hidden, self.head, targets, self.spec)
        with part("backward"):
            loss.backward()
        with part("update"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def count_step(config: FitConfig, num_tokens: int, length: int) -> dict[str, float]:
    """Count one step on random tokens.

    Args:
        config: of the method.
        num_tokens: of the batch.
        length: of each sequence.

    Returns:
        Millions of operations (a multiplication with its addition counts as two) a token by part,
        and bytes a token that wait for the backward, in float32.
    """
    step = _Step(config, num_tokens, length, torch.device("cpu"))
    figures: dict[str, float] = {}
    saved: dict[str, int] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        watched = _saved_bytes(saved) if name == "forward" else nullcontext()
        with FlopCounterMode(display=False) as counter, watched:
            yield
        figures[f"{name}_mflop"] = round(counter.get_total_flops() / len(step.tokens) / 1e6, 1)

    step.run(part)
    figures["saved_bytes"] = round(saved["bytes"] / len(step.tokens))
    return figures


def time_step(config: FitConfig, num_tokens: int, length: int, num_steps: int) -> dict[str, float]:
    """Time steps on random tokens, on a GPU.

    Args:
        config: of the method.
        num_tokens: of the batch.
        length: of each sequence.
        num_steps: timed, behind three that are not.

    Returns:
        Milliseconds by part (medians), of a whole step, and tokens a second.
    """
    step = _Step(config, num_tokens, length, torch.device("cuda"))
    times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        times.setdefault(name, []).append((begin, end))

    for i in range(3 + num_steps):
        if i == 3:
            times.clear()
        with part("step"):
            step.run(part)
    torch.cuda.synchronize()
    figures = {
        f"{name}_ms": round(statistics.median(a.elapsed_time(b) for a, b in pairs), 3)
        for name, pairs in times.items()
    }
    figures["tokens_per_s"] = round(len(step.tokens) / figures["step_ms"] * 1e3)
    figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return figures


def main() -> int:
    """Count or time on the command line."""
    parser = argparse.ArgumentParser(description="what a training step costs a token")
    parser.add_argument("--method", choices=list(METHODS), default="eagle3")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--unroll", type=int, default=5)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed on a GPU")
    parser.add_argument("--out", type=Path, help="file for the figures, with their provenance")
    given = parser.parse_args()
    config = FitConfig(
        method=given.method,
        unroll=given.unroll,
        draft_vocab_size=given.draft_vocab_size,
        warm_start=False,
    )
    sizes = config, given.tokens, given.length
    figures = count_step(*sizes) if given.device == "cpu" else time_step(*sizes, given.steps)
    print(json.dumps(figures, indent=2))
    if given.out is not None:
        device = torch.device(given.device)
        dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
        provenance = collect_provenance(shlex.join(sys.argv), 0, device, dtype)
        record = {"provenance": provenance, "figures": figures}
        given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
