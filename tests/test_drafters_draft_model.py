"""A draft model, step by step: what it proposes, which q it hands over, which KV it writes."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.draft_model import DraftModelConfig, DraftModelDrafter
from runner import draft_inputs
from runner.models.hf import HFModel
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
    Place,
    assert_rows_untouched,
)
from tests.models import tiny_model

V = 50
CPU = torch.device("cpu")
MIXED = (CHUNK, VERIFY, LAST_CHUNK, AT_END, VERIFY, VERIFY, LAST_CHUNK, PADDING, EMPTY)
SIZES = [
    DraftSizes(MIXED, 1),
    DraftSizes((VERIFY, AT_END, *(VERIFY,) * 6, PADDING), 2, num_drafts=6, block_size=3),
    DraftSizes((VERIFY,), 3, num_drafts=1, block_size=1),
    DraftSizes((CHUNK, LAST_CHUNK, CHUNK), 4, num_drafts=2, block_size=16),
]
steps = pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
UNWRITTEN = 7.0  # what no layer of the tiny models computes


class DraftStep:
    """A draft model bound to one step, whose KV of all earlier steps is in place.

    Args:
        sizes: of the step.
        vocab_size: of the draft model.
        sampling: "argmax" or "gumbel".
    """

    def __init__(self, sizes: DraftSizes, vocab_size: int = V, sampling: Any = "argmax") -> None:
        self.case = DraftCase(sizes, CPU)
        self.model: Any = tiny_model("llama", vocab_size=vocab_size)
        self.drafter = DraftModelDrafter(DraftModelConfig(model="target", sampling=sampling))
        runnable = HFModel(copy.deepcopy(self.model))
        num_drafts = sizes.num_drafts
        self.drafter.load(TargetView(runnable, V, 1, torch.float32, CPU, num_drafts, 120))
        self.kv = runnable.make_kv_cache(self.case.num_blocks, sizes.block_size)
        self.num_slots = self.case.num_blocks * sizes.block_size
        for table in (*self.kv.keys, *self.kv.values):
            table[: self.num_slots] = UNWRITTEN
        self.buffers = self.case.buffers(self.kv, with_logits=sampling == "gumbel")
        self.drafter.bind(self.case.state, self.buffers)
        for place in self.case.places:
            if place.row >= 0:
                self._fill_kv(place)
        self.before = [table.clone() for table in (*self.kv.keys, *self.kv.values)]

    def text(self, place: Place) -> list[int]:
        """Return the committed tokens of a place as the draft model reads them."""
        text = self.case.state.all_token_ids[place.row, : place.total_len]
        return text.clamp(max=self.model.config.vocab_size - 1).tolist()

    @torch.inference_mode()
    def _fill_kv(self, place: Place) -> None:
        """Write the KV of the positions that earlier steps covered, by transformers' own pass."""
        token_ids = torch.tensor([self.text(place)[: place.first]])
        if place.first == 0:
            return
        cache = self.model(token_ids, use_cache=True).past_key_values
        slots = [self.case.slot(place.row, position) for position in range(place.first)]
        for layer, (keys, values) in enumerate(zip(self.kv.keys, self.kv.values, strict=True)):
            keys[slots] = cache.layers[layer].keys[0].transpose(0, 1)
            values[slots] = cache.layers[layer].values[0].transpose(0, 1)

    def run(self) -> None:
        """Run both halves of the drafter."""
        self.drafter.first_pass(self.case.ctx)
        self.drafter.propose(self.case.ctx)

    def written(self) -> set[int]:
        """Return the slots whose keys or values changed since this was asked last."""
        tables = [*self.kv.keys, *self.kv.values]
        changed = torch.zeros(self.num_slots, dtype=torch.bool)
        for before, table in zip(self.before, tables, strict=True):
            changed |= (before != table)[: self.num_slots].flatten(1).any(1)
        self.before = [table.clone() for table in tables]
        return set(changed.nonzero()[:, 0].tolist())

    def drafting_places(self) -> list[Place]:
        """Return the places that can use a draft."""
        return [place for place in self.case.places if place.draft_limit > 0]

    @torch.inference_mode()
    def logits(self, place: Place, run: list[int]) -> Tensor:
        """Return transformers' own logits for the token behind each of the text, run[0], ..."""
        token_ids = torch.tensor([self.text(place) + run[:-1]])
        return self.model(token_ids, use_cache=False).logits[0, -len(run) :, :V]


@steps
@pytest.mark.parametrize("vocab_size", [V, V - 9, V + 4])
def test_drafts_are_the_models_own_greedy_continuation(sizes: DraftSizes, vocab_size: int) -> None:
    step = DraftStep(sizes, vocab_size)
    step.run()
    drafts = step.buffers.draft_tokens
    for place in step.drafting_places():
        run = drafts[place.row, : place.draft_limit].tolist()
        logits = step.logits(place, run)
        best = logits.topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3, "a near tie; choose another seed"
        assert run == logits.argmax(1).tolist()
    assert_rows_untouched(drafts, [place.row for place in step.case.places if place.row >= 0])
    assert drafts.max() < min(V, vocab_size)
    if sizes is SIZES[1]:
        assert max(place.draft_limit for place in step.case.places) > 3


@steps
@pytest.mark.parametrize("vocab_size", [V, V - 9])
def test_sampled_drafts_come_with_the_law_they_are_drawn_from(
    sizes: DraftSizes, vocab_size: int
) -> None:
    step = DraftStep(sizes, vocab_size, "gumbel")
    step.run()
    case, table = step.case, step.buffers.draft_logits
    assert table is not None
    kinds = set()
    for place in step.drafting_places():
        row, count = place.row, place.draft_limit
        temperature = float(case.temperature[row])
        run = step.buffers.draft_tokens[row, :count]
        own = step.logits(place, run.tolist()) / (temperature or 1.0)
        torch.testing.assert_close(table[row, :count, :vocab_size], own, rtol=1e-4, atol=1e-4)
        assert (table[row, :, vocab_size:] == float("-inf")).all()
        positions = torch.arange(place.total_len, place.total_len + count)
        noise = case.ctx.noise.gumbel(torch.full((count,), row), positions, torch.arange(V))
        scores = table[row, :count] + noise * (temperature > 0)
        assert run.tolist() == scores.argmax(1).tolist()
        kind = DRAFT_KIND_WITH_Q if temperature > 0 else DRAFT_KIND_ONE_HOT
        assert int(step.buffers.draft_kind[row]) == kind
        kinds.add(kind)
    if sizes is SIZES[1]:
        assert kinds == {DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q}
    rows = [place.row for place in case.places if place.row >= 0]
    others = [row for row in range(case.num_rows) if row not in rows]
    assert table[others, :, :vocab_size].isnan().all()
    assert (step.buffers.draft_kind[others] == 0).all()


def committed_slots(step: DraftStep) -> set[int]:
    """Return the slots of the positions that the step committed."""
    case = step.case
    return {case.slot(p.row, pos) for p in case.places if p.row >= 0 for pos in p.committed}


@steps
def test_passes_write_the_kv_of_committed_positions_and_usable_drafts_alone(
    sizes: DraftSizes,
) -> None:
    step = DraftStep(sizes)
    step.drafter.first_pass(step.case.ctx)
    assert step.written() == committed_slots(step)
    step.drafter.propose(step.case.ctx)
    drafted = {
        step.case.slot(place.row, place.total_len - 1 + index)
        for place in step.case.places
        for index in range(1, place.draft_limit)
    }
    assert step.written() == drafted
    if len(sizes.kinds) > 3:
        # Rejected drafts, and rows at their very end, are among the places.
        assert any(p.total_len < p.first + p.length for p in step.drafting_places())
        assert any(p.total_len == sizes.max_model_len for p in step.case.places)


def test_kv_of_one_position_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = draft_inputs.first_pass_inputs

    def one_more(ctx: Any, kv: Any) -> Any:
        state = replace(
            ctx.state,
            total_len=ctx.state.total_len + 1,
            all_token_ids=ctx.state.all_token_ids.clamp(min=0),
            block_table=ctx.state.block_table.clamp(min=0),
        )
        return right(replace(ctx, state=state), kv)

    monkeypatch.setattr("drafters.autoregressive.first_pass_inputs", one_more)
    # No row here is at its end: there is a block for the position that should not be written.
    step = DraftStep(DraftSizes((VERIFY,) * 4, 2, num_drafts=6))
    step.drafter.first_pass(step.case.ctx)
    assert step.written() > committed_slots(step)


def test_the_state_kept_is_a_hidden_state_a_row() -> None:
    step = DraftStep(SIZES[0])
    assert step.drafter.state_bytes() == step.case.num_rows * step.model.config.hidden_size * 4
