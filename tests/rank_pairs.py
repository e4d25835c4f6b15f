"""One pair of ranks for all tests of a module: to start processes takes longest."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.parallel_cases import read


def shared_pair(
    factory: pytest.TempPathFactory, name: str, start: Callable[[Path], None]
) -> list[dict[str, Any]]:
    """Return what each rank of one pair saw.

    The processes of a parallel pytest share the pair: the first one to need it starts it.

    Args:
        factory: of folders.
        name: of the pair's folder.
        start: starts the ranks, which leave what they saw in the folder, and waits for them.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / name
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            folder.mkdir()
            start(folder)
    ranks = read(folder)
    assert len(ranks) == 2
    return ranks
