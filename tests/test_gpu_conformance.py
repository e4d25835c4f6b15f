"""Every drafter of ours is held to the rules of the conformance kit on a GPU, with real graphs.

Run on a GPU machine with `pytest -m gpu`.
"""

from typing import Any

import pytest

from specdec.testing import Subject, run_conformance
from specdec.testing.conformance import RULES
from tests import fitting_drafters

pytestmark = pytest.mark.gpu

SAMPLING = {**fitting_drafters.ITSELF, "sampling": "gumbel"}
DRAFTERS: dict[str, Any] = {
    "none": "none",
    "ngram": "ngram",
    "draft_model": fitting_drafters.ITSELF,
    "draft_model, drawing": SAMPLING,
    "layer_skip": {"name": "layer_skip", "num_layers": 3},
    "medusa": fitting_drafters.medusa,
    "eagle": fitting_drafters.eagle,
    "eagle3": fitting_drafters.eagle3,
    "eagle3, drawing": fitting_drafters.eagle3_drawing,
    "block_parallel": fitting_drafters.block_parallel,
    "other tokenizer": fitting_drafters.other_tokenizer,
    "suffix": "suffix",
    "suffix of own text": {"name": "suffix", "use_global": False},
    "suffix, else model": fitting_drafters.mixed("suffix", fitting_drafters.ITSELF),
    "ngram, else eagle": fitting_drafters.ngram_else_eagle,
    "ngram, else drawing": fitting_drafters.mixed("ngram", SAMPLING),
    "best of two": fitting_drafters.best_of_two,
    "record beside ngram": fitting_drafters.mixed("tests.fitting_drafters:RecordAnew", "ngram"),
}
TARGETS: dict[str, Any] = {"other tokenizer": fitting_drafters.target_with_tokenizer}


@pytest.fixture(scope="module", params=DRAFTERS)
def subject(request: pytest.FixtureRequest) -> Subject:
    name = request.param
    return Subject(DRAFTERS[name], device="cuda", target=TARGETS.get(name))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_holds_on_a_gpu(rule: Any, subject: Subject) -> None:
    (finding,) = run_conformance(subject, [rule])
    assert finding.verdict != "broken", finding.message
    if finding.verdict == "not applicable":
        pytest.skip(f"not applicable: {finding.message}")
