"""Drafts of the host between those of a sampling draft model leave the target's joint law alone."""

from collections.abc import Sequence
from typing import Any

import pytest

from drafters.base import DrafterBase, DrafterConfig
from runner import adopt_drafts as adopting
from runner.input_batch import InputBatch
from runner.states import RequestState
from specdec.protocols import DraftContext, DrafterCapabilities, HostRequest, HostRow
from specdec.registry import register_drafter
from tests.test_rejection_law_engine import PLAIN, V, dense_noise, folders, law_test

__all__ = ["dense_noise", "folders"]  # fixtures


@register_drafter("test_host_in_turns", DrafterConfig)
class HostInTurns(DrafterBase):
    """Counts up from the last token, for every other token of a text."""

    capabilities = DrafterCapabilities(on_cpu=True)

    def propose(self, ctx: DraftContext) -> None:
        pass

    def propose_on_host(self, rows: Sequence[HostRow]) -> list[list[int]]:
        return [self._propose(row) for row in rows]

    def _propose(self, row: HostRow) -> list[int]:
        tokens = row.request.token_ids
        if len(tokens) % 2:
            return []
        return [(tokens[-1] + 1 + i) % V for i in range(row.num_drafts)]

    def end_request(self, request: HostRequest) -> None:
        pass


def mixture(folder: str) -> dict[str, Any]:
    sampling = {"name": "draft_model", "model": folder, "sampling": "gumbel"}
    return {"name": "mixed", "drafters": ["test_host_in_turns", sampling]}


@pytest.mark.parametrize("scope", ["none", "step"])
def test_the_joint_law_is_the_targets(folders: dict[str, str], scope: str) -> None:
    drafter = mixture(folders["opposite"])
    test, outputs = law_test(drafter, PLAIN, graph_scope=scope, graph_num_reqs=[512])
    assert test.passes, test
    accepted = sum(output.stats.num_accepted for output in outputs)
    assert 0 < accepted < sum(output.stats.num_drafted for output in outputs)


def test_a_draft_of_the_host_that_keeps_the_kind_of_another_is_noticed(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeping_kinds(batch: InputBatch, state: RequestState) -> None:
        kinds = state.draft_kind.clone()
        adopting.adopt_drafts_ref(batch, state)
        state.draft_kind.copy_(kinds)

    monkeypatch.setattr("runner.step.adopt_drafts", keeping_kinds)
    test, _ = law_test(mixture(folders["opposite"]), PLAIN)
    assert not test.passes, test
