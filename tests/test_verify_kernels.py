"""The kernels of block, typical and synthetic verification against their twins."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from sampler.draft_noise import draft_noise, epoch_seeds, epoch_seeds_ref
from sampler.noise import STREAM_DRAFT, STREAM_RESIDUAL, STREAM_TARGET, mix_epoch, mix_seed
from sampler.verify.base import VerifierBase
from sampler.verify.block import BlockConfig, BlockVerifier
from sampler.verify.coupled import CoupledConfig, CoupledVerifier
from sampler.verify.joint import judge_prefixes, judge_prefixes_ref
from sampler.verify.residual import draw_runs, draw_runs_ref
from sampler.verify.synthetic import (
    SyntheticConfig,
    SyntheticVerifier,
    judge_by_rates,
    judge_by_rates_ref,
)
from sampler.verify.typical import (
    TypicalConfig,
    TypicalVerifier,
    judge_typical,
    judge_typical_ref,
)
from specdec.protocols import VerifyInputs
from tests.strategies import draw_cases
from tests.test_sampler_verify_kernels import VERIFICATIONS, verify_inputs

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.gpu,
    # Padding has NaN for logits, which numpy remarks on inside the interpreter.
    pytest.mark.filterwarnings(
        "ignore:All-NaN slice",
        "ignore:invalid value",
        "ignore:divide by zero",
        "ignore:overflow encountered",
    ),
]
WIDE = {**VERIFICATIONS[-1], "vocab_size": 128_256}


def verifiers(device: torch.device, num_columns: int) -> list[VerifierBase]:
    """Return one of each rule, bound to a device."""
    rules = [
        BlockVerifier(BlockConfig()),
        CoupledVerifier(CoupledConfig()),
        TypicalVerifier(TypicalConfig()),
        SyntheticVerifier(SyntheticConfig(mean_length=1.6)),
    ]
    for rule in rules:
        rule.bind(num_columns, device)
    return rules


def compare_prefixes(inputs: VerifyInputs) -> None:
    """Hold the judgement of places, and the draws after it, to the twins."""
    found, twin = judge_prefixes(inputs), judge_prefixes_ref(inputs)
    assert torch.equal(found.accepted, twin.accepted)
    torch.testing.assert_close(found.lse, twin.lse, rtol=1e-6, atol=2e-6)
    for name in ("weight", "stop_prob"):
        a, b = getattr(found, name), getattr(twin, name)
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert not found.accepted[inputs.draft_tokens < 0].any()
    # Every line becomes a stop line once, whatever the noise has accepted.
    for refuse in (None, 0, 1):
        accepted = found.accepted.clone()
        if refuse is not None:
            accepted |= inputs.draft_tokens >= 0
            accepted[inputs.expanded_local_pos == refuse] = False
        judgement = dataclasses.replace(found, accepted=accepted)
        drawn = draw_runs(inputs, judgement, STREAM_RESIDUAL)
        twin_drawn = draw_runs_ref(inputs, judgement, STREAM_RESIDUAL)
        assert torch.equal(drawn.num_sampled, twin_drawn.num_sampled)
        assert torch.equal(drawn.sampled_tokens, twin_drawn.sampled_tokens)


@pytest.mark.parametrize("case", VERIFICATIONS)
def test_judgements_of_places_are_the_twins(device: torch.device, case: dict) -> None:
    compare_prefixes(verify_inputs(case, device))


@pytest.mark.parametrize("case", VERIFICATIONS)
def test_judgements_of_lines_are_the_twins(device: torch.device, case: dict) -> None:
    inputs = verify_inputs(case, device)
    for epsilon, delta in ((0.1, 0.3), (1.0, 0.6)):
        found, twin = (
            judge(inputs, epsilon, delta).accepted for judge in (judge_typical, judge_typical_ref)
        )
        assert torch.equal(found, twin)
    rates = torch.tensor([0.9, 0.5, 0.3, 0.1, 0.0], device=device)[-case["num_columns"] - 1 :]
    found, twin = judge_by_rates(inputs, rates), judge_by_rates_ref(inputs, rates)
    assert torch.equal(found.accepted, twin.accepted)
    drawn, drawn_twin = (
        draw(inputs, found, STREAM_TARGET, refuses=False) for draw in (draw_runs, draw_runs_ref)
    )
    assert torch.equal(drawn.sampled_tokens, drawn_twin.sampled_tokens)
    assert drawn.sampled_tokens.max() < case["vocab_size"]


@pytest.mark.gpu
def test_cases_keep_and_refuse_drafts(device: torch.device) -> None:
    seen: dict[str, list[Tensor]] = {"block": [], "typical": [], "synthetic": []}
    rates = torch.tensor([0.7, 0.5, 0.5, 0.4, 0.0])
    for case in VERIFICATIONS:
        inputs = verify_inputs(case, torch.device("cpu"))
        sampled = inputs.temperature[inputs.expanded_idx_mapping.long().clamp(min=0)] > 0
        own = (inputs.draft_tokens >= 0) & sampled
        seen["block"].append(judge_prefixes_ref(inputs).accepted[own])
        seen["typical"].append(judge_typical_ref(inputs, 0.1, 0.3).accepted[own])
        seen["synthetic"].append(judge_by_rates_ref(inputs, rates).accepted[own])
    for rule, accepted in seen.items():
        share = torch.cat(accepted).double().mean()
        assert 0.1 < share < 0.9, (rule, share)


@pytest.mark.parametrize("seed", range(2))
def test_judgements_over_a_real_vocabulary_are_the_twins(device: torch.device, seed: int) -> None:
    vocab_size = WIDE["vocab_size"] if device.type == "cuda" else 5000
    compare_prefixes(verify_inputs({**WIDE, "vocab_size": vocab_size, "seed": seed}, device))


def test_places_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    case = {**VERIFICATIONS[-1], "vocab_size": 1025, "num_real": 4, "num_padding": 0}
    inputs = verify_inputs(case, device)
    lines = (
        "logits",
        "draft_tokens",
        "draft_kind",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "draw_positions",
    )
    starts = inputs.cu_num_logits.tolist()
    for rule in verifiers(device, case["num_columns"]):
        together = rule.verify(inputs)
        for place, (start, end) in enumerate(itertools.pairwise(starts)):
            count = torch.tensor([0, end - start], dtype=torch.int32, device=device)
            own: dict[str, Any] = {name: getattr(inputs, name)[start:end] for name in lines}
            alone = rule.verify(dataclasses.replace(inputs, cu_num_logits=count, **own))
            assert torch.equal(alone.sampled_tokens[0], together.sampled_tokens[place])


def test_verification_reads_nothing_on_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = VERIFICATIONS[-1]
    inputs, rules = verify_inputs(case, device), verifiers(device, case["num_columns"])

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor was read on the host")

    with monkeypatch.context() as patch:
        for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero"):
            patch.setattr(Tensor, name, refuse)
        outputs = [rule.verify(inputs) for rule in rules]
    for output in outputs:
        assert output.sampled_tokens.shape[1] == case["num_columns"] + 1


def test_nan_logits_give_ids_inside_the_vocabulary(device: torch.device) -> None:
    case = VERIFICATIONS[0]
    inputs = verify_inputs(case, device)
    inputs.logits[:] = float("nan")
    for rule in verifiers(device, case["num_columns"]):
        outputs = rule.verify(inputs)
        column = torch.arange(outputs.sampled_tokens.shape[1], device=device)
        tokens = outputs.sampled_tokens[column < outputs.num_sampled[:, None]]
        assert ((tokens >= 0) & (tokens < case["vocab_size"])).all(), rule.name
    judgement, twin = judge_prefixes(inputs), judge_prefixes_ref(inputs)
    sampled = inputs.temperature[inputs.expanded_idx_mapping.long().clamp(min=0)] > 0
    assert not judgement.accepted[sampled].any()
    assert not twin.accepted[sampled].any()


@pytest.mark.parametrize("case", draw_cases(num=5, num_rows=[1, 3, 256, 257, 1000]))
def test_seeds_of_an_epoch_are_the_twins(device: torch.device, case: dict) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    n = case["num_rows"]
    seeds = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    epochs = torch.randint(0, 2**31 - 1, (n,), generator=generator, dtype=torch.int32)
    found = epoch_seeds(seeds.to(device), epochs.to(device))
    assert torch.equal(found.cpu(), epoch_seeds_ref(seeds, epochs))


def test_draws_of_an_epoch_are_made_with_the_noise_that_drafters_may_ask_for(
    device: torch.device,
) -> None:
    n, vocab_size = 5, 40
    generator = torch.Generator().manual_seed(3)
    rows = torch.tensor([3, 0, 4, -1], dtype=torch.int32, device=device)
    logits = torch.randn(4, vocab_size, generator=generator).to(device)
    positions = torch.tensor([9, 9, 12, 0], device=device)
    seeds = torch.tensor([mix_seed(i, 0) for i in range(n)], device=device)
    lengths = torch.tensor([9, 7, 5, 8, 11], dtype=torch.int32, device=device)
    temperature = torch.tensor([1.0, 1, 1, 1, 0], device=device)
    block = BlockVerifier(BlockConfig())
    noise = draft_noise(block, temperature, seeds, lengths)
    drawn = noise.draw(logits, rows, positions)
    by_hand = logits + noise.gumbel(
        rows.clamp(min=0), positions, torch.arange(vocab_size, device=device)
    )
    assert torch.equal(drawn[:2], by_hand[:2].argmax(1))
    assert torch.equal(drawn[2:], logits[2:].argmax(1))  # a greedy row, padding
    own = seeds[rows[:2].long()]
    mixed = mix_epoch(own, lengths[rows[:2].long()])
    assert not torch.equal(own, mixed)
    # The very noise of the drafters' stream under the epoch's seed, and another in the next step.
    lengths += 1
    assert not torch.equal(
        noise.gumbel(rows[:1], positions[:1], torch.arange(4, device=device)),
        by_hand[:1, :4] - logits[:1, :4],
    )
    assert block.draft_stream == STREAM_DRAFT
