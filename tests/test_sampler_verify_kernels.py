"""The kernels of verification against their twins: what lines judge, what is kept and drawn."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sampler.lines import gather_line_drafts, gather_line_drafts_ref
from sampler.noise import STREAM_RESIDUAL, mix_seed
from sampler.verify.chain import assemble_run, assemble_run_ref, num_accepted_ref
from sampler.verify.judge import judge_drafts, judge_drafts_ref
from sampler.verify.rejection import RejectionConfig, RejectionVerifier
from sampler.verify.residual import draw_runs, draw_runs_ref
from specdec.protocols import (
    DRAFT_KIND_NONE,
    DRAFT_KIND_ONE_HOT,
    DRAFT_KIND_WITH_Q,
    VerifyInputs,
)
from tests.poison import fill_poison
from tests.strategies import assert_same, draw_cases

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.gpu,
    # Padding has NaN for logits, which numpy remarks on inside the interpreter.
    pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value"),
]


@dataclass(frozen=True)
class Step:
    """A step of places with unlike numbers of lines, padding among them, over permuted rows."""

    num_lines: list[int]  # of each place
    rows: Tensor  # [R] int32, place -> row, -1 in padding
    num_rows: int
    rng: np.random.Generator

    @property
    def cu_num_logits(self) -> Tensor:
        return torch.tensor([0, *np.cumsum(self.num_lines)], dtype=torch.int32)

    @property
    def place_of_line(self) -> Tensor:
        return torch.repeat_interleave(torch.tensor(self.num_lines))

    @property
    def local_pos(self) -> Tensor:
        return torch.cat([torch.arange(n) for n in self.num_lines])

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.from_numpy(self.rng.integers(low, high, shape))


def make_step(case: dict[str, Any], max_lines: int) -> Step:
    """Build the step of a case; only padding may have no line, or more lines than drafts + 1."""
    rng = np.random.default_rng(case["seed"])
    num_real, num_padding = case["num_real"], case["num_padding"]
    num_rows = num_real + 3
    rows = [*rng.permutation(num_rows)[:num_real], *[-1] * num_padding]
    num_lines = [int(rng.integers(1, max_lines + 1)) for _ in range(num_real)]
    num_lines += [int(rng.integers(0, max_lines + 1)) for _ in range(num_padding)]
    return Step(num_lines, torch.tensor(rows, dtype=torch.int32), num_rows, rng)


def moved(value: Any, device: torch.device) -> Any:
    """Return an object of tensors on a device."""
    return SimpleNamespace(
        **{
            name: field.to(device) if isinstance(field, Tensor) else field
            for name, field in vars(value).items()
        }
    )


STEPS = draw_cases(num=12, num_real=[1, 2, 4], num_padding=range(3), num_columns=[0, 1, 2, 4, 5])


@pytest.mark.parametrize("case", STEPS)
def test_what_lines_judge_is_what_the_twin_says(device: torch.device, case: dict) -> None:
    num_columns = case["num_columns"]
    step = make_step(case, num_columns + 2)
    num_logits = sum(step.num_lines)
    real = step.rows[step.rows >= 0].long()
    drafts = fill_poison(torch.empty(step.num_rows, num_columns, dtype=torch.int64))
    kinds = fill_poison(torch.empty(step.num_rows, dtype=torch.int8))
    drafts[real] = step.integers(-1, 900, len(real), num_columns)
    kinds[real] = step.integers(0, 3, len(real)).to(torch.int8)
    state = SimpleNamespace(
        draft_tokens=drafts, draft_kind=kinds, num_speculative_tokens=num_columns
    )
    batch = SimpleNamespace(
        idx_mapping=step.rows,
        cu_num_logits=step.cu_num_logits,
        positions=step.integers(0, 5000, 2 * num_logits + 1),
        expanded_idx_mapping=step.rows[step.place_of_line],
        expanded_local_pos=step.local_pos.int(),
        logits_indices=torch.from_numpy(step.rng.permutation(2 * num_logits + 1)[:num_logits]),
        num_reqs=len(step.rows),
        num_logits=num_logits,
        max_num_logits=max(step.num_lines),
    )
    arguments: Any = (moved(batch, device), moved(state, device))
    found, twin = gather_line_drafts(*arguments), gather_line_drafts_ref(*arguments)
    assert_same(vars(found), vars(twin))
    assert {name: t.dtype for name, t in vars(found).items()} == {
        "draft_tokens": torch.int64,
        "draft_kind": torch.int8,
        "draw_positions": torch.int64,
        "num_drafts": torch.int32,
    }
    # Told again in plain words.
    tokens = found.draft_tokens.tolist()
    line = 0
    for place, row in enumerate(step.rows.tolist()):
        own = tokens[line : line + step.num_lines[place]]
        expected = drafts[row].tolist()[: max(step.num_lines[place] - 1, 0)] if row >= 0 else []
        expected += [-1] * (len(own) - len(expected))
        assert own == expected
        assert int(found.num_drafts[place]) == sum(token >= 0 for token in own)
        line += len(own)


@pytest.mark.parametrize("case", STEPS)
def test_runs_are_the_twins(device: torch.device, case: dict) -> None:
    step = make_step(case, case["num_columns"] + 1)
    num_logits = sum(step.num_lines)
    accepted = step.integers(0, 4, num_logits) > 0
    drafts = step.integers(0, 900, num_logits)
    next_tokens = step.integers(1000, 1900, num_logits)
    ends = step.cu_num_logits[1:].long()[torch.tensor(step.num_lines) > 0] - 1
    accepted[ends], drafts[ends] = False, -1
    width = max(step.num_lines) + case["seed"] % 2
    tensors = (t.to(device) for t in (accepted, drafts, next_tokens, step.cu_num_logits))
    arguments: Any = (*tensors, width)
    found, twin = assemble_run(*arguments), assemble_run_ref(*arguments)
    assert_same(vars(found), vars(twin))
    assert found.sampled_tokens.shape == (len(step.rows), width)
    line = 0
    for place, num_lines in enumerate(step.num_lines):
        run = []
        for i in range(line, line + num_lines):
            run.append(int(drafts[i] if accepted[i] else next_tokens[i]))
            if not accepted[i]:
                break
        assert int(found.num_sampled[place]) == len(run)
        assert found.sampled_tokens[place].tolist() == run + [-1] * (width - len(run))
        line += num_lines


def verify_inputs(case: dict[str, Any], device: torch.device) -> VerifyInputs:
    """Build one verification: kinds and temperatures by row, drafts that are kept now and then.

    Poison lies in every other row, in draft logits that belong to no draft, and behind the
    vocabulary; the lines of padding are NaN.
    """
    vocab_size, num_columns = case["vocab_size"], case["num_columns"]
    step = make_step(case, num_columns + 1)
    generator = torch.Generator().manual_seed(case["seed"])
    line_rows = step.rows[step.place_of_line].long()
    local = step.local_pos
    num_lines, real = len(local), line_rows >= 0
    shape = (num_lines, vocab_size)
    wide = torch.full((num_lines, vocab_size + 3), 1e30)
    logits = wide[:, :vocab_size]
    logits[:] = case["spread"] * torch.randn(shape, generator=generator)
    masked = torch.rand(shape, generator=generator) < 0.3
    masked[torch.arange(num_lines), step.integers(0, vocab_size, num_lines)] = False
    logits[masked] = float("-inf")
    draft_law = logits.clone() + torch.randn(shape, generator=generator)
    draft_law[:, step.integers(0, vocab_size, 1)] = 1.0
    drafts = torch.multinomial(draft_law.softmax(1), 1, generator=generator)[:, 0]
    drafts[torch.rand(num_lines, generator=generator) < 0.1] = -1
    is_last = torch.ones(num_lines, dtype=torch.bool)
    is_last[:-1] = step.place_of_line[:-1] != step.place_of_line[1:]
    drafts[is_last | ~real] = -1
    logits[~real] = float("nan")

    temperature = fill_poison(torch.empty(step.num_rows))
    seeds = fill_poison(torch.empty(step.num_rows, dtype=torch.int64))
    kinds = fill_poison(torch.empty(step.num_rows, dtype=torch.int8))
    for i, row in enumerate(step.rows[step.rows >= 0].tolist(), start=case["seed"]):
        temperature[row] = [1.0, 0.6, 0.0, 1.0, 0.0][i % 5]
        kinds[row] = [case["kind"], DRAFT_KIND_ONE_HOT, case["kind"], *[DRAFT_KIND_WITH_Q] * 2][
            i % 5
        ]
        seeds[row] = mix_seed(case["seed"], row)
    draft_kind = torch.where(real, kinds[line_rows], DRAFT_KIND_NONE).to(torch.int8)
    draft_logits = None
    if case["has_q"]:
        draft_logits = fill_poison(torch.empty(step.num_rows, num_columns, vocab_size))
        has_q = (drafts >= 0) & (draft_kind == DRAFT_KIND_WITH_Q)
        draft_logits[line_rows[has_q], local[has_q]] = draft_law[has_q]
    tensors = {
        "draft_tokens": drafts,
        "draft_kind": draft_kind,
        "cu_num_logits": step.cu_num_logits,
        "expanded_idx_mapping": line_rows.int(),
        "expanded_local_pos": local.int(),
        "draw_positions": step.integers(0, 5000, num_lines),
        "temperature": temperature,
        "seeds": seeds,
    }
    return VerifyInputs(
        logits=wide.to(device)[:, :vocab_size],
        all_greedy=False,
        draft_logits=None if draft_logits is None else draft_logits.to(device),
        max_num_logits=num_columns + 1,
        **{name: tensor.to(device) for name, tensor in tensors.items()},
    )


VERIFICATIONS = [
    *draw_cases(
        num=12,
        vocab_size=[2, 7, 61, 999, 1024],
        num_real=[1, 2, 4],
        num_padding=range(3),
        num_columns=[1, 2, 4],
        spread=[0.3, 2.0],
        kind=[DRAFT_KIND_ONE_HOT, DRAFT_KIND_WITH_Q],
        has_q=[True, True, False],
    ),
    *[
        {
            "vocab_size": vocab_size,
            "num_real": num_real,
            "num_padding": 1,
            "num_columns": 2,
            "spread": 1.0,
            "kind": DRAFT_KIND_WITH_Q,
            "has_q": True,
            "seed": 5,
        }
        for vocab_size, num_real in ((1, 4), (4097, 2))
    ],
]


def stop_lines(inputs: VerifyInputs, accepted: Tensor) -> Tensor:
    """Return the lines that draw, of places that have lines."""
    count = num_accepted_ref(accepted, inputs.cu_num_logits, inputs.max_num_logits)
    return (inputs.cu_num_logits[:-1].long() + count)[count >= 0]


@pytest.mark.parametrize("case", VERIFICATIONS)
def test_judgements_and_draws_are_the_twins(device: torch.device, case: dict) -> None:
    compare_judgements(case, device)


def compare_judgements(case: dict, device: torch.device) -> None:
    """Hold the judgement of lines, and the runs that are drawn, to the twins."""
    inputs = verify_inputs(case, device)
    before = {
        name: tensor.clone() for name, tensor in vars(inputs).items() if isinstance(tensor, Tensor)
    }
    found, twin = judge_drafts(inputs), judge_drafts_ref(inputs)
    assert torch.equal(found.accepted, twin.accepted)
    torch.testing.assert_close(found.lse, twin.lse, rtol=1e-6, atol=2e-6)
    assert not found.accepted[inputs.draft_tokens < 0].any()

    # Every line becomes a stop line once, whatever the noise has accepted.
    for refuse in (None, 0, 1):
        accepted = found.accepted.clone()
        if refuse is not None:
            accepted |= inputs.draft_tokens >= 0
            accepted[inputs.expanded_local_pos == refuse] = False
        judgement = dataclasses.replace(found, accepted=accepted)
        drawn = draw_runs(inputs, judgement, STREAM_RESIDUAL)
        drawn_twin = draw_runs_ref(inputs, judgement, STREAM_RESIDUAL)
        assert torch.equal(drawn.num_sampled, drawn_twin.num_sampled)
        assert torch.equal(drawn.sampled_tokens, drawn_twin.sampled_tokens)
        lines = stop_lines(inputs, accepted)
        (places,) = (drawn.num_sampled > 0).nonzero(as_tuple=True)
        last = drawn.sampled_tokens[places, drawn.num_sampled[places].long() - 1]
        assert ((last >= 0) & (last < case["vocab_size"])).all()
        if case["vocab_size"] > 2:
            real = lines[inputs.expanded_idx_mapping[lines] >= 0]
            own = last[inputs.expanded_idx_mapping[lines] >= 0]
            chosen = inputs.logits[real].gather(1, own[:, None])
            assert (chosen > float("-inf")).all(), "a masked token was drawn"
    for name, tensor in before.items():
        torch.testing.assert_close(
            getattr(inputs, name), tensor, rtol=0, atol=0, equal_nan=True, msg=name
        )


def test_cases_keep_and_refuse_drafts_of_every_kind(device: torch.device) -> None:
    seen = set()
    for case in VERIFICATIONS:
        inputs = verify_inputs(case, torch.device("cpu"))
        judgement = judge_drafts_ref(inputs)
        for line in (inputs.draft_tokens >= 0).nonzero().flatten().tolist():
            greedy = float(inputs.temperature[inputs.expanded_idx_mapping[line]]) == 0
            has_q = inputs.draft_logits is not None and inputs.draft_kind[line] == 2
            seen.add((greedy, bool(has_q), bool(judgement.accepted[line])))
    assert len(seen) == 8


def test_residual_without_mass_falls_back_to_the_target(device: torch.device) -> None:
    case = {**VERIFICATIONS[-1], "vocab_size": 7, "num_real": 1, "num_padding": 0}
    inputs = verify_inputs(case, device)
    row = int(inputs.expanded_idx_mapping[0])
    assert inputs.draft_logits is not None
    # p = q, yet the draft is refused, as rounding might have it; then a law of one token.
    inputs.draft_tokens[0] = 3
    inputs.logits[0] = torch.arange(7.0)
    inputs.draft_logits[row, 0] = torch.arange(7.0)
    for kind in (DRAFT_KIND_WITH_Q, DRAFT_KIND_ONE_HOT):
        if kind == DRAFT_KIND_ONE_HOT:
            inputs.logits[0] = torch.where(torch.arange(7) == 3, 1.0, float("-inf"))
        inputs.draft_kind[0] = kind
        judgement = judge_drafts(inputs)
        judgement.accepted[0] = False
        none = dataclasses.replace(inputs, draft_tokens=torch.full_like(inputs.draft_tokens, -1))
        for draw in (draw_runs, draw_runs_ref):
            fallback = int(draw(inputs, judgement, STREAM_RESIDUAL).sampled_tokens[0, 0])
            assert fallback == int(draw(none, judgement, STREAM_RESIDUAL).sampled_tokens[0, 0])


def test_places_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    case = {**VERIFICATIONS[-1], "vocab_size": 1025, "num_real": 4, "num_padding": 0}
    inputs = verify_inputs(case, device)
    verifier = RejectionVerifier(RejectionConfig())
    together = verifier.verify(inputs)
    starts = inputs.cu_num_logits.tolist()
    for place in range(len(starts) - 1):
        own = slice(starts[place], starts[place + 1])
        alone = verifier.verify(
            dataclasses.replace(
                inputs,
                cu_num_logits=torch.tensor(
                    [0, own.stop - own.start], dtype=torch.int32, device=device
                ),
                **{
                    name: getattr(inputs, name)[own]
                    for name in (
                        "logits",
                        "draft_tokens",
                        "draft_kind",
                        "expanded_idx_mapping",
                        "expanded_local_pos",
                        "draw_positions",
                    )
                },
            )
        )
        assert torch.equal(alone.sampled_tokens[0], together.sampled_tokens[place])
        assert int(alone.num_sampled[0]) == int(together.num_sampled[place])


def test_nan_logits_give_ids_inside_the_vocabulary(device: torch.device) -> None:
    inputs = verify_inputs(VERIFICATIONS[0], device)
    inputs.logits[:] = float("nan")
    outputs = RejectionVerifier(RejectionConfig()).verify(inputs)
    kept = (
        torch.arange(outputs.sampled_tokens.shape[1], device=device) < outputs.num_sampled[:, None]
    )
    tokens = outputs.sampled_tokens[kept]
    assert ((tokens >= 0) & (tokens < VERIFICATIONS[0]["vocab_size"])).all()
