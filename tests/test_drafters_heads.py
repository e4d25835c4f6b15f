"""EAGLE-style heads in an engine: logits, KV and texts, against the heads in plain torch."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.heads import chain
from drafters.heads.checkpoint import load_head
from drafters.heads.modules import ChainHead, make_head
from specdec import LLM, Engine, SamplingParams
from specdec.request import Request
from specdec.testing.lengths import RandomLengthConfig
from tests.attention_cases import AttentionCase, AttentionSizes
from tests.head_cases import CASES, HEAD_DIM, HEADS, KV_HEADS, HeadFiles
from tests.models import random_prompts, tiny_model, tiny_target
from tests.schedules import Arrival, draw_schedule, run_schedule

V, LAYERS, K = 17, 6, 3
RELATIVE = 1e-3
SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 120,
    "max_num_batched_tokens": 24,
    "max_num_reqs": 5,
    "block_size": 4,
    "num_kv_blocks": 90,
}


@pytest.fixture(scope="module")
def model() -> Any:
    """Build the target, as transformers runs it."""
    # Of the usual scale: hidden states of larger models are alike in size, and so are their errors.
    return tiny_model("llama", scale=2.0, vocab_size=V, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def heads(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, HeadFiles]:
    """Write a head in every layout."""
    folder = tmp_path_factory.mktemp("heads")
    return {
        name: HeadFiles(case, model, folder / str(i), seed=i)
        for i, (name, case) in enumerate(CASES.items())
    }


def make_engine(
    model: Any, files: HeadFiles, sampling: str, verifier: str, **options: Any
) -> Engine:
    drafter = {"name": files.case.method, "path": files.path, "sampling": sampling}
    return Engine(tiny_target(model), drafter, verifier, K, **{**SIZES, **options})


class HeadCheck:
    """Compares what a drafter left after a step with the plain head, request by request."""

    def __init__(self, engine: Engine, model: Any, files: HeadFiles) -> None:
        self.engine, self.model, self.files = engine, model, files
        self.logits_error = self.kv_error = 0.0
        self.num_first = self.num_chained = self.num_kv = self.num_steps = self.accepted = 0

    @torch.inference_mode()
    def look(self, request: Request) -> None:
        """Compare a running request, whose outcomes have all been read."""
        runner, row = self.engine.runner, request.row
        state, text = runner.state, torch.tensor(request.token_ids)
        computed = int(state.num_computed_tokens.tensor[row])
        output = self.model.get_decoder()(text[None], output_hidden_states=True)
        features = self.files.fused((*output.hidden_states[:-1], output.last_hidden_state))
        # Input i needs the token behind: of a text that is not in its prompt there is none at last.
        known = min(computed, len(text) - 1)
        _, keys, values = self.files.run(text[1 : known + 1], features[:known])
        slots = self.slots(row, known)
        assert runner.draft_kv is not None
        for cached, fresh in ((runner.draft_kv.keys, keys), (runner.draft_kv.values, values)):
            self.kv_error = max(self.kv_error, relative(cached[0][slots], fresh))
        self.num_kv += 1
        limit = min(int(state.draft_limit[row]), self.engine.scheduler._last_drafted)
        drafts = state.draft_tokens[row, :limit].tolist()
        if computed < len(text) - 1 or not drafts:
            return
        assert -1 not in drafts
        expected = self.files.chain(text, drafts, features)
        assert runner.draft_logits is not None
        law = runner.draft_logits[row, :limit] * request.params.temperature
        for i, own in enumerate(law):
            seen = expected[i].isfinite()
            assert torch.equal(own.isfinite(), seen)
            self.logits_error = max(self.logits_error, relative(own[seen], expected[i][seen]))
        self.num_first += 1
        self.num_chained += limit - 1

    def slots(self, row: int | None, num_tokens: int) -> Tensor:
        """Return the slots of a row's first positions."""
        size = self.engine.config.block_size
        positions = torch.arange(num_tokens)
        table = self.engine.runner.state.block_table.tensor
        return table[row, positions // size].long() * size + positions % size

    def run(self, params: SamplingParams, prompts: list[list[int]], every: int = 1) -> None:
        """Write all texts, looking at the requests at rest after every so many steps."""
        for i, prompt in enumerate(prompts):
            self.engine.add_request(str(i), prompt, params)
        while self.engine.has_requests:
            for increment in self.engine.step():
                if increment.output is not None:
                    self.accepted += increment.output.stats.num_accepted
            self.num_steps += 1
            if self.num_steps % every:
                continue
            unread = {r for f in self.engine._in_flight for r in f.scheduled.requests}
            for request in self.engine.scheduler.running:
                if request not in unread:
                    self.look(request)


def relative(own: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a part of the largest number."""
    if expected.numel() == 0:
        return 0.0
    return float((own - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_plain_head(
    model: Any, heads: dict[str, HeadFiles], name: str
) -> None:
    engine = make_engine(model, heads[name], "gumbel", "rejection")
    check = HeadCheck(engine, model, heads[name])
    check.run(SamplingParams(temperature=1.0, max_tokens=12), random_prompts((9, 2, 30), 1, V))
    assert check.logits_error < RELATIVE
    assert min(check.num_first, check.num_chained) > 6


def make_alone(files: HeadFiles, fused: bool) -> ChainHead:
    """Return a head outside of an engine, run by kernels or by its modules."""
    checkpoint = load_head(files.path, files.case.method)
    head = make_head(checkpoint.spec)
    head.load_state_dict(checkpoint.tensors)
    head.eval().requires_grad_(False)
    head.share(lambda ids: files.embedding[ids], lambda hidden: hidden @ files.head.T)
    if fused:
        head.fuse_kernels(files.embedding)
    return head


def make_pass(seed: int) -> AttentionCase:
    """Return a pass of three texts from their first token on; no cell of the cache is written."""
    sizes = AttentionSizes((6, 1, 4), (0, 0, 0), KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, 4)
    return AttentionCase(dataclasses.replace(sizes, seed=seed), torch.device("cpu"))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_a_pass_for_some_lines_gives_those_of_a_whole_one_and_the_same_kv(
    heads: dict[str, HeadFiles], name: str, fused: bool
) -> None:
    files, generator = heads[name], torch.Generator().manual_seed(7)
    head = make_alone(files, fused)
    # A single line, too: beside a residual of all lines it would be repeated without an error.
    for lines in ([5, 6, 10], [9, 0, 4, 7], [8]):
        whole, some = make_pass(len(lines)), make_pass(len(lines))
        count = len(whole.metadata.positions)
        input_ids = torch.randint(V, (count,), generator=generator)
        features = torch.randn(count, files.size, generator=generator)
        wanted, hidden = torch.tensor(lines), []
        for case, chosen in ((whole, None), (some, wanted)):
            metadata = case.metadata
            hidden.append(head(input_ids, metadata.positions, features, metadata, chosen))
        assert hidden[0].shape == (count, files.size)
        torch.testing.assert_close(hidden[1], hidden[0][wanted], rtol=1e-5, atol=1e-5)
        for full, part in ((whole.kv.keys, some.kv.keys), (whole.kv.values, some.kv.values)):
            # Cells that no pass wrote are NaN in both.
            torch.testing.assert_close(part[0], full[0], rtol=0, atol=0, equal_nan=True)
            assert full[0][whole.metadata.slot_mapping].isfinite().all()


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "EAGLE-3, speculators"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 40, "max_num_batched_tokens": 7},
        {"graph_scope": "step"},
        {"graph_scope": "step", "graph_num_reqs": [4], "draft_length": RandomLengthConfig(seed=1)},
    ],
    ids=["plain", "chunks and preemption", "fixed shapes", "lengths change"],
)
def test_kv_after_fifty_steps_is_that_of_the_committed_text(
    model: Any, heads: dict[str, HeadFiles], name: str, options: dict[str, Any]
) -> None:
    engine = make_engine(model, heads[name], "gumbel", "rejection", **options)
    check = HeadCheck(engine, model, heads[name])
    params = SamplingParams(temperature=1.5, max_tokens=95, seed=3)
    check.run(params, random_prompts((11, 1, 20), 4, V), every=4)
    assert check.kv_error < 1e-4
    assert check.logits_error < RELATIVE
    assert check.num_steps >= 50
    assert check.accepted > 10
    assert check.num_kv > 25


def test_kv_of_the_heads_own_features_is_noticed(
    model: Any, heads: dict[str, HeadFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the last input is computed anew: what the passes behind drafts left stays.
    right = chain.first_head_inputs

    def only_last(ctx: Any, kv: Any) -> Any:
        step = right(ctx, kv)
        if ctx.is_verify.all():
            keep = torch.zeros_like(step.attn_metadata.slot_mapping, dtype=torch.bool)
            keep[step.last_indices] = True
            slots = torch.where(keep, step.attn_metadata.slot_mapping, -1)
            step.attn_metadata.slot_mapping = slots
        return step

    monkeypatch.setattr(chain, "first_head_inputs", only_last)
    check = HeadCheck(
        make_engine(model, heads["EAGLE"], "gumbel", "rejection"), model, heads["EAGLE"]
    )
    check.run(SamplingParams(temperature=1.5, max_tokens=60, seed=3), random_prompts((11,), 4, V))
    assert check.kv_error > 1e-2


def test_features_of_the_wrong_layers_are_noticed(
    model: Any, heads: dict[str, HeadFiles], tmp_path: Path
) -> None:
    files = HeadFiles(CASES["EAGLE-3, SpecForge"], model, tmp_path)
    engine = make_engine(model, files, "gumbel", "rejection")
    files.aux_layers = (1, 4, 3)
    check = HeadCheck(engine, model, files)
    check.run(SamplingParams(temperature=1.0, max_tokens=6), random_prompts((9,), 1, V))
    assert check.logits_error > 10 * RELATIVE


SCOPES = {
    "none": {"graph_scope": "none"},
    "step": {"graph_scope": "step", "graph_num_reqs": [1, 2, 4]},
    "draft": {"graph_scope": "draft", "graph_num_reqs": [2, 5], "max_steps_in_flight": 2},
    "step, two in flight": {"graph_scope": "step", "max_steps_in_flight": 2},
}


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3, SpecForge"])
def test_text_is_that_of_plain_decoding_in_every_scope(
    heads: dict[str, HeadFiles], model: Any, name: str
) -> None:
    options: dict[str, Any] = {"max_model_len": 64, "num_kv_blocks": 18}
    for seed in range(2):
        arrivals = [
            Arrival(a.step, [t % V for t in a.prompt], a.params, a.abort_after)
            for a in draw_schedule(seed)
        ]
        whole = [Arrival(a.step, a.prompt, a.params, None) for a in arrivals]
        plain = Engine(tiny_target(model), "none", "sampled_match", K, **SIZES)
        expected = run_schedule(plain, whole).texts()
        for scope in SCOPES.values():
            engine = make_engine(
                model, heads[name], "argmax", "sampled_match", **{**options, **scope}
            )
            for request_id, text in run_schedule(engine, arrivals).texts().items():
                assert text == expected[request_id][: len(text)], (scope, request_id)


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3"])
def test_scopes_propose_the_same_drafts(heads: dict[str, HeadFiles], model: Any, name: str) -> None:
    prompts = random_prompts((9, 14, 5, 20), 5, V)
    params = SamplingParams(temperature=0, max_tokens=20)
    counts = []
    for scope in SCOPES.values():
        options = {**scope, "max_steps_in_flight": 1}
        engine = make_engine(model, heads[name], "argmax", "greedy", **options)
        result = run_schedule(engine, [Arrival(0, prompt, params, None) for prompt in prompts])
        stats = {i: output.stats.accepted_per_position for i, output in result.outputs.items()}
        counts.append((result.texts(), stats))
        if scope["graph_scope"] != "none":
            parts = {key.part for key in engine.runner.graphs.keys}
            assert parts == {scope["graph_scope"], "propose"}
    assert all(count == counts[0] for count in counts)


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3, SpecForge"])
def test_a_head_that_the_kernels_do_not_compute_runs_by_its_modules(
    model: Any, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = HeadFiles(CASES[name], model, tmp_path, seed=3)
    path = Path(files.path) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"hidden_act": "gelu"}), encoding="utf-8")
    params, prompts = SamplingParams(temperature=0, max_tokens=12), random_prompts((5, 9), 0, V)
    drafter = {"name": CASES[name].method, "path": files.path}
    with caplog.at_level(logging.INFO):
        outputs = LLM(tiny_target(model), drafter, "greedy", K, **SIZES).generate(prompts, params)
    plain = LLM(tiny_target(model), "none", "greedy", **SIZES).generate(prompts, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
    assert "head runs unfused: the activation of its MLP is GELUActivation" in caplog.text
