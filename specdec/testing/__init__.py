"""The conformance kit: holds any drafter to the rules that the runner relies on.

    from specdec.testing import DrafterConformance

    class TestMine(DrafterConformance):
        drafter = {"name": "my_drafter", "width": 3}

or `python -m specdec.testing my_drafter width=3`. Nothing heavy loads before a name is used: the
pytest plug-in imports this package in every run of pytest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.testing.conformance import (
        DrafterConformance,
        Finding,
        conformance_cases,
        run_conformance,
    )
    from specdec.testing.rule import NotApplicable, Rule, RuleBroken
    from specdec.testing.subject import Subject
    from specdec.testing.target import tiny_model, tiny_target

_PUBLIC = {
    "DrafterConformance": "specdec.testing.conformance",
    "Finding": "specdec.testing.conformance",
    "conformance_cases": "specdec.testing.conformance",
    "run_conformance": "specdec.testing.conformance",
    "NotApplicable": "specdec.testing.rule",
    "Rule": "specdec.testing.rule",
    "RuleBroken": "specdec.testing.rule",
    "Subject": "specdec.testing.subject",
    "tiny_model": "specdec.testing.target",
    "tiny_target": "specdec.testing.target",
}

__all__ = [
    "DrafterConformance",
    "Finding",
    "NotApplicable",
    "Rule",
    "RuleBroken",
    "Subject",
    "conformance_cases",
    "run_conformance",
    "tiny_model",
    "tiny_target",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'specdec.testing' has no attribute {name!r}")
