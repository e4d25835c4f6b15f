"""KV after any number of steps is that of the committed text, computed from scratch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runner import draft_inputs
from specdec import LLM, SamplingParams
from specdec.request import Request
from specdec.testing.lengths import RandomLengthConfig
from tests.models import SIZES, random_prompts, tiny_model, tiny_target

V = 17
K = 3
NUM_TOKENS = 18
PROMPTS = random_prompts((5, 23, 3, 14, 9, 1), seed=2, vocab_size=V)
TOLERANCE = 2e-5  # float32 in unlike batch shapes


def draft() -> Any:
    """Build a draft model that agrees with the target now and then: its last layer is missing."""
    model = tiny_model("llama", vocab_size=V)
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[:-1]
    model.config.num_hidden_layers = SIZES["num_hidden_layers"] - 1
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save the draft model."""
    path = tmp_path_factory.mktemp("draft")
    draft().save_pretrained(path)
    return str(path)


@torch.inference_mode()
def largest_error(model: Any, kv: Any, slots: Tensor, token_ids: list[int]) -> float:
    """Return how far cached keys and values are from those of a fresh pass over a text."""
    cache = model(torch.tensor([token_ids]), use_cache=True).past_key_values
    errors = [0.0]
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        for cached, fresh in (
            (keys, cache.layers[layer].keys),
            (values, cache.layers[layer].values),
        ):
            errors.append(float((cached[slots] - fresh[0].transpose(0, 1)).abs().max()))
    return max(errors)


class KvCheck:
    """Compares both caches of an engine with fresh passes, request by request."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.target, self.draft = tiny_model("llama", vocab_size=V), draft()
        self.num_checked = 0

    def slots(self, row: int, num_tokens: int) -> Tensor:
        """Return the slots of a row's first positions."""
        block_size = self.engine.config.block_size
        positions = torch.arange(num_tokens)
        blocks = self.engine.runner.state.block_table.tensor[row, positions // block_size]
        return blocks.long() * block_size + positions % block_size

    def request_error(self, request: Request) -> float:
        """Return the largest error of a running request, whose outcomes have all been read."""
        assert request.row is not None
        state, runner = self.engine.runner.state, self.engine.runner
        computed = int(state.num_computed_tokens.tensor[request.row])
        committed = len(request.token_ids)
        assert state.total_len.tensor[request.row] == committed
        assert state.all_token_ids.tensor[request.row, :committed].tolist() == request.token_ids
        scheduler = self.engine.scheduler
        column = scheduler.running.index(request)
        assert computed == scheduler.table.num_computed_tokens[column]
        # The target has not seen a sampled token yet; the draft has: it drafted what follows.
        target_ids = request.token_ids[:computed]
        prefilling = scheduler.table.is_prefilling[column]
        draft_ids = target_ids if prefilling else request.token_ids
        self.num_checked += 1
        return max(
            largest_error(self.target, runner.kv, self.slots(request.row, computed), target_ids),
            largest_error(
                self.draft, runner.draft_kv, self.slots(request.row, len(draft_ids)), draft_ids
            ),
        )

    def run(self, params: SamplingParams) -> float:
        """Write all texts and return the largest error after any step."""
        for i, prompt in enumerate(PROMPTS):
            self.engine.add_request(str(i), prompt, params)
        worst, accepted = 0.0, 0
        while self.engine.has_requests:
            for increment in self.engine.step():
                if increment.output is not None:
                    accepted += increment.output.stats.num_accepted
            # A row is at rest only where no step that advances it is still unread.
            unread = {r for f in self.engine._in_flight for r in f.scheduled.requests}
            for request in self.engine.scheduler.running:
                if request not in unread:
                    worst = max(worst, self.request_error(request))
        assert accepted > 0
        assert self.num_checked > len(PROMPTS)
        return worst


SAMPLED = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


@pytest.mark.parametrize(
    ("sampling", "verifier", "params"),
    [("argmax", "greedy", GREEDY), ("gumbel", "rejection", SAMPLED)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 18, "block_size": 4},
        {"max_num_reqs": 2, "block_size": 3},
        {"draft_length": RandomLengthConfig(seed=1), "num_kv_blocks": 18, "block_size": 4},
        {"draft_length": RandomLengthConfig(seed=2, lengths=[0, 3]), "graph_scope": "step"},
    ],
    ids=["plain", "chunks", "preempted", "rows reused", "lengths change", "0 or K in shapes"],
)
def test_kv_is_that_of_the_committed_text(
    folder: str, options: dict[str, Any], sampling: str, verifier: str, params: SamplingParams
) -> None:
    drafter = {"name": "draft_model", "model": folder, "sampling": sampling}
    llm = LLM(
        tiny_target(tiny_model("llama", vocab_size=V)),
        drafter,
        verifier,
        K,
        **{"max_model_len": 48, **options},
    )
    assert KvCheck(llm).run(params) < TOLERANCE


def test_draft_kv_that_skips_the_last_accepted_draft_is_noticed(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The draft's own passes never saw the last draft: without the first pass its KV would be stale.
    right = draft_inputs.first_pass_inputs

    def only_last(ctx: Any, kv: Any) -> Any:
        step = right(ctx, kv)
        if ctx.is_verify.all():
            keep = torch.zeros_like(step.attn_metadata.slot_mapping, dtype=torch.bool)
            keep[step.last_indices] = True
            slots = torch.where(keep, step.attn_metadata.slot_mapping, -1)
            step.attn_metadata.slot_mapping = slots
        return step

    monkeypatch.setattr("drafters.autoregressive.first_pass_inputs", only_last)
    drafter = {"name": "draft_model", "model": folder}
    target = tiny_target(tiny_model("llama", vocab_size=V))
    llm = LLM(target, drafter, "greedy", K, max_model_len=48)
    assert KvCheck(llm).run(GREEDY) > 100 * TOLERANCE
