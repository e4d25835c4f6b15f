"""What the property tests share. CPU tests only: GPU hosts need not have hypothesis."""

from hypothesis import settings
from hypothesis import strategies as st

QUICK = settings(max_examples=50, deadline=None, derandomize=True)

seeds = st.integers(0, 2**32 - 1)
