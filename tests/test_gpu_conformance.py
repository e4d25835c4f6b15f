"""Every drafter of ours is held to the rules of the conformance kit on a GPU, with real graphs.

Run on a GPU machine with `pytest -m gpu`.
"""

from typing import Any

import pytest

from specdec.testing import Subject, run_conformance
from specdec.testing.conformance import RULES

pytestmark = pytest.mark.gpu

DRAFTERS: list[Any] = [
    "none",
    "ngram",
    {"name": "draft_model", "model": "target"},
    {"name": "draft_model", "model": "target", "sampling": "gumbel"},
]


@pytest.fixture(scope="module", params=DRAFTERS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param, device="cuda")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_holds_on_a_gpu(rule: Any, subject: Subject) -> None:
    (finding,) = run_conformance(subject, [rule])
    assert finding.verdict != "broken", finding.message
    if finding.verdict == "not applicable":
        pytest.skip(f"not applicable: {finding.message}")
