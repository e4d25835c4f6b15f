"""The how-to page holds: its drafter passes the kit, its table knows every capability."""

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.protocols import DrafterCapabilities
from specdec.testing import Subject, run_conformance
from specdec.testing.conformance import RULES

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "write_a_drafter.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def module(tmp_path: Path) -> Iterator[str]:
    """Import the page's first block as `my_drafter`."""
    path = tmp_path / "my_drafter.py"
    path.write_text(BLOCKS[0])
    spec = importlib.util.spec_from_file_location("my_drafter", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["my_drafter"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["my_drafter"])
    yield "my_drafter"
    del sys.modules["my_drafter"]


def test_the_drafter_of_the_page_passes_the_kit(module: str) -> None:
    subject = Subject({"name": f"{module}:LagDrafter", "lag": 5})
    apart = set()
    for finding in run_conformance(subject, [rule for rule in RULES if not rule.slow]):
        assert finding.verdict != "broken", finding.message
        if finding.verdict == "not applicable":
            apart.add(finding.rule.name)
    assert apart == {"host_drafts", "confidence", "score"}  # none of which is declared
    assert len("".join(BLOCKS).splitlines()) < 100


def test_the_test_of_the_page_names_the_drafter() -> None:
    assert '{"name": "my_drafter:LagDrafter", "lag": 5}' in BLOCKS[1]
    compile(BLOCKS[1], "test_lag.py", "exec")


def test_every_capability_is_explained() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert explained == {field.name for field in dataclasses.fields(DrafterCapabilities)}
