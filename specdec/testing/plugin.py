"""The pytest plug-in: options of `specdec.testing.suite`, and the marker of the slower rules.

    pytest --pyargs specdec.testing.suite --drafter my_drafter --drafter-set width=3

It is loaded in every run of pytest where the project is installed, and imports nothing heavy.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("specdec", "conformance of drafters (specdec.testing)")
    group.addoption("--drafter", metavar="NAME", help="drafter that specdec.testing.suite checks")
    group.addoption(
        "--drafter-set",
        action="append",
        metavar="KEY=VALUE",
        help="a parameter of that drafter; may be given again",
    )
    group.addoption(
        "--drafter-device", metavar="DEVICE", help="cpu (the default) or cuda, for all drafters"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker that leaves the slower rules out: -m "not slow"."""
    config.addinivalue_line("markers", "slow: rules of the conformance kit that take seconds")
