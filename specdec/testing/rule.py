"""What a rule is: a name, what it proves, and a check that raises when the rule is broken."""

from collections.abc import Callable
from dataclasses import dataclass

from specdec.testing.subject import Subject

# Raises RuleBroken or NotApplicable; returns a note where only a part could be checked.
Check = Callable[[Subject], str | None]


class RuleBroken(AssertionError):
    """A drafter broke a rule.

    Args:
        found: what was seen.
        fix: what most likely mends it.
    """

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(f"{found}; likely fix: {fix}")


class NotApplicable(Exception):
    """A rule says nothing about this drafter, because of what it declares."""


@dataclass(frozen=True)
class Rule:
    """One rule of the kit.

    Args:
        name: short, as a test's id.
        proves: one sentence.
        check: the check.
        slow: takes several seconds; left out of the quick subset.
    """

    name: str
    proves: str
    check: Check
    slow: bool = False


def require(holds: bool, found: str, fix: str) -> None:
    """Raise `RuleBroken` unless something holds."""
    if not holds:
        raise RuleBroken(found, fix)


def require_drafts(subject: Subject) -> None:
    """Leave a rule about drafts aside for a drafter that declares to have none."""
    if subject.never_drafts:
        raise NotApplicable("declared never_drafts=True")
