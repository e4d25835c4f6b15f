"""The conformance kit names the rule that a broken drafter breaks, and lets its sound sibling pass.

Each broken drafter differs from its sibling in the one thing that its docstring says.
"""

from typing import Any

import pytest
import torch

from sampler.sampler import Sampler
from specdec.testing import Subject, run_conformance
from specdec.testing.conformance import RULES
from tests import broken_drafters, broken_scores

BY_NAME = {rule.name: rule for rule in RULES}
# Broken drafter -> the rule that must be named, and words of its message.
BROKEN = {
    "broken_reads_host": ("host_reads", "reads a value on the host"),
    "broken_data_shape": ("host_reads", "depends on what a tensor holds"),
    "broken_columns": ("num_drafts", "behind column 1 in a step that asked for so many of 3"),
    "broken_counts_proposals": ("num_drafts", "behind steps that asked for fewer drafts"),
    "broken_confidence_likeliest": ("confidence", "its draft_logits give it"),
    "broken_confidence_first": ("confidence", "draft 1 has a confidence of nan"),
    "broken_confidence_places": ("bounds", "draft_confidence of rows that are not in the step"),
    "broken_host_many": ("host_drafts", "more than the 2 drafts that a row can use"),
    "broken_host_text": ("host_drafts", "changed the token ids of a request"),
    "broken_behind_the_end": ("bounds", "before or behind draft_tokens"),
    "broken_other_rows": ("bounds", "rows that are not in the step"),
    "broken_state": ("read_only", "state.last_sampled_tokens"),
    "broken_global_noise": ("noise", "a global random generator"),
    "broken_target_stream": ("noise", "changed with the request's seed"),
    "broken_own_noise": ("noise", "changed with ctx.noise"),
    "broken_row_memory": ("row_reuse", "had an owner before"),
    "broken_chunks": ("chunks", "chunks of 7"),
    "broken_rejected_feature": ("committed_text", "after rejected drafts"),
    "broken_stale_kv": ("draft_kv", "random lengths and acceptance"),
    "broken_stale_kind": ("kinds", "a stale kind"),
    "broken_kind_places": ("committed_text", "index ctx.temperature by row (ctx.idx_mapping)"),
    "broken_law": ("law", "chi-square"),
    "broken_score_missing": ("score", "the drafter has no score()"),
    "broken_score_position": ("score", "proposals of score() are not those of propose()"),
    "broken_score_no_first_pass": ("score", "proposals of score() are not those of propose()"),
    "broken_score_first_k": ("score", "proposals of score() are not those of propose()"),
    "broken_score_law": ("score", "draft_logits of score() are not those of propose()"),
    "broken_score_kind": ("score", "of kind 1 instead of"),
    "broken_score_no_fork": ("score", "called fork() 0 times"),
    "broken_score_late_fork": ("score", "proposals of score() are not those of propose()"),
    "broken_score_early_fork": ("score", "proposals of score() are not those of propose()"),
}
SIBLINGS = {
    "sound_repeat": ["host_reads", "bounds", "read_only", "noise", "row_reuse", "num_drafts"],
    "sound_counter": ["chunks", "num_drafts"],
    "sound_host": ["host_drafts", "statistics", "committed_text"],
    "sound_confidence": ["confidence", "bounds"],
    "sound_kinds": ["committed_text"],
    "sound_law": ["noise", "kinds", "law", "score"],
    "sound_features": ["committed_text", "score"],
    "sound_kv": ["draft_kv", "committed_text", "score"],
}


def test_every_drafter_with_a_broken_score_is_expected_to_fail() -> None:
    own = [
        value
        for value in vars(broken_scores).values()
        if isinstance(value, type) and value.__module__ == broken_scores.__name__
    ]
    assert len(own) == sum(rule == "score" for rule, _ in BROKEN.values())


@pytest.fixture(autouse=True)
def seeds_in_the_wrong_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand the requests' seeds to the drafter that must not have them."""
    right = Sampler.noise

    def noise(self: Sampler, *rest: Any) -> Any:
        broken_drafters.TargetStream.seeds = self.state.seeds
        return right(self, *rest)

    monkeypatch.setattr(Sampler, "noise", noise)


def cases(rules_of: dict[str, list[str]]) -> list[Any]:
    """Return a case for each drafter and rule, marked as the rule is."""
    return [
        pytest.param(name, rule, marks=[pytest.mark.slow] if BY_NAME[rule].slow else [])
        for name, rules in rules_of.items()
        for rule in rules
    ]


@pytest.mark.parametrize(
    ("name", "rule"), cases({name: [rule] for name, (rule, _) in BROKEN.items()})
)
def test_broken_drafter_fails_by_the_rule_that_it_broke(name: str, rule: str) -> None:
    words = BROKEN[name][1]
    (finding,) = run_conformance(Subject(name), [BY_NAME[rule]])
    assert finding.verdict == "broken", finding
    assert f"rule {rule!r} is broken" in finding.message
    assert words in finding.message, finding.message
    assert "likely fix: " in finding.message


@pytest.mark.parametrize(("name", "rule"), cases(SIBLINGS))
def test_sound_sibling_passes_the_rule_that_a_broken_one_breaks(name: str, rule: str) -> None:
    (finding,) = run_conformance(Subject(name), [BY_NAME[rule]])
    assert finding.verdict == "passed", finding.message


@pytest.mark.parametrize("name", ["sound_repeat", "suffix"])
def test_a_drafter_that_cannot_score_is_not_held_to_the_rule_about_it(name: str) -> None:
    (finding,) = run_conformance(Subject(name), [BY_NAME["score"]])
    assert finding.verdict == "not applicable"
    assert "declared can_score=False" in finding.message


def test_what_a_drafter_raises_is_a_broken_rule_with_its_reason() -> None:
    subject = Subject("sound_repeat")
    # A drafter that fails in a running engine, and not while it is built.
    broken_drafters.SoundRepeat.observe = _fail  # pyright: ignore[reportAttributeAccessIssue]
    try:
        (finding,) = run_conformance(subject, [BY_NAME["lossless"]])
    finally:
        del broken_drafters.SoundRepeat.observe
    assert finding.verdict == "broken"
    assert "RuntimeError: no such table" in finding.message


def _fail(self: Any, ctx: Any) -> None:
    raise RuntimeError("no such table")


def test_the_kit_leaves_the_global_generators_as_they_were() -> None:
    before = torch.get_rng_state()
    for finding in run_conformance(Subject("sound_law"), [BY_NAME["noise"], BY_NAME["kinds"]]):
        assert finding.verdict == "passed", finding.message
    assert torch.equal(torch.get_rng_state(), before)
