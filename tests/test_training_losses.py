"""The fused loss against formulas written out over whole logits, with autograd's gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.training import losses
from experiments.training.losses import LOSSES, LossSpec, LossTargets, OutputHead, fused_loss
from specdec.errors import ConfigError

T, HIDDEN, V, J = 40, 12, 23, 3
LENGTH = 10  # lines of a sequence
OFFSETS = (1, 2, 3)
WEIGHTS = (1.0, 0.5, 0.25)


class Case:
    """Random states, a draft vocabulary, and some lines that count."""

    def __init__(self, seed: int = 0, ids: list[int] | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

        self.hidden = normal(J, T, HIDDEN).requires_grad_()
        self.weight, self.states = normal(V, HIDDEN), normal(T, HIDDEN)
        self.ids = None if ids is None else torch.tensor(ids)
        self.next_ids = torch.randint(V, (T,), generator=generator)
        lines = torch.randperm(T, generator=generator)[:27].sort().values
        self.targets = LossTargets(self.states, self.next_ids, lines, lines % LENGTH)
        self.head = OutputHead(self.weight, self.ids)

    def plain(self, kind: str) -> Tensor:
        """Return the loss, line by line, in the order of the definitions."""
        ids = torch.arange(V) if self.ids is None else self.ids
        total = torch.zeros((), dtype=torch.float64)
        for j, offset in enumerate(OFFSETS):
            values = []
            for line, place in zip(self.targets.lines, self.targets.places, strict=True):
                if place < offset:
                    continue
                law = (self.weight @ self.states[line]).double().softmax(0)[ids]
                draft = (self.weight[ids] @ self.hidden[j, line - offset]).double().softmax(0)
                if kind == "kl":
                    values.append(-(law * draft.log()).sum())
                elif kind == "tv":
                    values.append(1 - torch.minimum(law, draft).sum())
                else:
                    label = self.next_ids[line]
                    known = (ids == label).nonzero()
                    values.append(-draft[known[0, 0]].log() if len(known) else draft.sum() * 0)
            total = total + WEIGHTS[j] / sum(WEIGHTS) * torch.stack(values).mean()
        return total


IDS = [2, 3, 5, 7, 11, 13, 17, 19, 22]


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole vocabulary", "part"])
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("chunk_rows", [7, 4096])
def test_loss_and_gradient_are_those_of_the_formula(
    kind: str, ids: list[int] | None, chunk_rows: int
) -> None:
    case = Case(ids=ids)
    spec = LossSpec(kind, OFFSETS, WEIGHTS, chunk_rows)
    own, figures = fused_loss(case.hidden, case.head, case.targets, spec)
    (gradient,) = torch.autograd.grad(own * 3, case.hidden)
    expected = case.plain(kind)
    (wanted,) = torch.autograd.grad(expected * 3, case.hidden)
    torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    counts = [(case.targets.places >= offset).sum() for offset in OFFSETS]
    assert figures.num_positions.tolist() == [int(count) for count in counts]


def test_a_wrong_offset_is_noticed() -> None:
    case = Case(ids=IDS)
    own, _ = fused_loss(case.hidden, case.head, case.targets, LossSpec("kl", (0, 1, 2), WEIGHTS))
    # A hundred times what the formula and the fused loss may differ by.
    assert abs(float(own.detach()) - float(case.plain("kl").detach())) > 1e-3


def test_acceptance_and_agreement_are_those_of_the_laws() -> None:
    case = Case(seed=2, ids=IDS)
    _, figures = fused_loss(case.hidden, case.head, case.targets, LossSpec("kl", OFFSETS, WEIGHTS))
    for j, offset in enumerate(OFFSETS):
        lines = case.targets.lines[case.targets.places >= offset]
        law = (case.states[lines] @ case.weight.T).softmax(1)
        draft = torch.zeros_like(law)
        logits = case.hidden[j, lines - offset].detach() @ case.weight[case.ids].T
        draft[:, case.ids] = logits.softmax(1)
        accepted = torch.minimum(law, draft).sum(1).mean()
        agreed = (law.argmax(1) == draft.argmax(1)).float().mean()
        assert float(figures.accepted[j]) == pytest.approx(float(accepted), abs=1e-5)
        assert float(figures.agreed[j]) == pytest.approx(float(agreed), abs=1e-6)
    # The least total variation that there can be is that of the tokens that D does not have.
    assert float(figures.accepted.max()) <= 1


def test_total_variation_is_least_at_the_targets_own_law() -> None:
    case = Case(ids=None)
    same = torch.stack([case.states.roll(-offset, 0) for offset in OFFSETS])
    spec = LossSpec("tv", OFFSETS, WEIGHTS)
    loss, figures = fused_loss(same, case.head, case.targets, spec)
    assert abs(float(loss)) < 1e-5
    assert figures.agreed.tolist() == [1.0] * J


def test_no_logits_of_more_than_a_chunk_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    plain = losses.linear

    def measured(states: Tensor, rows: Tensor) -> Tensor:
        nonlocal largest
        logits = plain(states, rows)
        largest = max(largest, len(logits))
        return logits

    monkeypatch.setattr(losses, "linear", measured)
    case = Case(ids=IDS)
    fused_loss(case.hidden, case.head, case.targets, LossSpec("kl", OFFSETS, WEIGHTS, 5))
    assert largest == 5


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="ce, kl, tv"):
        LossSpec("mse", (1,), (1.0,))


def test_inputs_without_gradients_have_none() -> None:
    case = Case()
    hidden: Any = case.hidden.detach()
    loss, _ = fused_loss(hidden, case.head, case.targets, LossSpec("kl", OFFSETS, WEIGHTS))
    assert not loss.requires_grad
