"""The rules, a run of them all, and the class that makes each of them a test."""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import yaml

from specdec.errors import ConfigError
from specdec.testing import (
    rules_contract,
    rules_graph,
    rules_history,
    rules_law,
    rules_lengths,
    rules_score,
    rules_texts,
)
from specdec.testing.rule import NotApplicable, Rule, RuleBroken
from specdec.testing.subject import DrafterSpec, Subject, TargetSpec

RULES = (
    Rule(
        "interface",
        "every method is there, and needs are declared as data",
        rules_texts.check_interface,
    ),
    Rule(
        "lossless",
        "texts are the autoregressive ones: mixed batches, random arrival, abort, preemption",
        rules_texts.check_lossless,
    ),
    Rule(
        "lossless_greedy",
        "texts are the autoregressive ones under the greedy verifier",
        rules_texts.check_lossless_greedy,
    ),
    Rule(
        "statistics",
        "drafts are counted as proposed, and accepted as the text bears them out",
        rules_texts.check_statistics,
    ),
    Rule(
        "limits",
        "no draft behind max_context, max_model_len or a request's budget (0 included)",
        rules_texts.check_limits,
    ),
    Rule(
        "bounds",
        "nothing is written outside the step's rows and columns, nor in padding",
        rules_contract.check_bounds,
    ),
    Rule(
        "read_only",
        "state, contexts and the target's KV are read and not written",
        rules_contract.check_read_only,
    ),
    Rule(
        "host_reads",
        "no value is read on the host, and no shape depends on one",
        rules_contract.check_host_reads,
    ),
    Rule(
        "host_drafts",
        "on the host, as many drafts as asked for are returned, and no text is changed",
        rules_contract.check_host_drafts,
    ),
    Rule(
        "graph_replay",
        "captured calls on changed inputs propose what their eager twins do",
        rules_graph.check_graph_replay,
    ),
    Rule(
        "num_drafts",
        "a step that asks for fewer drafts, or for none, gets no more and spoils no later one",
        rules_lengths.check_num_drafts,
    ),
    Rule(
        "confidence",
        "each draft has its probability, and texts do not change where drafts end by it",
        rules_lengths.check_confidence,
    ),
    Rule("noise", "drafts are drawn through ctx.noise alone", rules_contract.check_noise),
    Rule(
        "kinds",
        "each draft has the kind that was written for it, and its law",
        rules_contract.check_kinds,
    ),
    Rule(
        "committed_text",
        "drafts depend on the committed text, and not on drafts that were rejected",
        rules_history.check_committed_text,
    ),
    Rule(
        "chunks",
        "texts and drafts do not depend on the size of prefill chunks",
        rules_history.check_chunks,
    ),
    Rule(
        "row_reuse",
        "a new owner of a row sees nothing of an earlier one",
        rules_history.check_row_reuse,
    ),
    Rule(
        "preemption",
        "a preempted request goes on as if nothing had happened",
        rules_history.check_preemption,
    ),
    Rule(
        "score",
        "at many starts of a text at once, score() proposes what propose() does in real runs",
        rules_score.check_score,
    ),
    Rule(
        "draft_kv",
        "the drafter's KV after n steps of random lengths and acceptance is that of a fresh pass",
        rules_history.check_draft_kv,
        slow=True,
    ),
    Rule(
        "law", "texts have the target's joint law under rejection", rules_law.check_law, slow=True
    ),
)


_SUBJECTS = pytest.StashKey[dict[type, Subject]]()  # what the rules of a class share


@dataclass(frozen=True)
class Finding:
    """What became of one rule."""

    rule: Rule
    verdict: Literal["passed", "broken", "not applicable"]
    message: str  # the rule broken and the likely fix; why it does not apply; or a note
    seconds: float


def run_conformance(subject: Subject, rules: Sequence[Rule] = RULES) -> Iterator[Finding]:
    """Check rules one by one, and say what became of each.

    What a rule raises beside its own verdicts is a broken rule, too; an error of the configuration
    is the caller's, and is raised by `subject.probe` before.

    Args:
        subject: the drafter.
        rules: which ones, in their order.
    """
    for rule in rules:
        started = time.perf_counter()
        try:
            note = rule.check(subject)
            verdict, message = "passed", note or ""
        except NotApplicable as reason:
            verdict, message = "not applicable", str(reason)
        except Exception as error:  # whatever a stranger's code raises, the rule is named
            verdict, message = "broken", describe(rule, error)
        yield Finding(rule, verdict, message, time.perf_counter() - started)


def describe(rule: Rule, error: Exception) -> str:
    """Say which rule was broken, and how."""
    found = str(error)
    if not isinstance(error, RuleBroken):
        found = f"{type(error).__name__}: {' '.join(found.split())[:300]}"
    return f"rule {rule.name!r} is broken ({rule.proves}): {found}"


def conformance_cases(
    rules: Sequence[Rule] = RULES, quick: Collection[str] | None = None
) -> list[Any]:
    """Return the rules as parameters of a test, slow ones marked `slow`.

    Args:
        rules: which.
        quick: names of those that stay unmarked; None leaves it to the rules.
    """
    unknown = sorted(set(quick or ()) - {rule.name for rule in rules})
    if unknown:
        raise ConfigError(
            f"quick names a rule {unknown[0]!r}; known: {', '.join(rule.name for rule in rules)}"
        )
    marks = [rule.slow if quick is None else rule.name not in quick for rule in rules]
    return [
        pytest.param(rule, id=rule.name, marks=[pytest.mark.slow] if slow else [])
        for rule, slow in zip(rules, marks, strict=True)
    ]


class DrafterConformance:
    """Holds one drafter to every rule, a test each; derive from it and name the drafter.

    Attributes:
        drafter: registered name, mapping with a key "name", or a static method that is given the
            loaded target and returns one of these. None takes the option `--drafter`.
        num_speculative_tokens: K.
        device: "cpu" or "cuda". None takes the option `--drafter-device`, or "cpu".
        target: None for the kit's own tiny one; a folder or hub id that is run in float32; or a
            static method that is given the device and returns a loaded one.
        quick: names of the rules whose tests are not marked `slow`; None leaves out those alone
            that take seconds for any drafter.
    """

    drafter: ClassVar[DrafterSpec | None] = None
    num_speculative_tokens: ClassVar[int] = 3
    device: ClassVar[str | None] = None
    target: ClassVar[TargetSpec | None] = None
    quick: ClassVar[Collection[str] | None] = None

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        """Build what the rules share."""
        options, cls = request.config.option, type(self)
        kept = request.config.stash.setdefault(_SUBJECTS, {})
        if cls in kept:
            return kept[cls]
        drafter = cls.drafter
        if drafter is None:
            name = getattr(options, "drafter", None)
            if name is None:
                raise pytest.UsageError(
                    f"{cls.__name__} names no drafter; set its attribute drafter, or give --drafter"
                )
            drafter = {"name": name, **read_values(options.drafter_set or [])}
        device = cls.device or getattr(options, "drafter_device", None) or "cpu"
        kept[cls] = Subject(drafter, cls.num_speculative_tokens, device, cls.target)
        return kept[cls]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each rule; pytest calls this for every class."""
        metafunc.parametrize("rule", conformance_cases(quick=type(self).quick))

    def test_rule(self, rule: Rule, subject: Subject) -> None:
        """Check one rule."""
        (finding,) = run_conformance(subject, [rule])
        if finding.verdict == "not applicable":
            pytest.skip(f"not applicable: {finding.message}")
        if finding.verdict == "broken":
            pytest.fail(finding.message, pytrace=False)


def read_values(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` pairs of a command line; values are YAML, as in the experiments.

    Raises:
        ConfigError: one is no pair.
    """
    values = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise ConfigError(f"{pair!r} is no key=value; give for instance max_n=4")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"cannot read the value of {pair!r}; quote it") from error
    return values
