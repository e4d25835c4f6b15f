"""Drafts that end where the drafter doubts them: where they end, and that the law stays."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runner import step
from runner.confidence import cut_by_confidence
from specdec import LLM, Engine, SamplingParams
from specdec.request import Request
from tests.models import random_prompts, tiny_model, tiny_target
from tests.statistics import dense_gumbel_sample
from tests.test_draft_kv import V, draft
from tests.test_rejection_law_engine import FLAT, PLAIN, draft_model, folders, law_test

__all__ = ["folders"]  # a fixture

K = 4
THRESHOLD = 0.05


@pytest.fixture(autouse=True)
def dense_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash all of the few tokens at once; test_rejection_law shows that this changes nothing."""
    monkeypatch.setattr("sampler.gumbel.gumbel_sample_ref", dense_gumbel_sample)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("draft")
    draft().save_pretrained(path)
    return str(path)


def make_llm(folder: str, sampling: str, threshold: float | None, **options: Any) -> LLM:
    policy: Any = "fixed"
    if threshold is not None:
        policy = {"name": "confidence", "threshold": threshold}
    return LLM(
        tiny_target(tiny_model("llama", vocab_size=V)),
        draft_model(folder, sampling),
        options.pop("verifier", "rejection"),
        K,
        draft_length=policy,
        **{"max_model_len": 64, **options},
    )


PROMPTS = random_prompts((5, 9, 3, 14), seed=4, vocab_size=V)
PARAMS = [
    SamplingParams(temperature=t, seed=i, max_tokens=20) for i, t in enumerate((1, 0.5, 0, 1))
]


@torch.inference_mode()
def kept_by_reference(model: Any, request: Request, temperature: float, drafts: list[int]) -> int:
    """Return how many of the drafts after a text stay, from the draft model's own laws."""
    token_ids, product = list(request.token_ids), 1.0
    for i, token in enumerate(drafts):
        logits = model(torch.tensor([token_ids])).logits[0, -1]
        product *= float((logits / (temperature or 1.0)).softmax(0)[token])
        if product < THRESHOLD:
            return i
        token_ids.append(token)
    return len(drafts)


@pytest.mark.parametrize("scope", ["none", "step"])
@pytest.mark.parametrize("sampling", ["argmax", "gumbel"])
def test_drafts_end_where_an_independent_computation_ends_them(
    folder: str, sampling: str, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Engine = make_llm(folder, sampling, THRESHOLD, graph_scope=scope).engine
    state, model = engine.runner.state, draft()
    uncut: dict[int, list[int]] = {}

    def watched(idx_mapping: Tensor, draft_tokens: Tensor, *rest: Any) -> None:
        rows = [row for row in idx_mapping.tolist() if row >= 0]
        uncut.update({row: draft_tokens[row].tolist() for row in rows})
        cut_by_confidence(idx_mapping, draft_tokens, *rest)

    monkeypatch.setattr(step, "cut_by_confidence", watched)
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)
    seen = set()
    while engine.has_requests:
        engine.step()
        for request in engine.scheduler.running:
            row, params = request.row, request.params
            assert row is not None
            drafts, limit = uncut[row], int(state.draft_limit[row])
            sampled = sampling == "gumbel" and params.temperature > 0
            own_temperature = params.temperature if sampled else 0.0
            kept = kept_by_reference(model, request, own_temperature, drafts)
            # A draft that was drawn from a law stays to be weighed against it, and is the last.
            kept = min(kept + sampled, K, limit)
            left = [token for token in state.draft_tokens[row].tolist() if token >= 0]
            assert left == drafts[:kept]
            seen.add(kept)
    assert len(seen) >= 4, "the cut falls at many places"


@pytest.mark.parametrize("sampling", ["argmax", "gumbel"])
def test_threshold_zero_is_a_fixed_length(folder: str, sampling: str) -> None:
    fixed = make_llm(folder, sampling, None).generate(PROMPTS, PARAMS)
    outputs = make_llm(folder, sampling, 0.0).generate(PROMPTS, PARAMS)
    for one, other in zip(fixed, outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats == other.stats


def test_threshold_one_leaves_no_draft_but_those_that_were_drawn(folder: str) -> None:
    outputs = make_llm(folder, "argmax", 1.0).generate(PROMPTS, PARAMS)
    assert sum(out.stats.num_drafted for out in outputs) == 0
    assert all(out.stats.num_verify_tokens == out.stats.num_verify_steps for out in outputs)
    outputs = make_llm(folder, "gumbel", 1.0).generate(PROMPTS, PARAMS)
    for out, params in zip(outputs, PARAMS, strict=True):
        drafted = out.stats.drafted_per_position
        assert (drafted[0] > 0) == (params.temperature > 0)
        assert not any(drafted[1:])


@pytest.mark.parametrize("threshold", [0.05, 0.5])
def test_fewer_drafts_are_accepted_more_often_and_texts_stay(folder: str, threshold: float) -> None:
    params = [SamplingParams(temperature=0, max_tokens=30)] * len(PROMPTS)
    fixed = make_llm(folder, "argmax", None, verifier="greedy").generate(PROMPTS, params)
    outputs = make_llm(folder, "argmax", threshold, verifier="greedy").generate(PROMPTS, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in fixed]
    drafted, accepted = (
        [sum(getattr(out.stats, name) for out in group) for group in (fixed, outputs)]
        for name in ("num_drafted", "num_accepted")
    )
    assert 0 < drafted[1] < drafted[0]
    assert accepted[1] / drafted[1] > accepted[0] / drafted[0]


def test_buffer_is_there_only_where_the_cut_reads_it(folder: str) -> None:
    assert make_llm(folder, "argmax", None).engine.runner.draft_confidence is None
    llm = make_llm(folder, "argmax", 0.5, max_num_reqs=7)
    confidence = llm.engine.runner.draft_confidence
    assert confidence is not None
    assert confidence.shape == (7, K)
    assert confidence.dtype == torch.float32


# --- the law --------------------------------------------------------------------------------------

CUT = {"name": "confidence", "threshold": 0.4}


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("model", ["opposite", "other"])
def test_cut_of_sampled_drafts_leaves_the_law_untouched(
    folders: dict[str, str], model: str, verifier: str
) -> None:
    result, outputs = law_test(draft_model(folders[model]), PLAIN, verifier, draft_length=CUT)
    assert result.passes, result
    drafted = [sum(out.stats.drafted_per_position[i] for out in outputs) for i in range(2)]
    assert drafted[1] < 0.9 * drafted[0]


def test_cut_of_likeliest_drafts_leaves_the_law_untouched(folders: dict[str, str]) -> None:
    result, _ = law_test(draft_model(folders["other"], "argmax"), PLAIN, draft_length=CUT)
    assert result.passes, result


def test_leaving_out_a_drawn_draft_for_what_it_is_breaks_the_law(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_one_hot(idx_mapping: Tensor, tokens: Tensor, kind: Tensor, *rest: Any) -> None:
        cut_by_confidence(idx_mapping, tokens, torch.zeros_like(kind), *rest)

    monkeypatch.setattr(step, "cut_by_confidence", as_one_hot)
    result, _ = law_test(draft_model(folders["other"]), FLAT, draft_length=CUT)
    assert not result.passes, result


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_law_holds_while_the_length_changes(folders: dict[str, str], verifier: str) -> None:
    lengths = {"name": "specdec.testing.lengths:RandomLength", "seed": 3}
    for scope in ("none", "step"):
        options = {"graph_scope": scope, "draft_length": lengths, "max_steps_in_flight": 2}
        if scope == "step":
            options["graph_num_reqs"] = [512]
        result, outputs = law_test(draft_model(folders["opposite"]), PLAIN, verifier, **options)
        assert result.passes, (scope, result)
        assert sum(out.stats.num_accepted for out in outputs) > 0
