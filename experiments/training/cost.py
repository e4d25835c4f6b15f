"""What a training step costs, counted: operations by part, and bytes that wait for the backward.

    python -m experiments.training.cost --method eagle3 --tokens 512

Runs one step of a target of the embedded one's shape with random weights on the CPU and counts what
torch dispatches; numbers are for each token, so that they hold for any batch of the same lengths.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.bench_step import random_model
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
    model = random_model(_NUM_LAYERS, torch.float32, torch.device("cpu"))
    target = FrozenTarget(LoadedTarget("random", HFModel(model), None))
    cls = method_class(config.method)
    reduces = cls.reduces_vocabulary and config.draft_vocab_size
    ids = torch.arange(config.draft_vocab_size) if reduces else None
    trainee = cls(config, target, ids)
    head = OutputHead(target.head_weight, ids)
    spec = LossSpec(config.loss, trainee.offsets, [1.0] * len(trainee.offsets), config.chunk_rows)
    starts = torch.arange(0, num_tokens + 1, length)
    zeros = torch.zeros(len(starts) - 1, dtype=torch.int64)
    tokens = torch.randint(100, (int(starts[-1]),))
    batch = pad_batch(TokenBatch(tokens, starts, zeros, zeros.float(), zeros))
    figures: dict[str, float] = {}
    saved: dict[str, int] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        with FlopCounterMode(display=False) as counter:
            yield
        figures[f"{name}_mflop"] = round(counter.get_total_flops() / len(tokens) / 1e6, 1)

    with part("target"):
        states = target.states(batch, trainee.aux_layers)
    with part("forward"), _saved_bytes(saved):
        hidden = trainee(batch, states)
    with part("loss"):
        loss, _ = fused_loss(hidden, head, loss_targets(batch, states), spec)
    with part("backward"):
        loss.backward()
    figures["saved_bytes"] = round(saved["bytes"] / len(tokens))
    return figures


def main() -> int:
    """Count on the command line."""
    parser = argparse.ArgumentParser(description="what a training step costs a token")
    parser.add_argument("--method", choices=list(METHODS), default="eagle3")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--unroll", type=int, default=5)
    given = parser.parse_args()
    config = FitConfig(method=given.method, unroll=given.unroll, warm_start=False)
    print(json.dumps(count_step(config, given.tokens, given.length), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
