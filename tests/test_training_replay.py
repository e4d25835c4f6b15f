"""What was recorded while serving goes through the trainer's forward: the logits are the same.

A small drafter of each kind, with random weights, speculates beside `record`. Whenever it is its
turn, its drafts and the laws that they were drawn from are kept. Later the recorded hidden states,
and the text with these drafts behind it, are given to the trainer's own forward, all passes of it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from experiments.training import attention
from experiments.training.config import FitConfig
from experiments.training.dataset import TokenBatch
from experiments.training.frozen_target import FrozenTarget, PaddedBatch, TargetStates, pad_batch
from experiments.training.losses import OutputHead
from experiments.training.trainee import Trainee, method_class
from specdec import Engine, SamplingParams
from tests.models import VOCAB_SIZE, random_prompts, tiny_model, tiny_target

K = 4
LAYERS = 6
METHODS = ("eagle3", "draft_model", "medusa", "block_parallel")
TOLERANCE = 1e-4  # relative, in float32
IDS = torch.arange(1, VOCAB_SIZE, 2)


@dataclass
class Moment:
    """The drafts of a request behind a text, and their logits."""

    text: list[int]
    drafts: list[int]
    logits: Tensor  # [D, V], -inf where the drafter has no such token


@dataclass
class Served:
    """A drafter that was served, and what it left."""

    trainee: Trainee
    head: OutputHead
    moments: list[Moment]
    records: list[dict[str, Tensor]]


def serve(method: str, folder: Path, beside: list[Any]) -> Served:
    """Serve a random drafter beside `record`, and drafters that are preferred to it."""
    model = tiny_model("llama", scale=2.0, num_hidden_layers=LAYERS)
    target = tiny_target(model)
    config = FitConfig(method=method, unroll=K, data="none", copied_layers=[0, 4], num_layers=2)
    cls = method_class(method)
    ids = IDS if cls.reduces_vocabulary else None
    trainee = cls(config, FrozenTarget(target), ids)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainee.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.3 / max(parameter.shape[-1], 1) ** 0.5)
    trainee.save(folder / "drafter", trainee.state_dict(), "tiny")
    states = folder / "states"
    record = {"name": "record", "folder": str(states), "aux_layers": list(trainee.aux_layers)}
    own = {**trainee.drafter(folder / "drafter"), "sampling": "gumbel"}
    engine = Engine(
        target, {"name": "mixed", "drafters": [record, *beside, own]}, "rejection", K,
        device="cpu", max_num_reqs=3, max_model_len=96, max_num_batched_tokens=24, block_size=4,
    )  # fmt: skip
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=5)
    for i, prompt in enumerate(random_prompts([9, 21, 4, 13], seed=2)):
        engine.add_request(str(i), prompt, params)
    moments: list[Moment] = []
    child = len(beside) + 1
    while engine.has_requests:
        engine.step()
        moments += _moments(engine, child)
    engine.drafter.children[0].flush()  # pyright: ignore
    records = [load_file(path) for path in sorted(states.glob("*.safetensors"))]
    weight = target.model.head.weight.detach()
    return Served(trainee, OutputHead(weight, ids), moments, records)


def _moments(engine: Engine, child: int) -> list[Moment]:
    """Return what a child of the mixture proposes at present."""
    runner, found = engine.runner, []
    for request in engine.scheduler.running:
        row = request.row
        computed = int(runner.state.num_computed_tokens.tensor[row])
        if computed < len(request.token_ids) - 1 or int(engine.drafter.chosen[row]) != child:
            continue
        limit = int(runner.state.draft_limit[row])
        drafts = [t for t in runner.state.draft_tokens[row, :limit].tolist() if t >= 0]
        logits = runner.draft_logits[row, : len(drafts)].clone()
        found.append(Moment(list(request.token_ids), drafts, logits))
    return found


@torch.no_grad()
def error(served: Served, shift: int = 0, batch_cls: type[PaddedBatch] = PaddedBatch) -> float:
    """Return the largest difference between replayed and served logits, as a part of the largest.

    Args:
        served: what to replay.
        shift: positions by which the recorded states are moved.
        batch_cls: what gives tokens to the trainer's passes.
    """
    worst = 0.0
    for moment in served.moments:
        text = moment.text + moment.drafts
        (record,) = (
            r for r in served.records
            if len(r["token_ids"]) >= len(moment.text) - 1
            and r["token_ids"][: len(moment.text) - 1].tolist() == moment.text[:-1]
        )  # fmt: skip
        empty = torch.zeros(1)
        starts, zero = torch.tensor([0, len(text)]), torch.zeros(1, dtype=torch.int64)
        padded = pad_batch(TokenBatch(torch.tensor(text), starts, zero, empty, zero))
        length = padded.token_ids.shape[1]

        def known(states: Tensor, end: int = len(moment.text) - 1, size: int = length) -> Tensor:
            # Behind the text nothing was known when the drafts were made.
            lines = torch.zeros(size, states.shape[1])
            lines[:end] = states[:end].roll(shift, 0)
            return lines

        aux = record.get("aux_hidden_states")
        states = TargetStates(known(record["hidden_states"]), None if aux is None else known(aux))
        batch = batch_cls(**vars(padded))
        hidden = served.trainee(batch, states)
        for i, law in enumerate(moment.logits):
            # A chain starts at its last known input, but a model's pass has a line for every draft.
            last = len(moment.text) - 2
            output = hidden[0, last + 1 + i] if len(hidden) == 1 else hidden[i, last]
            logits = served.head.rows @ output
            own = law if served.head.target_ids is None else law[served.head.target_ids]
            worst = max(worst, float((logits - own).abs().max() / own.abs().max()))
    return worst


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """Serve a drafter of each method."""
    return {name: serve(name, tmp_path_factory.mktemp(name), []) for name in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_replayed_logits_are_those_that_were_served(served: dict[str, Served], method: str) -> None:
    own = served[method]
    assert len(own.moments) > 20
    assert sum(len(moment.drafts) for moment in own.moments) > 3 * len(own.moments)
    assert error(own) < TOLERANCE


def test_states_recorded_while_another_drafter_speculates_are_the_same(tmp_path: Path) -> None:
    own = serve("eagle3", tmp_path, [{"name": "ngram", "min_n": 1}])
    assert len(own.moments) > 5
    assert error(own) < TOLERANCE


@pytest.mark.parametrize("method", ["eagle3", "medusa", "block_parallel"])
def test_states_of_the_position_before_are_noticed(served: dict[str, Served], method: str) -> None:
    assert error(served[method], shift=1) > 100 * TOLERANCE


class _OneFurther(PaddedBatch):
    def behind(self, distance: int) -> Tensor:
        return super().behind(distance + 1)


@pytest.mark.parametrize("method", ["eagle3", "block_parallel"])
def test_tokens_of_the_position_behind_are_noticed(served: dict[str, Served], method: str) -> None:
    assert error(served[method], batch_cls=_OneFurther) > 100 * TOLERANCE


@pytest.mark.parametrize("method", ["eagle3", "block_parallel"])
def test_a_mask_that_forgets_the_chain_is_noticed(
    served: dict[str, Served], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def causal(q: Any, k: Any, v: Any, scaling: float, *chain: Any) -> Any:
        return attention._fused_forward(q, k, v, scaling)[0]

    monkeypatch.setattr(attention.ChainAttention, "apply", causal)
    assert error(served[method]) > 100 * TOLERANCE


@pytest.mark.parametrize("method", ["eagle3", "block_parallel"])
def test_passes_at_the_position_of_the_first_are_noticed(
    served: dict[str, Served], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unmoved(Tensor):
        def __add__(self, other: Any) -> Any:
            return self

    plain: Any = PaddedBatch.positions.fget  # pyright: ignore
    unmoved = property(lambda batch: plain(batch).as_subclass(Unmoved))
    monkeypatch.setattr(PaddedBatch, "positions", unmoved)
    assert error(served[method]) > 100 * TOLERANCE
