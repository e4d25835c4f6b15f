"""Every rule as a test of the drafter that `--drafter` names; see `specdec.testing.plugin`."""

from specdec.testing.conformance import DrafterConformance


class TestDrafter(DrafterConformance):
    """The drafter of the command line."""
