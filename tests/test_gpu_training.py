"""Training on a GPU: the fused kernel's use in chains, one step in bf16, and its speed."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.training.attention import ChainAttention
from experiments.training.config import FitConfig
from experiments.training.fit import run_fit
from experiments.training.losses import LOSSES, LossSpec, LossTargets, OutputHead, fused_loss
from experiments.training.stage import StageRun
from tests.training_cases import curve_of, save_dataset, save_target

pytestmark = pytest.mark.gpu


def test_chains_in_bf16_are_those_of_dense_attention() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    b, h, length, d, passes = 2, 3, 130, 64, 4
    shape = (b, h, length, d)

    def lines() -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        return x.requires_grad_()

    q, k, v = lines(), lines(), lines()
    chain = [lines() for _ in range(2 * passes)]
    own: Any = ChainAttention.apply(q, k, v, d**-0.5, *chain)
    grad = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    found = torch.autograd.grad(own, [q, k, v, *chain], grad)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v, *chain)]
    wq, wk, wv, *wide_chain = wide
    scores = wq @ wk.mT * d**-0.5
    future = torch.ones(length, length, device="cuda").triu(1).bool()
    scores = scores.masked_fill(future, float("-inf"))
    extra = [(wq * key).sum(-1, keepdim=True) * d**-0.5 for key in wide_chain[::2]]
    weights = torch.cat([scores, *extra], -1).softmax(-1)
    expected = weights[..., :length] @ wv
    for m, value in enumerate(wide_chain[1::2]):
        expected = expected + weights[..., length + m : length + m + 1] * value
    wanted = torch.autograd.grad(expected, wide, grad.float())
    for a, e in zip((own, *found), (expected, *wanted), strict=True):
        error = float((a.float() - e).norm() / e.norm())
        assert error < 2e-2


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("reduced", [False, True], ids=["whole vocabulary", "part"])
def test_the_compiled_loss_is_the_eager_one(kind: str, reduced: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(3, 90, 32, generator=generator), torch.randn(999, 32)
    ids = torch.randperm(999, generator=generator)[:400].sort().values if reduced else None
    lines = torch.arange(2, 88)
    next_ids = torch.randint(999, (90,), generator=generator)
    parts = hidden[0] + 0.5, next_ids, lines, lines % 30
    spec = LossSpec(kind, (1, 2, 3), (1.0, 0.8, 0.6), 37)

    def run(device: str) -> tuple[torch.Tensor, ...]:
        own = hidden.to(device).requires_grad_()
        head = OutputHead(weight.to(device), None if ids is None else ids.to(device))
        loss, figures = fused_loss(own, head, LossTargets(*(p.to(device) for p in parts)), spec)
        loss.backward()
        assert own.grad is not None
        return loss.detach().cpu(), own.grad.cpu(), *(figure.cpu() for figure in figures)

    for found, expected in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["eagle3", "draft_model", "medusa", "block_parallel"])
def test_loss_falls_in_bf16(tmp_path: Path, method: str) -> None:
    config = FitConfig(
        method=method, target=save_target(tmp_path / "target"), device="cuda", unroll=3,
        data=save_dataset(tmp_path / "data"), batch_tokens=256, draft_vocab_size=60, lr=3e-3,
        max_steps=40, max_epochs=0, log_every=10, save_every=20, warm_start=False,
    )  # fmt: skip
    started = time.monotonic()
    run_fit(config, StageRun(tmp_path / "run", "test"))
    curve = curve_of(tmp_path / "run")
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert time.monotonic() - started < 120
