"""Medusa heads against heads written out by hand, over steps of every kind."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.medusa import MedusaConfig, MedusaDrafter, load_medusa, save_medusa
from runner.models.hf import HFModel
from specdec.errors import ConfigError, WeightsError
from specdec.protocols import DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q, TargetView
from tests.draft_cases import (
    AT_END,
    CHUNK,
    EMPTY,
    LAST_CHUNK,
    PADDING,
    VERIFY,
    DraftCase,
    DraftSizes,
    assert_rows_untouched,
)
from tests.models import tiny_model

V = 50
HIDDEN = 64
CPU = torch.device("cpu")
MIXED = (CHUNK, VERIFY, LAST_CHUNK, AT_END, VERIFY, VERIFY, LAST_CHUNK, PADDING, EMPTY)
SIZES = [
    DraftSizes(MIXED, 1),
    DraftSizes((VERIFY, AT_END, *(VERIFY,) * 6, PADDING), 2, num_drafts=6, block_size=3),
    DraftSizes((VERIFY,), 3, num_drafts=1, block_size=1),
    DraftSizes((CHUNK, LAST_CHUNK, CHUNK), 4, num_drafts=2),
]


def head_tensors(num_heads: int, num_layers: int, own: bool = True) -> dict[str, Tensor]:
    """Return random heads by the names of the Medusa repository."""
    generator = torch.Generator().manual_seed(num_heads)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {}
    for i in range(num_heads):
        for j in range(num_layers):
            tensors[f"{i}.{j}.linear.weight"] = randn(HIDDEN, HIDDEN)
            tensors[f"{i}.{j}.linear.bias"] = randn(HIDDEN)
        if own:
            tensors[f"{i}.{num_layers}.weight"] = randn(V, HIDDEN)
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    """Write a folder of heads."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def plain_logits(tensors: dict[str, Tensor], head: int, hidden: Tensor, lm_head: Tensor) -> Tensor:
    """Compute one head's logits [V] from one hidden state [HIDDEN], element by element."""
    layer = 0
    while f"{head}.{layer}.linear.weight" in tensors:
        x = tensors[f"{head}.{layer}.linear.weight"] @ hidden
        x = x + tensors[f"{head}.{layer}.linear.bias"]
        hidden = hidden + x / (1 + torch.exp(-x))
        layer += 1
    return tensors.get(f"{head}.{layer}.weight", lm_head) @ hidden


class MedusaStep:
    """Heads bound to one step, whose hidden states are random."""

    def __init__(self, sizes: DraftSizes, path: str, sampling: Any = "argmax") -> None:
        self.case = case = DraftCase(sizes, CPU)
        self.hidden = torch.randn(len(case.ctx.positions), HIDDEN)
        self.ctx = replace(case.ctx, hidden_states=self.hidden)
        self.drafter = MedusaDrafter(MedusaConfig(path=path, sampling=sampling))
        self.target = HFModel(tiny_model("llama", vocab_size=V))
        k = sizes.num_drafts
        self.drafter.load(TargetView(self.target, V, HIDDEN, torch.float32, CPU, k, 120))
        self.buffers = case.buffers(with_logits=sampling == "gumbel")
        self.drafter.bind(case.state, self.buffers)
        self.drafter.first_pass(self.ctx)
        # What `propose` is given in a graph of its own has no tokens.
        self.drafter.propose(replace(self.ctx, hidden_states=None))

    def token_before_the_last(self, index: int) -> int:
        """Return the step's token after which a place's last committed token was sampled."""
        place = self.case.places[index]
        verifies = bool(self.ctx.is_verify[index])
        start = place.first - 1 if verifies else place.first  # position of its first token
        return int(self.ctx.query_start_loc[index]) + place.total_len - 2 - start


@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
@pytest.mark.parametrize(
    ("num_heads", "num_layers", "own"), [(4, 1, True), (2, 2, True), (6, 1, False), (1, 0, True)]
)
@pytest.mark.parametrize("sampling", ["argmax", "gumbel"])
def test_drafts_are_those_of_heads_written_by_hand(
    tmp_path: Path, sizes: DraftSizes, num_heads: int, num_layers: int, own: bool, sampling: Any
) -> None:
    tensors = head_tensors(num_heads, num_layers, own)
    step = MedusaStep(sizes, write(tmp_path, tensors), sampling)
    lm_head = step.target.head.weight
    count = min(num_heads, sizes.num_drafts)
    drafts, table = step.buffers.draft_tokens, step.buffers.draft_logits
    rows, kinds = [], set()
    for i, place in enumerate(step.case.places):
        if place.row < 0:
            continue
        rows.append(place.row)
        assert (drafts[place.row, count:] == -1).all()
        if place.draft_limit == 0:
            continue
        hidden = step.hidden[step.token_before_the_last(i)]
        logits = torch.stack([plain_logits(tensors, h, hidden, lm_head) for h in range(count)])
        temperature = float(step.case.temperature[place.row])
        if table is not None:
            logits = logits / (temperature or 1.0)
            torch.testing.assert_close(table[place.row, :count], logits, rtol=1e-4, atol=1e-4)
            positions = torch.arange(place.total_len, place.total_len + count)
            rows_ = torch.full((count,), place.row)
            noise = step.ctx.noise.gumbel(rows_, positions, torch.arange(V))
            logits = table[place.row, :count] + noise * (temperature > 0)
            kind = int(step.buffers.draft_kind[place.row])
            assert kind == (DRAFT_KIND_WITH_Q if temperature > 0 else DRAFT_KIND_ONE_HOT)
            kinds.add(kind)
        assert drafts[place.row, :count].tolist() == logits.argmax(1).tolist()
    assert_rows_untouched(drafts, rows)
    if sampling == "gumbel" and sizes is SIZES[1]:
        assert kinds == {DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q}


def test_places_stop_and_start_at_unlike_tokens_of_the_step(tmp_path: Path) -> None:
    step = MedusaStep(SIZES[1], write(tmp_path, head_tensors(2, 1)))
    offsets = {
        step.token_before_the_last(i) - int(step.ctx.query_start_loc[i])
        for i, place in enumerate(step.case.places)
        if place.draft_limit > 0
    }
    assert len(offsets) > 2


def test_fewer_drafts_than_heads_may_be_asked_for(tmp_path: Path) -> None:
    step = MedusaStep(SIZES[0], write(tmp_path, head_tensors(4, 1)))
    whole = step.buffers.draft_tokens.clone()
    step.buffers.draft_tokens.fill_(-1)
    step.drafter.propose(replace(step.ctx, num_drafts=2))
    rows = [place.row for place in step.case.places if place.row >= 0]
    assert step.buffers.draft_tokens[rows, :2].tolist() == whole[rows, :2].tolist()
    assert (step.buffers.draft_tokens[:, 2:] == -1).all()


def test_confidence_is_the_probability_of_each_draft(tmp_path: Path) -> None:
    tensors = head_tensors(4, 1)
    step = MedusaStep(SIZES[0], write(tmp_path, tensors))
    confidence = torch.zeros(step.case.num_rows, 4)
    step.drafter.bind(step.case.state, replace(step.buffers, draft_confidence=confidence))
    step.drafter.first_pass(step.ctx)
    step.drafter.propose(step.ctx)
    for i, place in enumerate(step.case.places):
        if place.draft_limit > 0:
            hidden = step.hidden[step.token_before_the_last(i)]
            for head in range(4):
                logits = plain_logits(tensors, head, hidden, step.target.head.weight)
                best = logits.softmax(0).max()
                torch.testing.assert_close(confidence[place.row, head], best, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("own", [True, False])
def test_saved_heads_load_again_by_the_names_of_vllm(tmp_path: Path, own: bool) -> None:
    path = write(tmp_path / "first", head_tensors(3, 2, own))
    heads: Any = load_medusa(path, HIDDEN, V)
    lm_head = torch.randn(V, HIDDEN)
    save_medusa(tmp_path / "second", heads, None if own else lm_head)
    again: Any = load_medusa(str(tmp_path / "second"), HIDDEN, V)
    for before, after in zip(heads, again, strict=True):
        for name, tensor in before.state_dict().items():
            assert torch.equal(after.state_dict()[name], tensor)
        if not own:
            assert torch.equal(after.projection.weight, lm_head)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert (config["num_heads"], config["num_hidden_layers"], config["vocab_size"]) == (3, 2, V)


def test_names_may_carry_the_prefix_of_the_whole_model(tmp_path: Path) -> None:
    tensors = head_tensors(2, 1)
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    heads: Any = load_medusa(write(tmp_path, prefixed), HIDDEN, V)
    assert torch.equal(heads[1].projection.weight, tensors["1.1.weight"])
    assert torch.equal(heads[0].blocks[0].bias, tensors["0.0.linear.bias"])


def test_wrong_heads_are_refused_in_one_sentence(tmp_path: Path) -> None:
    good = head_tensors(3, 2)
    cases = [
        ({**good, "0.2.weight": torch.zeros(V + 1, HIDDEN)}, [f"[{V + 1}, {HIDDEN}]", f"[{V}, "]),
        ({**good, "1.0.linear.weight": torch.zeros(8, 8)}, ["[8, 8]", "hidden size 64"]),
        ({**good, "fc.weight": torch.zeros(8, 8)}, ["'fc.weight'", "no part"]),
        ({k: v for k, v in good.items() if k[0] != "1"}, ["heads [0, 2]", "gap"]),
        ({k: v for k, v in good.items() if k[:3] != "1.0"}, ["head 1", "gap"]),
    ]
    for i, (tensors, parts) in enumerate(cases):
        path = write(tmp_path / str(i), tensors)
        with pytest.raises(WeightsError) as caught:
            load_medusa(path, HIDDEN, V)
        for part in parts:
            assert part in str(caught.value)
    with pytest.raises(WeightsError, match="does not exist"):
        load_medusa(str(tmp_path / "none"), HIDDEN, V)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(WeightsError, match="only safetensors"):
        load_medusa(str(pickled), HIDDEN, V)
    with pytest.raises(ConfigError, match="needs path"):
        MedusaConfig()
    shared: Any = load_medusa(write(tmp_path / "shared", head_tensors(1, 1, False)), HIDDEN, V)
    with pytest.raises(ConfigError, match="lm_head"):
        save_medusa(tmp_path / "saved", shared)
