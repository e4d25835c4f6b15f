"""The sampler's pipeline: what a verifier is given, what is left out, what no GPU is asked."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sampler.gumbel import gumbel_sample_ref
from sampler.noise import STREAM_DRAFT, mix_seed
from sampler.sampler import Sampler, process_logits
from sampler.temperature import scale_logits_ref
from sampler.top_k_top_p import apply_top_k_top_p_ref
from sampler.verify.greedy import GreedyConfig, GreedyVerifier
from sampler.verify.rejection import RejectionConfig, RejectionVerifier
from sampler.verify.sampled_match import SampledMatchConfig, SampledMatchVerifier
from specdec.protocols import DRAFT_KIND_ONE_HOT, VerifyInputs, VerifyOutputs
from specdec.types import SamplingParams
from tests.poison import fill_poison

V = 61
K = 2
NUM_ROWS = 7
ROWS = [5, 0, 3]
PARAMS = [
    SamplingParams(temperature=0.7, top_k=9, seed=1),
    SamplingParams(temperature=0.0, top_p=0.5, seed=2),
    SamplingParams(temperature=1.0, seed=3),
]
GREEDY = [SamplingParams(temperature=0.0, top_k=3, seed=seed) for seed in (1, 2, 3)]
CPU = torch.device("cpu")
VERIFIERS: dict[str, Any] = {
    "greedy": (GreedyVerifier, GreedyConfig, GREEDY),
    "sampled_match": (SampledMatchVerifier, SampledMatchConfig, PARAMS),
    "rejection": (RejectionVerifier, RejectionConfig, PARAMS),
}


class Recorder(RejectionVerifier):
    """Keeps what it is given."""

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        self.seen = inputs
        return super().verify(inputs)


def make_sampler(verifier: Any, params: list[SamplingParams], device: torch.device) -> Sampler:
    """Build a sampler whose rows ROWS hold the parameters; all other rows are poison."""
    sampler = Sampler(verifier, NUM_ROWS, V, device)
    for table in sampler.tables:
        fill_poison(table.tensor)
    for row, wanted in zip(ROWS, params, strict=True):
        assert wanted.seed is not None
        sampler.add_request(row, wanted, wanted.seed)
    for table in sampler.tables:
        table.apply_write()
    return sampler


def make_step(device: torch.device, rows: list[int], seed: int = 0) -> tuple[Tensor, Any, Any]:
    """Return logits, batch and state of a step in which every place has K + 1 lines."""
    rng = np.random.default_rng(seed)
    num_places, num_logits = len(rows), len(rows) * (K + 1)
    idx_mapping = torch.tensor(rows, dtype=torch.int32)
    local = torch.arange(K + 1).repeat(num_places)
    batch = {
        "idx_mapping": idx_mapping,
        "cu_num_logits": (K + 1) * torch.arange(num_places + 1, dtype=torch.int32),
        "positions": torch.from_numpy(rng.integers(0, 500, num_logits)),
        "logits_indices": torch.arange(num_logits),
        "expanded_idx_mapping": idx_mapping.repeat_interleave(K + 1),
        "expanded_local_pos": local.int(),
    }
    state = {
        "draft_tokens": torch.from_numpy(rng.integers(0, V, (NUM_ROWS, K))),
        "draft_kind": torch.full((NUM_ROWS,), DRAFT_KIND_ONE_HOT, dtype=torch.int8),
    }
    logits = torch.from_numpy(rng.normal(size=(num_logits, V)) * 3).float()
    return (
        logits.to(device),
        SimpleNamespace(
            num_reqs=num_places,
            num_logits=num_logits,
            max_num_logits=K + 1,
            rows_np=None,
            plain=False,
            **{name: tensor.to(device) for name, tensor in batch.items()},
        ),
        SimpleNamespace(
            num_speculative_tokens=K, **{name: t.to(device) for name, t in state.items()}
        ),
    )


def test_greedy_rows_are_verified_without_a_copy_of_the_logits() -> None:
    recorder = Recorder(RejectionConfig())
    logits, batch, state = make_step(CPU, [*ROWS, -1])
    make_sampler(recorder, GREEDY, CPU).sample(logits, batch, state, None)
    assert recorder.seen.all_greedy
    assert recorder.seen.logits is logits


def test_a_sampled_row_makes_all_logits_processed() -> None:
    recorder = Recorder(RejectionConfig())
    sampler = make_sampler(recorder, PARAMS, CPU)
    logits, batch, state = make_step(CPU, [*ROWS, -1])
    raw = logits.clone()
    sampler.sample(logits, batch, state, None)
    seen = recorder.seen
    assert torch.equal(logits, raw)
    assert not seen.all_greedy
    lines = batch.expanded_idx_mapping
    assert torch.equal(seen.logits, process_logits(raw, lines, sampler.state))
    kept = torch.isfinite(seen.logits).sum(1).view(-1, K + 1)[:, 0].tolist()
    assert kept == [9, V, V, V]
    assert torch.equal(seen.logits[lines != 5], raw[lines != 5])
    assert torch.equal(seen.draw_positions, batch.positions + 1)


def test_a_step_of_padding_alone_takes_the_dearest_path() -> None:
    recorder = Recorder(RejectionConfig())
    logits, batch, state = make_step(CPU, [-1, -1])
    output = make_sampler(recorder, GREEDY, CPU).sample(logits, batch, state, None)
    assert not recorder.seen.all_greedy
    assert output.num_drafts.tolist() == [0, 0]
    assert output.num_sampled.tolist() == [1, 1]


def test_tables_hold_every_parameter_of_a_row() -> None:
    sampler = make_sampler(GreedyVerifier(GreedyConfig()), PARAMS, CPU)
    state = sampler.state
    assert [table.tensor for table in state.tables] == [
        state.temperature,
        state.top_k,
        state.top_p,
        state.seeds,
    ]
    assert state.temperature[ROWS].tolist() == pytest.approx([0.7, 0.0, 1.0])
    assert state.top_k[ROWS].tolist() == [9, V, V]
    assert state.top_p[ROWS].tolist() == [1.0, 0.5, 1.0]
    assert state.seeds[ROWS].tolist() == [mix_seed(seed, 0) for seed in (1, 2, 3)]
    assert not any(table.num_staged for table in sampler.tables)


class HostReadError(Exception):
    """Raised where a test forbids to read a tensor on the host."""


@pytest.fixture
def forbidden_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every way in which our code could read a tensor on the host an error."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise HostReadError

    for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero"):
        monkeypatch.setattr(Tensor, name, refuse)
    monkeypatch.setattr(torch, "nonzero", refuse)


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("name", VERIFIERS)
def test_sampling_on_a_gpu_reads_nothing_on_the_host(
    device: torch.device, name: str, request: pytest.FixtureRequest
) -> None:
    verifier_cls, config_cls, params = VERIFIERS[name]
    sampler = make_sampler(verifier_cls(config_cls()), params, device)
    logits, batch, state = make_step(device, [*ROWS, -1])
    request.getfixturevalue("forbidden_reads")
    output = sampler.sample(logits, batch, state, None)
    request.getfixturevalue("monkeypatch").undo()
    assert output.sampled_tokens.shape == (4, K + 1)
    assert output.num_drafts.tolist() == [K] * 3 + [0]


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_on_a_gpu_gives_what_the_twins_give(
    device: torch.device, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier_cls, config_cls, params = VERIFIERS[name]
    sampler = make_sampler(verifier_cls(config_cls()), params, device)
    step = make_step(device, [*ROWS, -1], seed)
    output = sampler.sample(*step, None)
    for module in ("gumbel", "lines", "temperature", "top_k_top_p", "sampler"):
        monkeypatch.setattr(f"sampler.{module}.use_triton", lambda tensor: False)
    for module in ("chain", "judge", "residual"):
        monkeypatch.setattr(f"sampler.verify.{module}.use_triton", lambda tensor: False)
    twin = sampler.sample(*step, None)
    real = slice(0, len(ROWS))
    assert torch.equal(output.sampled_tokens[real], twin.sampled_tokens[real])
    assert torch.equal(output.num_sampled, twin.num_sampled)
    assert torch.equal(output.num_drafts, twin.num_drafts)


@pytest.mark.interpreter
@pytest.mark.gpu
def test_processed_logits_keep_greedy_lines_and_padding_raw(device: torch.device) -> None:
    sampler = make_sampler(GreedyVerifier(GreedyConfig()), PARAMS, device)
    logits = make_step(device, [*ROWS, -1])[0].to(torch.bfloat16)
    lines = torch.tensor([*ROWS, -1], dtype=torch.int32, device=device).repeat_interleave(K + 1)
    state = sampler.state
    found = process_logits(logits, lines, state)
    twin = scale_logits_ref(logits, lines, state.temperature)
    apply_top_k_top_p_ref(twin, lines, state.temperature, state.top_k, state.top_p)
    assert torch.equal(found, twin)
    assert torch.equal(found[K + 1 : 2 * (K + 1)], logits[K + 1 : 2 * (K + 1)].float())


@pytest.mark.interpreter
@pytest.mark.gpu
def test_drafters_draw_with_the_draft_stream(device: torch.device) -> None:
    sampler = make_sampler(GreedyVerifier(GreedyConfig()), PARAMS, device)
    logits, batch, _ = make_step(device, [*ROWS, -1])
    logits, positions = logits[:: K + 1], batch.positions[:: K + 1]
    drawn = sampler.noise().draw(logits, batch.idx_mapping, positions)
    state = sampler.state
    twin = gumbel_sample_ref(
        logits, batch.idx_mapping, positions, state.temperature, state.seeds, STREAM_DRAFT
    )
    assert torch.equal(drawn, twin)
    best = logits.argmax(1)
    assert torch.equal(drawn[[1, 3]], best[[1, 3]])  # a greedy row, padding
    # By hand, from the noise that drafters may ask for token by token.
    noise = sampler.noise().gumbel(batch.idx_mapping, positions, torch.arange(V, device=device))
    assert torch.equal(drawn[[0, 2]], (logits + noise).argmax(1)[[0, 2]])
